"""One round's lifetime on real processes, without a job: who is told what and when, and that nothing is left behind."""

import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState

from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.agent.round import RunningRound, how_to_stop, without_grace
from elastic_ext.agent.verdicts import failed_workers
from elastic_ext.base import settings
from elastic_ext.base.contracts import Resumption
from elastic_ext.failures.evidence import Platform
from elastic_ext.failures.host import HostEvidence
from elastic_ext.features.resume.watch import ResumePoint
from elastic_ext.rendezvous.contract import EndKind
from elastic_ext.telemetry.agent_metrics import WorkerProgress
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.progress import EndingWorkers, Progress, ProgressTable, WakePipe
from tests.until import LIMIT_S


class FakePin:
    def __init__(self):
        self.released = 0

    def release(self):
        self.released += 1


@pytest.fixture
def children():
    code = "import signal; signal.pause()"
    started = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.wait()


def resume_point(pin=None, conf=None):
    return ResumePoint(settings.read(conf or {}, {}), Resumption("/ckpt/step_3", 3, "newest", local=True), pin)


@pytest.fixture
def make(tmp_path, children):
    """Make a round of the children with these companions and pin."""
    pipe = WakePipe(str(tmp_path / "wake"))

    def _make(companions, pin=None):
        table = ProgressTable(str(tmp_path / "progress"), len(children))
        processes = WorkerProcesses({rank: child.pid for rank, child in enumerate(children)}, own_groups=True)
        files = {rank: str(tmp_path / str(rank)) for rank in range(len(children))}
        workers = LocalWorkers(processes, table, {0: 6, 1: 7}, files, files)
        ending = EndingWorkers(table, pipe)
        return RunningRound(workers, ending, {1}, resume_point(pin), None, companions)

    yield _make
    pipe.close()


@pytest.mark.seam
def test_a_dead_workers_evidence_stays_until_the_end(make, children):
    running = make([])
    children[0].send_signal(signal.SIGKILL)
    running.workers.processes.wait(LIMIT_S)
    assert running.failed
    assert list(running.workers.running_pids()) == [1]
    running.stop(5.0)
    host = SimpleNamespace()
    ended = running.ended("here", host, None, SimpleNamespace(state=None, failures={}))
    assert ended.workers.processes.exits[0].exitcode == -signal.SIGKILL
    assert (ended.node, ended.host, ended.warm, ended.asked_to_end) == ("here", host, {1}, False)
    running.close()


@pytest.mark.seam
def test_workers_stopped_while_asleep_count_as_failed(make):
    running = make([])
    running.stop(5.0)
    host = HostEvidence(None, (), Platform())
    unhealthy = SimpleNamespace(state=WorkerState.UNHEALTHY, failures={})
    ended = running.ended("here", host, SimpleNamespace(tail=lambda local_rank: ""), unhealthy)
    assert [worker.rank for worker in failed_workers(ended, ())] == [6, 7]
    well = {rank: replace(exit_, exitcode=0) for rank, exit_ in running.workers.processes.exits.items()}
    running.workers.processes.exits.update(well)
    assert [worker.exitcode for worker in failed_workers(ended, ())] == [0, 0]
    assert failed_workers(replace(ended, asked_to_end=False), ()) == []
    running.close()


@pytest.mark.seam
def test_a_checkpoint_is_pinned_until_step_or_end(make):
    pin = FakePin()
    point = resume_point(pin)
    idle, done = Progress(1, 0, 0, 0, False), Progress(1, 1, 5, 5, False)
    point.check(SimpleNamespace(read_progress=lambda: [idle, idle]))
    assert not pin.released
    point.check(SimpleNamespace(read_progress=lambda: [idle, done]))
    assert pin.released == 1
    pin = FakePin()
    running = make([], pin)
    running.check()
    assert not pin.released
    running.stop(5.0)
    running.close()
    assert pin.released == 1


def test_an_interrupted_release_of_the_pin_is_repeated():
    calls = []

    def release():
        calls.append(1)
        if len(calls) == 1:
            raise InterruptedError

    point = resume_point(SimpleNamespace(release=release))
    with pytest.raises(InterruptedError):
        point.release()
    point.release()
    point.release()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("jit", "exitcodes", "at_once"),
    [
        ((True, False, True), (1,), {0, 2}),
        ((True, True), (-signal.SIGKILL, None), {0, 1}),
        ((True, True), (), {0, 1}),  # it is about to end, or failed elsewhere
        ((True, True), (1, -signal.SIGTERM), set()),
        ((False, False), (1,), set()),
        ((), (1,), set()),  # there is no table
    ],
)
def test_who_gets_no_time_after_a_failure(jit, exitcodes, at_once):
    assert without_grace([Progress(jit_saves=each) for each in jit], exitcodes) == at_once


@pytest.mark.parametrize(
    ("kind", "hung", "stop"),
    [
        (EndKind.FAILED, False, (None, True)),
        (EndKind.BROKEN, False, (None, False)),  # another node was preempted, say
        (EndKind.CLOSED, False, (None, False)),
        (EndKind.DIFFERS, False, (0.0, False)),
        (EndKind.STALLED, False, (None, False)),
        (EndKind.STALLED, True, (0.0, False)),
    ],
)
def test_how_a_rounds_end_stops_its_workers(kind, hung, stop):
    assert how_to_stop(kind, hung) == stop


def test_rows_of_the_metrics():
    workers = [
        Progress(11, 4, 10**9, 3 * 10**9, True, saves=2, saved_step=2, saved_ns=2 * 10**9, saving_s=0.7, failed_saves=1),
        Progress(12, 0, 0, 0, False),
        Progress(0, 0, 0, 0, False),  # its bootstrap is not in place
    ]
    ranks = {0: 8, 1: 9, 2: 10}
    local = LocalWorkers(cast("Any", None), cast("Any", SimpleNamespace(read_all=lambda: workers)), ranks, {}, {})
    assert local.rows() == [WorkerProgress(0, 8, workers[0]), WorkerProgress(1, 9, workers[1])]
