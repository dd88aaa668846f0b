"""The short form of the seeded suite; `make chaos` has hundreds of runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import lossy_network
from tests.chaos.seeded.schedule import KINDS, plan
from tests.jobs import ended

TIMEOUT_S = 200


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("kind", ["kill host", "cut", "kill etcd leader"])
def test_a_seed_whose_plan_has_this_kind_of_fault(kind: str, tmp_path: Path) -> None:
    lossy_network.required()
    seed = sorted(KINDS).index(kind)
    assert kind in {fault.kind for fault in plan(seed).faults}
    command = [sys.executable, "-m", "tests.chaos.seeded", f"--seed={seed}", f"--folder={tmp_path}"]
    run = ended(command, TIMEOUT_S)
    assert run.returncode == 0, f"{run.err}\nagain: {' '.join(command[1:-1])}"
