"""Helper processes of an agent: how they start, and go on when somebody has stopped them; and the reaper's client.

The reaper's program and protocol are in `reaper.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from elastic_ext.workers import processes, reaper

logger = logging.getLogger(__name__)

REAPER_END_S = 40.0  # the reaper itself gives up after about 30 s
REAPER_STOPPED_S = 2.0  # how long to wait for its end before checking whether it is stopped


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block what may end this process inside the context: a helper is known to the caller before a handler can raise.

    Blocked signals stay blocked across exec: none of these can end a helper, even while it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, reaper.BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_helper(
    program: str, *arguments: str, stdin: int, stderr: int | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a helper process that outlives this one: a file that needs only the standard library. Raises OSError.

    Call it inside `signals_blocked` if the process would be lost without its result.
    """
    with signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-I", "-S", program, *arguments],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # Without the workers' token. LD_*, because some interpreters find their own library only through LD_LIBRARY_PATH.
            env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
            pass_fds=pass_fds,
            bufsize=0,  # or closing its input would retry writes that have failed
            start_new_session=True,  # a signal to the agent's process group must not reach it
        )


def resume(pid: int, what: str) -> bool:
    """Resume a helper process if it was stopped (SIGSTOP). Return whether it was. what: its name for the log."""
    if processes.state(pid) != "T":
        return False
    logger.warning("the %s (pid %s) was stopped from outside; resuming it", what, pid)
    with suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGCONT)
    return True


class Reaper:
    """Keeps a reaper process running beside the agent from construction to close(), and sends it each round's workers.

    If no reaper can be started (no process or descriptor is left), this logs it once, and each round tries again.
    """

    def __init__(self, token: str, run_dir: str, inherited: Callable[[], Sequence[int]] = tuple) -> None:
        """Start the reaper.

        token: in every worker's environment. run_dir: a directory to remove once the agent has ended. inherited: returns
        descriptors that stay open as long as the reaper lives.
        """
        self._token = token
        self._run_dir = run_dir
        self._inherited = inherited
        self._workers: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None  # readable once the reaper has ended; None: no reaper runs
        self._cannot_start = False  # logged once
        self._cannot_run = False  # it ended unasked, as the next one would
        self._start()

    def _start(self) -> None:
        try:
            with signals_blocked():
                self._process = self._spawn()
                self.pidfd = processes.watch(self._process.pid)
        except OSError as error:
            self._kill()
            if not self._cannot_start:
                logger.warning("cannot start the reaper: %s; if this agent is killed, its workers may outlive it", error)
            self._cannot_start = True
            return
        if self._cannot_start:
            self._cannot_start = False
            logger.warning("the reaper is running again (pid %s)", self._process.pid)

    def _spawn(self) -> subprocess.Popen[bytes]:
        arguments = str(os.getpid()), self._token, self._run_dir
        process = start_helper(reaper.__file__, *arguments, stdin=subprocess.PIPE, pass_fds=self._inherited())
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a reaper that does not read must not block the agent
        return process

    def watch(self, pids: Iterable[int]) -> None:
        """Send the workers of this round to the reaper."""
        self._workers = list(pids)
        self.revive()
        if self._process is None and not self._cannot_run:
            self._start()
        self._send_round()

    def runs(self) -> bool:
        """Return whether the reaper process has not ended."""
        return self._process is not None and self._process.poll() is None

    def revive(self) -> None:
        """Restart the reaper if it was killed (its pidfd is then readable); continue it if it was stopped."""
        if self._process is None:
            return
        if self._process.poll() is None:
            resume(self._process.pid, "reaper")
            return
        pid, code = self._process.pid, self._process.returncode
        self._release()
        if code >= 0:
            self._cannot_run = True
            logger.error("the reaper ended with exit code %s; if this agent is killed, its workers may outlive it", code)
            return
        logger.warning("the reaper (pid %s) was killed from outside; starting another", pid)
        self._start()
        self._send_round()

    def _send_round(self) -> None:
        self._send(" ".join([reaper.WORKERS, *map(str, self._workers)]))

    def close(self, clean: bool) -> None:
        """End the reaper. Unless clean, everything that the agent started is dead when this returns."""
        if not clean:
            self.revive()  # without a reaper, what the agent started would survive
        if self._process is not None:
            self._send(f"{reaper.END} {reaper.CLEAN}" if clean else reaper.END)
        if self._process is not None and self._await_end(self._process):
            self._release()
            return
        self._kill()
        if not clean:
            reaper.kill_marked(self._token.encode())

    def _await_end(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the process to end. Return False if it stays stopped."""
        resume(process.pid, "reaper")
        try:
            process.wait(REAPER_STOPPED_S)
        except subprocess.TimeoutExpired:
            if processes.state(process.pid) in ("T", "t"):
                logger.warning("the reaper (pid %s) stays stopped; killing it", process.pid)
                return False
        try:
            process.wait(REAPER_END_S - REAPER_STOPPED_S)
        except subprocess.TimeoutExpired:
            logger.warning("the reaper (pid %s) still waits for a process that is asleep in the kernel", process.pid)
        return True

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(REAPER_STOPPED_S)
            except subprocess.TimeoutExpired:
                logger.warning("the reaper (pid %s) did not end after SIGKILL", self._process.pid)
        self._release()

    def _release(self) -> None:
        process, self._process = self._process, None
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def _send(self, line: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        text = line.encode() + b"\n"
        try:
            whole = self._process.stdin.write(text) == len(text)  # None: the pipe is full
        except BrokenPipeError:
            return  # the reaper has ended; its pidfd reports that
        if not whole:  # half a line may be in the pipe, so this reaper would misread the next one
            logger.warning("the reaper (pid %s) has not read its messages for a long time; starting another", self._process.pid)
            self._kill()
            self._start()
            if not line.startswith(reaper.END):
                self._send_round()
            elif self._process is not None:
                self._send(line)
