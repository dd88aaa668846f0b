"""benchmarks/hangs.py runs and reports what it promises. Its figures are not tested."""

import json
import subprocess
import sys

import pytest

from tests.jobs import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import hangs  # noqa: E402
from jobs import Stamp  # noqa: E402

TIMEOUT_S = 200


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / "hangs.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.long
def test_one_row(tmp_path):
    done = run("--repeat=1", "--rows=spin", "--timeout=40", f"--results={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    record = json.loads(line)
    assert (tmp_path / "hangs.json").read_text() == line + "\n"
    assert (tmp_path / "hangs.md").read_text().strip() in done.stdout
    [row] = record["rows"]
    for side in ("ours", "stock"):
        assert row[side]["lost"] == 0
        assert row[side]["all_s"] == [row[side]["median_s"]]
        assert 0 < row[side]["noticed_s"] <= row[side]["median_s"]


def test_an_unknown_row_is_refused():
    done = run("--rows=spi")
    assert done.returncode == 2
    assert "unknown row 'spi'; expected some of sleep, spin, stopped" in done.stderr


def test_a_recovery_is_from_the_last_fault_to_the_last_rank():
    def attempt(number: int, begin_s: int, *done_s: int) -> list[Stamp]:
        begins = [Stamp(number, rank, "begin", begin_s * 10**9) for rank, _ in enumerate(done_s)]
        return begins + [Stamp(number, rank, "all_reduce", at * 10**9) for rank, at in enumerate(done_s)]

    faults = [Stamp(0, 0, "fault", 10 * 10**9), Stamp(0, 1, "fault", 11 * 10**9)]
    first = attempt(0, 1, 2, 3)
    assert hangs.recovery([*first, *faults, *attempt(1, 20, 22, 23)]) == hangs.Recovery(9.0, 12.0)
    assert hangs.recovery([*first, *faults, *attempt(1, 20, 22), *attempt(2, 30, 31, 31)]) == hangs.Recovery(19.0, 20.0)
    assert hangs.recovery([*first, *faults, *attempt(1, 20, 22)]) is None
    assert hangs.recovery([*first, *attempt(1, 20, 22, 23)]) is None
    lost = hangs.summary([None, hangs.Recovery(1.0, 3.0), hangs.Recovery(2.0, 5.0)])
    assert lost == {"noticed_s": 1.5, "median_s": 4.0, "all_s": [3.0, 5.0], "lost": 1}
