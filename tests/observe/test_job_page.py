"""The page of the whole job in a real browser."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_ext.observe.job_status import Document
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, TORCHRUN, Job
from tests.observe.pages_in_chromium import DESKTOP, HTML, OVERFLOW, PHONE, chromium, document, failure, of_nodes, served

SHOTS = ROOT / "entrypoints" / "monitoring"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def opened(browser: Any, url: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Any:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#nodes tbody tr", state="attached")
    return page


def test_text_of_others_stays_text(browser: Any) -> None:
    hostile = document(2, name=HTML + "{}", last=failure(2, HTML, 65))
    with served(hostile) as url:
        page = opened(browser, url)
        assert HTML in page.inner_text("#nodes")
        assert HTML in page.inner_text("#failures")
        assert page.evaluate("[window.owned, document.querySelectorAll('img, b').length]") == [None, 0]
        assert page.problems == []
        # And a script that somebody gets into the page does not run.
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned = 1'}))")
        assert page.evaluate("window.owned") is None
        page.close()


def test_512_nodes_fit_a_phone_and_a_desk(browser: Any) -> None:
    with served(document(512)) as url:
        for size in (PHONE, DESKTOP):
            page = opened(browser, url, size)
            assert page.locator("#nodes tbody tr").count() == 512
            assert page.evaluate(OVERFLOW) == []
            assert page.evaluate("document.documentElement.scrollHeight") < 6000
            assert page.problems == []
            page.close()


def test_light_and_dark_differ_and_can_be_read(browser: Any) -> None:
    seen = {}
    contrast = """() => { const lum = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(
          v => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b };
      const back = lum(getComputedStyle(document.querySelector('section')).backgroundColor);
      return [...document.querySelectorAll('td, th, dt, dd, h2, .soft')].map(e => lum(getComputedStyle(e).color)).map(
          l => (Math.max(l, back) + 0.05) / (Math.min(l, back) + 0.05)).reduce((a, b) => Math.min(a, b)) }"""
    with served(document(3)) as url:
        for scheme in ("light", "dark"):
            page = opened(browser, url, scheme=scheme)
            seen[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert page.evaluate(contrast) >= 4.5  # WCAG AA
            page.close()
    assert seen["light"] != seen["dark"]


def test_the_page_says_that_its_agent_has_gone(browser: Any) -> None:
    with served(document(3)) as url:
        page = opened(browser, url)
        assert page.is_hidden("#stale")
    page.wait_for_selector("#stale:not([hidden])")
    assert page.locator("#nodes tbody tr").count() == 3
    page.close()


SCRIPT = """
import os, torch
from pathlib import Path
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
while not Path("end").exists():
    parameter.grad = torch.ones(1)
    optimizer.step()
    if os.environ["RANK"] == "1" and Path("crash").exists():
        os.unlink("crash")
        os.kill(os.getpid(), 9)
"""


@pytest.mark.long
def test_a_crash_of_a_real_job_shows_on_the_page_of_another_node(browser: Any, server: EtcdServer, tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = [*TORCHRUN, "--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=seen", "--nnodes=2"]
    job += ["--max-restarts=3", "train.py"]
    with Job(job, tmp_path, ELASTIC_EXT_NODE_NAME="a") as one, Job(job, tmp_path, ELASTIC_EXT_NODE_NAME="b") as two:
        url = one.wait_for(r"(http://[\d.:]+)/metrics")[0][1]
        two.wait_for("supervises this run")
        page = opened(browser, url)
        page.locator("#nodes tbody tr").nth(1).wait_for()
        assert page.inner_text("#state") == "running"
        (tmp_path / "crash").touch()
        page.locator("#failures tbody tr", has_text="SIGKILL").wait_for()
        page.locator("#rounds tbody tr").nth(1).wait_for()
        assert page.problems == []
        page.close()
        (tmp_path / "end").touch()
        assert [one.finish().returncode, two.finish().returncode] == [0, 0]


def scene(name: str) -> Document:
    if name == "healthy":
        return replace(document(8), unknown=())
    if name == "recovery":
        gone = failure(2, "n6 has gone: its host does not answer", host="n6")
        changes = {6: {"state": "silent", "state_s": None, "seen_s": 52.0}, 4: {"state": "start"}}
        return replace(of_nodes(document(8, "recovering", last=gone), changes), unknown=())
    last = failure(2, "KeyError: 'labels' at train.py:88 in step: a bug in the code, it came back on the second try", 65)
    return replace(document(8, "failed", last=last), unknown=(), stragglers=())


@pytest.mark.long
@pytest.mark.parametrize("name", ["healthy", "recovery", "ended"])
def test_screenshots(browser: Any, name: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow makes the pictures small: it comes with matplotlib")
    with served(scene(name)) as url:
        for size, device in ((PHONE, "phone"), (DESKTOP, "desktop")):
            page = opened(browser, url, size, "dark" if name == "recovery" else "light")
            assert page.evaluate(OVERFLOW) == []
            assert page.problems == []
            path = SHOTS / f"status_{name}_{device}.png"
            height = min(1500, page.evaluate("document.documentElement.scrollHeight"))
            shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": size["width"], "height": height})
            image.open(io.BytesIO(shot)).convert("RGB").quantize(256, dither=0).save(path, optimize=True)
            assert path.stat().st_size < 100_000
            page.close()


def test_a_browser_may_do_nothing_else_with_the_page() -> None:
    with served(document(1)) as url, urllib.request.urlopen(url) as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        text = answer.read().decode()
    assert "innerHTML" not in text
    assert "http://" not in text
    assert "https://" not in text
    with served(document(512)) as url, urllib.request.urlopen(url + "/job.json") as answer:
        assert len(json.load(answer)["nodes"]) == 512
