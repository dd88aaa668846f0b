"""Launchers of tests, forked from a process that has imported torch: to import it takes a launcher longer than all else it does.

Each process of pytest has one server, started when its first job is.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LISTENS = ("env", "--default-signal=INT")  # before a command: a shell has its background jobs ignore it
MODULES = ("torch.distributed.run", "elastic_ext.agent")  # `python -m`
PRELOADED = ("torch.distributed.launcher.api", "elastic_ext.agent.supervisor", "elastic_ext.rendezvous.handler")
# Begins of variables that Python, the loader, or a library reads before the fork.
AT_START = (
    *("PYTHON", "LD_", "LANG", "LC_", "TZ", "OMP_", "MKL_", "OPENBLAS_"),
    *("ATEN_", "TORCH", "PYTORCH", "LOGLEVEL", "FSSPEC", "GRPC"),
)


class Launched:
    """As much of subprocess.Popen as tests use."""

    def __init__(self, pid: int, status: socket.socket, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # the server writes the exit status there
        self.stdout, self.stderr = os.fdopen(stdout, "rb"), os.fdopen(stderr, "rb")

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked launcher", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._status.recv(32)))
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launchers:
    """The server, as seen by this process of pytest."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._lock = threading.Lock()  # tests start jobs from several threads
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.launchers", str(theirs.fileno())]
        root = Path(__file__).resolve().parents[1]
        self._server = subprocess.Popen(
            command, cwd=root, env=self._environ, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        self._control.close()
        self._server.wait()

    def start(self, command: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Launched | None:
        """None: a fork is not the same. It is for a plain `python -m` of a launcher, with no other variable that counts early.

        LISTENS may stand before it.
        """
        listens = tuple(command[:2]) == LISTENS
        command = command[2:] if listens else command
        differs = {name for name in environ.keys() | self._environ.keys() if environ.get(name) != self._environ.get(name)}
        if (
            tuple(command[:2]) != (sys.executable, "-m")
            or command[2] not in MODULES
            or any(name.startswith(AT_START) for name in differs)
        ):
            return None
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        status, theirs = socket.socketpair()
        message = {"command": list(command), "cwd": str(cwd), "environ": dict(environ), "listens": listens}
        with self._lock:
            socket.send_fds(self._control, [json.dumps(message).encode()], [theirs_out, theirs_err, theirs.fileno()])
        theirs.close()
        os.close(theirs_out)
        os.close(theirs_err)
        return Launched(int(status.recv(32)), status, out, err)


class Server:
    """Forks launchers, and reports their ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the process, and where its status is reported

    def serve(self) -> dict[str, Any] | None:
        """In a launcher, return the request that started it; in the server, None at the end."""
        while True:
            ready = select.select([self._control, *self._running], [], [])[0]
            for pidfd in set(ready) & self._running.keys():
                pid, status = self._running.pop(pidfd)
                status.send(b"%d" % os.waitpid(pid, 0)[1])
                status.close()
                os.close(pidfd)
            if self._control in ready:
                data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 20, 3)
                if not data:
                    return None
                if (request := self._fork(data, *descriptors)) is not None:
                    return request

    def _fork(self, data: bytes, out: int, err: int, status: int) -> dict[str, Any] | None:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(out, 1)
            os.dup2(err, 2)
            for descriptor in (out, err, status, *self._running):
                os.close(descriptor)
            for _, other in self._running.values():
                other.close()
            self._control.close()
            return json.loads(data)
        os.close(out)
        os.close(err)
        reports = socket.socket(fileno=status)
        reports.send(b"%d" % pid)
        self._running[os.pidfd_open(pid)] = pid, reports
        return None


def become(command: Sequence[str], cwd: str, environ: Mapping[str, str], listens: bool) -> None:
    """Run this command in this process, as if it had been started by it."""
    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[0] = cwd
    sys.orig_argv[:] = command
    sys.argv[:] = command[2:]
    random.seed()
    tempfile.tempdir = None
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for each in PRELOADED:
        importlib.import_module(each)
    gc.freeze()  # the collector must not write to shared pages
    with socket.socket(fileno=int(sys.argv[1])) as control:
        request = Server(control).serve()
    if request is not None:
        become(**request)
