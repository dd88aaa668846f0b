"""Claims of a real cut, through a real TCPStore, as the agent makes them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed import TCPStore

from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.agent.hangs import HangHandling
from elastic_ext.failures import cuts
from elastic_ext.rendezvous.c10d import claims
from elastic_ext.rendezvous.c10d.round_events import RoundEvents
from elastic_ext.rendezvous.handler import Rendezvous
from elastic_ext.workers.hangs import unanswered
from elastic_ext.workers.hangs.quiet_watch import QuietWatch
from elastic_ext.workers.hangs.watch import HangWatch
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.progress import ProgressTable
from tests.networks import network
from tests.workers.hangs.test_unanswered import as_root, connected, note_steps, until_told

HANDLE = """
import sys
from tests.rendezvous.c10d.test_cut_claims import end_round
print(end_round(int(sys.argv[1]), *sys.argv[2:]))
"""


@as_root
@pytest.mark.full
def test_a_cut_just_after_a_node_has_finished_ends_the_round_once_claims_count_again(tmp_path):
    with network(2) as net, connected(net) as (_, client):
        one, other = net.hosts
        net.cut(one, other)
        until_told(client, True)
        command = [*one.inside, sys.executable, "-c", HANDLE, str(client.pid), str(tmp_path / "progress"), other.address]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    assert f"a node gets no answer from another one ({other.address})" in found


def end_round(pid: int, path: str, other: str) -> str:
    """Have the agent of this worker watch for hangs; return why the round ends. path: of its progress table.

    Of the other nodes, the one with the address `other` is quiet, and one has just finished.
    """
    claims.CLAIMS_S = 2.0
    board = ProgressTable(path, 1)
    note_steps(path, pid)
    unanswered.UNANSWERED_S, unanswered.RETRANSMISSIONS = 1.5, 3
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    one, two, three = (RoundEvents("localhost", server.port, rank, 3, lambda: None) for rank in range(3))
    threading.Thread(target=three.await_all_done, args=(60.0,), daemon=True).start()
    two.quiet(cuts.Reach((other,)))
    handler = SimpleNamespace(report_quiet=one.quiet, report_stall=one.stalled)
    processes = SimpleNamespace(pids={0: pid}, running={0})
    workers = LocalWorkers(cast(WorkerProcesses, processes), board, {0: 7}, {}, {0: f"{path}-stacks"})
    quiet = QuietWatch(board, {0: 7}, None)
    hangs = HangHandling(HangWatch(board, {0: 7}, None), quiet, cast(Rendezvous, handler), None)
    begun, pause = time.monotonic(), threading.Event()
    while one.ended_by is None:
        assert time.monotonic() < begun + 20, "nobody judges the hang"
        pause.wait(min(0.1, hangs.next_check_s()))
        hangs.check(workers)
    for each in (one, two, three):
        each.shut_down()
    return one.ended_by.reason
