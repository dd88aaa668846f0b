"""The last of each worker's stderr, for what C code says there before it dies: NCCL, CUDA, "terminate called".

Between a worker and the console stands a relay (`relay.py`). The worker's bootstrap opens a named pipe as its fd 2, so children
and C code write there too; bytes reach the console at once and unchanged. What can differ from a worker that writes to the
console itself: its stdout is not relayed, so where both go to one place their order may be off by the time of one read; and a
console that is gone costs the output, not the worker.

Where stderr goes to a file (--log-dir with --redirects or --tee) nothing is pumped, and the tail is that of the file. Nothing is
kept, and the tail is None, where the console is a terminal (a worker's stderr must stay one: progress bars and debuggers look),
where no bootstrap runs (functions, other programs), and where any of this fails: the worker keeps the stderr it has.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.workers import pidfds
from elastic_ext.workers.reaper import reaper
from elastic_ext.workers.stderr import relay
from elastic_ext.workers.wake_pipe import named_pipe

logger = logging.getLogger(__name__)

FLUSH_S = 0.05  # how long a recovery waits for the console at most
END_S = 5.0  # how long the end of the job waits for it; later bytes are written by the relay alone
TAIL_BYTES = relay.RING_BYTES
STOPPED_LOOK_S = 5.0  # nothing tells that a process was stopped


@dataclass
class _Source:
    """The agent's ends of one worker's pipe. While they are open, no death of the relay can hurt the worker."""

    pipe: int
    ring_fd: int
    ring: relay.Ring
    shown: bool
    held: int | None = None  # see `named_pipe`

    def close(self) -> None:
        self.let_end()
        os.close(self.pipe)
        os.close(self.ring_fd)

    def let_end(self) -> None:
        """From here on the end of the worker is the end of the pipe."""
        held, self.held = self.held, None
        if held is not None:
            os.close(held)


class StderrTails:
    """Keeps a relay process from construction to close(), and what this round's workers have written last."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and _console_can_be_pumped()
        self._lock = threading.RLock()
        self._sources: dict[int, _Source] = {}
        self._files: dict[int, str] = {}
        self._numbers = itertools.count()
        self._slow = False  # the console did not take everything in time: it is not waited for again in this round
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._keeper: threading.Thread | None = None
        self._said_not_kept = False
        self._lacking = False  # no relay can be had, which has been said
        if self.enabled:
            try:
                self._begin()
            except (OSError, RuntimeError) as error:  # no descriptor, no thread
                self._say_not_kept("all workers", error)
                self.enabled = False

    def _begin(self) -> None:
        console = os.dup(2)  # a relay started later writes to the same
        try:
            closing = os.pipe()
        except OSError:
            os.close(console)
            raise
        self._console, self._closing = console, closing
        keeper = threading.Thread(target=self._keep, name="elastic_ext_stderr", daemon=True)
        try:
            self._start()
            keeper.start()
        except (OSError, RuntimeError):
            self._release()
            for descriptor in (console, *closing):
                os.close(descriptor)
            raise
        self._keeper = keeper

    # What the supervisor calls.

    def begin_round(self) -> None:
        """Forget the workers of the round before. Whoever of them still writes is carried on to the console all the same."""
        with self._lock:
            self._slow = False
            self._files.clear()
            if self._sources:
                self._let_end()
                self._send(b"forget")
            self._close_sources()

    def connect(self, local_rank: int, destination: str, directory: str) -> str | None:
        """Return the named pipe that this worker's bootstrap is to open as its stderr; None: it keeps the one it has.

        destination: where torch sends its stderr; a file, os.devnull, or "" for the console. directory: for the pipe.
        """
        if destination not in ("", os.devnull):
            self._files[local_rank] = destination
            return None
        if not self.enabled:
            return None
        path = os.path.join(directory, "stderr")
        try:
            path, source = _make_source(path, shown=destination == "")
        except OSError as error:
            self._say_not_kept(f"worker {local_rank}", error)
            return None
        with self._lock:
            if not self._hand_over(source):
                source.close()
                return None
            self._sources[local_rank] = source
        return path

    def settle(self) -> None:
        """Wait until the console has what the workers have written by now, but never long: what the agent says comes after it."""
        if self._sources and not self._slow:
            self._slow = self._flush(FLUSH_S) is None

    def tail(self, local_rank: int, traceback: str = "") -> str | None:
        """The last TAIL_BYTES that this worker has written to stderr; None: not known.

        traceback: what the worker did not print because the agent shows it; it belongs at the end.
        """
        if local_rank in self._files:
            text = _file_tail(self._files[local_rank])
        else:
            self.settle()
            source = self._sources.get(local_rank)
            text = source.ring.read() if source is not None and source.ring.connected else None
        if text is None:
            return traceback or None
        shown = text.decode(errors="replace")
        return shown if traceback.rstrip() in shown else shown + traceback

    def close(self) -> None:
        """Let the relay finish. It stays only as long as somebody holds a pipe open, or the console takes nothing."""
        if self._keeper is None:
            return
        self._let_end()
        self._go_on()
        self._send(b"forget")
        still_open = self._flush(END_S)
        with self._lock:
            os.close(self._closing[1])
            self.enabled = False
        self._keeper.join()
        os.close(self._closing[0])
        self._keeper = None
        self._release()
        if self._process is not None and still_open == 0:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                logger.warning("the stderr relay (pid %s) has not ended yet", self._process.pid)
        self._close_sources()
        os.close(self._console)

    def _say_not_kept(self, whose: str, error: Exception) -> None:
        """Once: it would be the same for every worker of every round."""
        level = logging.DEBUG if self._said_not_kept else logging.WARNING
        self._said_not_kept = True
        logger.log(level, "the stderr of %s is not kept: %s", whose, error)

    # The relay.

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        # Blocked signals stay blocked over exec: those are for the agent, and the relay ends after it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, reaper.DEAF_TO)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py"))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._console,
                # Not the token of the workers; but an interpreter may find its own library only so.
                env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
                start_new_session=True,  # a signal to the agent's group must not reach it
            )
        except OSError as error:
            self._serve_here(theirs, str(error))
        else:
            theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _serve_here(self, control: socket.socket, why: str) -> None:
        """No process can be had: a thread carries what there is. Less robust, but a full pipe would stop the workers."""
        logger.error("the workers' stderr passes the agent itself, for its relay cannot run: %s", why)
        try:
            ends = control, os.dup(self._console)
            threading.Thread(target=_relay_and_close, args=ends, name="elastic_ext_relay", daemon=True).start()
        except (OSError, RuntimeError):
            control.close()
            self._release()
            raise
        self._process = None

    def _keep(self) -> None:
        """Start the relay again as soon as somebody kills it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, reaper.DEAF_TO)  # the main thread waits for those
        while (process := self._process) is not None:
            pidfd = None
            try:
                pidfd = pidfds.watch(process.pid)
            except ProcessLookupError:  # reaped by _revive in another thread, which may be about to start another
                with self._lock:
                    if self._process is not process:
                        continue
            except OSError as error:  # a lack of descriptors, or of threads: the looks go on without
                logger.debug("the end of the stderr relay is not seen at once: %s", error)
            ready = self._await_news(pidfd)
            if pidfd is not None:
                os.close(pidfd)
            if ready:
                return
            self._go_on()
            self._revive()

    def _await_news(self, pidfd: int | None) -> bool:
        """Until the relay has ended, it is time to look whether it was stopped, which nothing tells, or this is to end: True."""
        poll = select.poll()
        poll.register(self._closing[0], select.POLLIN)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        return any(descriptor == self._closing[0] for descriptor, _ in poll.poll(STOPPED_LOOK_S * 1000))

    def _go_on(self) -> None:
        """A relay that somebody has stopped would hold up the workers as soon as their pipes are full."""
        process = self._process
        if process is not None:
            pidfds.go_on(process.pid, "stderr relay")

    def _revive(self) -> None:
        with self._lock:
            if not self.enabled or self._process is None or self._process.poll() is None:
                return
            pid, code = self._process.pid, self._process.returncode
            self._release()
            try:
                if code >= 0:
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self._control = ours
                    self._serve_here(theirs, f"it ended with exit code {code}")
                else:
                    if not self._lacking:
                        logger.warning("the stderr relay (pid %s) was killed from outside; starting another", pid)
                    self._start()
            except (OSError, RuntimeError) as error:  # its process is still the dead one: the next look tries again
                level = logging.DEBUG if self._lacking else logging.WARNING
                self._lacking = True
                logger.log(level, "the stderr relay (pid %s) has ended, no other can be started now: %s", pid, error)
                return
            self._lacking = False
            for source in self._sources.values():
                self._offer(source)

    def _release(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _let_end(self) -> None:
        for source in self._sources.values():
            source.let_end()

    def _close_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _hand_over(self, source: _Source) -> bool:
        """Whether the relay carries it; one that has just been killed is replaced first."""
        if self._offer(source):
            return True
        self._await_end(time.monotonic() + FLUSH_S)
        self._revive()
        return self._offer(source)

    def _offer(self, source: _Source) -> bool:
        return self._send(b"source %d" % source.shown, [source.pipe, source.ring_fd])

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [message], list(descriptors), socket.MSG_DONTWAIT)
        except OSError:
            return False  # it was killed, and whoever starts it again tells it all; or it does not read
        return True

    def _flush(self, timeout_s: float) -> int | None:
        """Have the relay empty the pipes; how many are still open then, or None if the console has not taken it all in time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while time.monotonic() < deadline:
                self._revive()
                if self._control is None:
                    return None
                number = next(self._numbers)
                self._send(b"flush %d" % number)
                answer = self._hear(number, deadline)
                if answer is not None:
                    return answer
        return None

    def _hear(self, number: int, deadline: float) -> int | None:
        """The answer to flush `number`; None where it does not come in time, or the relay is gone."""
        poll = select.poll()
        control = self._control
        if control is None:
            return None
        poll.register(control, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            try:
                answer = control.recv(256).split()
            except OSError:
                answer = []
            if not answer:
                self._await_end(deadline)
                return None
            if int(answer[0]) == number:
                return int(answer[1])
        return None

    def _await_end(self, deadline: float) -> None:
        """The relay's socket has ended: its process is about to."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass


def _relay_and_close(control: socket.socket, console: int) -> None:
    relay.Relay(control, console).run()
    os.close(console)


def _console_can_be_pumped() -> bool:
    try:
        return not os.isatty(2) and bool(os.fstat(2))
    except OSError:  # closed
        return False


def _make_source(path: str, shown: bool) -> tuple[str, _Source]:
    """The name of a pipe and the agent's ends of it."""
    # The relay gets this very descriptor, so it need not find the path.
    path, pipe, held = named_pipe(path)
    ring_fd = -1
    try:
        ring_fd = _memory()
        # Not ftruncate alone: a hole that cannot be filled is SIGBUS at the first touch.
        os.posix_fallocate(ring_fd, 0, relay.HEADER_BYTES + relay.RING_BYTES)
        return path, _Source(pipe, ring_fd, relay.Ring(ring_fd), shown, held)
    except OSError:
        for descriptor in (pipe, ring_fd, held):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        raise


def _memory() -> int:
    """A file without a name, in memory where the kernel and this Python have memfd_create."""
    try:
        return os.memfd_create("elastic_ext_stderr", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _file_tail(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return None
