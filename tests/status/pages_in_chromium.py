"""Headless Chromium for the tests of the page, and documents to show in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_ext.base.goodput import StateSeconds
from elastic_ext.http import pages
from elastic_ext.http.server import MetricsServer
from elastic_ext.http.tls import ServerTls
from elastic_ext.status import job_status
from elastic_ext.status.job_status import Document, Failure, GoodputPoint, Job, NodeStatus, RoundSpan, Straggler, Unknown
from tests.programs import needs

LIMIT_MS = 180_000.0
PHONE, DESKTOP = {"width": 360, "height": 780}, {"width": 1100, "height": 900}
# What is wider than its room; the head of a table takes one pixel on a phone.
OVERFLOW = """[document.documentElement, ...document.querySelectorAll('section, table, tr, td, div, p, ul')].filter(
  each => each.scrollWidth > each.clientWidth && each.clientWidth > 1 && getComputedStyle(each).display !== 'inline').map(
  each => each.id || each.className || each.tagName)"""
HTML = '<img src=x onerror="window.owned=1"><b>bold</b>'


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser; skip the test where there is none."""
    needs("chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"], timeout=LIMIT_MS
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def served(document: Document, tls: ServerTls | None = None) -> Iterator[str]:
    """Serve a document with the agent's own page; yield the URL."""
    server = MetricsServer(pages.of_job(lambda: job_status.encode(document).encode()), tls=tls)
    try:
        assert server.url is not None
        yield server.url
    finally:
        server.close()


def failure(
    round_: int = 1, reason: str = "rank 27 was killed by SIGKILL: out of memory", code: int | None = None, host: str = "n3"
) -> Failure:
    decision, kind = ("stop", "code") if code is not None else ("restart", "host_memory" if host == "n3" else "network")
    rank, said = 27 if host == "n3" else -1, f"node {host} failed; the job {'stopped' if code is not None else 'restarts'}"
    return Failure(round_, decision, kind, reason, "killed", host, rank, code, 1, 3, "2026-01-02 03:04:05+0000", said)


def spent(minute: float) -> tuple[StateSeconds, ...]:
    """A job that starts for a minute, trains, and loses some minutes from the 38th on."""
    began, lost = min(1.0, minute), min(4.0, max(0.0, minute - 38))
    trained = minute - began - lost
    given = {"productive": 57 * trained, "checkpoint_save": 3 * trained, "startup": 50 * began + 20 * lost}
    given |= {"rendezvous": 10 * began + 6 * lost, "lost_work": 34 * lost}
    return tuple(StateSeconds(state, seconds) for state, seconds in given.items() if seconds)


def document(count: int = 4, state: str = "running", name: str = "n{}", last: Failure | None = None) -> Document:
    """A job of this many nodes, in its second round."""
    of_agent = {"running": "running", "recovering": "rendezvous", "starting": "start"}.get(state, "ended")
    running = state == "running"
    nodes = tuple(
        NodeStatus(
            *(f"{name.format(i)}-77-ab", name.format(i), of_agent, i, i * 8, 8, 1210.0 if running else 7.5, 12000 + i % 3),
            *(3.21, 0.4 if running else 9.1, 11900, 31.0, 8, 0.0 if i == 0 else 4.0),
        )
        for i in range(count)
    )
    rounds = (RoundSpan(1, 3600.0, 1280.0, failure().headline), RoundSpan(2, 1210.0, None if state == "running" else 7.5, ""))
    headline = last.headline if last is not None else f"all {count} nodes train" if running else "the workers start again"
    reason = "" if last is not None or running else "waiting for 1 node"
    points = tuple(GoodputPoint(3600.0 - 60 * minute, spent(minute)) for minute in range(60))
    return Document(
        job=Job(
            *("llama-70b", "ext_etcd", state, reason, 2, count, count * 8, 1, 3, last or failure(), 12000, 3.21, 11900, 31.0),
            headline=headline,
        ),
        nodes=nodes,
        rounds=rounds,
        failures=(failure(), *([last] if last else [])),
        stragglers=(Straggler("n2", 17, 0.021, 0.025, 0.064, 0.328), Straggler("n1", -1, 0.006, 0.01, 0.064, 0.09, 0.0004)),
        goodput=spent(60),
        goodput_points=points,
        unknown=(Unknown("failures", "only verdicts that this node has heard"),),
        shown_by="n0-77-ab",
        rounds_by="n0",
        read_s=0.4,
    )


def of_nodes(document: Document, changes: Mapping[int, Mapping[str, Any]]) -> Document:
    """Return the document with other fields of these nodes, by rank."""
    return replace(document, nodes=tuple(replace(each, **changes.get(rank, {})) for rank, each in enumerate(document.nodes)))
