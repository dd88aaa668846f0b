"""The short form of the seeded suite; `make chaos` has hundreds of runs."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from tests import lossy_network
from tests.chaos.seeded.__main__ import mode, reported, started
from tests.chaos.seeded.schedule import SETUPS, kinds_of, plan
from tests.jobs import Finished, ended

TIMEOUT_S = 1200


@pytest.mark.seam
def test_a_run_that_never_began_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "problems.json").write_text("[]")
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # no Python starts with it
    (problem,) = started(7, tmp_path)
    assert "the suite itself left with 1" in problem


@pytest.mark.parametrize(
    ("problems", "code", "shown"),
    [
        ("[]", 0, []),
        ('["ends: stuck"]', 1, ["ends: stuck"]),
        ("[]", 1, ["the suite itself left with 1: said"]),
        ("[]", -9, ["the suite itself left with -9: said"]),
        ('["ends: stuck"]', 0, ["ends: stuck", "the suite itself left with 0: said"]),
        (None, 0, ["the suite itself left with 0: said"]),
    ],
)
def test_a_run_passes_only_if_it_wrote_so(problems: str | None, code: int, shown: list[str]):
    assert reported(problems, Finished(code, "", "said")) == shown


@pytest.mark.full
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("kind", ["kill worker", "kill host", "cut", "kill etcd leader", "kill store"])
def test_the_first_seed_with_this_fault_alone(kind: str, tmp_path: Path) -> None:
    lossy_network.required()
    embedded = kind not in kinds_of(SETUPS)
    plans = (plan(seed, embedded) for seed in itertools.count())
    alone = (each for each in plans if [fault.kind for fault in each.faults] == [kind])
    seed = next(each.seed for each in alone if each.trainers == 2 and each.store == "folder")
    command = [sys.executable, "-m", "tests.chaos.seeded", f"--seed={seed}", *mode(embedded), f"--folder={tmp_path}"]
    run = ended(command, TIMEOUT_S)
    assert run.returncode == 0, f"{run.err}\nagain: {' '.join(command[1:-1])}"
