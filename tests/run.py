"""Run tiers of the tests: `python -m tests.run check seam`, or `full`, with --quarter of it only.

What fails is run once more, alone. What passes then is flaky: it is named at the end with the log of its failure, and does not
fail the run, unless three are. Which quarter follows from the number of commits: the continuous integration runs another one
after each commit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import FULL, QUARTERS, TIERS
from tests.jobs import ROOT

PROCESSES = 3  # on two cores: most tests of real parts wait
MAX_FLAKY = 2
PYTEST = [sys.executable, "-m", "pytest", "-q"]
TESTS_FAILED = 1  # pytest's exit code; any other but 0 is an error of the run itself


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="+", choices=TIERS)
    parser.add_argument("--quarter", action="store_true", help="of `full`, only one quarter")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--paths", nargs="+", default=["tests"], help="only the tests in these files and folders")
    parser.add_argument("--counts", type=Path, help="file for how many passed, failed and were skipped, as JSON")
    args = parser.parse_args(argv)
    runs = [[tier for tier in args.tiers if tier != FULL], [FULL] if FULL in args.tiers else []]
    flaky: dict[str, str] = {}
    counts = Counter(passed=0, failed=0, skipped=0)
    code = 0
    for tiers in filter(None, runs):
        if not code:
            quarter = [f"--quarter={commits() % QUARTERS}"] if args.quarter and tiers == [FULL] else []
            code = run([f"--tiers={','.join(tiers)}", *quarter], args.processes, flaky, counts, args.paths)
    for test, log in flaky.items():
        print(f"\nflaky: {test} failed, and passed when it ran once more, alone. Its log:\n{log}")
    if args.counts is not None and code in (0, TESTS_FAILED):
        args.counts.write_text(json.dumps({**counts, "flaky": sorted(flaky)}))
    return code


def run(options: Sequence[str], processes: int, flaky: dict[str, str], counts: Counter[str], paths: Sequence[str]) -> int:
    """Run these tests, and once more those that fail.

    Adds to `flaky`, by test the log of its failure, and to `counts`. Returns the exit code.
    """
    began, cpu_s = time.monotonic(), cpu()
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "failures", Path(folder) / "report.xml"
        ways = ["-n", str(processes), "--dist", "loadgroup", "--durations=20", f"--failures={path}", f"--junitxml={report}"]
        code = subprocess.run([*PYTEST, *ways, *options, *paths], cwd=ROOT, check=False).returncode
        print(f"{' '.join(options)}: {(time.monotonic() - began) / 60:.1f} min, {(cpu() - cpu_s) / 60:.1f} CPU-min", flush=True)
        if code in (0, TESTS_FAILED):
            counts.update(counted(report))
        if code != TESTS_FAILED or not path.exists():  # none failed: a module could not be imported
            return code
        failures = {each["test"]: each["log"] for each in map(json.loads, path.read_text().splitlines())}
    if len(flaky) + len(failures) > MAX_FLAKY:
        print(f"{len(failures)} tests failed: no more than {MAX_FLAKY} may be flaky, so none is run once more")
        return code
    for test, log in failures.items():
        print(f"\nonce more, alone: {test}", flush=True)
        code = subprocess.run([*PYTEST, test.partition("@")[0]], cwd=ROOT, check=False).returncode
        if code:
            return code
        flaky[test] = log
        counts.update(passed=1, failed=-1)
    return 0


def counted(report: Path) -> Counter[str]:
    """Of pytest's report: a test fails once, however many of its parts do."""
    found = {}
    for case in xml.parse(report).iter("testcase"):
        parts = {part.tag for part in case}
        how = "failed" if parts & {"failure", "error"} else "skipped" if "skipped" in parts else "passed"
        name = case.get("classname"), case.get("name")
        found[name] = "failed" if found.get(name) == "failed" else how
    return Counter(found.values())


def commits() -> int:
    return int(subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout)


def cpu() -> float:
    """Seconds of the processes that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
