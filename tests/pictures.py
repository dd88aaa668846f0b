"""Makes every picture of the pages again: `make pictures`. What a real run shows comes from one; it takes some minutes.

    python -m tests.pictures [--only status,timeline,demo,plots]

The plots are drawn from the results that are there, but for those that need what only a measurement has: `make bench`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.jobs import ROOT

MONITORING = "entrypoints/monitoring"
RESULTS = "benchmarks/results"
DRAWN = (
    *("busy/restart", "checkpoints", "classification", "code_bug_waste", "compressed", "embedded/node_loss", "gpu/restart"),
    *("growth", "handlers", "hangs", "integrity", "long/hangs", "memory_tier", "node_loss", "overhead", "rendezvous", "restart"),
    *(
        "restart_reliability",
        "save_record",
        "scrape_load",
        "simulate",
        "steady_state",
        "stragglers",
        "trainers",
        "warm/node_loss",
    ),
)
MEASURED = ("checkpoint_stall", "own_etcd", "verdict")
MOST_BYTES = 150_000  # of a PNG


@dataclass(frozen=True)
class Maker:
    """A command, after `python`, that makes pictures; it runs at the root of the repository."""

    name: str
    pictures: tuple[str, ...]
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)

    def run(self) -> bool:
        """Run it; return whether it could."""
        print(f"{self.name}: {' '.join(self.command)}", file=sys.stderr, flush=True)
        environ = {**os.environ, **self.environ, "REQUIRE_TEST_PROGRAMS": "1"}
        return subprocess.run([sys.executable, *self.command], cwd=ROOT, env=environ).returncode == 0


def _by_test(test: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", test)


MAKERS = (
    Maker(
        "status",
        tuple(
            f"{MONITORING}/status_{state}_{device}.png"
            for state in ("healthy", "recovery", "ended")
            for device in ("desktop", "phone")
        ),
        _by_test("tests/status/test_job_page.py::test_a_real_job_on_a_nodes_page"),
        {"RECORD_STATUS": "1"},
    ),
    Maker(
        "timeline",
        (f"{MONITORING}/timeline.svg",),
        _by_test("tests/cli/test_timeline_job.py::test_a_crash_a_lost_node_and_a_requeue"),
        {"RECORD_TIMELINE": "1"},
    ),
    Maker("demo", ("entrypoints/demo.svg",), ("entrypoints/record_demo.py", "entrypoints/demo.svg")),
    Maker("plots", tuple(f"{RESULTS}/{each}.png" for each in DRAWN), ("benchmarks/plots.py",)),
)


def made() -> set[str]:
    """Return the pictures that have a maker, by their path in the repository."""
    by_bench = {f"{RESULTS}/{each}.png" for each in MEASURED}
    return {picture for each in MAKERS for picture in each.pictures} | by_bench


def shown() -> dict[str, set[str]]:
    """Return the pictures that pages show, each with its pages."""
    found: dict[str, set[str]] = {}
    for page in _pages():
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text()):
            if "://" not in target:
                picture = os.path.relpath(page.parent / target, ROOT)
                found.setdefault(picture, set()).add(str(page.relative_to(ROOT)))
    return found


def _pages() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("elastic_ext", "entrypoints", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.md"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names of makers")
    names = set(filter(None, parser.parse_args().only.split(",")))
    if unknown := names - {each.name for each in MAKERS}:
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; there are {', '.join(each.name for each in MAKERS)}")
    failed = [each.name for each in MAKERS if (not names or each.name in names) and not each.run()]
    if failed:
        print(f"failed, so its pictures are the last ones: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
