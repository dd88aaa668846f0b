"""The reasons why workers start without a warm standby. Each start is counted, and each reason is logged once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_ext.workers.standby.rules import Cold, ColdReason

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # pause after a temporary shortage of descriptors, processes or memory; doubles each time
RETRY_MAX_S = 300.0  # the longest pause
NOT_READY = Cold(ColdReason.NOT_READY, "none was ready")


class ColdStarts:
    """The reasons for the cold starts of one pool. Any thread may call this.

    Attributes:
        off: why there are no standbys until `retry` clears this; None: there may be some.
        unfit: why the waiting standbys cannot be used.
        next_round: why the next round starts cold.
    """

    def __init__(self, started: Callable[[str, str], None]) -> None:
        """Start without reasons. started: called for each worker start with "warm" or "cold", and the reason."""
        self.off: Cold | None = None
        self.unfit: Cold | None = None
        self.next_round: Cold | None = None
        self._started = started
        self._lock = threading.Lock()  # guards the attributes below
        self._logged: set[str] = set()
        self._retry_at: float | None = None  # monotonic; set only while `off` is a temporary shortage
        self._pause_s = RETRY_S

    @property
    def reason(self) -> Cold | None:
        """Return why a start would be cold now even if standbys wait, or None."""
        return self.off or self.unfit or self.next_round

    def count_warm(self) -> None:
        self._started("warm", "")

    def count_cold(self, cold: Cold) -> None:
        self._started("cold", cold.reason.value)
        self.log(cold)

    def log(self, cold: Cold) -> None:
        """Log a reason, once."""
        with self._lock:
            logged = cold.text in self._logged
            self._logged.add(cold.text)
        if not logged:
            level = logging.INFO if cold.reason is ColdReason.NOT_READY else logging.WARNING
            logger.log(level, "workers are started without a warm standby: %s", cold.text)

    def give_up(self, cold: Cold) -> None:
        """Do without standbys for good."""
        self.off = cold
        self.log(cold)

    # A temporary shortage: the pool tries again after a pause.

    def pause(self, lacking: str) -> None:
        """Do without standbys for a while, at most until the next round has started."""
        with self._lock:
            self.off = Cold(ColdReason.LACKING, f"a resource has run out: {lacking}")
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
        self.log(self.off)

    def retry_within(self, seconds: float) -> None:
        """If there is a pause, let it end after this time."""
        with self._lock:
            if self._retry_at is not None:
                self._retry_at = time.monotonic() + seconds

    def retry(self) -> float | None:
        """End the pause if its time is over; return how many seconds are left, None if there is no pause."""
        with self._lock:
            if self._retry_at is None:
                return None
            left_s = self._retry_at - time.monotonic()
            if left_s > 0:
                return left_s
            self.off = self._retry_at = None
        logger.info("trying warm standbys again")
        return None

    def recovered(self) -> None:
        """Reset the pause, because all standbys wait."""
        with self._lock:
            paused, self._pause_s = self._pause_s > RETRY_S, RETRY_S
        if paused:
            logger.warning("warm standbys are ready again")
