"""What the agent's HTTP server answers: pages by path, each made when it is asked for."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

METRICS, HEALTH, READY, STATUS, JOB = "/metrics", "/healthz", "/readyz", "/status.json", "/job.json"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
_PRIVATE = "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-store\r\n"


@dataclass(frozen=True)
class Page:
    """An answer. body: of this content type. headers: further lines, each with its line end."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: str = ""

    def encoded(self) -> bytes:
        """Return it as HTTP/1.0 sends it."""
        head = (
            f"HTTP/1.0 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n{self.headers}\r\n"
        )
        return head.encode("ascii") + self.body


MakePage = Callable[[str], Page]  # from the request's Accept
Pages = Mapping[str, MakePage]


def text(status: HTTPStatus, line: str) -> Page:
    """Return a page of one line."""
    return Page(status, TEXT, line.encode("ascii", "replace") + b"\n")


def of_metrics(registry: CollectorRegistry) -> Pages:
    """Return the page for scrapers, in the format that they accept."""

    def scrape(accept: str) -> Page:
        encode, content_type = choose_encoder(accept)
        return Page(HTTPStatus.OK, content_type, encode(registry))

    return {METRICS: scrape}


def of_job(document: Callable[[], bytes]) -> Pages:
    """Return the page of the whole job, and the document that it polls."""
    html = resources.files(__package__).joinpath("job.html").read_text("utf-8")
    headers = f"Content-Security-Policy: {_policy(html)}\r\n{_PRIVATE}"
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
