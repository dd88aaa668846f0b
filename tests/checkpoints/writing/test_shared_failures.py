"""What one rank could not do is told to all, in one line, and the next save goes well."""

from __future__ import annotations

from pathlib import Path
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from elastic_ext.checkpoints.ranks import CheckpointError, causes, summary
from tests.checkpoints.rank_groups import RankGroups, complete

# Saves.


@pytest.mark.seam
@pytest.mark.parametrize("where", ["decision of rank 0", "state of rank 1"])
@pytest.mark.parametrize("tier", ["one tier", "two tiers"])
def test_an_unforeseen_failure_costs_one_save(tmp_path: Path, groups: RankGroups, where: str, tier: str) -> None:
    """The ranks stay in step: the second save is written by all."""
    options = {"local_dir": str(tmp_path / "local")} if tier == "two tiers" else {}
    args = {"directory": str(tmp_path / "checkpoints"), "where": where, "options": options}
    for result in groups.run("unforeseen", 2, args, nodes=[2], memory=str(tmp_path / "memory")):
        [first, second] = result
        assert first.startswith("step 1 was not saved: rank ")
        assert first.endswith(": other: LookupError: not now")
        assert second is None
    assert complete(options.get("local_dir", args["directory"])) == ["step_00000002.g0001"]


@pytest.mark.seam
def test_a_failure_unknown_to_others_names_its_cause(directory: str, groups: RankGroups) -> None:
    """Nobody knows whether the others have gone on, so nothing more is saved; but they have not lost each other."""
    for result in groups.run("unforeseen", 2, {"directory": directory, "where": "between collectives"}):
        for told in result:
            assert "LookupError: not now (unforeseen" in told
            assert "communicate" not in told


@pytest.mark.seam
def test_a_rank_that_is_gone_is_reported_so(directory: str, groups: RankGroups) -> None:
    results = groups.run("unforeseen", 2, {"directory": directory, "where": "death of rank 1"})
    assert results[1] == []
    for told in results[0]:
        assert "the ranks can no longer communicate" in told


@pytest.mark.seam
@pytest.mark.parametrize("others", ["no such object", "an empty one"])
def test_what_only_rank_0_has_is_saved(tmp_path: Path, groups: RankGroups, others: str) -> None:
    for rank, result in enumerate(groups.run("extra_of_rank_0", 2, {"directory": str(tmp_path), "others": others})):
        there = rank == 0 or others == "an empty one"
        assert result == {"error": None, "step": 1, "held": [7.0] * 3 if there else []}


# Loads.


@pytest.mark.seam
def test_what_does_not_fit_is_told_once(directory: str, groups: RankGroups) -> None:
    groups.run("train", 2, {"directory": directory, "steps": 1})
    env = {"ELASTIC_EXT_RESUME_FROM": f"{directory}/{complete(directory)[0]}"}
    for result in groups.run("refused_load", 2, {"directory": directory, "elements": 400}, env=env):
        told = result["raised"]
        assert told.startswith("CheckpointError: ValueError: ")
        assert told.endswith(" (ranks 0, 1)")
        assert "Traceback" not in told
        assert "\\n" not in told
        assert told.count("ize mismatch") == 1
        assert len(told) < 300


@pytest.mark.seam
def test_damage_found_by_one_rank_names_it(directory: str, groups: RankGroups) -> None:
    groups.run("train", 2, {"directory": directory, "steps": 1})
    name = complete(directory)[0]
    Path(directory, name, "rank_00001.pt").write_bytes(b"")
    env = {"ELASTIC_EXT_RESUME_FROM": f"{directory}/{name}"}
    for result in groups.run("refused_load", 2, {"directory": directory, "elements": 600}, env=env):
        assert result["raised"].startswith(f"CheckpointError: {directory}/{name}: rank_00001.pt has 0 bytes, expected ")
        assert result["raised"].count("rank_00001.pt") == 1
        assert result["raised"][-9:] in (" (rank 0)", " (rank 1)")


def test_causes_come_first_and_once() -> None:
    of_torch: dict[int, tuple[BaseException, StackSummary]] = {
        rank: (ValueError("no\n  place"), StackSummary()) for rank in (0, 1, 2, 5)
    }
    of_torch[4] = CheckpointError.of_ranks([(4, "it is gone")]), StackSummary()
    told = [each for rank in range(6) for each in causes(CheckpointException("read", of_torch), rank)]
    assert summary(told) == "ValueError: no place (ranks 0 to 2, 5); it is gone (rank 4)"
    assert causes(CheckpointError(""), 3) == [(3, "CheckpointError: ")]


def test_a_message_stays_short_for_many_ranks() -> None:
    told = summary((rank, causes(KeyError(f"{rank}" * 5000), rank)[0][1]) for rank in range(1000, 2000))
    assert told.endswith("; 996 more causes on other ranks")
    assert len(told) < 2500
