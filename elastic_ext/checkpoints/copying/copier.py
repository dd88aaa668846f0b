"""The agent's side of copying: runs the program `replicate`, passes orders to it, and tracks what is not copied yet."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

from elastic_ext.base import contracts, errors, isolated, log_records, records, waits, wakeup
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.copying import notes, replicate, script_saves
from elastic_ext.checkpoints.copying.replicate import FINISH, LOOK, TOKEN_ENV, UNFINISHED
from elastic_ext.checkpoints.copying.reports import CopyState, Pulse, decode, made_progress
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.own_files import MANIFEST
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from elastic_ext.checkpoints.record.stored import SAVES
from elastic_ext.checkpoints.storage import open_storage

logger = logging.getLogger(__name__)


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
# At the end of a job, without progress: then the process is replaced, and after as long again given up. Storage that is slow, but
# not dead, has moved by then: a request is tried again for less.
STALL_S = 60.0
ALARM_AFTER = 3  # deaths, or failed turns, in a row
END_S = 5.0  # time limit for a killed process to end
MAX_DEATHS_AT_END = 10  # limit for a process that makes progress each time but never finishes


class Child:
    """A running process, and its pipes. Raises OSError if it cannot be started. Call `close` after it has ended."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # a signal to the agent's group must not reach it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders, self._output = self.process.stdin, self.process.stdout
        os.set_blocking(self._orders.fileno(), False)  # a stopped process must not block the agent
        self._poll = select.poll()
        self._poll.register(self._output.fileno(), select.POLLIN)
        self._rest = b""  # an incomplete line

    def send(self, order: str) -> None:
        """Send an order; drop it if the process has ended or the pipe is full."""
        with contextlib.suppress(OSError, ValueError):
            self._orders.write(f"{order}\n".encode())
            self._orders.flush()

    def lines(self, timeout_s: float) -> list[bytes] | None:
        """Wait for output; return the complete lines, or None if the process has closed its output."""
        if not self._poll.poll(wakeup.milliseconds(timeout_s)):
            return []
        data = os.read(self._output.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines if data else None

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        with contextlib.suppress(OSError):  # it left orders unread
            self._orders.close()
        self._output.close()


class CopyProgress:
    """Bytes sent by this node or another, and checkpoints that became complete, by the process's messages.

    Pure: callers pass the time in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.last: CopyState | None = None  # the last report; None before the first
        self.working = True  # it was given work, and has not yet reported that nothing is left
        # heard_at: when it last sent a message or was given work.
        # progress_at: when it last made progress, or when a wait for progress began.
        self.heard_at = self.progress_at = now
        self._pulsed = 0  # bytes of this turn that are already counted

    def started(self, now: float) -> None:
        """Note that a process was started; it looks for work without an order."""
        self.working, self.heard_at, self._pulsed = True, now, 0

    def ordered(self, now: float) -> None:
        """Note that an order was sent."""
        if not self.working:
            self.working, self.heard_at = True, now

    def heard(self, message: CopyState | Pulse, now: float) -> int:
        """Process a message; return the bytes sent since the previous one."""
        self.heard_at = now
        if isinstance(message, Pulse):
            self.progress_at = now
            new, self._pulsed = max(0, message.pulse - self._pulsed), message.pulse
            return new
        if self.last is None or made_progress(message, self.last):
            self.progress_at = now
        self.last, self.working = message, bool(message.waiting or message.failures)
        new, self._pulsed = max(0, message.sent - self._pulsed), 0
        return new


class CopyMetrics(Protocol):
    """Receiver of the metrics. A thread calls its methods, so they must be quick."""

    def copied(self, size: int, lag_steps: int | None, lag_s: float, complete: bool, failed: bool, /) -> None:
        """Count copied bytes. size: bytes sent since the last call. lag_steps, lag_s, failed: see `CopyState`.

        complete: whether a checkpoint has become complete.
        """

    def copy_took(self, seconds: float, /) -> None:
        """Record how long it took to copy a checkpoint."""

    def copy_failed(self) -> None:
        """Count a process that died or seems stuck."""


class Stage(Enum):
    COPYING = auto()
    FINISHING = auto()  # copy the rest, then end
    CLOSED = auto()  # end


class RestartedChild:
    """Runs the process from construction until `finish`. Only `finish` waits.

    A process that has work but stays silent for `stall_s` is logged. While finishing, a process that makes no progress for
    `stall_s` is replaced once, then given up, so that the agent does not wait forever.
    """

    def __init__(self, start: Callable[[], Child], target: str, metrics: CopyMetrics, stall_s: float) -> None:
        """target: the remote directory, for log messages."""
        self._start, self._target, self._metrics, self._stall_s = start, target, metrics, stall_s
        self._changed = threading.Condition()  # guards all that follows
        self._stage = Stage.COPYING
        # done: whether it has finished with nothing left to copy.
        self._ended = self.done = False  # _ended: the thread has ended
        self._child: Child | None = None
        self.progress = CopyProgress(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="elastic_ext-copier", daemon=True)
        self._thread.start()

    def order(self, order: str) -> None:
        with self._changed:
            self.progress.ordered(time.monotonic())
            if self._child is not None:  # a process that is about to start looks without an order
                self._child.send(order)

    def finish(self, deadline: float) -> None:
        """Let the process copy the rest and end. Wait while it makes progress, but not past `deadline` (monotonic seconds)."""
        with self._changed:
            self._stage = Stage.FINISHING
            self.progress.progress_at = time.monotonic()
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
                child.process.kill()
            self._thread.join(END_S)

    def _wait_for_end(self, deadline: float) -> None:
        replaced, wait = False, waits.Waiting(f"the copies to {self._target}", time.monotonic())
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                stuck_at = self.progress.progress_at + self._stall_s
                if now >= deadline or (now >= stuck_at and replaced):
                    return
                if now >= stuck_at:
                    replaced, self.progress.progress_at = True, now
                    logger.warning(
                        "copying to %s has made no progress for %.0f s: restarting the process", self._target, self._stall_s
                    )
                    if self._child is not None:
                        self._child.process.kill()
                    continue
                wait.say(now, min(stuck_at, deadline), "they are given up unless they go on")
                self._changed.wait(wait.pause_s(now, min(stuck_at, deadline)))

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
            self.progress.started(time.monotonic())
            if self._stage is Stage.CLOSED:
                child.process.kill()
            elif self._stage is Stage.FINISHING:
                child.send(FINISH)
        self._listen(child)
        code = child.process.wait()
        with self._changed:
            self._child = None
            child.close()
        return code

    def _listen(self, child: Child) -> None:
        """Process its messages until it ends. If it has work but is silent for too long, log that once."""
        silent = False
        while True:
            with self._changed:
                due = self.progress.heard_at + self._stall_s if self.progress.working and not silent else None
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
        except records.OtherSchema as error:
            logger.warning("it is unknown whether checkpoints are being copied: %s", error)
            return
        except records.RecordError:
            logger.info("the process that copies checkpoints printed: %s", line.decode(errors="replace").rstrip())
            return
        with self._changed:
            before = self.progress.last
            sent = self.progress.heard(message, time.monotonic())
        if isinstance(message, CopyState):
            _log(message, before or CopyState(), self._target)
            names = (message.complete, message.arrived)
            complete = before is not None and names != (before.complete, before.arrived) and any(names)
            self._metrics.copied(sent, message.lag_steps, message.lag_s, complete, bool(message.failures))
            if message.copy_s is not None:
                self._metrics.copy_took(message.copy_s)
        elif before is not None:
            self._metrics.copied(sent, before.lag_steps, before.lag_s, False, False)


def _log(report: CopyState, before: CopyState, target: str) -> None:
    failures, reason = report.failures, report.reason
    if failures == ALARM_AFTER:
        logger.error("checkpoints cannot be copied to %s, %s failures in a row: %s", target, failures, reason)
    elif failures and (failures == 1 or reason != before.reason):
        logger.warning("copying checkpoints to %s failed: %s; trying again", target, reason)
    elif before.failures >= ALARM_AFTER and not failures:
        logger.warning("checkpoints are copied to %s again", target)
    for name, last in ((report.complete, before.complete), (report.arrived, before.arrived)):
        if name != last:
            logger.info("complete in %s: %s", target, name)


class Copier:
    """Keeps the local tier copied from construction until close(). Only close() waits."""

    def __init__(
        self, local_dir: str, checkpoint_dir: str, options: Sequence[str], token: str, metrics: CopyMetrics, stall_s: float
    ) -> None:
        """Start the process.

        Args:
            options: arguments of the process.
            token: the agent's token.
            stall_s: seconds that the process may go without progress.
        """
        command = [*isolated.command(replicate.__name__), *options]
        environ = {
            **os.environ,
            TOKEN_ENV: token,
            log_records.NODE_NAME: log_records.node(),
            contracts.LOCAL_DIR: local_dir,
            contracts.CHECKPOINT_DIR: checkpoint_dir,
        }
        self._local, self._target = open_storage(local_dir), checkpoint_dir
        self._saves: object = None
        self._abandoned: frozenset[str] = frozenset()
        self._child = RestartedChild(lambda: Child(command, environ), checkpoint_dir, metrics, stall_s)

    def update_saves(self, saves: int) -> None:
        """Notify the process to look if there is another save. saves: how many this round's workers have reported so far."""
        now = saves, _changed_at(self._local.path(SAVES))
        if now != self._saves:
            self._saves = now
            self._child.order(LOOK)

    def look_now(self) -> None:
        """Notify the process to look, because there may be a checkpoint that its worker could no longer report."""
        self._child.order(LOOK)

    def note_round(self, saves_here: bool) -> None:
        """Note whether the script of a round that begins saves in the local directory."""
        try:
            notes.note_round(self._local, saves_here)
        except OSError as error:
            logger.warning("local_dir %s cannot be written to: %s", self._local.address, error)

    def abandon_newer_than(self, resumes_from: str) -> None:
        """Abandon the local checkpoints newer than the one that the workers resume from ("": from nothing)."""
        order = order_or_oldest(resumes_from.rpartition("/")[2])
        try:
            self._abandoned = frozenset(name for name in tiers.own_checkpoints(self._local) if order_or_oldest(name) > order)
        except OSError as error:
            logger.warning("local_dir %s cannot be listed: %s", self._local.address, error)

    def close(self, wait_s: float | None) -> tuple[str, ...]:
        """Let the process copy the rest and end. Return the checkpoints whose only copy is on this node.

        wait_s: maximum wait in seconds; None: as long as it makes progress.
        """
        try:
            self._child.finish(float("inf") if wait_s is None else time.monotonic() + wait_s)
        finally:  # also if a signal ends the wait
            left = self._left()
            if left:
                where = self._local.address
                logger.error(
                    "checkpoints not complete in %s; their only copy is on this node (%s): %s",
                    self._target,
                    where,
                    ", ".join(left),
                )
        return left

    def _left(self) -> tuple[str, ...]:
        """Return the local checkpoints that are newer than every complete remote one, except abandoned ones."""
        if self._child.done:
            return ()
        last = self._child.progress.last or CopyState()
        complete = order_of(last.complete) or (-1, -1)
        try:
            names = [name for name in tiers.own_checkpoints(self._local) if self._local.stat(f"{name}/{MANIFEST}") is not None]
        except OSError as error:
            logger.warning("local_dir %s cannot be listed: %s", self._local.address, error)
            names = list(last.waiting)
        waiting = [name for name in last.waiting if order_of(name) is None]
        try:
            of_script = script_saves.left(self._local, waiting)
        except OSError:
            of_script = waiting
        return (*(name for name in names if order_or_oldest(name) > complete and name not in self._abandoned), *of_script)


def _changed_at(path: str) -> int | None:
    """Return when a directory got its last file, as a number that only changes; None: there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def claim_local_dir(settings: Settings) -> None:
    """Bind local_dir to checkpoint_dir. Raises UsageError if it belongs to another one, or if checkpoint_dir is not set."""
    if settings.local_dir is None:
        return
    if settings.checkpoint_dir is None:
        raise errors.UsageError("local_dir is set but checkpoint_dir is not: there is nowhere to copy checkpoints to; set both")
    try:
        tiers.claim(open_storage(settings.local_dir), open_storage(settings.checkpoint_dir))
    except OSError as error:
        logger.warning("local_dir %s cannot be written to: %s; saves go to checkpoint_dir", settings.local_dir, error)


def start(settings: Settings, token: str, metrics: CopyMetrics) -> Copier | None:
    """Start copying; return None without a local tier. token: the agent's token."""
    if settings.local_dir is None or settings.checkpoint_dir is None:
        return None
    options = [f"--mb-s={settings.copy_mb_s}", f"--pattern={settings.checkpoint_pattern}"]
    return Copier(settings.local_dir, settings.checkpoint_dir, options, token, metrics, STALL_S)
