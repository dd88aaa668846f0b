"""Plain English: words that the product must not use, and what to write instead; and how tests and modules are named."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from tests.jobs import ROOT

# Whole words, in any case. A blank may be the end of a line. Behind each: what to write instead.
WORDS = {
    "whoever": "one that, anyone who",
    "anew": "again, once more",
    "lately": "recently, or since when",
    "befall|befalls|befallen": "happen to, meet",
    "nobody": "no process, no node, no user: who is missing; else no one",
    "by itself": "what ends or starts it; else on its own",
    "so many": "this many, as many",
    "tell|tells|telling": "say, report, show, find out; tell apart: distinguish",
    "told|untold": "said, reported, informed; told to: asked to, ordered to",
    r"(?<!there )(?:is|are|was|were) (?-i:none)(?! of\b)": "there is none; or a verb: does not have one, is not one",
    r"(?:(?<=^)|(?<=[.;:|] ))who (?:has|have|had|is|are|was|comes|waits|notices|replaces|scrapes)": "a noun: a node that has",
    r"(?<!-)ill(?!-)": "bad, faulty: what does not work",
    "whence|hence|thereof|wherein|lest|ere|albeit|amongst|whilst|hitherto|henceforth": "a word of today",
}
# In identifiers, whole or between underscores. They say nothing to a reader who has not written them.
NAMES = {
    "door": "what it guards",
    "bring": "what it does: copy, restore, start",
    "brings": "what it does: copy, restore, start",
    "sheet": "what is on it",
    "course": "what happens",
    "sightings": "what was seen",
    "last_words": "which output: the end of stderr, the watchdog's text",
    "last_will": "what is done at the end",
    "incidents": "failures, recoveries",
    "told": "reported, said",
    "untold": "unreported",
}
FILE_NAMES = {**NAMES, "early": "what it does before the rest"}
ALLOWED_FILE_NAMES = {"errors": "each of these subpackages has its own family of errors"}

PACKAGE = ROOT / "elastic_ext"
FOR_PEOPLE = (".py", ".md", ".sbatch", ".yaml", ".yml", ".sh", ".html")
MAX_USES = 2  # of a module's file name
MAX_WORDS = 8  # in a test's name


def product() -> list[Path]:
    folders = [path for folder in (PACKAGE, ROOT / "entrypoints") for path in folder.rglob("*") if path.suffix in FOR_PEOPLE]
    benchmarks = [path for path in (ROOT / "benchmarks").glob("*") if path.suffix in (".py", ".md")]
    return sorted([*folders, *benchmarks, *(ROOT / ".github").glob("*.md"), ROOT / "README.md", ROOT / "Makefile"])


def test_the_product_uses_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: write {instead}"
        for path in product()
        for line, text in texts(path.read_text(), path.suffix == ".py")
        if compiled("|".join(WORDS)).search(text)
        for pattern, instead in WORDS.items()
        for match in compiled(pattern).finditer(text)
    ]
    assert not found, "\n".join(found)


def test_names_in_code_are_no_riddles() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}: write {instead}"
        for path in product()
        if path.suffix == ".py" and re.search("|".join(NAMES), path.read_text())
        for token in tokens(path.read_text())
        if token.type == tokenize.NAME
        for name, instead in NAMES.items()
        if f"_{name}_" in f"_{token.string}_"
    ]
    assert not found, "\n".join(found)


def test_file_names_are_clear_and_rarely_repeated() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    assert not [path for path in paths for name in FILE_NAMES if f"_{name}_" in f"_{path.stem}_"]
    uses = Counter(path.stem for path in paths)
    assert {name for name, count in uses.items() if count > MAX_USES} == set(ALLOWED_FILE_NAMES)


def test_names_of_tests_are_short() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        if len(name.split("_")) - 1 > MAX_WORDS
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("'''A member that restarts\n    is none.'''", ["is none"]),
        ("x = 1  # there is none: nobody\n# has it", ["nobody"]),
        ("'Ends by ' 'itself'", ["by itself"]),
        ("file.tell()  # not who is late. Who is late waits", ["Who is"]),
        ("'the text is none of these; who has it'", ["who has"]),
    ],
)
def test_what_the_scan_finds(text: str, found: list[str]) -> None:
    read = [each for _, each in texts(text, python=True)]
    assert [match[0] for each in read for pattern in WORDS for match in compiled(pattern).finditer(each)] == found


def texts(source: str, python: bool) -> Iterator[tuple[int, str]]:
    """Yield what people read in a file: the number of the first line, and a paragraph as one line.

    Of Python: comments, and strings with what stands between those of one text. Of other files: all.
    """
    if not python:
        yield from paragraphs(1, source)
        return
    read = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    layout = {tokenize.NL, getattr(tokenize, "FSTRING_START", tokenize.NL), getattr(tokenize, "FSTRING_END", tokenize.NL)}
    for is_text, group in groupby(tokens(source), lambda token: token.type in read | layout):
        found = [token for token in group if token.type in read]
        if is_text and found:
            yield from paragraphs(found[0].start[0], "\n".join(strip(token) for token in found))


def strip(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.STRING:
        return re.sub(r"""^[A-Za-z]*("{3}|'{3}|"|')|["']+$""", "", token.string)
    return token.string.lstrip("# ") if token.type == tokenize.COMMENT else token.string


def paragraphs(line: int, text: str) -> Iterator[tuple[int, str]]:
    for each in re.split(r"(\n\s*\n)", text):
        yield line + len(each) - len(each.lstrip("\n")), re.sub(r"\s*\n[\s#]*|\s+", " ", each).strip()
        line += each.count("\n")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)


def tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)
