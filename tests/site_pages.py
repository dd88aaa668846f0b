"""What mkdocs.yml has done with the pages: the site holds them under the paths that they have in the repository.

So links between them hold on both. A link to a file that is no page leads to a copy of it; one to a folder becomes plain text.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
START = "elastic_ext/docs/README.md"  # its first table has a line for each page
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    version = re.search(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    config.site_name = f"{config.site_name} {version[1]}"
    config.mdx_configs["toc"] = {"slugify": anchor}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for found in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(found)
    pages = [path for _, paths in sections(config.nav) for path in paths]
    for path in sorted({*pages, *(target for page in pages for target in targets(page) if (ROOT / target).is_file())}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    def without_folder(link: re.Match[str]) -> str:
        folder = link[2][0] != "#" and (ROOT / target(page.file.src_uri, link[2])).is_dir()
        return link[1] if folder else link[0]

    return LINK.sub(without_folder, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(llms(config.site_name, config.nav))
    for path in (path for _, paths in sections(config.nav) for path in paths):
        shutil.copy(ROOT / path, site / path)  # llms.txt names the Markdown


def anchor(heading: str, _: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def sections(nav: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for each in nav:
        ((name, pages),) = each.items()
        yield name, [pages] if isinstance(pages, str) else pages


def targets(page: str) -> Iterator[str]:
    """What a page links to in the repository."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from (target(page, link) for _, link in LINK.findall(prose) if not re.match(r"\w+:|#", link))


def target(page: str, link: str) -> str:
    return normpath(PurePosixPath(page).parent / link.partition("#")[0])


def llms(name: str, nav: list[dict[str, Any]]) -> str:
    """A list of the pages for programs, as llmstxt.org says: each with its line of the start page, else its first sentence."""
    (_, (front,)), *rest = sections(nav)
    answers = {target(START, link): plain(row[2]) for row in _rows() for _, link in LINK.findall(row[1])}
    lines = [f"# {name}", "", f"> {first_sentence(front)}"]
    for section, pages in rest:
        lines += ["", f"## {section}", ""]
        lines += [f"- [{title(page)}]({page}): {answers.get(page) or first_sentence(page)}" for page in pages]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[re.Match[str]]:
    return re.finditer(r"(?m)^\| (\[.*?) \| (.*) \|$", (ROOT / START).read_text())


def title(page: str) -> str:
    return (ROOT / page).read_text().partition("\n")[0].removeprefix("# ")


def first_sentence(page: str) -> str:
    """Of the first paragraph that is neither a heading, a picture, a table nor a row of links."""
    paragraphs = re.split(r"\n\s*\n", (ROOT / page).read_text())
    found = next(each for each in paragraphs if each[0] not in "#!|" and "·" not in each and LINK.sub("", each).strip())
    return re.split(r"(?<=\.)\s", plain(" ".join(found.split())))[0]


def plain(text: str) -> str:
    return LINK.sub(r"\1", text)
