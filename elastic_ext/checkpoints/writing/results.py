"""The results of this group's saves, for the user, the agent and the next save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.checkpoints.directory.generations import StaleGroup
from elastic_ext.checkpoints.writing.errors import FailureKind, SaveFailure
from elastic_ext.training import saves

logger = logging.getLogger(__name__)

ALARM_AFTER = 3  # failed saves in a row


@dataclass(frozen=True)
class Event:
    """The argument of `on_event`, which the writing thread calls.

    Attributes:
        kind: saved, failed, alarm (several saves failed in a row) or pruned.
        step: step of the save; for "pruned", of the save that made the checkpoint superfluous.
        name: name of the checkpoint in its directory; "" if it got none.
        seconds: time from the call of `save` to the commit.
        size: bytes.
        reason: why it failed or was removed.
    """

    kind: str
    step: int
    name: str
    seconds: float = 0.0
    size: int = 0
    reason: str = ""


class Results:
    """The results so far.

    Attributes:
        last_error: why the last save failed; None if it succeeded.
        failures: failed saves in a row.
        last_saved: step of this group's last committed save; None before the first.
        stale: set if another group has taken over: no further save is possible.
        ended: any other reason why no further save is possible, else "".
    """

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self.last_error: str | None = None
        self.failures = 0
        self.last_saved: int | None = None
        self._saved: set[int] = set()  # steps committed by this group
        self.stale: StaleGroup | None = None
        self.ended = ""

    def new_group(self) -> None:
        """Forget what is saved: steps trained again belong to a new group."""
        self.last_saved = None
        self._saved.clear()

    def committed(self, name: str, step: int, size: int, seconds: float) -> None:
        """Record a committed save."""
        self.last_error, self.failures, self.last_saved = None, 0, step
        self._saved.add(step)
        saves.report_saved(step, seconds)
        self.emit(Event("saved", step, name, seconds, size))

    def failed(self, name: str, step: int, failure: SaveFailure) -> None:
        """Record a failed save."""
        self.failures += 1
        self.last_error = f"step {step} was not saved: rank {failure.rank}: {failure.kind.value}: {failure.reason}"
        logger.warning("%s; training continues", self.last_error)
        saves.report_save_failed()
        self.emit(Event("failed", step, name, reason=self.last_error))
        if failure.kind is FailureKind.STALE:
            self.stale = StaleGroup(failure.reason)
        elif failure.kind is FailureKind.GROUP:
            self.ended = self.last_error
        elif self.failures >= ALARM_AFTER:
            logger.error("%s saves failed in a row; the last saved step is %s", self.failures, self.last_saved)
            self.emit(Event("alarm", step, name, reason=self.last_error))

    def skip(self, step: int) -> bool:
        """Return whether this step need not or cannot be saved, and if so tell the agent. Raises StaleGroup."""
        if self.stale is not None:
            raise self.stale
        if self.ended:
            logger.info("step %s is not saved: %s", step, self.ended)
            saves.report_save_failed()
        elif step in self._saved:  # nothing is ever written into a committed checkpoint
            logger.info("step %s is not saved: it has been saved already", step)
            saves.report_saved(step, 0.0)
        else:
            return False
        return True

    def emit(self, event: Event) -> None:
        """Call `on_event` and log its exceptions."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("on_event failed")
