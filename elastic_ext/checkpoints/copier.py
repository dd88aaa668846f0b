"""The agent's side of `replicate`: starts it, again whenever it has died, tells it of saves, and passes on what it tells."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_ext.checkpoints import replicate, tiers
from elastic_ext.checkpoints.replicate import FIRST_PAUSE_S, LONGEST_PAUSE_S
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.errors import UsageError
from elastic_ext.observe.metrics import AgentMetrics
from elastic_ext.settings import Settings
from elastic_ext.workers import isolated

logger = logging.getLogger(__name__)

TOKEN_ENV = "ELASTIC_EXT_COPIER"  # carries the agent's token: the warden ends what carries it when the agent is gone
ALARM_AFTER = 3  # failures one after the other
END_S = 5.0  # that the process may take to end when it is told to


class Copier:
    """Keeps the process from construction to close(). Its methods never wait, but for close()."""

    def __init__(self, local_dir: str, checkpoint_dir: str, mb_s: float, token: str, on_told: Callable[[Any], None]) -> None:
        """on_told: gets each line as a dict, from a thread."""
        self._command = [*isolated.command(replicate.__name__), f"--mb-s={mb_s}"]
        # Not as arguments, which every user of the machine can read: a URL may hold credentials.
        self._environ = {**os.environ, TOKEN_ENV: token, tiers.LOCAL_ENV: local_dir, tiers.REMOTE_ENV: checkpoint_dir}
        self._to = checkpoint_dir
        self._on_told = on_told
        self._saves = 0
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._finishing = self._closed = False
        self._last: dict[str, Any] = {}
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

    def close(self, wait_s: float | None) -> None:
        """Have it copy what is left, and end. wait_s: for so long; None: while it makes progress."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._say("finish")
        logger.info("what is still to be copied to %s is waited for", self._to)
        try:
            self._thread.join(wait_s)
        finally:  # a signal that ends the wait, too
            with self._changed:
                self._closed = True
                self._changed.notify_all()
                process = self._process
            if process is not None and process.poll() is None:
                process.kill()
            self._thread.join(END_S)
        if self._last.get("waiting"):
            logger.warning(
                "these checkpoints are not complete in %s, and have their only copy on this node: %s",
                self._to,
                ", ".join(self._last["waiting"]),
            )

    def _say(self, line: str) -> None:
        with self._changed:
            process = self._process
            if process is None or process.stdin is None:
                return  # it looks when it starts
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            except (OSError, ValueError):
                pass  # it has ended: the thread sees that

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                code = self._once()
            except OSError as error:
                code = -1
                logger.error("checkpoints are not copied to %s: the process cannot be started: %s", self._to, error)
            with self._changed:
                if self._closed or (self._finishing and code >= 0):
                    return
            pause = FIRST_PAUSE_S if time.monotonic() - began > LONGEST_PAUSE_S else min(2 * pause, LONGEST_PAUSE_S)
            logger.warning("the process that copies checkpoints ended with %s; another one is started in %.1f s", code, pause)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return

    def _once(self) -> int:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
            text=True,
            start_new_session=True,  # a signal to the agent's group must not reach it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with self._changed:
            self._process = process
            finishing = self._finishing
            if self._closed:
                process.kill()
        if finishing:
            self._say("finish")
        for line in process.stdout:
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

    def _heard(self, line: str) -> None:
        try:
            told = json.loads(line)
            failures, reason = told["failures"], told["reason"]
        except (ValueError, KeyError, TypeError):
            logger.info("the process that copies checkpoints says: %s", line.rstrip())  # a library's print
            return
        before, self._last = self._last, told
        if failures == ALARM_AFTER:
            logger.error("checkpoints cannot be copied to %s, %s failures in a row: %s", self._to, failures, reason)
        elif failures and (failures == 1 or reason != before.get("reason")):
            logger.warning("copying checkpoints to %s failed: %s; it is tried again", self._to, reason)
        elif before.get("failures", 0) >= ALARM_AFTER and not failures:
            logger.warning("checkpoints are copied to %s again", self._to)
        if told["complete"] != before.get("complete", ""):
            logger.info("complete in %s: %s", self._to, told["complete"])
        self._on_told(told)


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

    return Copier(settings.local_dir, settings.checkpoint_dir, settings.copy_mb_s, token, on_told)
