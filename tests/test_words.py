"""How tests, modules and what is in them are named. How pages are written: test_prose.py."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.jobs import ROOT

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
ALLOWED_FILE_NAMES = {
    "errors": "each of these subpackages has its own family of errors",
    **dict.fromkeys(("rows", "watch"), "each feature's folder has the same parts"),
}

PACKAGE = ROOT / "elastic_ext"
FOR_PEOPLE = (".py", ".md", ".sbatch", ".yaml", ".yml", ".sh", ".html")
MAX_USES = 2  # of a module's file name
MAX_WORDS = 8  # in a test's name


def product() -> list[Path]:
    folders = [path for folder in (PACKAGE, ROOT / "entrypoints") for path in folder.rglob("*") if path.suffix in FOR_PEOPLE]
    benchmarks = [path for path in (ROOT / "benchmarks").glob("*") if path.suffix in (".py", ".md")]
    return sorted([*folders, *benchmarks, *(ROOT / ".github").glob("*.md"), ROOT / "README.md", ROOT / "Makefile"])


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


def tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)
