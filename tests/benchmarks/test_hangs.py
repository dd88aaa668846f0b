"""benchmarks/hangs.py runs and reports what it promises. Its figures are not tested."""

import hangs
import pytest
from jobs import Stamp

from tests.benchmarks.runs import result


@pytest.mark.full
def test_one_row(tmp_path):
    record = result("hangs.py", tmp_path, "--repeat=1", "--rows=spin,evaluates", "--timeout=40", "--alone=25")
    [row] = record["rows"]
    for side in ("ours", "stock"):
        assert row[side]["lost"] == 0
        assert row[side]["all_s"] == [row[side]["median_s"]]
        assert 0 < row[side]["noticed_s"] <= row[side]["median_s"]
    assert "waits for other ranks" in row["ours"]["named"]  # in which collective only a recorder knows; this group has none
    assert record["quiet"] == [{"row": "evaluates", "alone_s": 25.0, "code": 0, "restarts": 0}]


def attempt(number: int, begin_s: int, *done_s: int) -> list[Stamp]:
    begins = [Stamp(number, rank, "begin", begin_s * 10**9) for rank, _ in enumerate(done_s)]
    return begins + [Stamp(number, rank, "all_reduce", at * 10**9) for rank, at in enumerate(done_s)]


def test_recovery_is_from_last_fault_to_last_rank():
    faults = [Stamp(0, 0, "fault", 10 * 10**9), Stamp(0, 1, "fault", 11 * 10**9)]
    first = attempt(0, 1, 2, 3)
    assert hangs.recovery([*first, *faults, *attempt(1, 20, 22, 23)]) == hangs.Recovery(9.0, 12.0)
    assert hangs.recovery([*first, *faults, *attempt(1, 20, 22), *attempt(2, 30, 31, 31)]) == hangs.Recovery(9.0, 20.0)
    assert hangs.recovery([*first, *faults, *attempt(1, 20, 22)]) == hangs.Recovery(9.0, None)
    assert hangs.recovery([*first, *faults]) is None
    assert hangs.recovery([*first, *attempt(1, 20, 22, 23)]) is None
    lost = hangs.summary([None, hangs.Recovery(1.0, 3.0), hangs.Recovery(2.0, 5.0), hangs.Recovery(9.0, None)])
    assert lost == {"noticed_s": 2.0, "median_s": 4.0, "all_s": [3.0, 5.0], "lost": 2, "named": ""}
