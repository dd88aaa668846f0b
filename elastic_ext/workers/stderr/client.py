"""Keeps a relay running while the agent lives, whatever happens to the relay."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time

from elastic_ext.workers import pidfds
from elastic_ext.workers.reaper import reaper
from elastic_ext.workers.stderr import link
from elastic_ext.workers.stderr.source import Source

logger = logging.getLogger(__name__)

RETRY_S = 0.05  # how long to wait for a relay that is about to end, before offering a source to the next one
END_S = 5.0  # how long the end of the job waits for the console; the relay writes later bytes on its own
STOPPED_CHECK_S = 5.0  # no event reports that a process was stopped


class RelayClient:
    """The relay of one agent, from construction to close(). A thread starts another relay as soon as one is killed.

    Invariant: the running relay has every source of this round. Methods may be called from any thread.
    """

    def __init__(self) -> None:
        """Start a relay that writes to this process's fd 2. Raises OSError or RuntimeError if no descriptor or thread is left."""
        self._lock = threading.RLock()
        self._sources: list[Source] = []
        self._closed = False
        self._cannot_start = False  # logged once
        self._console = os.dup(2)  # a relay started later writes to the same console
        closing: tuple[int, ...] = ()
        try:
            closing = os.pipe()
            self._closing = closing
            self._link = link.start_process(self._console)
            self._thread = threading.Thread(target=self._watch, name="elastic_ext_stderr", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._link.close()
                raise
        except (OSError, RuntimeError):
            for descriptor in (self._console, *closing):
                os.close(descriptor)
            raise

    def add(self, source: Source) -> bool:
        """Make the relay read this source; close it after the round. On failure, close it at once and return False."""
        with self._lock:
            if not self._link.add(source):  # perhaps the relay has just been killed
                self._link.await_end(RETRY_S)
                self._revive()
                if not self._link.add(source):
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
                answer = self._link.flush(deadline)
                if answer is not None or self._cannot_start:
                    return answer
        return None

    def close(self) -> None:
        """Let the relay finish. It stays only while a process holds a pipe open or the console accepts nothing."""
        if self._closed:
            return
        self._link.resume()
        with self._lock:
            self._forget_unopened()
        still_open = self.flush(END_S)
        with self._lock:
            self._closed = True
            os.close(self._closing[1])
        self._thread.join()
        os.close(self._closing[0])
        self._link.close()
        if still_open == 0:
            self._await_end()
        self._close_sources()
        os.close(self._console)

    def _await_end(self) -> None:
        if not self._link.await_end(END_S) and self._link.process is not None:
            logger.warning("the stderr relay (pid %s) has not ended yet", self._link.process.pid)

    def _forget_unopened(self) -> None:
        for source in self._sources:
            source.close_writer()
        self._link.forget_unopened()

    def _close_sources(self) -> None:
        for source in self._sources:
            source.close()
        self._sources.clear()

    def _watch(self) -> None:
        """Start another relay as soon as somebody kills this one. This is the thread's target."""
        signal.pthread_sigmask(signal.SIG_BLOCK, reaper.BLOCKED_SIGNALS)  # the main thread waits for these
        while (process := self._link.process) is not None:
            pidfd = None
            try:
                pidfd = pidfds.watch(process.pid)
            except ProcessLookupError:  # another thread has reaped it in _revive, and may be about to start the next
                with self._lock:
                    if self._link.process is not process:
                        continue
            except OSError as error:  # descriptors or threads have run out: the regular checks continue
                logger.debug("cannot watch the stderr relay, its end will be seen at the next check: %s", error)
            closing = self._wait(pidfd)
            if pidfd is not None:
                os.close(pidfd)
            if closing:
                return
            self._link.resume()
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
            process = self._link.process
            if self._closed or process is None or process.poll() is None:
                return
            self._link.close()
            try:
                if process.returncode >= 0:  # another process would end the same way
                    self._link = link.start_thread(self._console, f"it ended with exit code {process.returncode}")
                else:
                    if not self._cannot_start:
                        logger.warning("the stderr relay (pid %s) was killed from outside; starting another", process.pid)
                    self._link = link.start_process(self._console)
            except (OSError, RuntimeError) as error:  # the link is still the dead relay's: the next check tries again
                level = logging.DEBUG if self._cannot_start else logging.WARNING
                self._cannot_start = True
                logger.log(level, "the stderr relay (pid %s) has ended, and another cannot be started: %s", process.pid, error)
                return
            self._cannot_start = False
            for source in self._sources:
                self._link.add(source)
