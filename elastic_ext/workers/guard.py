"""The agent's side of the warden: starts it, tells it the workers, ends it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elastic_ext.workers import warden

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 40.0  # the warden gives up by itself after about 30 s


class Guard:
    """Keeps a warden process beside the agent from construction to close()."""

    def __init__(self, token: str, run_dir: str) -> None:
        """token: what every worker carries in its environment. run_dir: removed when the agent has ended."""
        self._token = token
        self._run_dir = run_dir
        self._workers: list[int] = []
        self._will: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None  # readable when the warden has ended; None without one
        self._start()

    def _start(self) -> None:
        path = str(Path(__file__).with_name("warden.py"))
        # Blocked signals stay blocked over exec: the warden is deaf to these from its first moment.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, warden.DEAF_TO)
        try:
            self._process = self._spawn(path)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pidfd = os.pidfd_open(self._process.pid)

    def _spawn(self, path: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", path, str(os.getpid()), self._token, self._run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # No token; but an interpreter may find its own library only so.
            env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
            bufsize=0,  # what could not be written must not come back at close
            start_new_session=True,  # a signal to the agent's group must not reach it
        )

    def watch(self, pids: Iterable[int], will: dict[str, Any] | None = None) -> None:
        """Tell the workers of this round, and how to take this node out of the rendezvous when the agent is killed."""
        self._workers = list(pids)
        self._will = will
        self.revive()
        self._tell()

    def revive(self) -> None:
        """Start the warden again if somebody killed it; its pidfd is readable then."""
        if self._process is None or self._process.poll() is None:
            return
        pid, code = self._process.pid, self._process.returncode
        self._release()
        if code >= 0:
            logger.error("the warden ended with exit code %s: if this agent is killed, its workers may outlive it", code)
            return
        logger.warning("the warden (pid %s) was killed from outside; starting another", pid)
        self._start()
        self._tell()

    def _tell(self) -> None:
        self._say("workers " + " ".join(map(str, self._workers)))
        if self._will is not None:
            self._say("will " + json.dumps(self._will))

    def close(self, clean: bool) -> None:
        """End the warden. Unless clean, everything that the agent started is dead when this returns."""
        if not clean:
            self.revive()  # the one thing that must not be missed
        if self._process is None:
            if not clean:
                warden.kill_marked(self._token.encode())
            return
        self._say("end clean" if clean else "end")
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the warden (pid %s) is still ending a process that sleeps in the kernel", self._process.pid)
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
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            pass  # it is gone: its pidfd says so
