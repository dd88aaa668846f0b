"""benchmarks/stragglers.py runs and reports what it promises. Its figures are not tested."""

import json
import subprocess
import sys

import pytest

from tests.jobs import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import stragglers  # noqa: E402
from stragglers import ROWS, Found, Try  # noqa: E402

TIMEOUT_S = 400


@pytest.mark.full
def test_one_row(tmp_path):
    options = ["--repeat=1", "--rows=host-30", "--quiet-minutes=0.05", "--pairs=1", "--pair-seconds=2", f"--results={tmp_path}"]
    command = [sys.executable, str(BENCHMARKS / "stragglers.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    line = done.stdout.splitlines()[-1]
    record = json.loads(line)
    assert done.returncode == int(not record["kept"]), done.stdout + done.stderr
    assert (tmp_path / "stragglers.json").read_text() == line + "\n"
    assert (tmp_path / "stragglers.md").read_text().strip() in done.stdout
    [row] = record["rows"]
    assert (row["right"], row["tries"]) == (1, 1)
    assert row["all_s"] == [row["median_s"]]
    assert record["quiet"]["false_names"] == 0
    assert record["overhead"]["ratio"] > 0


def name(host: str, rank: int | None, second: int) -> dict:
    return {"host": host, "rank": rank, "time": f"1970-01-01T00:00:{second:02}.000000Z", "share": 0.2}


STAMPS = {"late": {"event": "late", "time": 10.0, "steps": 99, "host": "na"}}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([name("nb", 3, 40)], Try(30.0, True, 0.2)),
        ([name("na", 3, 40)], Try(30.0, False, 0.2)),
        ([name("nb", 2, 40)], Try(30.0, False, 0.2)),
        ([name("nb", 3, 40), name("na", 0, 50)], Try(30.0, False, 0.2)),
        ([name("nb", 3, 8)], Try(-2.0, False, 0.2)),
        ([], Try(None, False, None)),
    ],
)
def test_what_a_job_counts_as(names, expected):
    assert stragglers.outcome(Found(STAMPS, tuple(names)), ROWS["rank-10"]) == expected


def test_a_row_that_takes_too_long_breaks_the_promise():
    row = {"row": "rank-10", **stragglers.summary([Try(30.0, True, 0.1), Try(61.0, True, 0.1)])}
    record = {"rows": [row], "quiet": None, "overhead": None}
    assert not stragglers.kept(record)
    assert stragglers.kept({**record, "rows": [{**row, "all_s": [30.0, 60.0]}]})
    assert not stragglers.kept({**record, "rows": [], "quiet": {"false_names": 1}})
