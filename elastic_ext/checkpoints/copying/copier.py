"""The agent's side of `replicate`: starts it, again whenever it has died, tells it of saves, and passes on what it tells."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from elastic_ext.base import isolated
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.base.wakeup import milliseconds
from elastic_ext.checkpoints.copying import replicate
from elastic_ext.checkpoints.copying.replicate import FIRST_PAUSE_S, LONGEST_PAUSE_S, UNFINISHED
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.manifest import MANIFEST, order_of
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.observe.metrics import AgentMetrics

logger = logging.getLogger(__name__)

TOKEN_ENV = "ELASTIC_EXT_COPIER"  # carries the agent's token: the reaper ends what carries it when the agent is gone
ALARM_AFTER = 3  # failures one after the other
END_S = 5.0  # that the process may take to end when it is killed
STALL_S = 60.0  # default of the setting copy_stall
MOST_DEATHS_AT_END = 10  # of a process that gets somewhere each time, and never to the end


class Copier:
    """Keeps the process from construction to close(). Its methods never wait, but for close().

    Progress is what the process tells of: bytes that were sent, here or by another node that is waited for, and checkpoints that
    have become complete. One that says nothing while it has work is told of; at the end of the job it is replaced once, then
    given up. So nobody waits for a stuck one for ever, and nobody takes what it left for delivered.
    """

    def __init__(
        self,
        local_dir: str,
        checkpoint_dir: str,
        mb_s: float,
        token: str,
        on_told: Callable[[Any], None],
        on_failed: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
    ) -> None:
        """on_told: gets each line as a dict, from a thread; on_failed: called for each death, and when it seems stuck.

        stall_s: for how long it may make no progress.
        """
        self._command = [*isolated.command(replicate.__name__), f"--mb-s={mb_s}"]
        # Not as arguments, which every user of the machine can read: a URL may hold credentials.
        self._environ = {**os.environ, TOKEN_ENV: token, tiers.LOCAL_ENV: local_dir, tiers.REMOTE_ENV: checkpoint_dir}
        self._local, self._to = open_storage(local_dir), checkpoint_dir
        self._on_told, self._on_failed, self._stall_s = on_told, on_failed, stall_s
        self._saves = 0
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._finishing = self._closed = self._over = False
        self._done = False  # it has ended well, with nothing left to copy
        self._last: dict[str, Any] = {}
        self._pulsed = 0  # bytes of its turn that it has told of already
        self._working = True  # it has been given work, and has not said that nothing is left
        self._heard_at = self._progress_at = time.monotonic()
        self._past: frozenset[str] = frozenset()
        self._thread = threading.Thread(target=self._run, name="elastic_ext-copier", daemon=True)
        self._thread.start()

    def saved(self, saves: int) -> None:
        """So many saves the workers of this round tell of; it is told to look when that has changed."""
        if saves != self._saves:
            self._saves = saves
            self._say("look")

    def look(self) -> None:
        """There may be a checkpoint that no worker could tell of any more."""
        self._say("look")

    def round_starts(self, resumes_from: str) -> None:
        """The workers go on from this checkpoint ("": from nothing): newer ones that are here are of no use to anybody."""
        order = order_of(resumes_from.rpartition("/")[2]) or (0, 0)
        try:
            self._past = frozenset(name for name in tiers.own_checkpoints(self._local) if (order_of(name) or (0, 0)) > order)
        except OSError as error:
            logger.warning("local_dir %s cannot be looked at: %s", self._local.address, error)

    def close(self, wait_s: float | None) -> tuple[str, ...]:
        """Have it copy what is left, and end; return what has its only copy on this node.

        wait_s: for so long; None: while it makes progress.
        """
        with self._changed:
            self._finishing = True
            self._progress_at = time.monotonic()
            self._changed.notify_all()
        self._say("finish")
        logger.info("what is still to be copied to %s is waited for", self._to)
        try:
            self._await_end(float("inf") if wait_s is None else time.monotonic() + wait_s)
        finally:  # a signal that ends the wait, too
            with self._changed:
                self._closed = True
                self._changed.notify_all()
                process = self._process
            if process is not None and process.poll() is None:
                process.kill()
            self._thread.join(END_S)
            left = self._left()
            if left:
                logger.error("not complete in %s, and on this node only (%s): %s", self._to, self._local.address, ", ".join(left))
        return left

    def _await_end(self, deadline: float) -> None:
        """Until the process has done all, makes no progress any more, or the deadline (monotonic) is over."""
        replaced = False
        with self._changed:
            while not self._over:
                now = time.monotonic()
                stuck_at = self._progress_at + self._stall_s
                if now >= deadline or (now >= stuck_at and replaced):
                    return
                if now >= stuck_at:
                    replaced, self._progress_at = True, now
                    logger.warning("copying to %s makes no progress for %.0f s: it is begun anew", self._to, self._stall_s)
                    if self._process is not None:
                        self._process.kill()
                    continue
                self._changed.wait(min(stuck_at, deadline, now + threading.TIMEOUT_MAX) - now)

    def _left(self) -> tuple[str, ...]:
        """The checkpoints here that are newer than all that is known to be complete there, but for those that nobody wants."""
        if self._done:
            return ()
        complete = order_of(self._last.get("complete", "")) or (-1, -1)
        try:
            names = [name for name in tiers.own_checkpoints(self._local) if self._local.stat(f"{name}/{MANIFEST}") is not None]
        except OSError as error:
            logger.warning("local_dir %s cannot be looked at: %s", self._local.address, error)
            names = list(self._last.get("waiting", ()))
        return tuple(name for name in names if (order_of(name) or (0, 0)) > complete and name not in self._past)

    def _say(self, line: str) -> None:
        with self._changed:
            if not self._working:
                self._working, self._heard_at = True, time.monotonic()
            process = self._process
            if process is None or process.stdin is None:
                return  # it looks when it starts
            try:
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()
            except (OSError, ValueError):
                pass  # it has ended, or has read nothing for long: the thread sees that

    def _run(self) -> None:
        try:
            self._keep()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _keep(self) -> None:
        """Start it again whenever it dies, until all is copied."""
        pause, deaths, deaths_at_end = FIRST_PAUSE_S, 0, 0
        while True:
            began = time.monotonic()
            try:
                code = self._once()
            except OSError as error:
                code = -1
                logger.error("checkpoints are not copied to %s: the process cannot be started: %s", self._to, error)
            with self._changed:
                finishing = self._finishing
                self._done = finishing and code == 0
                if self._closed or (finishing and code in (0, UNFINISHED)):
                    return
            lived = time.monotonic() - began > LONGEST_PAUSE_S
            pause = FIRST_PAUSE_S if lived else min(2 * pause, LONGEST_PAUSE_S)
            deaths = 1 if lived else deaths + 1
            deaths_at_end += finishing
            self._on_failed()
            if deaths_at_end > MOST_DEATHS_AT_END:
                logger.error("the process that copies checkpoints to %s ends again and again, last with %s", self._to, code)
                return
            if deaths <= ALARM_AFTER:
                logger.warning("the process that copies checkpoints ended with %s; another one is started in %.1f s", code, pause)
            elif deaths == ALARM_AFTER + 1:
                logger.error("checkpoints are not copied to %s: the process for it ends again and again with %s", self._to, code)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return

    def _once(self) -> int:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
            start_new_session=True,  # a signal to the agent's group must not reach it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)  # a stopped one must not hold up the agent
        with self._changed:
            self._process = process
            self._working, self._heard_at, self._pulsed = True, time.monotonic(), 0
            finishing = self._finishing
            if self._closed:
                process.kill()
        if finishing:
            self._say("finish")
        for line in self._lines(process.stdout.fileno()):
            self._heard(line)
        code = process.wait()
        with self._changed:
            self._process = None
            try:
                process.stdin.close()
            except OSError:
                pass  # what it was not told any more
            process.stdout.close()
        return code

    def _lines(self, number: int) -> Iterator[str]:
        """What it says, until it ends; one that says nothing for too long while it has work is told of once."""
        poll = select.poll()
        poll.register(number, select.POLLIN)
        rest, silent = b"", False
        while True:
            with self._changed:
                due = self._heard_at + self._stall_s if self._working and not silent else None
            left_s = None if due is None else due - time.monotonic()
            if left_s is not None and left_s <= 0:
                silent = True
                self._on_failed()
                logger.error("nothing is copied to %s: the process for it says nothing for %.0f s", self._to, self._stall_s)
                continue
            # An idle one is looked at now and then: it may have been given work meanwhile.
            if not poll.poll(milliseconds(min(self._stall_s, self._stall_s if left_s is None else left_s) + 0.001)):
                continue
            data = os.read(number, 1 << 16)
            if not data:
                return
            if silent:
                silent = False
                logger.warning("checkpoints are copied to %s again", self._to)
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def _heard(self, line: str) -> None:
        try:
            told = json.loads(line)
            if "pulse" in told:
                self._note_pulse(int(told["pulse"]))
                return
            failures, reason = told["failures"], told["reason"]
        except (ValueError, KeyError, TypeError):
            logger.info("the process that copies checkpoints says: %s", line.rstrip())  # a library's print
            return
        before = self._last
        with self._changed:
            self._last = told
            self._heard_at = time.monotonic()
            self._working = bool(told["waiting"] or failures)
            if told["sent"] or any(told.get(key) != before.get(key) for key in ("waiting", "complete", "others")):
                self._progress_at = self._heard_at
        if failures == ALARM_AFTER:
            logger.error("checkpoints cannot be copied to %s, %s failures in a row: %s", self._to, failures, reason)
        elif failures and (failures == 1 or reason != before.get("reason")):
            logger.warning("copying checkpoints to %s failed: %s; it is tried again", self._to, reason)
        elif before.get("failures", 0) >= ALARM_AFTER and not failures:
            logger.warning("checkpoints are copied to %s again", self._to)
        if told["complete"] != before.get("complete", ""):
            logger.info("complete in %s: %s", self._to, told["complete"])
        told["sent"], self._pulsed = max(0, told["sent"] - self._pulsed), 0
        self._on_told(told)

    def _note_pulse(self, sent: int) -> None:
        """It is at work on a file that takes long. sent: bytes of its turn so far."""
        with self._changed:
            self._heard_at = self._progress_at = time.monotonic()
        more, self._pulsed = max(0, sent - self._pulsed), sent
        if self._last:
            self._on_told({**self._last, "sent": more, "failures": 0})


def check(settings: Settings) -> None:
    """Bind local_dir to checkpoint_dir. Raises UsageError where it is another's, or where there is nowhere to copy it to."""
    if settings.local_dir is None:
        return
    if settings.checkpoint_dir is None:
        raise UsageError("local_dir is set and checkpoint_dir is not: checkpoints could not be copied anywhere; set both")
    try:
        tiers.claim(open_storage(settings.local_dir), open_storage(settings.checkpoint_dir))
    except OSError as error:
        logger.warning("local_dir %s cannot be written to: %s; saves go to checkpoint_dir", settings.local_dir, error)


def start(settings: Settings, token: str, metrics: AgentMetrics) -> Copier | None:
    """None where there is no local tier."""
    if settings.local_dir is None or settings.checkpoint_dir is None:
        return None

    def on_told(told: Any) -> None:
        metrics.copied(told["sent"], told["lag_steps"], told["lag_s"], bool(told["failures"]))

    return Copier(
        settings.local_dir, settings.checkpoint_dir, settings.copy_mb_s, token, on_told, metrics.copy_failed, settings.copy_stall
    )
