"""Saves on demand and drains: whether there is time, what to wait for, and that all ranks of a job act at the same step."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException

from elastic_ext.agent import leaving
from elastic_ext.base import threads, torch_private
from elastic_ext.base.settings import Settings
from elastic_ext.failures import kubernetes
from elastic_ext.features.drains.published import published
from elastic_ext.features.drains.watch import DrainWatch, Published, is_new
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.round_records import Drain
from elastic_ext.workers.progress import Progress
from tests.interrupted import signal_at_line
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Job, descendants, run
from tests.rendezvous.test_etcd_jobs import store
from tests.until import LIMIT_S

__all__ = ["store"]

JOB = SCRIPTS / "saving_job.py"
PATIENT = {"ELASTIC_EXT_PLATFORM_GRACE": "600"}  # a platform that waits for any save


def worker(asks: bool = True, steps: int = 0, step_s: float = 1.0, save_s: float | None = None) -> Progress:
    return Progress(1, steps, 10**9, int((1 + step_s * max(steps - 1, 0)) * 1e9), True, asks_for_saves=asks, save_s=save_s)


@pytest.mark.parametrize(
    ("workers", "grace_s", "stop_s", "wait_s", "said"),
    [
        ([worker()], 30, 5, 25, "no save has been measured yet, and 25 s are left"),
        ([worker(save_s=10.0)], 30, 5, 25, "the last save took 10 s"),
        ([worker(save_s=20.0)], 30, 5, 0, "a save needs about 30 s, and 25 s are left"),
        ([worker(save_s=1.0), worker(save_s=20.0)], 30, 5, 0, "a save needs about 30 s"),
        ([worker(steps=11, step_s=9.0)], 30, 5, 0, "a save needs about 27 s"),
        ([worker()], 3, 5, 0, "0 s are left"),
        ([worker(asks=False)], 30, 5, 0, "has not called save_requested()"),
        ([worker(), worker(asks=False)], 30, 5, 0, "has not called save_requested()"),
        ([], 30, 5, 0, "has not called save_requested()"),
    ],
)
def test_is_there_time(workers, grace_s, stop_s, wait_s, said):
    plan = leaving.plan_save(grace_s, stop_s, workers)
    assert plan.wait_s == wait_s
    assert said in plan.reason


@pytest.mark.parametrize(
    ("platform_grace_s", "pod_grace_s", "environ", "expected"),
    [
        (None, None, {}, 30),
        (100, None, {}, 100),
        (10, None, {}, 10),
        (None, 60, {}, 60),
        (120, 5, {}, 5),  # kubectl delete --grace-period=5
        (60, 100, {}, 60),
        (100, 60, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1010"}, 10),
        (None, None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1020"}, 20),
        (100, None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1090"}, 90),
        (None, None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "5000"}, 30),
        (None, None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "900"}, 30),  # Slurm lets it run on for its KillWait
    ],
)
def test_until_when(platform_grace_s, pod_grace_s, environ, expected):
    assert leaving.grace_s(platform_grace_s, pod_grace_s, 30, environ, now=1000.0) == expected


@pytest.mark.parametrize(
    ("end", "left_s"),
    [
        ("2026-11-21T00:00:15Z", 15),  # a preStop hook has used 45 s
        ("2026-11-21T00:01:00Z", 60),
        ("2026-11-21T01:00:00Z", 60),  # the API server's clock is ahead: never longer
        ("2026-11-20T23:59:59Z", 60),  # behind: nothing can be learnt from it
        ("soon", 60),
        (None, 60),
        (7, 60),
    ],
)
def test_what_is_left_of_a_pods_grace(end, left_s):
    now = datetime(2026, 11, 21, tzinfo=timezone.utc).timestamp()
    pod = {"metadata": {"deletionTimestamp": end, "deletionGracePeriodSeconds": 60}}
    assert kubernetes.deletion_grace_s(pod, now) == left_s


@pytest.mark.parametrize("seconds", [None, "30", True, 0, -1])
def test_a_pod_that_does_not_tell_its_grace(seconds):
    pod = {"metadata": {"deletionTimestamp": "2026-11-21T00:00:30Z", "deletionGracePeriodSeconds": seconds}}
    assert kubernetes.deletion_grace_s(pod, 0.0) is None
    assert kubernetes.deletion_grace_s(None, 0.0) is None


def steps_saved(folder: Path, attempt: int, ranks: int) -> list[list[str]]:
    return [(folder / f"saved.{attempt}.{rank}").read_text().split() for rank in range(ranks)]


@pytest.mark.seam
def test_told_to_leave_a_node_saves_first(tmp_path):
    """SIGTERM to the agent: it saves once, and leaves with "try again". That all ranks save the same step is shown below."""
    with Job([*AGENT, "--nproc-per-node=1", JOB, tmp_path], tmp_path, **PATIENT, STOP=str(tmp_path / "stop")) as job:
        job.wait_for("steps")
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
    assert done.returncode == 75, done.err
    ((step,),) = steps_saved(tmp_path, 0, 1)
    assert int(step) > 0
    assert "checkpoint before leaving: saved" in done.err
    assert "stopped by SIGTERM" in done.err


@pytest.mark.full
def test_slurms_notice_is_no_bug(tmp_path):
    """With proctrack/linuxproc it reaches every process of the step; the workers get it first here, and have no handler."""
    variables = {"STOP": str(tmp_path / "stop"), "SLURM_JOB_ID": "7", "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / "verdict")}
    with Job([*AGENT, "--nproc-per-node=2", JOB, tmp_path], tmp_path, **PATIENT, **variables) as job:
        job.wait_for("steps", 2)
        processes = descendants(job.process.pid)
        for each in reversed(processes):
            os.kill(each, signal.SIGUSR2)
        done = job.finish()
    assert done.returncode == 75, done.err
    saved = steps_saved(tmp_path, 0, 2)
    assert saved[0] == saved[1]
    assert len(saved[0]) == 1
    decision = json.loads((tmp_path / "verdict").read_text())["decision"]
    assert decision["verdict"] == "requeue"
    assert decision["reason"].startswith("the agent received SIGUSR2: ")
    assert "SIGUSR2: asking the job for a checkpoint" in done.err
    assert "stopped by SIGUSR2" in done.err


@pytest.mark.full
def test_a_worker_ended_by_slurms_notice_is_fine(tmp_path):
    """A program that is not Python runs without what would ignore it."""
    (tmp_path / "noticed.sh").write_text("kill -USR1 $$")
    done = run([*AGENT, "--nproc-per-node=1", "--no-python", "sh", "noticed.sh"], tmp_path, SLURM_JOB_ID="7")
    assert done.returncode == 75, done.err


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "last"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (None, signal.SIGINT)],
    ids=["told-again", "interrupted", "interrupted-at-once"],
)
def test_only_the_user_ends_waiting_for_a_save(tmp_path, first, last):
    """SIGTERM comes twice from Slurm and from timeout(1), and says nothing new. SIGINT is a user who does not want to wait."""
    variables = {**PATIENT, "STOP": str(tmp_path / "stop"), "SAVE_WHEN": str(tmp_path / "go")}
    with Job([*AGENT, "--nproc-per-node=2", JOB, tmp_path], tmp_path, **variables) as job:
        job.wait_for("steps", 2)
        if first is not None:
            job.process.send_signal(first)
            job.wait_for(r"saves \d", 2)
        job.process.send_signal(last)
        if last == signal.SIGTERM:
            job.wait_for("SIGTERM again: waiting for the checkpoint")
            (tmp_path / "go").touch()
        done = job.finish()
    assert done.returncode == (75 if last == signal.SIGTERM else 130), done.err
    assert ("checkpoint before leaving: saved" in done.err) == (last == signal.SIGTERM)
    assert len(list(tmp_path.glob("saved.*"))) == (2 if last == signal.SIGTERM else 0)


def test_an_interrupted_request_can_be_closed():
    """The user's SIGINT comes between any two lines from the request to the thread that acknowledges it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    workers = SimpleNamespace(ranks={0: 0})
    progress = SimpleNamespace(want_save=lambda local_rank, number: None, read_all=lambda: [])
    files = {leaving.__file__, threads.__file__}

    def interrupted(line: int) -> bool:
        job = SimpleNamespace(part=SimpleNamespace(agreed=lambda topic: topics.SaveOrder(1)))
        on_demand = leaving.SavesOnDemand(job, progress, 1, ("localhost", store.port))
        with suppress(KeyboardInterrupt), signal_at_line(line, files, signal.SIGINT) as told:
            on_demand.update(workers)
        on_demand.workers_ended(workers)
        on_demand.workers_ended(workers)  # as a round that is closed again
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return told()

    lines = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    try:
        while interrupted(lines + 1):
            lines += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert lines > 10


def test_asked_again_after_its_time_an_agent_ends():
    before, leave_by = signal.getsignal(signal.SIGUSR1), None
    try:
        with torch_private.taken_for_sigterm([signal.SIGUSR1]):
            leaving.take_as_one(signal.SIGUSR1, lambda: leave_by)
            os.kill(os.getpid(), signal.SIGUSR1)  # the platform has not said yet how much time there is
            leave_by = time.monotonic() + 100
            os.kill(os.getpid(), signal.SIGUSR1)
            leave_by = time.monotonic()
            with pytest.raises(SignalException):
                os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.full
def test_a_node_does_not_wait_for_late_saves(tmp_path):
    options = ["--rdzv-conf=platform_grace=5", "--shutdown-timeout=1"]
    variables = {"STOP": str(tmp_path / "stop"), "TORCHELASTIC_LOG_LEVEL": "INFO", "LOGLEVEL": "INFO"}
    variables["SAVE_WHEN"] = str(tmp_path / "never")
    with Job([*AGENT, "--nproc-per-node=1", *options, JOB, tmp_path], tmp_path, **variables) as job:
        job.wait_for("steps")
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
    assert done.returncode == 75, done.err
    assert "checkpoint before leaving: not finished" in done.err, done.err


@pytest.mark.full
def test_a_possibly_hung_job_saves_if_it_continues(tmp_path):
    command = [*AGENT, "--nproc-per-node=2", "--rdzv-conf=hang_timeout=60", JOB, tmp_path, "stall"]
    variables = {
        "STOP": str(tmp_path / "stop"),
        "STALL": str(tmp_path / "on"),
        "TORCHELASTIC_LOG_LEVEL": "INFO",
        "LOGLEVEL": "INFO",
    }
    with Job(command, tmp_path, **variables) as job:
        job.wait_for("asking for a checkpoint because the workers may hang")
        (tmp_path / "on").touch()
        job.wait_for("saved by", 2)
        (tmp_path / "stop").touch()
        done = job.finish()
    assert done.returncode == 0, done.err
    saved = steps_saved(tmp_path, 0, 2)
    assert len(saved[0]) == 1
    assert saved[0] == saved[1]


@pytest.mark.seam
@pytest.mark.full("embedded")
def test_one_node_is_to_leave_and_all_save(tmp_path, store):
    """Four ranks on two nodes: one boundary for all. The node leaves, the other goes on alone."""
    with ExitStack() as stack:
        where = [f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job", "--nnodes=1:2", "--rdzv-conf=last_call_timeout=60"]
        command = [*TORCHRUN, *store.options, *where, "--nproc-per-node=2", JOB, tmp_path]
        jobs = [stack.enter_context(Job(command, tmp_path, **PATIENT, STOP=str(tmp_path / "stop"))) for _ in range(2)]
        for job in jobs:
            job.wait_for("steps . attempt 0", 2)
        jobs[1].process.send_signal(signal.SIGTERM)
        assert jobs[1].finish().returncode == 75
        saved = steps_saved(tmp_path, 0, 4)
        assert len(saved[0]) == 1
        assert all(each == saved[0] for each in saved)
        jobs[0].wait_for("steps . attempt 1", 2)
        (tmp_path / "stop").touch()
        assert jobs[0].finish().returncode == 0


class Node:
    """A node with `local_dir` that is to leave, of which the test tells what its worker and the copier do."""

    def __init__(self, monkeypatch: Any) -> None:
        self.holds = Published("/c/0", 0, lies_there=frozenset({("/c/0", None)}))
        self.went: list[int | None] = []
        self._look = threading.Event()
        monkeypatch.setattr("elastic_ext.features.drains.watch.POLL_S", 0.001)
        job = SimpleNamespace(
            drain=Drain("n1-1-aaaaaa", "n1", 1, reason="its fan"),
            part=SimpleNamespace(agreed=lambda topic: None, post=lambda topic, ready: self.went.append(ready.step)),
        )
        self._watch = DrainWatch(cast("Any", job), None, self._look.set, lambda: self.holds, local=True)

    def check(self, saves: int, saved_step: int | None) -> bool:
        """The worker has told of so many saves, the last one of this step. Return whether the node can leave."""
        row = SimpleNamespace(saves=saves, saved_step=saved_step, asks_for_saves=False)
        self._watch.check(cast("Any", SimpleNamespace(read_progress=lambda: [row])))
        return bool(self.went)

    def copied(self, step: int) -> None:
        """A copy of this step is complete, and has been seen."""
        self._seen()
        self.holds = Published(f"/c/{step}", step)
        self._seen()

    def _seen(self) -> None:
        assert self._watch._under_way is not None
        directory = self._watch._under_way.directory
        assert directory is not None
        while directory.newest != self.holds:
            assert self._look.wait(LIMIT_S)
            self._look.clear()

    def close(self) -> None:
        self._watch.workers_ended(cast("Any", None))


def test_saves_faster_than_copies_do_not_move_goals(monkeypatch):
    node = Node(monkeypatch)
    assert not node.check(1, 10)
    node.copied(10)
    assert not node.check(1, 10)  # from before the request: steps since would be lost
    assert not node.check(2, 20)
    assert not node.check(3, 30)
    node.copied(20)
    assert node.check(4, 40)
    node.close()


def test_a_script_without_saves_leaves_with_next_copy(monkeypatch):
    node = Node(monkeypatch)
    assert not node.check(0, None)
    node.copied(10)
    assert node.check(0, None)
    node.close()


class Files:
    """A checkpoint_dir whose files the test writes and deletes; each is younger than those before it."""

    def __init__(self, folder: Path, pattern: str = "") -> None:
        self.folder, self.settings = folder, Settings(checkpoint_dir=str(folder), checkpoint_pattern=pattern)
        self._written = 0

    def look(self) -> Published:
        return published(self.settings)

    def write(self, name: str) -> None:
        torch.save({"weight": torch.zeros(1)}, self.folder / f".{name}")
        self._written += 1
        os.utime(self.folder / f".{name}", (self._written, self._written))
        (self.folder / f".{name}").rename(self.folder / name)


def test_an_old_checkpoint_is_not_new_after_deletions(tmp_path):
    files = Files(tmp_path)
    files.write("model_20.pt")
    files.write("model_30.pt")
    first = files.look()
    assert not is_new(first, files.look(), None)
    (tmp_path / "model_30.pt").unlink()
    assert not is_new(first, files.look(), None)
    files.write("model_40.pt")
    assert is_new(first, files.look(), None)


@pytest.mark.parametrize(
    ("before", "later"),
    [("epoch_1_step_900.pt", "epoch_2_step_5.pt"), ("model_latest.pt", "model_latest.pt"), ("", "model_1.pt")],
)
def test_a_checkpoint_is_new_whatever_its_step(tmp_path, before, later):
    files = Files(tmp_path)
    if before:
        files.write(before)
    first = files.look()
    assert not is_new(first, files.look(), None)
    files.write(later)
    assert is_new(first, files.look(), None)


def test_a_checkpoint_completed_only_now_is_new(tmp_path):
    files = Files(tmp_path)
    files.write("model_20.pt")
    (tmp_path / "model_30.pt").write_bytes(b"PK\x03\x04 half")
    first = files.look()
    assert not is_new(first, files.look(), None)
    files.write("model_30.pt")
    assert is_new(first, files.look(), None)


@pytest.mark.parametrize(
    ("first", "goal", "copied", "new"),
    [
        *[(0, 20, 10, False), (0, 20, 20, True), (0, 20, 30, True), (0, None, 10, True), (0, 20, None, True)],
        *[(800, 900, 850, False), (800, 900, 5, True)],  # 5 is of the next epoch
        *[(800, 5, 900, False), (800, 5, 4, False), (800, 5, 5, True), (None, 5, 5, True)],
    ],
)
def test_which_copy_is_late_enough(first, goal, copied, new):
    assert is_new(Published("/c/first", first), Published("/c/copied", copied), goal) is new
