"""One round's lifetime on real processes, without a job: who is told what and when, and that nothing is left behind."""

import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState

from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.metrics import progress_rows
from elastic_ext.agent.resume import ResumePoint
from elastic_ext.agent.round import RoundStart, RunningRound
from elastic_ext.agent.verdicts import failed_workers
from elastic_ext.base import settings
from elastic_ext.checkpoints.choice.agreement import Resumption
from elastic_ext.failures.evidence import Platform
from elastic_ext.failures.host import HostEvidence
from elastic_ext.telemetry.agent_metrics import WorkerProgress
from elastic_ext.workers.logs import WorkerLogs
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.progress import EndingWorkers, Progress, ProgressTable, WakePipe
from tests.until import LIMIT_S


class Recorder(Companion):
    """Writes down the moments at which it is called, and whether the progress table can be read then."""

    def __init__(self):
        self.seen = []

    def workers_started(self, workers):
        self.seen.append(("started", len(workers.read_progress())))

    def check(self, workers):
        self.seen.append(("check", len(workers.running_pids())))

    def workers_ended(self, workers):
        self.seen.append(("ended", len(workers.read_progress())))


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
        ending = EndingWorkers(table, processes.pids, pipe)
        return RunningRound(workers, ending, {1}, resume_point(pin), None, None, companions)

    yield _make
    pipe.close()


@pytest.mark.seam
def test_companions_meet_each_moment_of_a_round(tmp_path, make):
    recorder = Recorder()
    running = make([recorder])
    running.check()
    assert not running.failed
    running.stop(5.0)
    assert running.stopped
    running.close()
    assert recorder.seen == [("started", 2), ("check", 2), ("ended", 2)]
    assert not (tmp_path / "progress").exists()
    running.close()  # a signal may have interrupted the first


@pytest.mark.seam
def test_a_worker_that_dies_is_a_failure_and_its_evidence_stays_until_the_end(make, children):
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
def test_workers_stopped_for_a_sleep_in_the_kernel_count_as_failed(make):
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
def test_the_checkpoint_is_pinned_until_the_workers_have_made_a_step_or_the_round_ends(make):
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


def test_a_release_of_the_pin_that_a_signal_interrupts_is_made_up_for():
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


def test_what_workers_are_told_to_resume_from(tmp_path):
    assert resume_point().variables() == {}
    assert resume_point().step is None  # without checkpoint_dir nothing is known of the steps of a job
    conf = {"checkpoint_dir": str(tmp_path)}
    assert resume_point(conf=conf).step == 3
    assert resume_point(conf=conf).variables() == {
        "ELASTIC_EXT_CHECKPOINT_DIR": str(tmp_path),
        "ELASTIC_EXT_LOCAL_DIR": "",
        "ELASTIC_EXT_RESUME_FROM": "/ckpt/step_3",
        "ELASTIC_EXT_RESUME_STEP": "3",
    }


def test_a_start_that_fails_leaves_nothing_behind(tmp_path):
    """Neither a file nor a pin; the copier knows before the start what the round resumes from."""
    told = []
    logs = WorkerLogs(SimpleNamespace())
    logs.run_dir = str(tmp_path)
    companions = SimpleNamespace(
        token="t",
        observation=SimpleNamespace(
            message=lambda round, local_rank, rank: {"metrics": f"{round}.{local_rank}.{rank}"},
            goodput=SimpleNamespace(round_begins=lambda table, step, nodes: None),
        ),
        copier=SimpleNamespace(abandon_newer_than=lambda path: told.append(path)),
        flight_recorder=None,
        wake_pipe=SimpleNamespace(path="pipe"),
        warm_starts=SimpleNamespace(start=None, before_start=lambda: told.append("standbys")),
    )
    spec = SimpleNamespace(local_world_size=2, max_restarts=5, entrypoint=sys.executable, args=("train.py",))
    workers = [SimpleNamespace(global_rank=6), SimpleNamespace(global_rank=7)]
    group = SimpleNamespace(spec=spec, master_addr="host", master_port=1, workers=workers, group_world_size=4)
    handler = SimpleNamespace(round=4, launch="l", address="127.0.0.1", host="h")

    def start_processes():
        assert (tmp_path / "progress.t.3").exists()
        assert logs.messages[1] == {
            "agent": "t",
            "metrics": "4.1.7",
            "stragglers": "auto",
            "slot": 1,
            "progress": str(tmp_path / "progress.t.3"),
            "wake_pipe": "pipe",
            "store": ("host", 1),
        }
        assert logs.variables["TORCHELASTIC_RESTART_COUNT"] == "3"
        assert logs.variables["TORCHELASTIC_MAX_RESTARTS"] == "5"
        told.append("processes")
        raise OSError("no process")

    pin = FakePin()
    start = RoundStart(handler, settings.read({}, {}), logs, companions, group)
    with pytest.raises(OSError, match="no process"):
        start.run(resume_point(pin), start_processes, lambda: True)
    assert told == ["/ckpt/step_3", "standbys", "processes"]
    assert pin.released == 1
    assert not list(tmp_path.iterdir())


def test_rows_of_the_metrics():
    workers = [
        Progress(11, 4, 10**9, 3 * 10**9, True, saves=2, saved_step=2, saved_ns=2 * 10**9, saving_s=0.7, failed_saves=1),
        Progress(12, 0, 0, 0, False),
        Progress(0, 0, 0, 0, False),  # its bootstrap is not in place
    ]
    ranks = {0: 8, 1: 9, 2: 10}
    assert progress_rows(workers, ranks) == [WorkerProgress(0, 8, workers[0]), WorkerProgress(1, 9, workers[1])]
