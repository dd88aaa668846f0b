"""The campaign itself: how it judges a restart, and three kills of one job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.checkpoints.record.stored import KnownSave
from tests.chaos.kills.apart import ApartCampaign, FoundPart, files_in, gone, whole_saves
from tests.chaos.kills.campaign import Campaign
from tests.chaos.kills.judging import Ledger, Start, Verdict, judge
from tests.chaos.kills.local import LocalCampaign, different

LINES = """begin 0 4 step_4
begin 1 4 step_4
end 1 4 step_4
end 0 4 step_4
done 4 step_4
begin 0 4 last
end 0 4 last
done 4 last
begin 0 8 last
"""
FOUND = (("model", 4), ("optimizer", 4))


def ledger(lines: str = LINES) -> Ledger:
    made = Ledger()
    made.take(lines.splitlines())
    return made


def starts(resumes: str | None = "/c/step_4", found: tuple[tuple[str, int], ...] = FOUND, error: str = "") -> list[Start]:
    return [Start(rank, 10 + rank, (1, 0), resumes, found, error) for rank in (0, 1)]


def test_a_save_that_is_overwritten_is_not_expected() -> None:
    made = ledger()
    assert (made.whole, made.open) == ({"step_4": 4}, {("0", "last"): 8})
    made.take(["end 0 8 last", "done 8 last"])
    assert (made.expected, made.open) == (8, {})
    made.resumed(4)
    assert made.expected == 4


def test_what_the_script_removed_is_known() -> None:
    made = ledger(f"{LINES}remove 0 12 step_4\nremove 0 12 step_0\nbegin 0 12 step_0\n")
    assert made.removed == {"step_4"}


def found(name: str, part: int = 0, parts: int = 1, attempt: int = 1) -> FoundPart:
    return FoundPart(KnownSave(attempt, 3, name), part, parts)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([found("step_8", 0, 2), found("step_8", 1, 2)], {"step_8": 8}),
        ([found("step_8", 0, 2), found("step_8", 0, 2)], {}),
        ([found("step_8", 0, 2), found("step_8", 1, 2, attempt=2)], {}),
        ([found("step_8.pt")], {"step_8.pt": 8}),
        ([found("ckpt_8_0.pt"), found("ckpt_8_1.pt")], {"ckpt_8_0.pt": 8, "ckpt_8_1.pt": 8}),
        ([found("ckpt_8_0.pt"), found("ckpt_4_1.pt")], {}),
        ([found("ep0-ba8-rank0.pt"), found("ep0-ba8-rank1.pt")], {"ep0-ba8-rank0.pt": 8, "ep0-ba8-rank1.pt": 8}),
    ],
    ids=["both", "one twice", "of two saves", "one file", "of ranks", "one rank", "named"],
)
def test_which_saves_are_whole(parts: list[FoundPart], whole: dict[str, int]) -> None:
    assert whole_saves(parts, world=2) == whole


def test_files_that_have_gone_are_named(tmp_path: Path) -> None:
    for name in ("step_4/a", "step_8/a", "notes.txt", ".elastic_ext/own"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    before = files_in(tmp_path)
    for name in ("step_4/a", "step_8/a", ".elastic_ext/own"):
        (tmp_path / name).unlink()
    assert gone(before, files_in(tmp_path), removed=["step_4"]) == ["step_8/a"]


@pytest.mark.parametrize(
    ("found", "copies", "missing", "wanted"),
    [
        (starts(), (), (), Verdict.RIGHT),
        (starts(found=(("model", 8), ("optimizer", 8))), (), (), Verdict.RIGHT),
        (starts(found=(("model", 8), ("optimizer", 4))), (), (), Verdict.WRONG),
        ([replace(each, found=(("own", 4 + 4 * each.rank),)) for each in starts()], (), (), Verdict.WRONG),
        (starts(found=(("model", 0),)), (), (), Verdict.OLDER),
        (starts(None, ()), (), (), Verdict.WRONG),
        ([replace(each, resumes="/c/step_4" if each.rank else None) for each in starts()], (), (), Verdict.WRONG),
        (starts(error="Traceback\nEOFError"), (), (), Verdict.WRONG),
        (starts(), ["step_4"], (), Verdict.WRONG),
        (starts(), (), ["notes.txt"], Verdict.WRONG),
    ],
    ids=["same", "newer", "mixture", "ranks", "older", "nothing", "one", "torn", "copy", "gone"],
)
def test_a_restart_is_judged(found: list[Start], copies: list[str], missing: list[str], wanted: Verdict) -> None:
    assert judge(found, ledger(), copies, missing)[0] is wanted


def test_nothing_is_right_at_first() -> None:
    assert judge(starts(None, ()), Ledger(), (), ())[0] is Verdict.RIGHT


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dcp", "peft"])
def test_three_kills_of_a_job(tmp_path: Path, kind: str) -> None:
    """Not of plain files: the first save of them may be taken although it was cut, see test_recorded.py."""
    campaign = Campaign(kind, tmp_path / kind, seed=1, environ={})
    campaign.run(kills=3, limit_s=300)
    counts = campaign.counts()
    assert (counts["kills"], counts["right"]) == (3, 3), campaign.results


def test_what_checkpoint_dir_lacks_is_named(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    for folder in (local / "step_4", remote / "step_4", local / ".elastic_ext", remote):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (
        local / "step_4" / "a",
        local / "step_4" / "b",
        local / "final",
        local / ".elastic_ext" / "own",
        remote / "more",
    ):
        path.write_text("x")
    (remote / "step_4" / "a").write_text("x")
    (remote / "step_4" / "b").write_text("y")
    assert different(local, remote) == ["final", "step_4/b"]


@pytest.mark.full
def test_two_kills_of_a_job_in_local_dir(tmp_path: Path) -> None:
    campaign = LocalCampaign("own", tmp_path / "own", seed=1, local=tmp_path / "local")
    campaign.run(kills=2, limit_s=300)
    counts = campaign.counts()
    assert (counts["kills"], counts["right"], counts["of elsewhere, right"]) == (2, 2, 1), campaign.results


@pytest.mark.full
def test_two_kills_of_a_job_on_two_nodes(tmp_path: Path) -> None:
    campaign = ApartCampaign("shards", tmp_path / "shards", seed=1)
    campaign.run(kills=2, limit_s=300)
    counts = campaign.counts()
    assert (counts["kills"], counts["right"], counts["of elsewhere, right"]) == (2, 2, 1), campaign.results
