"""The site that `make site` makes of the pages: all of them are in it, no link is dead, and search works without a network."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import elastic_ext
from tests.jobs import ROOT, environment
from tests.status.pages_in_chromium import LIMIT_MS, chromium

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
FRONT, PAGES = NAV[0]["Overview"], [page for section in NAV[1:] for pages in section.values() for page in pages]
LOADS = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//""")


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "site", f"VENV={Path(sys.executable).parent.parent}", f"SITE={site}"]
    return subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT, made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_every_page_is_in_the_nav() -> None:
    folders = (ROOT.glob("*.md"), ROOT.glob(".github/*.md"), ROOT.glob("elastic_ext/**/*.md"), ROOT.glob("entrypoints/**/*.md"))
    there = {str(path.relative_to(ROOT)) for paths in folders for path in paths}
    assert there - {FRONT, *PAGES} == set()
    assert len(set(PAGES)) == len(PAGES)


def test_nested_lists_nest_in_the_site() -> None:
    """GitHub takes two spaces, Python-Markdown four."""
    found = [
        f"{page}: {line}"
        for page in PAGES
        for line in re.findall(r"(?m)^ {1,3}(?:[-*]|\d+\.) .*", re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text()))
    ]
    assert found == []


@pytest.mark.full
@pytest.mark.xdist_group("site")
def test_the_site_has_every_page(site: Path) -> None:
    html = [str(Path(page).with_suffix(".html")).replace("README.html", "index.html") for page in PAGES]
    assert [page for page in html if not (site / page).is_file()] == []
    assert f"<title>elastic_ext {elastic_ext.__version__}</title>" in (site / "index.html").read_text()
    rules = (site / "elastic_ext/docs/rules.html").read_text()
    assert rules.count("<tr>") > 50, "the generated table"
    script = "entrypoints/slurm/train.sbatch"
    assert (site / script).read_text() == (ROOT / script).read_text(), "a file that is no page, but linked"


@pytest.mark.full
@pytest.mark.xdist_group("site")
def test_llms_txt_names_each_page(site: Path) -> None:
    """As llmstxt.org says: a title, a summary, and lists of links."""
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == f"# elastic_ext {elastic_ext.__version__}"
    assert lines[2].startswith("> ")
    listed = re.findall(r"(?m)^- \[[^\]]+\]\((\S+)\): \S+", "\n".join(lines))
    assert listed == PAGES
    assert all((site / page).read_text() == (ROOT / page).read_text() for page in listed)


@pytest.mark.full
@pytest.mark.xdist_group("site")
def test_nothing_comes_from_another_host(site: Path) -> None:
    files = [path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]
    assert len(files) > len(PAGES)
    assert [path for path in files if LOADS.search(path.read_text())] == []


@pytest.mark.full
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    checkout, dead = tmp_path / "checkout", ["no_such_page.md", "failures.md#no-such-heading", "#no-such-heading", "/failures.md"]
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", ".matrix", "build", "*cache*"))
    with (checkout / "elastic_ext/docs/hangs.md").open("a") as page:
        page.write("".join(f"\n[there]({link})\n" for link in dead))
    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    assert [link for link in dead if f"'{link}'" not in done.stdout + done.stderr] == []


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.full
@pytest.mark.xdist_group("site")
@pytest.mark.parametrize(("words", "page"), [("hang_timeout", "hangs.html"), ("체크포인트", "ko.html")])
def test_search_finds_words_of_pages(served: str, words: str, page: str) -> None:
    with chromium() as browser:
        shown, errors = browser.new_page(), list[object]()
        shown.set_default_timeout(LIMIT_MS)
        shown.on("pageerror", lambda error: errors.append(error))
        with shown.expect_console_message(lambda message: "search ready" in message.text):
            shown.goto(f"{served}/elastic_ext/docs/metrics.html")
        shown.click("[data-bs-target='#mkdocs_search_modal']")
        shown.fill("#mkdocs-search-query", words)
        shown.press("#mkdocs-search-query", "End")
        shown.wait_for_selector(f"#mkdocs-search-results a[href*='{page}']")
        assert errors == []
