"""benchmarks/stragglers.py runs and reports what it promises. Its figures are not tested."""

import pytest
import stragglers
from stragglers import ROWS, Found, Try

from tests.benchmarks.runs import result


@pytest.mark.full
def test_one_row(tmp_path):
    short = ("--quiet-minutes=0.05", "--pairs=1", "--pair-seconds=2")
    record = result("stragglers.py", tmp_path, "--repeat=1", "--rows=host-30", *short)
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
