"""Keep the program that copies checkpoints running: restart it whenever it dies, until it is done or given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from elastic_ext.base.records import OtherSchema, RecordError
from elastic_ext.checkpoints.copying.child import Child
from elastic_ext.checkpoints.copying.progress import Progress
from elastic_ext.checkpoints.copying.protocol import FINISH, UNFINISHED, Report, decode

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
ALARM_AFTER = 3  # deaths, or failed turns, in a row
END_S = 5.0  # time limit for a killed process to end
MAX_DEATHS_AT_END = 10  # limit for a process that makes progress each time but never finishes


class CopyMetrics(Protocol):
    """Receiver of the metrics. A thread calls its methods, so they must be quick."""

    def copied(self, size: int, lag_steps: int | None, lag_s: float, complete: bool, failed: bool, /) -> None:
        """Count copied bytes. size: bytes sent since the last call. lag_steps, lag_s, failed: see `protocol.Report`.

        complete: whether a checkpoint has become complete.
        """

    def copy_took(self, seconds: float, /) -> None:
        """Record how long it took to copy a checkpoint."""

    def copy_failed(self) -> None:
        """Count a process that died or seems stuck."""


class Stage(Enum):
    """The current task of the process."""

    COPYING = auto()
    FINISHING = auto()  # copy the rest, then end
    CLOSED = auto()  # end


class RestartedChild:
    """Runs the process from construction until `finish`. Only `finish` waits.

    A process that has work but stays silent for `stall_s` is logged. While finishing, a process that makes no progress for
    `stall_s` is replaced once, then given up, so that nobody waits forever for a stuck one.

    Attributes:
        done: whether it has finished with nothing left to copy.
    """

    def __init__(self, start: Callable[[], Child], target: str, metrics: CopyMetrics, stall_s: float) -> None:
        """target: the remote directory, for log messages."""
        self._start, self._target, self._metrics, self._stall_s = start, target, metrics, stall_s
        self._changed = threading.Condition()  # guards all that follows
        self._stage = Stage.COPYING
        self._ended = self.done = False  # _ended: the thread has ended
        self._child: Child | None = None
        self._progress = Progress(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="elastic_ext-copier", daemon=True)
        self._thread.start()

    @property
    def last(self) -> Report:
        """The last report, or an empty one before the first."""
        return self._progress.last or Report()

    def order(self, order: str) -> None:
        """Send an order of `protocol`."""
        with self._changed:
            self._progress.ordered(time.monotonic())
            if self._child is not None:  # a process that is about to start looks by itself
                self._child.send(order)

    def finish(self, deadline: float) -> None:
        """Let the process copy the rest and end. Wait while it makes progress, but not past `deadline` (monotonic seconds)."""
        with self._changed:
            self._stage = Stage.FINISHING
            self._progress.progress_at = time.monotonic()
            self._changed.notify_all()
        self.order(FINISH)
        logger.info("waiting until all checkpoints are copied to %s", self._target)
        try:
            self._wait_for_end(deadline)
        finally:  # also if a signal ends the wait
            with self._changed:
                self._stage = Stage.CLOSED
                self._changed.notify_all()
                child = self._child
            if child is not None:
                child.kill()
            self._thread.join(END_S)

    def _wait_for_end(self, deadline: float) -> None:
        replaced = False
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                stuck_at = self._progress.progress_at + self._stall_s
                if now >= deadline or (now >= stuck_at and replaced):
                    return
                if now >= stuck_at:
                    replaced, self._progress.progress_at = True, now
                    logger.warning(
                        "copying to %s has made no progress for %.0f s: restarting the process", self._target, self._stall_s
                    )
                    if self._child is not None:
                        self._child.kill()
                    continue
                self._changed.wait(min(stuck_at, deadline, now + threading.TIMEOUT_MAX) - now)

    def _run(self) -> None:
        try:
            self._restart()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _restart(self) -> None:
        """Run one process after another until everything is copied or given up."""
        pause, deaths, deaths_at_end = FIRST_PAUSE_S, 0, 0
        while True:
            began = time.monotonic()
            code = self._run_once()
            with self._changed:
                finishing = self._stage is not Stage.COPYING
                self.done = finishing and code == 0
                if self._stage is Stage.CLOSED or (finishing and code in (0, UNFINISHED)):
                    return
            lived = time.monotonic() - began > LONGEST_PAUSE_S
            pause = FIRST_PAUSE_S if lived else min(2 * pause, LONGEST_PAUSE_S)
            deaths = 1 if lived else deaths + 1
            deaths_at_end += finishing
            self._metrics.copy_failed()
            if deaths_at_end > MAX_DEATHS_AT_END:
                logger.error(
                    "the process that copies checkpoints to %s dies repeatedly, last with exit code %s", self._target, code
                )
                return
            if deaths <= ALARM_AFTER:
                logger.warning(
                    "the process that copies checkpoints ended with exit code %s; restarting it in %.1f s", code, pause
                )
            elif deaths == ALARM_AFTER + 1:
                logger.error(
                    "checkpoints are not copied to %s: the copying process dies repeatedly, last with exit code %s",
                    self._target,
                    code,
                )
            with self._changed:
                if self._changed.wait_for(lambda: self._stage is Stage.CLOSED, pause):
                    return

    def _run_once(self) -> int:
        """Run one process until it ends; return its exit code, or -1 if it cannot be started."""
        try:
            child = self._start()
        except OSError as error:
            logger.error("checkpoints are not copied to %s: the copying process cannot be started: %s", self._target, error)
            return -1
        with self._changed:
            self._child = child
            self._progress.started(time.monotonic())
            if self._stage is Stage.CLOSED:
                child.kill()
            elif self._stage is Stage.FINISHING:
                child.send(FINISH)
        self._listen(child)
        code = child.wait()
        with self._changed:
            self._child = None
            child.close()
        return code

    def _listen(self, child: Child) -> None:
        """Process its messages until it ends. If it has work but is silent for too long, log that once."""
        silent = False
        while True:
            with self._changed:
                due = self._progress.heard_at + self._stall_s if self._progress.working and not silent else None
            left_s = None if due is None else due - time.monotonic()
            if left_s is not None and left_s <= 0:
                silent = True
                self._metrics.copy_failed()
                logger.error(
                    "checkpoints are not copied to %s: the copying process has been silent for %.0f s",
                    self._target,
                    self._stall_s,
                )
                continue
            # Check even an idle process at intervals: it may have been given work.
            lines = child.lines(min(self._stall_s, self._stall_s if left_s is None else left_s) + 0.001)
            if lines is None:
                return
            if silent and lines:
                silent = False
                logger.warning("checkpoints are copied to %s again", self._target)
            for line in lines:
                self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        try:
            message = decode(line)
        except OtherSchema as error:
            logger.warning("cannot tell whether checkpoints are being copied: %s", error)
            return
        except RecordError:
            logger.info("the process that copies checkpoints printed: %s", line.decode(errors="replace").rstrip())
            return
        with self._changed:
            before = self._progress.last
            sent = self._progress.heard(message, time.monotonic())
        if isinstance(message, Report):
            _log(message, before or Report(), self._target)
            complete = before is not None and message.complete not in ("", before.complete)
            self._metrics.copied(sent, message.lag_steps, message.lag_s, complete, bool(message.failures))
            if message.copy_s is not None:
                self._metrics.copy_took(message.copy_s)
        elif before is not None:
            self._metrics.copied(sent, before.lag_steps, before.lag_s, False, False)


def _log(report: Report, before: Report, target: str) -> None:
    """Log what changed."""
    failures, reason = report.failures, report.reason
    if failures == ALARM_AFTER:
        logger.error("checkpoints cannot be copied to %s, %s failures in a row: %s", target, failures, reason)
    elif failures and (failures == 1 or reason != before.reason):
        logger.warning("copying checkpoints to %s failed: %s; trying again", target, reason)
    elif before.failures >= ALARM_AFTER and not failures:
        logger.warning("checkpoints are copied to %s again", target)
    if report.complete != before.complete:
        logger.info("complete in %s: %s", target, report.complete)
