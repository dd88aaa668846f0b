"""benchmarks/node_loss.py runs, reports what it promises, and leaves nothing behind. Its figures are not tested."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import node_loss
import pytest
from node_loss import JobEvents, WorkerEvent

from tests.benchmarks.runs import result

MARK = "NODE_LOSS_OF_TEST"  # in the environment of all processes of a run


@pytest.mark.full
def test_one_row_of_ours(tmp_path):
    marked = {**os.environ, MARK: str(os.getpid())}
    record = result("node_loss.py", tmp_path, "--repeat=1", "--rows=node", "--sides=ours-2", env=marked)
    [row] = record["rows"]
    side = row["ours-2"]
    assert side["outcomes"] == [["trains again", side["median_s"]]]
    assert tuple(side["phases_s"]) == node_loss.PHASES
    assert sum(side["phases_s"].values()) == pytest.approx(side["median_s"], abs=0.01)
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if _is_marked(path)] == []


def _is_marked(path: Path) -> bool:
    try:
        return f"{MARK}={os.getpid()}".encode() in path.read_bytes().split(b"\0")
    except OSError:
        return False


def test_phases_end_with_the_last_node():
    new = [WorkerEvent("a", 11, 0, 2, "step", 9 * 10**9), WorkerEvent("b", 12, 1, 2, "step", 8 * 10**9)]
    found = node_loss.phases(10**9, [2 * 10**9, 3 * 10**9], new, {11: 4 * 10**9, 12: 5 * 10**9})
    assert found == {"stop": 2.0, "round": 2.0, "start": 4.0}


@pytest.mark.seam
def test_a_world_trains_when_all_ranks_step(tmp_path):
    events = JobEvents(tmp_path / "events")

    def send(rank: int, world: int, pid: int) -> None:
        stamp = {"node": "a", "pid": pid, "rank": rank, "world": world, "event": "step", "ns": 1}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events_socket:
            events_socket.sendto(json.dumps(stamp).encode(), events.path)

    ends = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    send(0, 2, os.getpid())
    assert events.until(lambda: events.training(2), 0.0) is None
    send(1, 2, ends.pid)
    there = events.until(lambda: events.training(2), 60)
    assert there is not None
    assert {rank: step.pid for rank, step in there.items()} == {0: os.getpid(), 1: ends.pid}
    ends.communicate(b"\n")
    assert events.until(lambda: events.ended_ns.get(ends.pid), 60) is not None
    assert events.training(2) is None
    events.close()
