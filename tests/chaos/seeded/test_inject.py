"""Whom a fault strikes, and what of a checkpoint is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ext.checkpoints.formats.manifest import MANIFEST
from tests.chaos.seeded.inject import NotYet, trainers, whole
from tests.chaos.seeded.schedule import RANK_0


@pytest.mark.parametrize(
    ("target", "struck"),
    [
        ("a", "a"),
        (RANK_0, "d"),
        ("b", "d"),  # it waits
        ("a-d", "a-d"),
        ("a-b", "a-d"),
        ("b-c", "a-d"),
        ("c", "c"),  # it is down: maybe it comes back
    ],
)
def test_who_trains_is_struck_in_place_of_who_waits(target: str, struck: str):
    assert trainers(target, {0: "d", 1: "a"}, {"c"} if target == "c" else set()) == struck


@pytest.mark.parametrize(("target", "by_rank"), [("a", {}), (RANK_0, {}), ("a-b", {0: "a"})])
def test_nobody_is_struck_where_too_few_train(target: str, by_rank: dict[int, str]):
    with pytest.raises(NotYet):
        trainers(target, by_rank, set())


def test_a_checkpoint_without_a_manifest_is_not_whole(tmp_path: Path):
    for name in ("step_00000005.g0001", "step_00000010.g0001", "other"):
        (tmp_path / name).mkdir()
        if name != "step_00000010.g0001":
            (tmp_path / name / MANIFEST).touch()
    assert whole(tmp_path) == {"step_00000005.g0001"}
