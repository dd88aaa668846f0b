"""benchmarks/integrity.py runs and reports what it promises. Its figures are not tested."""

import integrity
import pytest
from integrity import ROWS, Try

from tests.benchmarks.runs import result


@pytest.mark.full
def test_one_row(tmp_path):
    record = result("integrity.py", tmp_path, "--repeat=1", "--rows=parameter-2", "--mb=1")
    [row] = record["rows"]
    [found] = row["tries"]
    assert row["kept"], record
    assert (row["flip_at"], found["found_at"], found["resumed_at"], found["right"]) == (150, 200, 100, True)
    [cost] = record["cost"]
    assert cost["tensors"] == 2 * 4  # a parameter, Adam's two averages and its step
    assert all(cost[key] > 0 for key in ("mb", "step_ms", "hash_ms", "sum_ms"))


OUTPUT = """rank 0 on n0 attempt 0 from step 0
rank 1 on n2 attempt 0 from step 0
rank 1: a bit flips at 10.5
rank 0 on n0 attempt 1 from step 100
rank 1 on n1 attempt 1 from step 100
rank 0 attempt 1 loss 0x1p+0
"""
OVER = {"event": "round_over", "cause": "differs", "monotonic": 12.0, "reason": "all differ after step 200 of this round; all"}
VERDICT = {
    "event": "decision",
    "rule": "replicas-differ",
    "decision": "replace_node",
    "culprit_host": "n2",
    "reason": "n0 and n2",
}


@pytest.mark.parametrize(
    ("row", "verdict", "right"),
    [
        ("state-3", {}, True),
        ("state-3", {"culprit_host": "n0"}, False),
        ("state-3", {"decision": "restart"}, False),
        ("parameter-2", {"decision": "restart"}, True),
        ("parameter-2", {"decision": "restart", "reason": "n0"}, False),
        ("parameter-2", {}, False),
    ],
)
def test_what_a_job_counts_as(row, verdict, right):
    found = integrity.outcome(OUTPUT, [OVER, VERDICT | verdict], ROWS[row])
    assert found == Try(200, 1.5, right, 100, "0x1p+0")
    assert integrity.outcome(OUTPUT, [], ROWS[row]) == Try(None, None, False, None, "0x1p+0")


@pytest.mark.parametrize(
    ("found_at", "resumed_at", "in_time"),
    [(200, 100, True), (200, 0, True), (300, 100, False), (200, 120, False), (None, None, False)],
)
def test_a_flip_is_found_and_the_job_recovers(found_at, resumed_at, in_time):
    assert integrity.is_in_time(Try(found_at, 1.0, True, resumed_at, ""), 150, 100) == in_time
