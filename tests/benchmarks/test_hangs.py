"""benchmarks/hangs.py runs and reports what it promises. Its figures are not tested."""

import os
import subprocess
import sys

import hangs
import pytest
from jobs import Stamp

from tests.benchmarks.runs import BENCHMARKS, TIMEOUT_S, result


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


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, which only root may")
def test_after_a_cut_two_hosts_train_again():
    """In a process of its own, for it kills all its children. Stock would take its timeout four times."""
    code = "import hangs; found = hangs.one_try('ours', 'cut', 60.0); print(found.noticed_s, found.again_s)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr
    noticed_s, again_s = map(float, done.stdout.split())
    assert 0 < noticed_s < again_s


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
    assert lost == {"noticed_s": 2.0, "median_s": 4.0, "all_s": [3.0, 5.0], "lost": 2, "died_s": [], "named": ""}
    assert hangs.fate(lost, 150.0) == "not in 150 s"


def test_two_of_three_suffice_after_a_cut():
    faults = [Stamp(0, rank, "fault", (10 + rank) * 10**9) for rank in range(3)]
    seen = [*attempt(0, 1, 2, 3, 3), *faults, Stamp(0, 2, "begin", 20 * 10**9), Stamp(1, 0, "begin", 21 * 10**9)]
    died = hangs.recovery(seen, 3, 90 * 10**9)
    assert died == hangs.Recovery(8.0, None, 78.0)
    assert hangs.recovery(seen, 2) is None
    assert hangs.recovery([*seen, *attempt(2, 30, 31, 32)], 3, 90 * 10**9) == hangs.Recovery(8.0, 20.0)
    assert hangs.fate(hangs.summary([died]), 510.0) == "the job dies after 78 s"
