"""The agent's side of the reaper: starts it, tells it the workers, ends it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elastic_ext.workers import pidfds
from elastic_ext.workers.reaper import reaper

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 40.0  # the reaper gives up by itself after about 30 s
STOPPED_S = 2.0  # after so long it is looked whether it has been stopped; one that does not go on then is not waited for


class Reaper:
    """Keeps a reaper process beside the agent from construction to close().

    Where none can be had (no process, no descriptor) the agent goes on without, says so once, and tries again at each round.
    """

    def __init__(self, token: str, run_dir: str) -> None:
        """token: what every worker carries in its environment. run_dir: removed when the agent has ended."""
        self._token = token
        self._run_dir = run_dir
        self._workers: list[int] = []
        self._will: Mapping[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None  # readable when the reaper has ended; None without one
        self._lacking = False  # none can be had, which has been said
        self._cannot_run = False
        self._start()

    def _start(self) -> None:
        path = str(Path(__file__).with_name("reaper.py"))
        # Blocked signals stay blocked over exec: the reaper is deaf to these from its first moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, reaper.DEAF_TO)
        try:
            self._process = self._spawn(path)
            self.pidfd = pidfds.watch(self._process.pid)
        except OSError as error:
            self._kill()
            if not self._lacking:
                logger.warning("no reaper can be started: %s; if this agent is killed, its workers may outlive it", error)
            self._lacking = True
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._lacking:
            self._lacking = False
            logger.warning("the reaper runs now (pid %s)", self._process.pid)

    def _spawn(self, path: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", path, str(os.getpid()), self._token, self._run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # No token; but an interpreter may find its own library only so.
            env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
            bufsize=0,  # what could not be written must not come back at close
            start_new_session=True,  # a signal to the agent's group must not reach it
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # one that does not read must not stop the agent
        return process

    def watch(self, pids: Iterable[int], will: Mapping[str, Any] | None = None) -> None:
        """Tell the workers of this round, and how to take this node out of the rendezvous when the agent is killed."""
        self._workers = list(pids)
        self._will = will
        self.revive()
        if self._process is None and not self._cannot_run:
            self._start()
        self._tell()

    def revive(self) -> None:
        """Start the reaper again if somebody killed it (its pidfd is readable then), let it go on if somebody stopped it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            pidfds.go_on(self._process.pid, "reaper")
            return
        pid, code = self._process.pid, self._process.returncode
        self._release()
        if code >= 0:
            self._cannot_run = True
            logger.error("the reaper ended with exit code %s: if this agent is killed, its workers may outlive it", code)
            return
        logger.warning("the reaper (pid %s) was killed from outside; starting another", pid)
        self._start()
        self._tell()

    def _tell(self) -> None:
        self._say("workers " + " ".join(map(str, self._workers)))
        if self._will is not None:
            self._say("will " + json.dumps(self._will))

    def close(self, clean: bool) -> None:
        """End the reaper. Unless clean, everything that the agent started is dead when this returns."""
        if not clean:
            self.revive()  # the one thing that must not be missed
        if self._process is None:
            if not clean:
                reaper.kill_marked(self._token.encode())
            return
        self._say("end clean" if clean else "end")
        if self._process is None or not self._await_end(self._process):
            self._kill()
            if not clean:
                reaper.kill_marked(self._token.encode())
            return
        self._release()

    def _await_end(self, process: subprocess.Popen[bytes]) -> bool:
        """False where it has been stopped and cannot be made to go on."""
        pidfds.go_on(process.pid, "reaper")
        try:
            process.wait(STOPPED_S)
        except subprocess.TimeoutExpired:
            if pidfds.state(process.pid) in ("T", "t"):
                logger.warning("the reaper (pid %s) does not go on; it is killed", process.pid)
                return False
        try:
            process.wait(END_TIMEOUT_S - STOPPED_S)
        except subprocess.TimeoutExpired:
            logger.warning("the reaper (pid %s) is still ending a process that sleeps in the kernel", process.pid)
        return True

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(STOPPED_S)
            except subprocess.TimeoutExpired:
                logger.warning("the reaper (pid %s) did not end of SIGKILL", self._process.pid)
        self._release()

    def _release(self) -> None:
        process, self._process = self._process, None
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def _say(self, line: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        text = line.encode() + b"\n"
        try:
            whole = self._process.stdin.write(text) == len(text)  # None: the pipe is full
        except BrokenPipeError:
            return  # it is gone: its pidfd says so
        if not whole:  # half a line may be in the pipe: nothing more can be said to this one
            logger.warning("the reaper (pid %s) has not read for long; another one takes its place", self._process.pid)
            self._kill()
            self._start()
            if not line.startswith("end"):
                self._tell()
            elif self._process is not None:
                self._say(line)
