"""What an agent shows: pages by path, each made when a client asks for it, and its last metrics.

An agent ends at the verdict, mostly before the next scrape: what it counted last would be lost, and that is the failure itself.
So it may serve its metrics until they are scraped once more.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib import resources

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from elastic_ext.base import threads
from elastic_ext.base.wakeup import Wakeup, readable

logger = logging.getLogger(__name__)

METRICS, HEALTH, READY, STATUS, JOB = "/metrics", "/healthz", "/readyz", "/status.json", "/job.json"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
MAX_REQUEST = 16 << 10  # bytes
CPU_SHARE = 0.03  # of a core, for making the page of the metrics: some 6 times a second with two workers
CPU_BURST_S = 0.1

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

_PRIVATE = ("X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer", "Cache-Control: no-store")


@dataclass(frozen=True)
class Request:
    """A whole request, read from bytes that anyone may have sent."""

    line: str  # its first line
    path: str  # without the query
    accept: str  # the value of this header, or ""


def parse(received: bytes) -> Request | Page | None:
    """Return the request; the page that says what is wrong with it; None while it is incomplete."""
    head, end, _ = received.replace(b"\r\n", b"\n").partition(b"\n\n")
    if not end:
        too_long = len(received) > MAX_REQUEST
        return text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long") if too_long else None
    line, *fields = head.decode("latin-1").split("\n")
    method, _, target = line.partition(" ")
    target, _, protocol = target.partition(" ")
    if not protocol.startswith("HTTP/"):
        return text(HTTPStatus.BAD_REQUEST, "this is not HTTP")
    if method != "GET":
        return text(HTTPStatus.NOT_IMPLEMENTED, "expected GET")
    named = (field.partition(":") for field in fields)
    accept = next((value.strip() for name, _, value in named if name.lower() == "accept"), "")
    return Request(line, target.partition("?")[0], accept)


class CpuBudget:
    """Credit in CPU seconds that grows with time and shrinks with use. It may become negative: work is paid for afterwards.

    share: of one core, in the long run. burst_s: CPU seconds that may be used at once after a quiet time.
    """

    def __init__(self, share: float, burst_s: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._credit_s, self._at = burst_s, 0.0

    def spend(self, cpu_s: float, now: float) -> None:
        self._credit_s = self._credit(now) - cpu_s
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return how long to wait before the next piece of work; 0: it may begin."""
        return max(0.0, -self._credit(now) / self._share)

    def _credit(self, now: float) -> float:
        return min(self._burst_s, self._credit_s + self._share * max(0.0, now - self._at))


@dataclass(frozen=True)
class Page:
    """An answer. body: of this content type. headers: further lines. sent: called once the client has been sent all of it."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()
    sent: Callable[[], None] = lambda: None
    made_at: float = 0.0  # when it was begun (time.monotonic()); 0: it does not change

    def encoded(self) -> bytes:
        head = (
            *(f"HTTP/1.0 {self.status.value} {self.status.phrase}", *self.headers),
            *(f"Content-Type: {self.content_type}", f"Content-Length: {len(self.body)}", "Connection: close", "\r\n"),
        )
        return "\r\n".join(head).encode("ascii") + self.body


MakePage = Callable[[str], Page]  # from the request's Accept
Pages = Mapping[str, MakePage]


def text(status: HTTPStatus, line: str) -> Page:
    return Page(status, TEXT, line.encode("ascii", "replace") + b"\n")


def of_metrics(registry: CollectorRegistry) -> Pages:
    """Return the page for scrapers, in the format that they accept. One that scrapes too often gets the last page again."""

    budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
    last: dict[str, Page] = {}  # by format

    def scrape(accept: str) -> Page:
        # Of two: prometheus_client would put any text of a stranger's Accept into the head of the answer.
        accepted = OPENMETRICS if OPENMETRICS.partition(";")[0] in accept else ""
        if accepted not in last or budget.wait_s(time.monotonic()) == 0:
            encode, content_type = choose_encoder(accepted)
            began, now = time.thread_time(), time.monotonic()
            last[accepted] = Page(HTTPStatus.OK, content_type, encode(registry), made_at=now)
            budget.spend(time.thread_time() - began, time.monotonic())
        return last[accepted]

    return {METRICS: scrape}


def of_job(document: Callable[[], bytes]) -> Pages:
    """Return the page of the whole job, and the document that it polls."""
    html = resources.files(__package__).joinpath("job.html").read_text("utf-8")
    headers = (f"Content-Security-Policy: {_policy(html)}", *_PRIVATE)
    page = Page(HTTPStatus.OK, HTML, html.encode(), headers)
    return {"/": lambda _: page, JOB: lambda _: Page(HTTPStatus.OK, JSON, document(), _PRIVATE)}


def _policy(html: str) -> str:
    """Return what a browser may do for the page: run its own script and style, ask this agent, nothing else."""
    of_script, of_style = (
        base64.b64encode(hashlib.sha256(html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].encode()).digest()).decode()
        for tag in ("script", "style")
    )
    own = f"script-src 'sha256-{of_script}'; style-src 'sha256-{of_style}'; connect-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def of_agent(
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    status: Callable[[], Mapping[str, object]],
    job: Callable[[], bytes],
) -> Pages:
    """Return all pages of an agent.

    not_ready: why its workers do not run now; "" if they do. status: what the agent knows of its node, as JSON has it. job: the
    status of the whole job as JSON.
    """

    def ready(_: str) -> Page:
        why = not_ready()
        return text(HTTPStatus.SERVICE_UNAVAILABLE, why) if why else text(HTTPStatus.OK, "ready")

    return {
        **of_job(job),
        HEALTH: lambda _: text(HTTPStatus.OK, "ok"),
        READY: ready,
        STATUS: lambda _: Page(HTTPStatus.OK, JSON, json.dumps(status()).encode()),
        **of_metrics(registry),
    }


class LastScrape:
    """Notes the first scrape, sent to its last byte, of metrics that were made after the agent had ended."""

    def __init__(self) -> None:
        self.ended_at: float | None = None  # since when the metrics are the last ones (time.monotonic()); None: they are not yet
        self._seen = threading.Event()
        self._wakeup: Wakeup | None = None

    def noting(self, pages: Pages) -> Pages:
        """Return these pages, and note each scrape of the metrics."""
        make = pages[METRICS]

        def scrape(accept: str) -> Page:
            page = make(accept)
            ended = self.ended_at is not None and page.made_at >= self.ended_at  # not one that was kept from before
            return replace(page, sent=self._note) if ended and page.status is HTTPStatus.OK else page

        return {**pages, METRICS: scrape}

    def _note(self) -> None:
        self._seen.set()
        if (wakeup := self._wakeup) is not None:
            wakeup.set()

    def wait(self, timeout_s: float, wakeup: Wakeup) -> Sequence[int]:
        """Wait until it has come, for timeout_s at most, or until a signal asks this process to end.

        wakeup: signals wake it. Returns the signals that came meanwhile. They have done nothing so far.
        """
        deadline = time.monotonic() + timeout_s
        self._wakeup = wakeup
        with threads.held() as signals:
            if not self._seen.is_set():  # shown, because the agent seems to hang
                logger.warning(
                    "metrics: this agent is done; it serves its last metrics until they are scraped, %g s at most", timeout_s
                )
            while not self._seen.is_set() and (left_s := deadline - time.monotonic()) > 0:
                readable(wakeup, left_s)
                wakeup.clear()
                if signals:
                    logger.info("metrics: %s ends the wait for a last scrape", signal.Signals(signals[0]).name)
                    break
            else:
                if not self._seen.is_set():
                    logger.warning("metrics: the final metrics were not scraped within %g s (metrics_linger)", timeout_s)
        self._wakeup = None
        return signals
