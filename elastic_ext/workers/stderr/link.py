"""The agent's side of one relay, from its start to its end. `relay.py` defines the protocol."""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from elastic_ext.workers import pidfds
from elastic_ext.workers.reaper import reaper
from elastic_ext.workers.stderr import relay
from elastic_ext.workers.stderr.source import Source

logger = logging.getLogger(__name__)


class RelayLink:
    """One running relay: a process, or a thread of the agent. Messages to a relay that has ended are lost without an error.

    Attributes:
        process: None for a thread, which lives as long as the agent does.
    """

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.process = process
        self._control: socket.socket | None = control
        self._numbers = itertools.count()

    def add(self, source: Source) -> bool:
        """Make the relay read this pipe; return False if the message could not be sent."""
        return self._send(b"%s %d" % (relay.SOURCE, source.shown), [source.pipe, source.ring_fd])

    def forget_unopened(self) -> None:
        """Make the relay close the pipes that no worker has opened."""
        self._send(relay.FORGET)

    def flush(self, deadline: float) -> int | None:
        """Make the relay empty the pipes; return how many are still open, None on a timeout or if the relay has ended."""
        number = next(self._numbers)
        self._send(b"%s %d" % (relay.FLUSH, number))
        return self._answer(number, deadline)

    def resume(self) -> None:
        """Continue the process if it was stopped: full pipes would soon block the workers."""
        if self.process is not None:
            pidfds.resume(self.process.pid, "stderr relay")

    def await_end(self, timeout_s: float) -> bool:
        """Return whether the process ended within this time; True for a thread."""
        if self.process is None:
            return True
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the socket. The relay ends by itself once its pipes have ended."""
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        if self._control is None:
            return False
        try:
            socket.send_fds(self._control, [message], list(descriptors), socket.MSG_DONTWAIT)
        except OSError:
            return False  # the relay was killed and another one will get every message, or it does not read
        return True

    def _answer(self, number: int, deadline: float) -> int | None:
        if self._control is None:
            return None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            try:
                answer = self._control.recv(256).split()
            except OSError:
                answer = []
            if not answer:  # the socket has ended, so the process is about to end
                self.await_end(deadline - time.monotonic())
                return None
            if int(answer[0]) == number:
                return int(answer[1])
        return None


def start_process(console: int) -> RelayLink:
    """Start a relay process, or a thread if no process can start. console: a descriptor. Raises OSError, RuntimeError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Blocked signals stay blocked across exec. These are for the agent, and the relay must outlive it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, reaper.BLOCKED_SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py")), str(relay.VERSION)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=console,
            # Without the workers' token. LD_*, because some interpreters find their own library only through LD_LIBRARY_PATH.
            env={name: value for name, value in os.environ.items() if name.startswith("LD_")},
            start_new_session=True,  # a signal to the agent's process group must not reach it
        )
    except OSError as error:
        return _serve(ours, theirs, console, str(error))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return RelayLink(ours, process)


def start_thread(console: int, why: str) -> RelayLink:
    """Run the relay in this process. why: reason for the log why no process can run. Raises OSError, RuntimeError."""
    return _serve(*socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), console, why)


def _serve(ours: socket.socket, theirs: socket.socket, console: int, why: str) -> RelayLink:
    logger.error("the agent itself copies the workers' stderr, because the relay process cannot run: %s", why)
    try:
        ends = theirs, os.dup(console)
        threading.Thread(target=_relay_and_close, args=ends, name="elastic_ext_relay", daemon=True).start()
    except (OSError, RuntimeError):
        ours.close()
        theirs.close()
        raise
    return RelayLink(ours, None)


def _relay_and_close(control: socket.socket, console: int) -> None:
    relay.Relay(control, console).run()
    os.close(console)
