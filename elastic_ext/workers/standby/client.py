"""The agent's side of warm standbys: the process that forks them, one that waits, and a Popen that starts no new process.

See `standby_server.py` for what is said between them. Everything here is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_ext.base.wakeup import readable
from elastic_ext.workers import descriptors as limits
from elastic_ext.workers import pidfds

logger = logging.getLogger(__name__)

SERVER = str(Path(__file__).with_name("server.py"))
PARK_S = 5.0  # a fork takes 10 ms
RELEASE_S = 2.0  # the standby only waits for this; one that does not read is stopped or swapped out
END_S = 5.0
NICE = 10  # a tenth of what a worker gets of a processor that both want
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ServerState:
    """What a server says when it is ready; see `Server._state` in standby_server.py."""

    seconds: float
    unsafe: dict[str, str]
    absent: dict[str, str]
    threads: int
    names: frozenset[str]
    read: dict[str, list[str]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> ServerState:
        return ServerState(**{**told, "names": frozenset(told["names"]), "changed": tuple(told["changed"])})


class Standby:
    """A standby. Invariant: its pidfd is open until it is released or ended, so no stranger is ever signalled."""

    def __init__(self, pid: int, waiting: socket.socket) -> None:
        self.pid = pid
        self._waiting = waiting
        self.pidfd = pidfds.watch(pid)

    @property
    def alive(self) -> bool:
        return not readable(self.pidfd)

    def release(self, told: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Let it run. Raises OSError where it does not say that it does; it is dead then."""
        text = json.dumps(told).encode()
        limits.as_users(self.pid)
        try:
            if pidfds.state(self.pid) in ("T", "t"):
                raise ConnectionError(f"standby {self.pid} was stopped from outside")
            self._waiting.settimeout(RELEASE_S)
            socket.send_fds(self._waiting, [len(text).to_bytes(4, "big")], list(descriptors))
            self._waiting.sendall(text)
            if not self._waiting.recv(1):
                raise ConnectionError(f"standby {self.pid} has ended")
        except OSError:
            self.end()
            raise
        self._forget()

    def end(self) -> None:
        """Kill and reap it."""
        if self.alive:
            pidfds.send(self.pidfd, self.pid, signal.SIGKILL)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass  # somebody waits for all children of this process
        self._forget()

    def _forget(self) -> None:
        self._waiting.close()
        os.close(self.pidfd)


class StandbyServer:
    """The process that imports and forks."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: str, cwd: str | None = None) -> None:
        """command: the interpreter with its options. env: of the workers. output: file for what imports print."""
        self._output = output
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, open(output, "wb") as printed:
                self._process = subprocess.Popen(
                    [*command, SERVER, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env=dict(env),
                    cwd=cwd,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a signal to the agent's group must not reach it
                )
        except OSError:
            ours.close()
            raise
        self._control = ours
        try:
            self.pidfd = pidfds.watch(self._process.pid)
        except OSError:
            ours.close()
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._control.fileno()

    def preload(self, path: str) -> None:
        """path: of a file with what standby_server.py says. `hear` tells when it is done."""
        self._send({"preload": path})

    def hear(self) -> ServerState | None:
        """What it says; None where it has ended. Blocks until then."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
        except ConnectionError:
            return None
        if not data:
            return None
        if not descriptors:
            raise OSError(errno.EMFILE, "no descriptor left for what the server of the standbys says")
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            return ServerState.from_json(json.load(file)["ready"])

    def park(self, count: int) -> list[Standby]:
        """Fork standbys; fewer where one did not come up in time."""
        waiting = []
        with _adopting_orphans():
            for _ in range(count):
                try:
                    ours, theirs = socket.socketpair()
                except OSError as error:
                    logger.debug("no more standbys can be asked for: %s", error)
                    break
                with theirs:
                    try:
                        self._send({"park": os.getpid()}, [theirs.fileno()])
                    except OSError:
                        ours.close()
                        break
                waiting.append(ours)
            deadline = time.monotonic() + PARK_S
            return [parked for each in waiting if (parked := _greeted(each, deadline)) is not None]

    def lower_priority(self, lower: bool) -> None:
        """While it imports, where that can be undone. Not to SCHED_IDLE, which on a busy host gets nothing at all."""
        if _priority_can_be_raised():
            try:
                os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + (NICE if lower else 0))
            except ProcessLookupError:
                pass  # hear() says so

    def end(self) -> None:
        """Kill and reap it. Standbys that wait go on without it."""
        self._control.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self.pidfd)

    def last_words(self) -> str:
        """How it ended and the last of what it has printed."""
        try:
            code: object = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = "unknown"
        try:
            printed = Path(self._output).read_bytes()[-1000:].decode(errors="replace").strip()
        except OSError:
            printed = ""
        return f"exit code {code}{': ' if printed else ''}{printed}"

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))


def _greeted(waiting: socket.socket, deadline: float) -> Standby | None:
    """The standby at the other end, which says its pid."""
    waiting.settimeout(max(0.01, deadline - time.monotonic()))
    ours = 0
    try:
        pid = int(waiting.recv(32) or b"0")
        if pid:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # ours to wait for, or an error
            ours = pid
            return Standby(pid, waiting)
    except OSError as error:
        logger.debug("a standby did not come up: %s", error)
    waiting.close()
    if ours:  # no descriptor to know it by: it must not stay as a zombie
        os.kill(ours, signal.SIGKILL)
        os.waitpid(ours, 0)
    return None


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """While standbys are forked, this process is the parent of what its descendants leave behind.

    An orphan of somebody else that comes in these milliseconds stays a child of the agent, and when it has ended, a zombie.
    """
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@functools.cache
def _priority_can_be_raised() -> bool:
    """Whether a process may come back from a lower priority, which takes a right (getpriority(2)): found out on one.

    Workers are forked from the process that imports, so its priority must not stay low.
    """
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as other:  # until its input ends
        own = os.getpriority(os.PRIO_PROCESS, other.pid)
        try:
            os.setpriority(os.PRIO_PROCESS, other.pid, own + 1)
            os.setpriority(os.PRIO_PROCESS, other.pid, own)
        except OSError:
            return False
    return True


class WarmPopen(subprocess.Popen):
    """A Popen whose process is a standby, already there. All that a Popen can do works: the standby is a child of this process.

    Python's private name here is `_execute_child` (3.10 to 3.14: the pipe ends are arguments 10 to 15 of it, in this order);
    `_close_pipe_fds` is what it ends with.
    """

    def __init__(
        self,
        parked: Standby,
        command: Sequence[str],
        program: Sequence[str],
        env: Mapping[str, str],
        processors: frozenset[int] | None = None,
        **streams: Any,
    ) -> None:
        """command: of the cold start. program: the end of it, which the bootstrap runs: [SCRIPT, ...] or ["-m", MODULE, ...].

        processors: that it is to run on, where they are others than this process's.

        Raises OSError where the standby has died meanwhile.
        """
        self._parked = parked
        self._program = list(program)
        self._shown = list(command)
        self._processors = processors
        # The script is not to see the bootstrap.
        super().__init__([*command[: len(command) - len(program) - 1], *program], env=env, start_new_session=True, **streams)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        env = rest[3]
        ends = rest[7:13]
        stdin, _, _, stdout, _, stderr = ends
        wanted = {number: fd if fd != -1 else number for number, fd in enumerate((stdin, stdout, stderr))}
        wanted = {number: fd for number, fd in wanted.items() if _is_open(fd)}
        told = {
            "argv": self._program,
            "orig_argv": list(args),
            "shown": self._shown,
            "env": dict(env),
            "open": list(wanted),
            "processors": sorted(self._processors or ()),
            "ignored": _ignored_signals(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
        try:
            self._parked.release(told, list(wanted.values()))
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
        self.pid = self._parked.pid
        self._child_created = True


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _ignored_signals() -> int:
    with open("/proc/thread-self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn:"))
