"""What the agent's HTTP server answers: pages by path, each made when it is asked for."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from elastic_ext.observe.cpu_budget import CpuBudget

METRICS, HEALTH, READY, STATUS, JOB = "/metrics", "/healthz", "/readyz", "/status.json", "/job.json"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
CPU_SHARE = 0.03  # of a core, for making the page of the metrics: some 6 times a second with two workers
CPU_BURST_S = 0.1

# What prometheus_client is asked for. It would put any text of a stranger's Accept into the head of the answer.
_OPENMETRICS = "application/openmetrics-text"
_FORMATS = ((_OPENMETRICS, ""), (_OPENMETRICS, "1.0.0"), ("text/plain", "1.0.0"))
_ESCAPINGS = ("allow-utf-8", "underscores", "dots", "values")
_PRIVATE = ("X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer", "Cache-Control: no-store")


@dataclass(frozen=True)
class Page:
    """An answer. body: of this content type. headers: further lines. sent: called once the client has been sent all of it.

    made_at: when it was begun (time.monotonic()); 0: it does not change.
    """

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()
    sent: Callable[[], None] = lambda: None
    made_at: float = 0.0

    def encoded(self) -> bytes:
        """Return it as HTTP/1.0 sends it."""
        head = (
            *(f"HTTP/1.0 {self.status.value} {self.status.phrase}", *self.headers),
            *(f"Content-Type: {self.content_type}", f"Content-Length: {len(self.body)}", "Connection: close", "\r\n"),
        )
        return "\r\n".join(head).encode("ascii") + self.body


MakePage = Callable[[str], Page]  # from the request's Accept
Pages = Mapping[str, MakePage]


def text(status: HTTPStatus, line: str, *headers: str) -> Page:
    """Return a page of one line."""
    return Page(status, TEXT, line.encode("ascii", "replace") + b"\n", headers)


def of_metrics(registry: CollectorRegistry) -> Pages:
    """Return the page for scrapers, in the format that they accept. Who scrapes all the time gets the last page once more."""

    budget = CpuBudget(CPU_SHARE, CPU_BURST_S)
    last: dict[str, Page] = {}  # by format, of which there are few

    def scrape(accept: str) -> Page:
        accepted = _known_format(accept)
        if accepted not in last or budget.wait_s(time.monotonic()) == 0:
            encode, content_type = choose_encoder(accepted)
            began, now = time.thread_time(), time.monotonic()
            last[accepted] = Page(HTTPStatus.OK, content_type, encode(registry), made_at=now)
            budget.spend(time.thread_time() - began, time.monotonic())
        return last[accepted]

    return {METRICS: scrape}


def _pair(parameter: str) -> tuple[str, str]:
    name, _, value = parameter.partition("=")
    return name, value


def _known_format(accept: str) -> str:
    """Return the first format in an Accept that there is, in one of a few wordings; "" for the plain text."""
    for each in accept.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        given = dict(_pair(parameter) for parameter in parameters)
        if (kind, given.get("version", "")) in _FORMATS:
            escaping = given.get("escaping", "")
            return f"{kind}; version=1.0.0" + (f"; escaping={escaping}" if escaping in _ESCAPINGS else "")
    return ""


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
    job: Callable[[], bytes] | None = None,
) -> Pages:
    """Return all pages of an agent.

    Args:
        not_ready: why its workers do not run now; "" if they do.
        status: what the agent knows of its node, as JSON has it.
        job: the status of the whole job as JSON; None: `/` only lists the other pages.
    """

    def ready(_: str) -> Page:
        why = not_ready()
        return text(HTTPStatus.SERVICE_UNAVAILABLE, why) if why else text(HTTPStatus.OK, "ready")

    pages = {
        HEALTH: lambda _: text(HTTPStatus.OK, "ok"),
        READY: ready,
        STATUS: lambda _: Page(HTTPStatus.OK, JSON, json.dumps(status()).encode()),
        **of_metrics(registry),
    }
    if job is not None:
        return {**of_job(job), **pages}
    links = "".join(f'<li><a href="{path}">{path[1:]}</a>' for path in pages)
    index = f"<!DOCTYPE html><title>elastic_ext</title><ul>{links}</ul>\n".encode()
    return {"/": lambda _: Page(HTTPStatus.OK, HTML, index), **pages}
