"""What ran on which torch and Python: the results of `make matrix`, and the table that docs/limits.md shows of them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import ROOT

RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "tests" / "data" / "matrix"  # a file for each series of torch and Python, and tier
TORCH = tuple(f"2.{minor}" for minor in range(8, 16))
PYTHON = tuple(f"3.{minor}" for minor in range(10, 15))
SUITE, SEAM, GPU = KINDS = ("suite", "seam", "GPU")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Ran:
    """One run that came to its end.

    Attributes:
        what: one of KINDS.
        torch: its version, as the environment that ran says.
        python: the same.
        date: of its end, in UTC.
        commit: that was checked out; "" if something was not committed.
        passed: how many tests. Those that passed when they ran once more, alone, are among them, and in `flaky`.
        parts: the folders of tests that alone ran; (): all.
        note: what ran, where that was not tests.
    """

    what: str
    torch: str
    python: str
    date: str
    commit: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    flaky: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    note: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        return series(self.torch), series(self.python)

    @property
    def path(self) -> Path:
        return FOLDER / f"{'-'.join(self.pair)}-{self.what}.json"

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        fresh.replace(self.path)

    def cell(self) -> str:
        counts = [f"{self.passed} passed"] * bool(self.passed) + [f"{self.failed} failed"] * bool(self.failed)
        if self.skipped:
            counts.append(f"{self.skipped} skipped")
        parts = f" of {', '.join(each.removeprefix('tests/') for each in self.parts)}" if self.parts else ""
        return f"{self.note or ', '.join(counts)}{parts}, {self.date}"


def series(version: str) -> str:
    """Return the first two numbers of a version; raise ValueError if it has none."""
    if (found := re.match(r"(\d+)\.(\d+)", version)) is None:
        raise ValueError(f"{version!r}: expected a version, such as 2.15.0")
    return f"{found[1]}.{found[2]}"


def read() -> list[Ran]:
    """Return all results: those of this folder, and the benchmark that ran on a GPU."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        fields = json.loads(path.read_text())
        found.append(Ran(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}))
    for path in sorted((RESULTS / "gpu").glob("*.json")):
        record = json.loads(path.read_text())
        machine, measured, note = record["machine"], record["measured"], f"benchmark `{record['benchmark']}`"
        found.append(Ran(GPU, machine["torch"], machine["python"], measured["date"], measured["commit"], note=note))
    return found


def rows(results: Iterable[Ran]) -> list[Sequence[str]]:
    """Return the rows of the table: a row for each two versions that ran, and one for the Pythons of each torch that did not."""
    by_torch: dict[str, dict[tuple[str, str], dict[str, Ran]]] = {each: {} for each in TORCH}
    for ran in results:
        versions = by_torch.setdefault(series(ran.torch), {})
        versions.setdefault((ran.torch, ran.python), {})[ran.what] = ran
    found: list[Sequence[str]] = []
    for torch, versions in by_torch.items():
        found += [(*pair, *cells(of)) for pair, of in sorted(versions.items(), key=lambda item: number(item[0][1]))]
        missing = [each for each in PYTHON if each not in {series(python) for _, python in versions}]
        if missing:
            found.append((torch, ", ".join(missing), *cells({})))
    return found


def cells(ran: Mapping[str, Ran]) -> list[str]:
    return [ran[what].cell() if what in ran else NOT_RUN for what in KINDS]


def number(version: str) -> tuple[int, ...]:
    """Return what sorts a version."""
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0]))


def newest_that_passed(results: Iterable[Ran]) -> tuple[int, ...]:
    """Return the newest series of torch whose suite ran without a failure."""
    return max(number(series(each.torch)) for each in results if each.what == SUITE and each.passed and not each.failed)
