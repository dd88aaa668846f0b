"""The agent's side of the protocol in `server.py`: the server's process, a waiting standby, a Popen that starts no new process.

Only one thread at a time may use an object of this module.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ext.base.wakeup import readable
from elastic_ext.workers import limits, processes
from elastic_ext.workers.standby import server

if TYPE_CHECKING:
    from elastic_ext.workers.standby.server import Ready, StandbyRelease

logger = logging.getLogger(__name__)

SERVER = str(Path(__file__).with_name("server.py"))
PARK_S = 5.0  # a fork takes 10 ms
RELEASE_S = 2.0  # the standby does nothing but wait for this; one that does not read is stopped or swapped out
END_S = 5.0
REAP_S = 0.001
NICE = 10  # a tenth of a worker's share of a processor that both want
OUTPUT_BYTES = 1000  # how much of a server's output goes to the log
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


class Standby:
    """A child of this process that waits to become a worker.

    Invariant: its pidfd is open until it is released or ended, so a signal never hits an unrelated process.
    """

    def __init__(self, pid: int, waiting: socket.socket) -> None:
        self.pid = pid
        self._waiting = waiting
        self.pidfd = processes.watch(pid)

    @property
    def alive(self) -> bool:
        return not readable(self.pidfd)

    def release(self, message: StandbyRelease, descriptors: Sequence[int]) -> None:
        """Let it run. If it does not confirm that, kill it and raise OSError."""
        text = json.dumps(message).encode()
        limits.restore_user_limit(self.pid)
        try:
            if processes.state(self.pid) in ("T", "t"):
                raise ConnectionError(f"standby {self.pid} was stopped from outside")
            self._waiting.settimeout(RELEASE_S)
            socket.send_fds(self._waiting, [len(text).to_bytes(server.HEADER_BYTES, "big")], list(descriptors))
            self._waiting.sendall(text)
            if not self._waiting.recv(1):
                raise ConnectionError(f"standby {self.pid} has ended")
        except OSError:
            self.end()
            raise
        self._close()

    def end(self) -> None:
        """Kill and reap it."""
        if self.alive:
            processes.send(self.pidfd, self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # other code waits for all children of this process
            os.waitpid(self.pid, 0)
        self._close()

    def _close(self) -> None:
        self._waiting.close()
        os.close(self.pidfd)


@dataclass(frozen=True)
class ServerEnd:
    """The end of a server's process. exitcode: as in subprocess; None if unknown. output: the end of its output."""

    exitcode: int | None
    output: str

    @property
    def killed(self) -> bool:
        """Return whether a signal ended it. Another server need not end the same way."""
        return self.exitcode is not None and self.exitcode < 0

    def __str__(self) -> str:
        code = "unknown" if self.exitcode is None else self.exitcode
        return f"exit code {code}{': ' if self.output else ''}{self.output}"


class ServerProcess:
    """The process that imports and forks, from its start to its end. Its program is `server.py`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: str, cwd: str | None = None) -> None:
        """Start the process. Raises OSError.

        command: the interpreter with its options. env: the workers' environment. output: file for what imports print. cwd: the
        workers' directory; None: the agent's.
        """
        self.importing = False  # it was asked to import and has not answered yet
        self.hurried = False  # it has learned that torch is enough, since it was asked
        self._lowered = False
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
            self.pidfd = processes.watch(self._process.pid)  # readable when it has ended
        except OSError:
            ours.close()
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive_ready` would not block."""
        return self._control.fileno()

    def preload(self, path: str) -> None:
        """Ask it to import. path: a file that holds a `server.PreloadRequest`. `receive_ready` returns when that is done."""
        self.importing, self.hurried = True, False
        with suppress(OSError):  # it has ended; `receive_ready` reports that
            self._send({"preload": path})

    def hurry(self) -> None:
        """Have it answer as soon as it has torch, which all workers would import again; the rest is to be asked for later."""
        if self.importing and not self.hurried:
            self.hurried = True
            self._use_full_priority()
            with suppress(OSError):
                self._send({"enough": True})

    def receive_ready(self) -> Ready | None:
        """Wait for its answer to `preload`; return None if it has ended. Raises OSError if no descriptor is left."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
        except ConnectionError:
            return None
        if not data:
            return None
        if not descriptors:
            raise OSError(errno.EMFILE, "no descriptor left to receive the answer of the standby server")
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            ready: Ready = json.load(file)
        self.importing = False
        self._use_full_priority()
        return ready

    def park(self, count: int) -> list[Standby]:
        """Fork standbys and return them; fewer than `count` if some did not start in time."""
        waiting = []
        with _adopting_orphans():
            for _ in range(count):
                try:
                    ours, theirs = socket.socketpair()
                except OSError as error:
                    logger.debug("cannot request more standbys: %s", error)
                    break
                with theirs:
                    try:
                        self._send({"park": os.getpid()}, [theirs.fileno()])
                    except OSError:
                        ours.close()
                        break
                waiting.append(ours)
            deadline = time.monotonic() + PARK_S
            return [standby for each in waiting if (standby := _accept(each, deadline)) is not None]

    def yield_to_workers(self) -> None:
        """Lower its priority until its imports are done, if that can be undone: workers are forked from it."""
        if self.importing and not self._lowered:
            self._lowered = True
            self._renice(NICE)

    def _use_full_priority(self) -> None:
        if self._lowered:
            self._renice(0)
            self._lowered = False

    def _renice(self, more: int) -> None:
        """Set its niceness to this process's plus `more`. Not SCHED_IDLE, which gets nothing at all on a busy host."""
        if _priority_can_be_raised():
            with suppress(ProcessLookupError):  # `receive_ready` reports that
                os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + more)

    def end(self) -> None:
        """Kill and reap it, and what it was forking. Its standbys keep waiting without it."""
        self._control.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        _reap_group(self.pid)
        os.close(self.pidfd)

    def how_it_ended(self) -> ServerEnd:
        """Return how the process ended. Call this after `receive_ready` has returned None."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = None
        try:
            printed = Path(self._output).read_bytes()[-OUTPUT_BYTES:].decode(errors="replace").strip()
        except OSError:
            printed = ""
        return ServerEnd(code, printed)

    def _send(self, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], list(descriptors))


def _accept(waiting: socket.socket, deadline: float) -> Standby | None:
    """Return the standby at the other end once it has sent its pid; None if it has not by the deadline (monotonic)."""
    waiting.settimeout(max(0.01, deadline - time.monotonic()))
    ours = 0
    try:
        pid = int(waiting.recv(32) or b"0")
        if pid:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # an error if it is not our child
            ours = pid
            return Standby(pid, waiting)
    except OSError as error:
        logger.debug("a standby did not start: %s", error)
    waiting.close()
    if ours:  # no descriptor left to watch it: it must not stay as a zombie
        os.kill(ours, signal.SIGKILL)
        os.waitpid(ours, 0)
    return None


def _reap_group(server: int) -> None:
    """Kill and reap what this process has adopted of a server that was killed as it forked. Standbys lead their own groups.

    Without a descriptor: it must work when none is left. And without a wait for the group: the kernel ends none when a late
    standby leaves it and only then dies.
    """
    deadline = time.monotonic() + END_S
    with suppress(ChildProcessError):  # nothing of it is our child
        while time.monotonic() < deadline:
            if os.waitid(os.P_PGID, server, os.WEXITED | os.WNOHANG) is None:
                with suppress(ProcessLookupError):  # the last one has just left it
                    os.killpg(server, signal.SIGKILL)
                time.sleep(REAP_S)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process the parent of orphaned descendants while standbys are forked.

    Any other orphan that arrives in these milliseconds stays a child of the agent, and becomes a zombie when it has ended. So
    does a standby that leads its group but has missed its deadline; what a server was still forking does not, see `_reap_group`.
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
    """Return whether a process may raise its lowered priority again, which takes a right (getpriority(2)). Tried on `cat`."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as other:  # until its input ends
        own = os.getpriority(os.PRIO_PROCESS, other.pid)
        try:
            os.setpriority(os.PRIO_PROCESS, other.pid, own + 1)
            os.setpriority(os.PRIO_PROCESS, other.pid, own)
        except OSError:
            return False
    return True


class WarmPopen(subprocess.Popen[bytes]):
    """A Popen whose process is an existing standby. All Popen methods work, because the standby is a child of this process.

    This relies on Python's private `_execute_child` (3.10 to 3.14: the pipe ends are its arguments 10 to 15, in this order) and
    on `_close_pipe_fds`, which it calls last.
    """

    def __init__(
        self,
        standby: Standby,
        command: Sequence[str],
        program: Sequence[str],
        env: Mapping[str, str],
        processors: frozenset[int] | None = None,
        **streams: Any,
    ) -> None:
        """Release the standby. Raises OSError if it has died in the meantime.

        command: the command of the cold start. program: the end of `command`, which the bootstrap runs: [SCRIPT, ...] or ["-m",
        MODULE, ...]. env: the worker's environment. processors: the processors to run on; None: those of this process. streams:
        stdin, stdout, stderr and text options, as for subprocess.Popen.
        """
        self._standby = standby
        self._program = list(program)
        self._shown = list(command)
        self._processors = processors
        # The script must not see the bootstrap.
        super().__init__([*command[: len(command) - len(program) - 1], *program], env=env, start_new_session=True, **streams)

    def _execute_child(self, args: Sequence[str], executable: object, preexec_fn: object, *rest: Any) -> None:
        env = rest[3]
        ends = rest[7:13]
        stdin, _, _, stdout, _, stderr = ends
        wanted = {number: fd if fd != -1 else number for number, fd in enumerate((stdin, stdout, stderr))}
        wanted = {number: fd for number, fd in wanted.items() if os.path.exists(f"/proc/self/fd/{fd}")}  # those that are open
        message: StandbyRelease = {
            "argv": self._program,
            "orig_argv": list(args),
            "shown": self._shown,
            "env": dict(env),
            "open": list(wanted),
            "processors": sorted(self._processors or ()),
            "ignored": server.signal_mask("SigIgn"),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
        try:
            self._standby.release(message, list(wanted.values()))
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
        self.pid = self._standby.pid
        self._child_created = True
