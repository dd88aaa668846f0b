"""benchmarks/stragglers.py runs and reports what it promises. Its figures are not tested."""

import json
import subprocess
import sys

import pytest
import stragglers
from stragglers import ROWS, Found, Try

from tests.benchmarks.runs import BENCHMARKS, TIMEOUT_S, result


@pytest.mark.full
def test_one_row(tmp_path):
    record = result("stragglers.py", tmp_path, "--repeat=1", "--rows=host-30", "--quiet-minutes=0.05", "--samples=0")
    [row] = record["rows"]
    assert (row["right"], row["tries"]) == (1, 1)
    assert row["all_s"] == [row["median_s"]]
    assert record["quiet"]["false_names"] == 0


@pytest.mark.full
def test_overhead():
    """In a process of its own: a benchmark ends all children of its process, here pytest's server of launchers, too."""
    runs = "print(json.dumps(stragglers.overhead(2, first=0)))"
    command = [sys.executable, "-c", f"import json, sys; sys.path.insert(0, sys.argv[1]); import stragglers; {runs}"]
    done = subprocess.run([*command, str(BENCHMARKS)], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    cost = json.loads(done.stdout.splitlines()[-1])
    assert cost["samples"] >= 2
    assert cost["apart_s"] > 0


def test_what_a_sample_costs():
    steps, sampled = [0.04] * 3000, [500, 1200, 1700, 2200, 2999]  # too early, three that count, and one at the end
    for at in sampled[1:-1]:
        steps[at + 1] += 0.03
        steps[at + 2] += 0.01
    cost = stragglers.held_up(steps, sampled)
    assert (cost["samples"], cost["extra_s"], cost["step_s"]) == (3, 0.04, 0.04)
    assert cost["share"] == pytest.approx(0.04 / 20.04, rel=0.02)
    assert cost["error"] == 0
    with pytest.raises(RuntimeError, match="say nothing"):
        stragglers.held_up(steps, sampled[:2])


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


def test_a_row_that_takes_long_breaks_the_promise():
    row = {"row": "rank-10", **stragglers.summary([Try(30.0, True, 0.1), Try(61.0, True, 0.1)])}
    record = {"rows": [row], "quiet": None, "overhead": None}
    assert not stragglers.kept(record)
    assert stragglers.kept({**record, "rows": [{**row, "all_s": [30.0, 60.0]}]})
    assert not stragglers.kept({**record, "rows": [], "quiet": {"false_names": 1}})
