"""Waits at the end of an agent until somebody has scraped its last metrics."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus

from elastic_ext.base.held_signals import held
from elastic_ext.base.wakeup import Wakeup, readable
from elastic_ext.observe.pages import METRICS, Page, Pages

logger = logging.getLogger(__name__)


class LastScrape:
    """Notes the first scrape, sent to its last byte, of metrics that were made after the agent had ended.

    Attributes:
        ended_at: since when the metrics are the last ones (time.monotonic()); None: they are not yet.
    """

    def __init__(self) -> None:
        self.ended_at: float | None = None
        self._seen = threading.Event()
        self._wakeup: Wakeup | None = None

    def noting(self, pages: Pages) -> Pages:
        """Return these pages; who gets the metrics is noted."""
        make = pages[METRICS]

        def scrape(accept: str) -> Page:
            page = make(accept)
            ended = self.ended_at is not None and page.made_at >= self.ended_at  # not one that was kept from before
            return dataclasses.replace(page, sent=self._note) if ended and page.status is HTTPStatus.OK else page

        return {**pages, METRICS: scrape}

    def _note(self) -> None:
        self._seen.set()
        if (wakeup := self._wakeup) is not None:
            wakeup.set()

    def wait(self, timeout_s: float, wakeup: Wakeup) -> Sequence[int]:
        """Wait until it has come, for timeout_s at most, or until a signal tells this process to end.

        wakeup: signals wake it. Returns the signals that came meanwhile. They have done nothing so far.
        """
        deadline = time.monotonic() + timeout_s
        self._wakeup = wakeup
        with held() as told:
            if not self._seen.is_set():  # shown, because the agent seems to hang
                logger.warning(
                    "metrics: this agent is done; it serves its last metrics until they are scraped, %g s at most", timeout_s
                )
            while not self._seen.is_set() and (left_s := deadline - time.monotonic()) > 0:
                readable(wakeup, left_s)
                wakeup.clear()
                if told:
                    logger.info("metrics: %s ends the wait for a last scrape", signal.Signals(told[0]).name)
                    break
            else:
                if not self._seen.is_set():
                    logger.warning("metrics: nobody has scraped the last metrics within %g s (metrics_linger)", timeout_s)
        self._wakeup = None
        return told
