"""The page of the whole job in a real browser. With RECORD_STATUS=1, as in `make pictures`, its pictures replace those in the
docs."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.base.goodput import StateSeconds
from elastic_ext.cli import main
from elastic_ext.http.tls import PemFiles, ServerTls
from elastic_ext.status.job_status import Refusal, Straggler, Unknown
from tests.etcd_server import Certificates, EtcdServer
from tests.jobs import ROOT, SCRIPTS, Job
from tests.status.pages_in_chromium import (
    DESKTOP,
    HTML,
    LIMIT_MS,
    OVERFLOW,
    PHONE,
    chromium,
    document,
    failure,
    of_nodes,
    served,
)
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

SHOTS = ROOT / "entrypoints" / "monitoring"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def opened(browser: Any, url: str, size: dict[str, int] = DESKTOP, scheme: str = "light", **more: Any) -> Any:
    page = browser.new_page(viewport=size, color_scheme=scheme, **more)
    page.set_default_timeout(LIMIT_MS)
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#nodes tbody tr", state="attached")
    return page


def test_a_job_without_run_id_is_named_so(browser: Any) -> None:
    shown = document(1)
    with served(replace(shown, job=replace(shown.job, run_id="none"))) as url:
        page = opened(browser, url)
        assert page.inner_text("#name") == "job without --rdzv-id"
        assert page.title() == "job without --rdzv-id: running"
        page.close()


@pytest.mark.seam
def test_text_of_others_stays_text(browser: Any) -> None:
    hostile = HTML + "</script><script>window.owned = 1</script>\"'>&lt;"
    shown = document(1, name=hostile + "{}", last=failure(2, hostile, 65, host=hostile))
    shown = replace(
        shown,
        job=replace(shown.job, run_id=hostile, state=hostile, headline=hostile, reason=hostile, backend=hostile),
        stragglers=(Straggler(hostile, 1, 0.02, 0.03, 0.06, 0.33),),
        refused=(Refusal(hostile, hostile),),
        goodput=(StateSeconds(hostile, 9.0), StateSeconds("constructor", 1.0)),
        unknown=(Unknown(hostile, hostile),),
        fault=hostile,
        **{"shown_by": hostile, "rounds_by": hostile},
    )
    with served(of_nodes(shown, {0: {"state": "constructor"}})) as url:
        page = opened(browser, url)
        for place in (
            "name",
            "state",
            "headline",
            "reason",
            "failures",
            "stragglers",
            "refused",
            "key",
            "unknown",
            "stale",
            "shown-by",
        ):
            assert hostile in page.inner_text(f"#{place}"), place
        assert page.title().startswith(f"job {hostile}")
        assert page.evaluate("[window.owned, document.querySelectorAll('script, img, b').length]") == [None, 1]
        assert page.problems == []
        # And a script that somebody gets into the page does not run.
        page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned = 1'}))")
        assert page.evaluate("window.owned") is None
        page.close()


GLOO = "node n3 was lost; then rank 0 raised RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer, on n0"


@pytest.mark.seam
def test_the_long_reason_stands_once(browser: Any) -> None:
    with served(document(3, "recovering", last=failure(2, GLOO))) as url:
        page = opened(browser, url)
        assert page.content().count(GLOO) == 1  # not in a title or a label either
        assert GLOO in page.inner_text("#failures")
        assert page.inner_text("#headline") == "node n3 failed; the job restarts"
        assert page.is_hidden("#reason")
        page.close()
    with served(document(3, "recovering")) as url:  # no failure says it
        page = opened(browser, url)
        assert page.inner_text("#reason") == "waiting for 1 node"
        page.close()


def test_nodes_at_a_glance_lead_to_their_rows(browser: Any) -> None:
    shown = of_nodes(document(512), {400: {"state": "silent", "seen_s": 80.0}, 7: {"state": "start"}})
    with served(shown) as url:
        page = opened(browser, url, PHONE)
        assert page.inner_text("#counts").split("\n") == ["510 running", "1 start", "1 silent", "1 node without a recent report"]
        assert page.locator("#map i.good, #map i.busy, #map i.bad").count() == 512
        assert page.locator("#map i").nth(400).get_attribute("class") == "bad"
        page.locator("#map i").nth(400).click()
        row = page.locator("#nodes tr.found")
        assert "n400" in row.inner_text()
        assert row.evaluate("e => { const r = e.getBoundingClientRect(); return r.top >= 0 && r.bottom <= innerHeight }")
        page.close()


def test_the_course_of_rounds_and_goodput_is_drawn(browser: Any) -> None:
    with served(document(3)) as url:
        page = opened(browser, url)
        shares = page.evaluate("[...document.querySelectorAll('#track span')].map(e => [e.className, parseFloat(e.style.width)])")
        assert [(kind, round(share, 1)) for kind, share in shares] == [("", 64.4), ("gap", 1.9), ("", 33.6)]
        assert "since this agent began" in page.inner_text("#over h3")  # earlier points went with earlier agents
        columns = "[...document.querySelectorAll('#columns rect')].map(e => ['x', 'height'].map(n => e.getAttribute(n)))"
        found: dict[float, float] = {}
        for x, height in page.evaluate(columns):
            found[float(x)] = found.get(float(x), 0.0) + float(height)
        assert len(found) == 60
        assert all(abs(height - 100) < 0.01 for height in found.values())
        page.close()
    points = document(1).goodput_points
    waits = (points[0], replace(points[0], age_s=points[20].age_s), points[40])  # workers start, which counts later
    with served(replace(document(1), goodput_points=waits)) as url:
        page = opened(browser, url)
        starts = page.evaluate("[...document.querySelectorAll('#columns rect')].map(e => parseFloat(e.getAttribute('x')))")
        assert {round(each) for each in starts} == {0, 67}
        page.close()


def test_old_news_is_said_to_be_old(browser: Any) -> None:
    with served(replace(document(2), read_s=75.0, fault="no etcd endpoint answered")) as url:
        page = opened(browser, url)
        assert page.inner_text("#stale") == "What is shown of the other nodes is 75 s old: no etcd endpoint answered"
        page.close()
    with served(replace(document(2), read_s=None)) as url:
        page = opened(browser, url)
        assert page.inner_text("#stale") == "Nothing is known of the other nodes yet."
        page.close()


def test_the_page_works_behind_tls(browser: Any, tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    with served(document(3), ServerTls(PemFiles(certificates.path("server.crt"), certificates.path("server.key")))) as url:
        page = opened(browser, url, ignore_https_errors=True)
        assert url.startswith("https://")
        assert page.locator("#nodes tbody tr").count() == 3
        assert page.problems == []
        page.close()


def test_512_nodes_fit_a_phone_and_a_desk(browser: Any) -> None:
    with served(document(512)) as url:
        for size in (PHONE, DESKTOP):
            page = opened(browser, url, size)
            assert page.locator("#nodes tbody tr").count() == 512
            assert page.evaluate(OVERFLOW) == []
            assert page.evaluate("document.documentElement.scrollHeight") < 4000
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


@pytest.mark.seam
def test_the_page_says_that_its_agent_has_gone(browser: Any) -> None:
    with served(document(3)) as url:
        page = opened(browser, url)
        assert page.is_hidden("#stale")
    page.evaluate("poll()")
    page.wait_for_selector("#stale:not([hidden])")
    assert page.locator("#nodes tbody tr").count() == 3
    page.close()


SCRIPT = """
import os, time, torch
import torch.distributed as dist
from pathlib import Path
import elastic_ext
from elastic_ext import Checkpointer
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
step = checkpointer.load().step
while True:
    with elastic_ext.phase("data"):
        time.sleep(0.01)
    model(torch.ones(8)).sum().backward()
    time.sleep(0.04)
    dist.all_reduce(torch.zeros(1))
    optimizer.step()
    step += 1
    if step % 25 == 0:
        checkpointer.save(step, wait=True)
    if os.environ["RANK"] == "1" and Path("bug").exists():
        print("loss", losss)
"""


def take(browser: Any, url: str, name: str) -> None:
    """Look at the page, and take the pictures of the documentation if asked to."""
    for size, device in ((PHONE, "phone"), (DESKTOP, "desktop")):
        page = opened(browser, url, size, "dark" if name == "recovery" else "light")
        assert page.evaluate(OVERFLOW) == []
        for reason in page.locator("#failures td.w").all_text_contents():
            assert page.text_content("main").count(reason) == 1
            assert reason not in page.text_content("header")
        assert page.problems == []
        if "RECORD_STATUS" in os.environ:
            from PIL import Image

            path = SHOTS / f"status_{name}_{device}.png"
            height = min(2600, page.evaluate("document.documentElement.scrollHeight"))
            shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": size["width"], "height": height})
            Image.open(io.BytesIO(shot)).convert("RGB").quantize(128, dither=0).save(path, optimize=True)
            assert path.stat().st_size < 100_000
        page.close()


def test_a_real_job_on_a_nodes_page(browser: Any, server: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loses a node, then etcd for a while, and ends by a bug."""
    (tmp_path / "train.py").write_text(SCRIPT)
    job = [sys.executable, str(SCRIPTS / "talkative_agent.py"), "--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}"]
    job += ["--rdzv-id=pretrain", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "train.py"]
    environ = {"ELASTIC_EXT_CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "ELASTIC_EXT_LEASE_TTL": "120"}
    with (
        Job(job, tmp_path, ELASTIC_EXT_NODE_NAME="n0", ELASTIC_EXT_METRICS_LINGER="300", **environ) as one,
        Job(job, tmp_path, ELASTIC_EXT_NODE_NAME="n1", **environ) as two,
    ):
        url = one.wait_for(r"(http://[\d.:]+)/metrics")[0][1]
        two.wait_for("supervises this run")
        page = opened(browser, url)
        page.locator("#nodes tbody tr", has_text=re.compile(r"step \d+")).nth(1).wait_for()
        page.locator("#columns rect").nth(9).wait_for(state="attached")
        page.locator("#headline", has_text="both nodes train").wait_for()
        take(browser, url, "healthy")
        two.process.kill()
        page.locator("#headline", has_text="node n1 was lost; n0 waits for it").wait_for()
        take(browser, url, "recovery")
        with Job(job, tmp_path, ELASTIC_EXT_NODE_NAME="n2", **environ) as three:
            page.locator("#rounds tbody tr").nth(1).wait_for()
            page.locator("#state", has_text="running").wait_for()
            page.locator("#stale").wait_for(state="hidden")
            assert_an_outage_is_shown(page, url, server)
            (tmp_path / "bug").touch()
            page.locator("#failures tbody tr", has_text="NameError").wait_for()
            page.locator("#headline", has_text="rank 1 on n2 failed in its code; the job stopped").wait_for()
            assert three.finish().returncode == 65
        one.wait_for("serves its last metrics")
        take(browser, url, "ended")
        assert page.problems == []
        page.close()
        urllib.request.urlopen(url + "/metrics").close()
        assert one.finish().returncode == 65
    assert main.main(["status", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=pretrain", "--json"]) == 1
    ended = json.loads(capsys.readouterr().out)
    assert ended["job"]["state"] == "failed"
    assert {(each["name"], each["state"], each["step"] > 0) for each in ended["nodes"]} >= {
        ("n0", "ended", True),
        ("n2", "ended", True),
    }
    assert [each["round"] for each in ended["rounds"]] == [1, 2]
    assert {"productive", "rendezvous"} <= {each["state"] for each in ended["goodput"]}


def assert_an_outage_is_shown(page: Any, url: str, server: EtcdServer) -> None:
    """Stop etcd for some seconds. The agent goes on to answer, and says how old what it tells is."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        page.locator("#stale", has_text="old").wait_for()
        ages, took = set(), []

        def asked_for_7_s() -> bool:
            """There is an answer a second: longer than a call to etcd takes to give up."""
            began = time.monotonic()
            with urllib.request.urlopen(url + "/job.json", timeout=LIMIT_S) as answer:
                ages.add(json.load(answer)["read_s"])
            urllib.request.urlopen(url + "/metrics", timeout=LIMIT_S).close()
            took.append(time.monotonic() - began)
            return len(ages) >= 7

        until(asked_for_7_s)
        assert statistics.median(took) < 5, took  # a call gives up after 5 s, and no answer waits for one
    finally:
        server.process.send_signal(signal.SIGCONT)
    page.locator("#stale", has_text="old").wait_for(state="hidden")


def test_a_browser_may_only_show_the_page() -> None:
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
