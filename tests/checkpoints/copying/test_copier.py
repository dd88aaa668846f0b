"""The agent's side of the copier: one that is stuck, or dies again and again, holds up nobody and hides nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ext.base.records import OtherSchema, RecordError
from elastic_ext.checkpoints.copying import copier
from elastic_ext.checkpoints.copying.copier import Copier, CopyProgress
from elastic_ext.checkpoints.copying.reports import SCHEMA, CopyState, Pulse, decode, encode
from tests.checkpoints.copying.test_replicate import complete, save
from tests.checkpoints.directory.test_tiers import copiers
from tests.jobs import AGENT, HASTY_AGENT, Job
from tests.until import LIMIT_S, until

BUSY = CopyState(7, None, 1.5, ("step_00000004.g0001",), "step_00000002.g0001", 1, "OSError: a\nb", "2 []")


@pytest.mark.parametrize("message", [BUSY, CopyState(), Pulse(5)])
def test_a_message_is_one_line_and_comes_back(message):
    line = encode(message)
    assert "\n" not in line
    assert decode(line.encode()) == message


def test_a_line_of_another_version_is_refused():
    with pytest.raises(OtherSchema, match="schema 2, expected 1"):
        decode(json.dumps({"schema": SCHEMA + 1, "pulse": 5}).encode())


@pytest.mark.parametrize(
    "line", [b"", b"a print", b"{}", b"[1]", b"\xff", b'{"schema": 1, "pulse": "x"}', b'{"schema": 1, "sent": []}']
)
def test_a_print_of_a_library_is_no_message(line):
    with pytest.raises(RecordError):
        decode(line)


def test_bytes_are_counted_once():
    progress = CopyProgress(0.0)
    assert [progress.heard(Pulse(sent), 1.0) for sent in (10, 30)] == [10, 20]
    assert progress.heard(CopyState(sent=35), 2.0) == 5
    assert progress.heard(Pulse(4), 3.0) == 4
    progress.started(4.0)  # another process, which counts from 0 again
    assert progress.heard(Pulse(6), 5.0) == 6


def test_what_counts_as_progress():
    progress = CopyProgress(0.0)
    waiting = CopyState(waiting=("a",), complete="b", others="2 []")
    progress.heard(waiting, 1.0)
    progress.heard(waiting, 2.0)
    assert (progress.progress_at, progress.heard_at, progress.working) == (1.0, 2.0, True)
    progress.heard(CopyState(waiting=("a",), complete="b", others="1 []"), 3.0)  # another node has sent something
    assert progress.progress_at == 3.0
    progress.heard(CopyState(complete="a"), 4.0)
    assert (progress.progress_at, progress.working) == (4.0, False)
    progress.ordered(5.0)
    assert (progress.heard_at, progress.working) == (5.0, True)
    progress.ordered(6.0)
    assert progress.heard_at == 5.0  # it had work already, and is silent since


pytestmark = pytest.mark.full

LONG_S = 1e9  # for a process that is not to be given up


class Watched:
    """A copier with the figures that it passes on."""

    def __init__(self, local: Path, remote: Path | str, stall_s: float) -> None:
        self.told: list[tuple[object, ...]] = []
        self.took: list[float] = []
        self.failed = 0
        self._changed = threading.Condition()
        self.copier = Copier(str(local), str(remote), (), "token", self, stall_s)

    def copied(self, *figures: object) -> None:
        with self._changed:
            self.told.append(figures)
            self._changed.notify_all()

    def copy_took(self, seconds: float) -> None:
        self.took.append(seconds)

    def copy_failed(self) -> None:
        with self._changed:
            self.failed += 1
            self._changed.notify_all()

    def until(self, wanted) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted(self), LIMIT_S), (self.failed, self.told)


@contextmanager
def watched(local: Path, remote: Path | str, stall_s: float) -> Iterator[Watched]:
    found = Watched(local, remote, stall_s)
    try:
        yield found
    finally:
        found.copier.close(0.0)


def test_a_stopped_copier_is_reported_and_replaced(tmp_path, monkeypatch, caplog):
    """Only the stopped one has little time, which begins with its second report; the one after it has as much as it needs."""
    with watched(tmp_path / "local", tmp_path / "remote", LONG_S) as each:
        each.until(lambda seen: seen.told)
        child, genuine = each.copier._child, copier.logger.warning
        child._stall_s = 1.0
        monkeypatch.setattr(copier.logger, "warning", lambda *args: (setattr(child, "_stall_s", LONG_S), genuine(*args)))
        each.copier.look_now()
        each.until(lambda seen: len(seen.told) > 1)
        (pid,) = copiers(os.getpid())
        os.kill(pid, signal.SIGSTOP)
        name = save([tmp_path / "local"], 2)
        each.copier.look_now()
        each.until(lambda seen: seen.failed)  # while the job goes on: a metric and one line
        assert each.copier.close(None) == ()
    assert complete(tmp_path / "remote", name)
    assert caplog.text.count("has been silent for 1 s") == 1
    assert "restarting the process" in caplog.text


@pytest.fixture
def silent_server(monkeypatch) -> Iterator[str]:
    """A URL of an object store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "none")
        yield "s3://bucket/job"


def test_a_storage_that_never_answers_is_given_up(tmp_path, silent_server, caplog):
    name = save([tmp_path / "local"], 2)
    with watched(tmp_path / "local", silent_server, 2.0) as each:
        assert each.copier.close(None) == (name,)
        assert f"their only copy is on this node ({tmp_path / 'local'}): {name}" in caplog.text
        until(lambda: not copiers(os.getpid()), "the end of the process")


def test_a_copier_that_dies_repeatedly_is_given_up(tmp_path, caplog):
    name = save([tmp_path / "local"], 2)
    with watched(tmp_path / "local", "nosuch://bucket", 2.0) as each:
        each.until(lambda seen: seen.failed)
        assert each.copier.close(None) == (name,)
    assert name in caplog.text


def test_what_no_worker_continued_from_is_not_missed(tmp_path):
    """A part of a checkpoint whose other parts are lost, in a job that went back and saved no more."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    for path in (local, remote):
        path.mkdir()
    (remote / ".elastic_ext").mkdir()
    (remote / ".elastic_ext" / "copying").mkdir()  # nothing can be copied
    old, passed = save([local], 2), save([local], 4)
    with watched(local, remote, 1.0) as each:
        each.copier.abandon_newer_than(f"s3://bucket/{old}")
        assert each.copier.close(None) == (old,)
    with watched(local, remote, 1.0) as each:
        assert each.copier.close(None) == (passed, old)


SCRIPT = """
import sys
from torch import nn
from elastic_ext import Checkpointer
checkpointer = Checkpointer(sys.argv[1], model=nn.Linear(3, 3))
checkpointer.load()
checkpointer.save(5, wait=True)
"""


PINNED = """
import fcntl, os, sys, torch
from torch import nn
from elastic_ext import Checkpointer
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters())
checkpointer = Checkpointer(sys.argv[1], model=model, optimizer=optimizer)

def pinned(look=fcntl.LOCK_NB):
    local, _, name = os.environ["ELASTIC_EXT_RESUME_FROM"].rpartition("/")
    try:
        with open(f"{local}/.elastic_ext/loading/{name}") as file:
            fcntl.flock(file, fcntl.LOCK_EX | look)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    checkpointer.load()
    checkpointer.save(5, wait=True)
    os.abort()
print("before", pinned(), flush=True)
checkpointer.load()
optimizer.step()
print("after", pinned(look=0), flush=True)  # once it is not
"""


def job(tmp_path: Path, script: str, conf: str, *options: str, agent: Sequence[str] = AGENT) -> Job:
    """With checkpoints in `remote` and the local directory `disk`."""
    (tmp_path / "job.py").write_text(script)
    conf = f"--rdzv-conf=checkpoint_dir={tmp_path / 'remote'},{conf}"
    command = [*agent, "--nproc-per-node=1", *options, conf, str(tmp_path / "job.py"), str(tmp_path / "remote")]
    return Job(command, tmp_path, ELASTIC_EXT_LOCAL_DIR=str(tmp_path / "disk"))


def test_the_agent_pins_what_its_workers_load(tmp_path):
    """From its choice until a worker has made a step."""
    with job(tmp_path, PINNED, "backoff=0", "--max-restarts=1") as pinning:
        done = pinning.finish()
    assert done.returncode == 0, done.err
    assert "before True\nafter False" in done.out


def test_a_last_checkpoint_that_is_not_copied_fails(tmp_path):
    """All ranks are done; the copies fail. Exit code 75, a verdict, the name; started again where the storage works: 0."""
    remote, conf = tmp_path / "remote", f"verdict_file={tmp_path}/verdict"
    (remote / ".elastic_ext" / "copying").mkdir(parents=True)  # where a file is to be
    with job(tmp_path, SCRIPT, conf, agent=HASTY_AGENT) as failing:
        done = failing.finish()
    (name,) = [path.name for path in (tmp_path / "disk").glob("step_*")]
    assert done.returncode == 75, done.err
    assert f"training is done, but {name} could not be copied" in done.err
    verdict = json.loads((tmp_path / "verdict").read_text())
    assert "not-copied" in json.dumps(verdict)
    (remote / ".elastic_ext" / "copying").rmdir()
    with job(tmp_path, SCRIPT, conf) as working:
        assert working.finish().returncode == 0
    assert complete(remote, name)
