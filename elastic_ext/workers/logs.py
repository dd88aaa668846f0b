"""Where the output of each worker goes, and the last bytes of its stderr: there NCCL, CUDA or the C++ runtime report errors
before a worker dies.

`WorkerLogs` stands around the user's own LogsSpecs and decides what each worker gets from the agent and where its files go. In
every version of torch, `reify` is the public hook in which a plug-in sees the environment of every worker before it starts.
torch's own LogsSpecs sets TORCHELASTIC_ERROR_FILE in it.

A relay (`relay.py`) stands between the workers and the console. Each worker's bootstrap opens a named pipe as its fd 2, so the
relay also gets what C code and child processes write. For a program without a bootstrap (`--no-python`), torch
opens it, as it does a file. Two things can differ from a worker that writes to the console itself: its
stdout is not relayed, so if both go to one place, their order may be off by the time of one read; and a console that is gone
costs the output, not the worker.

If stderr goes to a file (--log-dir with --redirects or --tee), nothing is relayed, and the tail is the end of that file. The
tail is None, and the worker keeps its stderr, if the console is a terminal (progress bars and debuggers check for one), if the
worker is a function, or if a pipe or the relay cannot be created.

Why the relay is a process: a thread of the agent can do the same work, and does if no process can run. Measured side by side
on two busy shared cores with two to eight writers:

    |                                                                 | process                 | thread of the agent     |
    |-----------------------------------------------------------------|-------------------------|-------------------------|
    | agent stopped for 3 s, each worker writes 200 KB/s: its pause   | 0.02 s                  | 2.7 s                   |
    | agent's main thread holds the GIL for about 2 s: the same pause | 0.08 s                  | 1.5 s                   |
    | agent gets SIGKILL, console full, 200 KB written: shown         | 200 KB                  | 55 to 60 KB             |
    | a process that the agent left running writes after its end      | shown                   | SIGPIPE kills it        |
    | a worker's death to the agent's reaction: median, 90 %          | 7 to 8 ms, 15 to 21 ms  | 4 to 7 ms, 21 to 27 ms  |
    | throughput, 8 writers of 100-byte lines                         | 78 to 194 MB/s          | 50 to 88 MB/s           |

The last two rows do not matter in practice. The others do: with a thread, training stops when the agent does (once a pipe's
64 KiB are full), the output before a kill is lost, and processes left running on purpose die. So the relay is a process.

Why not a file in the run directory that the agent reads and punches holes into, so that no worker ever waits for the console? At
100 MB/s on 2 cores that takes about as much processor time in all (1.5 s instead of 1.4 s in 5 s), but 0.87 s instead of 0.5 s in
the worker, and 0.67 s instead of none in the agent. What decides is the rest. A file has no limit: while the agent was stopped
for 3 s it took 290 MB of memory, and a write to a full /dev/shm (64 MB in a Docker container) fails in the worker. `echo >
/dev/stderr` truncates it, with what others have written. And after the agent's end no process reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from elastic_ext.base import files, wakeup
from elastic_ext.workers import helper_processes, processes, progress, progress_layout, reaper, relay, worker_env

logger = logging.getLogger(__name__)

RETRY_S = 0.05  # how long to wait for a relay that is about to end, before offering a source to the next one
END_S = 5.0  # how long the end of the job waits for the console; the relay writes later bytes on its own
STOPPED_CHECK_S = 5.0  # no event reports that a process was stopped
FLUSH_S = 0.05  # the longest time that a recovery waits for the console
TAIL_BYTES = relay.RING_BYTES

OF_TORCH = "torchelastic_"  # beginning of the directory that torch makes for logs if the user names none, and never removes
OWNER = "elastic_ext.lock"  # in such a directory, as long as it has no logs: its agent holds this lock


@dataclass
class StderrSource:
    """One worker's stderr for one round. While the agent holds the pipe open, a dying relay cannot harm the worker."""

    path: str  # the name by which the worker opens the pipe
    # pipe, ring_fd: the descriptors that the relay gets
    pipe: int
    ring_fd: int
    ring: relay.Ring
    shown: bool  # whether its bytes go to the console
    _writer: int | None  # keeps the pipe open until a worker has opened it; see `named_pipe`

    def close_writer(self) -> None:
        """Let the pipe end when the worker does, from now on."""
        writer, self._writer = self._writer, None
        if writer is not None:
            os.close(writer)

    def close(self) -> None:
        self.close_writer()
        os.close(self.pipe)
        os.close(self.ring_fd)


def make_source(path: str, shown: bool) -> StderrSource:
    """Make one worker's pipe. path: the requested name; if named pipes are refused, it gets another. Raises OSError."""
    path, pipe, writer = progress.named_pipe(path)  # the relay gets the descriptor, so it need not find the path
    ring_fd = -1
    try:
        ring_fd = _shared_memory()
        # Not ftruncate: touching a hole that cannot be filled raises SIGBUS.
        os.posix_fallocate(ring_fd, 0, relay.HEADER_BYTES + relay.RING_BYTES)
        return StderrSource(path, pipe, ring_fd, relay.Ring(ring_fd), shown, writer)
    except OSError:
        for descriptor in (pipe, ring_fd, writer):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        raise


def _shared_memory() -> int:
    """Create a file without a name: in memory if the kernel and this Python have memfd_create, else on disk.

    In memory it can get no shorter: a process that has it mapped would end by SIGBUS.
    """
    try:
        descriptor = os.memfd_create("elastic_ext_stderr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.suppress(OSError):  # a sandbox without seals
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return descriptor
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _start_process(console: int) -> tuple[subprocess.Popen[bytes] | None, socket.socket]:
    """Start a relay process, or a thread if no process can start. Return it (None: a thread) and our end of its socket.

    console: a descriptor. Raises OSError, RuntimeError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = helper_processes.start_helper(relay.__file__, stdin=theirs.fileno(), stderr=console)
    except OSError as error:
        ours.close()
        theirs.close()
        return None, _start_thread(console, str(error))
    theirs.close()
    return process, ours


def _start_thread(console: int, why: str) -> socket.socket:
    """Run the relay in this process; return our end of its socket. why: no process can run. Raises OSError, RuntimeError."""
    logger.error("the agent itself copies the workers' stderr, because the relay process cannot run: %s", why)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ends = theirs, os.dup(console)
        threading.Thread(target=_relay_and_close, args=ends, name="elastic_ext_relay", daemon=True).start()
    except (OSError, RuntimeError):
        ours.close()
        theirs.close()
        raise
    return ours


def _relay_and_close(control: socket.socket, console: int) -> None:
    relay.Relay(control, console).run()
    os.close(console)


class RelayClient:
    """The relay of one agent, from construction to close(). A thread starts another relay as soon as one is killed.

    Messages to a relay that has ended are lost without an error. Invariant: the running relay has every source of this round.
    Methods may be called from any thread.
    """

    def __init__(self) -> None:
        """Start a relay that writes to this process's fd 2. Raises OSError or RuntimeError if no descriptor or thread is left."""
        self._lock = threading.RLock()
        self._sources: list[StderrSource] = []
        self._closed = False
        self._cannot_start = False  # logged once
        self._numbers = itertools.count()  # of flushes
        self._console = os.dup(2)  # a relay started later writes to the same console
        closing: tuple[int, ...] = ()
        try:
            closing = os.pipe()
            self._closing = closing
            self._process, self._control = _start_process(self._console)  # no process: a thread, which lives as long as the agent
            self._thread = threading.Thread(target=self._watch, name="elastic_ext_stderr", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._control.close()
                raise
        except (OSError, RuntimeError):
            for descriptor in (self._console, *closing):
                os.close(descriptor)
            raise

    @property
    def pid(self) -> int | None:
        """The pid of the relay; None if it is a thread of the agent."""
        process = self._process  # another thread may replace it
        return process.pid if process is not None else None

    def add(self, source: StderrSource) -> bool:
        """Make the relay read this source; close it after the round. On failure, close it at once and return False."""
        with self._lock:
            if not self._offer(source):  # perhaps the relay has just been killed
                self._await_end(RETRY_S)
                self._revive()
                if not self._offer(source):
                    source.close()
                    return False
            self._sources.append(source)
            return True

    def forget_round(self) -> None:
        """Close this round's sources. The relay keeps reading those whose worker still writes."""
        with self._lock:
            if self._sources:
                self._forget_unopened()
            self._close_sources()

    def flush(self, timeout_s: float) -> int | None:
        """Make the relay empty the pipes; return how many are still open, None if the console did not take all in time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while time.monotonic() < deadline:
                self._revive()
                number = next(self._numbers)
                self._send(b"%s %d" % (relay.FLUSH, number))
                answer = self._answer(number, deadline)
                if answer is not None or self._cannot_start:
                    return answer
        return None

    def close(self) -> None:
        """Let the relay finish. It stays only while a process holds a pipe open or the console accepts nothing."""
        if self._closed:
            return
        self._resume()
        with self._lock:
            self._forget_unopened()
        still_open = self.flush(END_S)
        with self._lock:
            self._closed = True
            os.close(self._closing[1])
        self._thread.join()
        os.close(self._closing[0])
        self._control.close()  # the relay ends once its pipes have ended
        if still_open == 0 and not self._await_end(END_S):
            logger.warning("the stderr relay (pid %s) has not ended yet", self.pid)
        self._close_sources()
        os.close(self._console)

    def _forget_unopened(self) -> None:
        for source in self._sources:
            source.close_writer()
        self._send(relay.FORGET)

    def _close_sources(self) -> None:
        for source in self._sources:
            source.close()
        self._sources.clear()

    def _offer(self, source: StderrSource) -> bool:
        """Make the relay read this pipe; return False if the message could not be sent."""
        return self._send(b"%s %d" % (relay.SOURCE, source.shown), [source.pipe, source.ring_fd])

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        try:
            socket.send_fds(self._control, [message], list(descriptors), socket.MSG_DONTWAIT)
        except OSError:
            return False  # the relay was killed and another one will get every message, or it does not read
        return True

    def _answer(self, number: int, deadline: float) -> int | None:
        """Return the answer to this flush; None on a timeout or if the relay has ended."""
        if self._control.fileno() < 0:
            return None
        while wakeup.readable(self._control.fileno(), deadline - time.monotonic()):
            try:
                answer = self._control.recv(256).split()
            except OSError:
                answer = []
            if not answer:  # the socket has ended, so the process is about to end
                self._await_end(deadline - time.monotonic())
                return None
            if int(answer[0]) == number:
                return int(answer[1])
        return None

    def _resume(self) -> None:
        """Continue the process if it was stopped: full pipes would soon block the workers."""
        if (pid := self.pid) is not None:
            helper_processes.resume(pid, "stderr relay")

    def _await_end(self, timeout_s: float) -> bool:
        """Return whether the process ended within this time; True for a thread."""
        try:
            if self._process is not None:
                self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _watch(self) -> None:
        """Start another relay as soon as this one is killed. This is the thread's target."""
        signal.pthread_sigmask(signal.SIG_BLOCK, reaper.BLOCKED_SIGNALS)  # the main thread waits for these
        while (process := self._process) is not None:
            pidfd = None
            try:
                pidfd = processes.watch(process.pid)
            except ProcessLookupError:  # another thread has reaped it in _revive, and may be about to start the next
                with self._lock:
                    if self._process is not process:
                        continue
            except OSError as error:  # descriptors or threads have run out: the regular checks continue
                logger.debug("cannot watch the stderr relay, its end will be seen at the next check: %s", error)
            closing = self._wait(pidfd)
            if pidfd is not None:
                os.close(pidfd)
            if closing:
                return
            self._resume()
            self._revive()

    def _wait(self, pidfd: int | None) -> bool:
        """Block until the relay has ended or the next check is due; return whether this client is closing."""
        poll = select.poll()
        poll.register(self._closing[0], select.POLLIN)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        return any(descriptor == self._closing[0] for descriptor, _ in poll.poll(STOPPED_CHECK_S * 1000))

    def _revive(self) -> None:
        """Start another relay if this one has ended."""
        with self._lock:
            process = self._process
            if self._closed or process is None or process.poll() is None:
                return
            self._control.close()
            try:
                if process.returncode >= 0:  # another process would end the same way
                    self._control = _start_thread(self._console, f"it ended with exit code {process.returncode}")
                    self._process = None
                else:
                    if not self._cannot_start:
                        logger.warning("the stderr relay (pid %s) was killed from outside; starting another", process.pid)
                    self._process, self._control = _start_process(self._console)
            except (OSError, RuntimeError) as error:  # the process is still the dead relay: the next check tries again
                level = logging.DEBUG if self._cannot_start else logging.WARNING
                self._cannot_start = True
                logger.log(level, "the stderr relay (pid %s) has ended, and another cannot be started: %s", process.pid, error)
                return
            self._cannot_start = False
            for source in self._sources:
                self._offer(source)


class StderrTails:
    """The last stderr output of this round's workers, by local rank. Has a relay from construction to close()."""

    def __init__(self, enabled: bool, by_bootstrap: bool = True) -> None:
        """by_bootstrap: whether the workers' bootstrap opens their pipes; else torch does, as if they were files."""
        self.by_bootstrap = by_bootstrap
        self._relay: RelayClient | None = None
        self._sources: dict[int, StderrSource] = {}
        self._files: dict[int, str] = {}
        self._console_is_slow = False  # it did not take everything in time: this round does not wait for it again
        self._warned = False
        if enabled and _console_can_be_relayed():
            try:
                self._relay = RelayClient()
            except (OSError, RuntimeError) as error:  # no descriptor, no thread
                self._warn("all workers", error)

    def begin_round(self) -> None:
        """Forget the workers of the previous round. The console still gets what any of them writes."""
        self._console_is_slow = False
        self._files.clear()
        self._sources.clear()
        if self._relay is not None:
            self._relay.forget_round()

    def connect(self, local_rank: int, destination: str, directory: str) -> str | None:
        """Return the named pipe that is to be this worker's stderr; None if the worker keeps its stderr.

        destination: where torch sends its stderr: a file, os.devnull, or "" for the console. directory: where to make the pipe.
        """
        if destination not in ("", os.devnull):
            self._files[local_rank] = destination
            return None
        if self._relay is None:
            return None
        try:
            source = make_source(os.path.join(directory, "stderr"), shown=destination == "")
        except OSError as error:
            self._warn(f"worker {local_rank}", error)
            return None
        if not self._relay.add(source):
            return None
        self._sources[local_rank] = source
        return source.path

    def flush(self) -> None:
        """Wait, for FLUSH_S at most, until the console has all worker output so far. The agent's own lines follow it."""
        if self._relay is not None and self._sources and not self._console_is_slow:
            self._console_is_slow = self._relay.flush(FLUSH_S) is None

    def tail(self, local_rank: int) -> str | None:
        """Return the last TAIL_BYTES that this worker has written to stderr; None if not known."""
        if local_rank in self._files:
            tail = _file_tail(self._files[local_rank])
        else:
            self.flush()
            source = self._sources.get(local_rank)
            tail = source.ring.read() if source is not None and source.ring.connected else None
        return tail.decode(errors="replace") if tail is not None else None

    def close(self) -> None:
        """Let the relay finish; it may outlive this call. A second call does nothing."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            self._sources.clear()

    def _warn(self, whose: str, error: Exception) -> None:
        """Warn once, since the reason would be the same for every worker of every round."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        logger.log(level, "cannot keep the tail of the stderr of %s: %s", whose, error)


def _console_can_be_relayed() -> bool:
    try:
        return not os.isatty(2) and bool(os.fstat(2))
    except OSError:  # closed
        return False


def _file_tail(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return None


class WorkerLogs(LogsSpecs):  # type: ignore[misc, unused-ignore]  # torch is untyped
    """Adds our variables to the workers' environment and keeps their error files from torch's reader."""

    def __init__(self, inner: LogsSpecs) -> None:
        """Wrap `inner`, the user's own LogsSpecs."""
        super().__init__()
        self._inner = inner
        self._round_dir = ""
        self._on_disk: str | None = None  # this round's directory if run_dir is full
        # Set once: the agent's private directory, for the files of a job that wants no logs; the end of the workers' stderr.
        self.run_dir = ""
        self.stderr = StderrTails(enabled=False)
        # Set before each round, by local rank or for all workers of this node.
        self.variables: dict[str, str] = {}  # for their environment; TORCHELASTIC_RESTART_COUNT names the log directory
        self.own_variables: dict[int, dict[str, str]] = {}  # what differs for a worker
        self.messages: dict[int, dict[str, object]] = {}  # keys of each worker's message; see `worker_env`. `reify` adds the rest
        self.modules_file = ""  # where a worker of this round writes what it has imported
        # Read after the start: where each worker writes them, by local rank.
        self.error_files: dict[int, str] = {}
        self.stacks_files: dict[int, str] = {}
        self.failed = False  # set before the end: whether torch's message names the last round's error files, if there are any

    @property
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)

    @contextlib.contextmanager
    def owned_directory(self) -> Iterator[None]:
        """Own the directory that torch has made for logs, if it has. At the end leave only what somebody may look for there.

        Before that remove the directories of this user's agents that were killed. Torch itself never removes one.
        """
        owner: int | None = None
        parent, name = os.path.split(self.root_log_dir)
        try:
            if parent == tempfile.gettempdir() and name.startswith(OF_TORCH) and not os.listdir(self.root_log_dir):
                files.remove_orphans(f"{parent}/{OF_TORCH}*", OWNER, lambda folder: logger.info("removing %s", folder))
                owner = files.own(self.root_log_dir, OWNER)
        except OSError as error:
            logger.info("%s stays when this agent ends: %s", self.root_log_dir, error)
        try:
            yield
        finally:
            if owner is not None:
                if os.path.exists(os.path.join(self.root_log_dir, OWNER)):  # `reify` has left it there: no one wants logs
                    _remove_but(self.root_log_dir, self.error_files.values() if self.failed else ())
                os.close(owner)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the workers' environments, by local rank, and return where their logs go. Torch calls this each round."""
        for local_rank, env in envs.items():
            env.update(self.variables, **self.own_variables.get(local_rank, {}))
        dest = self._inner.reify(envs)
        if {*dest.stdouts.values(), *dest.stderrs.values()} - {"", os.devnull}:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.root_log_dir, OWNER))
        self.stderr.begin_round()
        if self._round_dir:  # the previous round's: a job that restarts for weeks must not fill the memory that holds it
            shutil.rmtree(self._round_dir, ignore_errors=True)
        self.remove()
        self._round_dir = os.path.join(self.run_dir, f"attempt_{self.variables['TORCHELASTIC_RESTART_COUNT']}")
        pipes: dict[int, str] = {}
        for local_rank, env in envs.items():
            error_file = env.get("TORCHELASTIC_ERROR_FILE") or os.path.join(self._private_dir(local_rank), "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = self.error_files[local_rank] = error_file
            self.stacks_files[local_rank] = os.path.join(os.path.dirname(error_file), "stacks.txt")
            destination = dest.stderrs[local_rank]  # a file, os.devnull, or "" for the console
            pipe = self.stderr.connect(local_rank, destination, self._private_dir(local_rank))
            if pipe is not None:
                pipes[local_rank] = pipe
            env[worker_env.WORKER_ENV] = json.dumps(self._message(local_rank, destination, pipe))
        # Torch reads the files named here, without checks, as soon as a worker has failed. The supervisor checks what it reads.
        stderrs = dest.stderrs if self.stderr.by_bootstrap else {**dest.stderrs, **pipes}
        return dataclasses.replace(dest, error_files=dict.fromkeys(dest.error_files, ""), stderrs=stderrs)

    def _message(self, local_rank: int, destination: str, pipe: str | None) -> dict[str, object]:
        """Return this worker's message. destination: where torch sends its stderr. pipe: see `StderrTails.connect`."""
        message = {
            "version": worker_env.VERSION,
            "progress_version": progress_layout.VERSION,
            **self.messages[local_rank],
            "stacks": self.stacks_files[local_rank],
            # If stderr goes to a file, the traceback belongs in that file; on the console, the agent shows it once.
            "quiet_traceback": destination in ("", os.devnull),
        }
        if "saves_below" in message:  # the agent reads it, too
            message["journal"] = self.messages[local_rank]["journal"] = os.path.join(self._private_dir(local_rank), "saves")
        return {**message, "stderr": pipe} if pipe is not None and self.stderr.by_bootstrap else message

    def _private_dir(self, local_rank: int) -> str:
        path = os.path.join(self._round_dir, str(local_rank))
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            on_disk = tempfile.mkdtemp(prefix="elastic_ext_")
            logger.warning("cannot create the workers' files in %s: %s; using %s", self._round_dir, error.strerror, on_disk)
            self.remove()
            self._round_dir, self._on_disk = on_disk, on_disk
            path = os.path.join(on_disk, str(local_rank))
            os.makedirs(path)
        return path

    def remove(self) -> None:
        """Remove the files of this round that are not in run_dir."""
        on_disk, self._on_disk = self._on_disk, None
        if on_disk is not None:
            shutil.rmtree(on_disk, ignore_errors=True)


def _remove_but(folder: str, kept: Collection[str]) -> None:
    """Remove a directory, but for these files and the directories in which they are."""
    for inside, folders, names in os.walk(folder, topdown=False):
        for name in (*folders, *names):  # a link to a directory is among the first
            if (path := os.path.join(inside, name)) not in kept:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        with contextlib.suppress(OSError):  # something is left in it
            os.rmdir(inside)
