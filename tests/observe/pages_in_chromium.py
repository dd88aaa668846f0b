"""Headless Chromium for the tests of the page, and documents to show in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ext.observe import job_status, pages
from elastic_ext.observe.job_status import Document, Failure, Job, NodeStatus, Straggler, Unknown
from elastic_ext.observe.node_report import RoundSpan, StateSeconds
from elastic_ext.observe.server import MetricsServer

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
HTML = '<img src=x onerror="window.owned=1"><b>bold</b>'


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser; skip the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
    binary = shutil.which("chromium")
    if binary is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def served(document: Document) -> Iterator[str]:
    """Serve a document with the agent's own page; yield the URL."""
    server = MetricsServer(pages.of_job(lambda: job_status.encode(document).encode()))
    try:
        assert server.url is not None
        yield server.url
    finally:
        server.close()


def failure(
    round_: int = 1, reason: str = "rank 3 was killed by SIGKILL: out of memory on n3", code: int | None = None
) -> Failure:
    decision = "stop" if code is not None else "restart"
    return Failure(round_, decision, "memory", reason, "killed", "n3", 3, code, 1, 3, "2026-01-02 03:04:05+0000")


def document(count: int = 4, state: str = "running", name: str = "n{}", last: Failure | None = None) -> Document:
    """A job of this many nodes."""
    of_agent = {"running": "running", "recovering": "rendezvous"}.get(state, "ended")
    goodput = (StateSeconds("productive", 3100.0), StateSeconds("rendezvous", 40.0), StateSeconds("lost_work", 160.0))
    nodes = tuple(
        NodeStatus(
            f"{name.format(i)}-77-ab", name.format(i), of_agent, i, i * 8, 8, 120.5, 12000 + i % 3, 3.21, 0.4, 11900, 31.0, 8, 4.0
        )
        for i in range(count)
    )
    rounds = (RoundSpan(1, 3600.0, 1220.0, failure().reason), RoundSpan(2, 1210.0, None if state == "running" else 7.5, ""))
    reason = last.reason if last is not None else "" if state == "running" else "waiting for 1 node"
    return Document(
        Job("llama-70b", "ext_etcd", state, reason, 2, count, count * 8, 1, 3, last or failure()),
        nodes,
        rounds,
        (failure(), *([last] if last else [])),
        (Straggler("n2", 17, 1.43),),
        (),
        goodput,
        unknown=(Unknown("failures", "only verdicts that this node has heard"),),
        shown_by="n0-77-ab",
        rounds_by="n0",
    )
