"""Late ranks and hosts of real jobs, by torch's flight recorder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from elastic_ext.agent.companion import LocalWorkers, RoundPlace
from elastic_ext.base import round_store
from elastic_ext.features.stragglers.decide import Alignment, Late, NodeSample, RankSample, Streak, WorkerSample
from elastic_ext.features.stragglers.watch import LatenessWatch, SlowNodes
from elastic_ext.workers import progress_layout as layout
from elastic_ext.workers.progress import ProgressTable
from tests.etcd_server import EtcdServer
from tests.jobs import HASTY_AGENT, SCRIPTS, Job, ended
from tests.until import LIMIT_S, until

JOB = SCRIPTS / "late_job.py"
STATUS = [sys.executable, "-m", "elastic_ext.cli", "status"]
OTHER_CLOCK = ["unshare", "--time", "--monotonic=1000", "--fork", "--kill-child"]


def stragglers(events: Path) -> list[dict[str, Any]]:
    return [each for each in map(json.loads, events.read_text().splitlines()) if each["event"] == "straggler"]


def other_clock() -> list[str]:
    """The beginning of a command that gets a monotonic clock of its own, as on another host."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return []
    return OTHER_CLOCK if subprocess.run([*OTHER_CLOCK, "true"], capture_output=True, check=False).returncode == 0 else []


def nodes(stack: ExitStack, server: EtcdServer, tmp_path: Path, *late: str, names: str = "ab", conf: str = "") -> list[Job]:
    """Start a job of two nodes of two ranks each, and spares. late: arguments of late_job.py after STOP."""
    where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=2", "--nproc-per-node=2"]
    where += ["--rdzv-backend=ext_etcd", f"--rdzv-conf=last_call_timeout=1{conf}"]
    command = [*HASTY_AGENT, *where, JOB, str(tmp_path / "stop"), *late]
    env = {"ELASTIC_EXT_EVENTS_FILE": str(tmp_path / "events")}
    clocks = {"b": other_clock()}
    return [
        stack.enter_context(Job([*clocks.get(name, []), *command], tmp_path, ELASTIC_EXT_NODE_NAME=f"n{name}", **env))
        for name in names
    ]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "who"), [(("3",), r"rank 3 on n[ab]"), (("2", "3"), r"n[ab], with all its ranks,")])
def test_what_is_late_is_named_on_two_nodes(server, tmp_path, ranks, who):
    with ExitStack() as stack:
        jobs = nodes(stack, server, tmp_path, "0.04", "0.04", *ranks)
        for job in jobs:
            job.wait_for("rank . is process", 2)
        (first,) = (job for job in jobs if "rank 0 is process" in job.out)
        first.wait_for(f"{who} is late by .* ms of a step of .* ms: [0-9]+%")
        where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job"]
        until(lambda: "straggler: " in ended([*STATUS, *where], 60).out)
        (tmp_path / "stop").touch()
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0], [each.err for each in done]
    assert sum(len(re.findall("is late by", each.err)) for each in done) == 1
    (event,) = stragglers(tmp_path / "events")
    assert (event["late"], event["rank"]) == (True, int(ranks[0]) if len(ranks) == 1 else None)
    assert 0.03 < event["seconds"] < 0.08
    assert 0.2 < event["share"] < 0.8


@pytest.mark.full
def test_stragglers_replace_puts_a_spare_in(server, tmp_path):
    """Once it has been late for REPLACE_AFTER_S, which is a second here, at the next checkpoint."""
    conf = ",stragglers=replace"
    with ExitStack() as stack:
        jobs = nodes(stack, server, tmp_path, "0.04", "0.04", "nb", conf=conf)
        for job in jobs:
            job.wait_for("rank . is process", 2)
        (spare,) = nodes(stack, server, tmp_path, "0.04", "0.04", "nb", names="c", conf=conf)
        spare.wait_for("rank . is process", 2)
        (tmp_path / "stop").touch()
        done = [job.finish() for job in (*jobs, spare)]
    assert [each.returncode for each in done] == [0, 69, 0], [each.err for each in done]
    assert "stragglers=replace: " in done[1].err


class Asked(SlowNodes):
    """Notes that it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def look(self, named: Sequence[Streak], now: float) -> None:
        self.times += 1


def test_a_comparison_after_its_round_removes_no_host(tmp_path):
    table = ProgressTable(str(tmp_path / "progress"), 1)
    (tmp_path / "stacks.issued").write_text(json.dumps({"schema": 1, "step": 128, "step_us": 60_000, "windows": []}))
    workers = LocalWorkers(None, table, {0: 0}, {}, {0: str(tmp_path / "stacks")})  # type: ignore[arg-type]
    compared, over, asked = threading.Event(), threading.Event(), Asked()

    def on_compared(found: Sequence[Late], named: Sequence[Streak]) -> None:
        compared.set()
        over.wait(60)

    watch = LatenessWatch(RoundPlace("n0", 0, 1, 1, ("", 0)), on_compared, asked)
    watch.workers_started(workers)
    with open(tmp_path / "progress", "r+b") as file:
        file.seek(8 * layout.SAMPLES)
        file.write((1).to_bytes(8, sys.byteorder))
    watch.check(workers)
    assert compared.wait(60)
    (thread,) = (each for each in threading.enumerate() if each.name == "elastic_ext-lateness")
    watch.workers_ended(workers)  # waits for a moment only
    over.set()
    thread.join(60)
    assert not asked.times


def test_a_newer_sample_ends_questions_about_the_old(tmp_path):
    """The node of rank 0 may sample more rarely. The last of many nodes would wait so long that it missed what is compared."""
    table, store, node = ProgressTable(str(tmp_path / "progress"), 2), HashStore(), 3000
    files = {local_rank: str(tmp_path / f"stacks{local_rank}") for local_rank in range(2)}
    workers = LocalWorkers(None, table, {0: 6000, 1: 6001}, {}, files)  # type: ignore[arg-type]
    watch = LatenessWatch(RoundPlace("n", node, node + 1, 2 * node + 2, ("", 0)), lambda found, named: None, Asked())
    watch._store = store
    watch.workers_started(workers)
    try:
        for count, step in ((1, 128), (2, 256)):
            for local_rank, path in files.items():
                Path(f"{path}.issued").write_text(json.dumps({"schema": 1, "step": step, "step_us": 60_000, "windows": []}))
                with open(tmp_path / "progress", "r+b") as file:
                    file.seek(local_rank * layout.ROW_BYTES + 8 * layout.SAMPLES)
                    file.write(count.to_bytes(8, sys.byteorder))
                watch.check(workers)
            store.wait([round_store.late(step, node)], timedelta(seconds=LIMIT_S))
    finally:
        watch.workers_ended(workers)


def test_nodes_without_a_sample_are_waited_for_together(monkeypatch):
    """They may sample more rarely than the node of rank 0. A thousand of them would hold it up for a minute."""
    monkeypatch.setattr("elastic_ext.features.stragglers.watch.WAIT_S", 0.0)
    monkeypatch.setattr("elastic_ext.features.stragglers.watch.LOOK_S", LIMIT_S)
    watch = LatenessWatch(RoundPlace("n0", 0, 1000, 1000, ("", 0)), lambda found, named: None, Asked())
    watch._store = HashStore()
    own = NodeSample("n0", "clock", (RankSample(0, WorkerSample(128, 60_000)),))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(watch._gather(own, 128)), daemon=True)
    thread.start()
    thread.join(LIMIT_S / 2)
    watch._over.set()
    assert found == [([own], [Alignment()])]
