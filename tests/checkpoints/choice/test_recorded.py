"""What is chosen where the saves of the job are recorded."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_ext.base import records
from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.choice.decisions import Choice
from elastic_ext.checkpoints.choice.listing import Wanted, newest_complete
from elastic_ext.checkpoints.choice.rank_files import files_by_rank
from elastic_ext.checkpoints.directory.catalogue import Known, list_checkpoints
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import known_saves, read_save
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import main
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, WEIGHTS, saved, text
from tests.checkpoints.record.recording import Script


def choice(directory: Path, **wanted: str) -> Choice:
    return newest_complete(str(directory), Wanted(**wanted))  # type: ignore[arg-type]


def chosen(directory: Path) -> str:
    found = choice(directory)
    assert not found.question, found.question
    return os.path.basename(found.resume.path) if found.resume is not None else ""


def folder(path: Path, *files: str, at: int = 0) -> str:
    """A directory of a script's own: model, optimizer and the rest of these."""
    for name in files or ("model.pt", "optimizer.pt"):
        if name.endswith(".pt"):
            saved(path / name, OPTIMIZER if name.startswith("optim") else WEIGHTS, at)
        else:
            text(path / name, "{}", at)
    return path.name


def trained(directory: Path, *steps: int, files: tuple[str, ...] = ()) -> Script:
    """One rank has saved these steps to directories, each proved by a step."""
    script = Script(directory)
    for step in steps:
        script.saves(step, folder(directory / f"step_{step}", *files, at=step)).steps(step + 1)
    return script


def test_the_last_proved_save_is_chosen(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    assert chosen(tmp_path) == "step_200"
    assert choice(tmp_path).resume.reason.startswith("last proved save: rank 0 has made a step since")  # type: ignore[union-attr]


def test_the_nodes_know_which_save_is_later(tmp_path: Path) -> None:
    """By its number, where one name is written over and over and holds no step."""
    numbers = []
    for at, steps in enumerate((8, 0, 8)):
        Script(tmp_path).saves(steps, saved(tmp_path / "last.pt", TRAINING, at).name).steps(steps + 1).record()
        found = scenes.resumed(tmp_path)
        assert (os.path.basename(found.path), found.step) == ("last.pt", None)
        numbers.append(found.save_number)
    first, at_start, last = numbers
    assert at_start is None
    assert first is not None
    assert last is not None
    assert last > first


def test_copies_of_people_are_never_chosen(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    for name in ("good", "step_100_good", "keep_900"):
        shutil.copytree(tmp_path / "step_100", tmp_path / name, copy_function=shutil.copyfile)
    assert chosen(tmp_path) == "step_200"


def test_a_later_checkpoint_of_others_is_named(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    saved(tmp_path / "other_run.pt", TRAINING, 10**6)
    found = choice(tmp_path)
    assert found.resume is not None
    assert [os.path.basename(each.path) for each in found.passed_over] == ["other_run.pt"]
    assert "set resume_from to its name" in found.passed_over[0].reason


FILES = ("model.pt", "optimizer.pt", "state.json")


@pytest.mark.parametrize("missing", FILES)
def test_a_save_cut_short_is_passed_over(tmp_path: Path, missing: str) -> None:
    """Whether the agent saw its end (it is recorded, not proved), or was killed before (it is not recorded)."""
    for seen in (True, False):
        directory = tmp_path / str(seen)
        script = trained(directory, 100, 200, files=FILES)
        name = folder(directory / "step_300", *(each for each in FILES if each != missing), at=300)
        (script.saves(300, name) if seen else script).record()
        assert chosen(directory) == "step_200"


def test_a_whole_save_without_a_step_since(tmp_path: Path) -> None:
    """Its files are those of the one before it, and each is whole."""
    for seen in (True, False):
        directory = tmp_path / str(seen)
        script = trained(directory, 100, 200, files=FILES)
        name = folder(directory / "step_300", *FILES, at=300)
        (script.saves(300, name) if seen else script).record()
        assert chosen(directory) == "step_300"


@pytest.mark.parametrize("seen", [True, False])
def test_a_mixture_in_place_is_never_chosen(tmp_path: Path, seen: bool) -> None:
    """The agent saw it, or was killed, too, so the record is of the save before."""
    script = Script(tmp_path).saves(100, folder(tmp_path / "step_100", at=100)).steps(101)
    script.saves(200, folder(tmp_path / "last", *FILES, at=200)).steps(201)
    if not seen:
        script.record()
    saved(tmp_path / "last" / "model.pt", WEIGHTS, 300)
    if seen:
        script.saves(300, "last/model.pt").record()
    assert chosen(tmp_path) == "step_100"
    assert any("last" in each.path for each in choice(tmp_path).passed_over)


def test_nothing_but_a_mixture(tmp_path: Path) -> None:
    """A job would stop: to begin from nothing would lose the user's work, too."""
    script = Script(tmp_path).saves(200, folder(tmp_path / "last", *FILES, at=200)).steps(201)
    saved(tmp_path / "last" / "model.pt", WEIGHTS, 300)
    script.saves(300, "last/model.pt").record()
    assert chosen(tmp_path) == ""
    assert choice(tmp_path).all_bad


def test_all_written_anew_counts_by_its_format(tmp_path: Path) -> None:
    script = Script(tmp_path).saves(200, folder(tmp_path / "last", *FILES, at=200)).steps(201)
    script.saves(300, folder(tmp_path / "last", *FILES, at=300)).record()
    assert chosen(tmp_path) == "last"


def test_no_older_round_and_no_number_decides(tmp_path: Path) -> None:
    """A script that begins again overtakes itself: the record's order counts."""
    trained(tmp_path, 900).record()
    trained(tmp_path, 100).record()
    assert chosen(tmp_path) == "step_100"


def test_trained_on_without_the_record(tmp_path: Path) -> None:
    """With torchrun alone, or with --no-python: a greater number of a recorded kind counts by its format."""
    trained(tmp_path, 100, 200).record()
    folder(tmp_path / "step_900", at=900)
    assert chosen(tmp_path) == "step_900"


def test_weights_alone_give_way(tmp_path: Path) -> None:
    script = Script(tmp_path)
    saved(tmp_path / "step_8.pt", TRAINING, 8)
    saved(tmp_path / "best.pt", WEIGHTS, 9)
    text(tmp_path / "metrics.csv", "loss")
    script.saves(8, "step_8.pt").saves(8, "best.pt").steps(9).saves(9, "metrics.csv").steps(10).record()
    assert chosen(tmp_path) == "step_8.pt"


def test_what_the_script_loads_counts(tmp_path: Path) -> None:
    """In any format, but no log."""
    for name in ("state_5.npz", "metrics.csv"):
        text(tmp_path / name, "data")
    Script(tmp_path).saves(5, "state_5.npz").steps(6).saves(6, "metrics.csv").steps(7).record()
    assert chosen(tmp_path) == ""
    text(tmp_path / "state_9.npz", "data")
    Script(tmp_path).loads("state_5.npz").loads("metrics.csv").saves(9, "state_9.npz").steps(10).record()
    assert chosen(tmp_path) == "state_9.npz"


def of_ranks(directory: Path, *steps: int, script: Script | None = None) -> Script:
    """Each of two ranks has saved a file of its own; the names do not say that the last number is a rank."""
    script = script or Script(directory, world=2)
    for step in steps:
        for rank in (0, 1):
            saved(directory / f"ckpt_{step}_{rank}.pt", TRAINING, step)
            script.saves(step, f"ckpt_{step}_{rank}.pt", rank=rank)
        script.steps(step + 1)
    return script


def test_each_rank_gets_the_file_that_it_wrote(tmp_path: Path) -> None:
    of_ranks(tmp_path, 100, 200).record()
    found = scenes.resumed(tmp_path)
    assert (found.path, found.step) == (str(tmp_path / "ckpt_200_*.pt"), 200)
    assert found.files == {rank: str(tmp_path / f"ckpt_200_{rank}.pt") for rank in (0, 1)}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seen", [True, False])
def test_one_ranks_file_is_no_checkpoint(tmp_path: Path, rank: int, seen: bool) -> None:
    """The other rank was killed before it wrote its own; and maybe the agent, too."""
    script = of_ranks(tmp_path, 100, 200)
    name = f"ckpt_300_{rank}.pt"
    saved(tmp_path / name, TRAINING, 300)
    (script.saves(300, name, rank=rank) if seen else script).record()
    assert chosen(tmp_path) == "ckpt_200_*.pt"
    assert "fewer files" in choice(tmp_path).passed_over[0].reason


def test_all_files_of_ranks_without_a_step_since(tmp_path: Path) -> None:
    script = of_ranks(tmp_path, 100, 200)
    for rank in (0, 1):
        saved(tmp_path / f"ckpt_300_{rank}.pt", TRAINING, 300)
        script.saves(300, f"ckpt_300_{rank}.pt", rank=rank)
    script.record()
    assert chosen(tmp_path) == "ckpt_300_*.pt"


def test_a_first_save_that_was_cut(tmp_path: Path) -> None:
    """model.pt was written, and optimizer.pt was not."""
    saved(tmp_path / "step_4" / "model.pt", WEIGHTS)
    Script(tmp_path).saves(4, "step_4/model.pt").record()
    assert chosen(tmp_path) == ""


@pytest.mark.xfail(reason="a copy is compared with the last 32 recorded saves only (MOST_COMPARED)", strict=True)
def test_a_copy_of_a_long_past_save(tmp_path: Path) -> None:
    """`cp step_1.pt step_900.pt` is no newer save, however many there were since."""
    script = Script(tmp_path)
    for step in range(1, 41):
        saved(tmp_path / f"step_{step}.pt", TRAINING, step)
        script.saves(step, f"step_{step}.pt").steps(step + 1)
    script.record()
    shutil.copyfile(tmp_path / "step_1.pt", tmp_path / "step_900.pt")
    assert chosen(tmp_path) == "step_40.pt"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("again", [True, False], ids=["both", "the other"])
def test_a_save_that_failed_is_made_again(tmp_path: Path, rank: int, again: bool) -> None:
    """One rank was killed before it wrote its file; in the next round both did, or only it; then the agent was killed, too."""
    script = of_ranks(tmp_path, 100, 200)
    saved(tmp_path / f"ckpt_300_{rank}.pt", TRAINING, 300)
    script.saves(300, f"ckpt_300_{rank}.pt", rank=rank).record()
    saved(tmp_path / f"ckpt_300_{1 - rank}.pt", TRAINING, 300)
    if again:
        saved(tmp_path / f"ckpt_300_{rank}.pt", TRAINING, 301)
    assert chosen(tmp_path) == "ckpt_200_*.pt"


def test_files_of_ranks_without_record(tmp_path: Path) -> None:
    """The agent was killed, too, before it could record the last save: whose file is which is not known."""
    of_ranks(tmp_path, 100, 200).record()
    for rank in (0, 1):
        saved(tmp_path / f"ckpt_300_{rank}.pt", TRAINING, 300)
    found = scenes.resumed(tmp_path)
    assert found.files == {rank: str(tmp_path / f"ckpt_200_{rank}.pt") for rank in (0, 1)}


def test_files_of_ranks_with_the_word(tmp_path: Path) -> None:
    """Also where one rank has gone on to a save that the other never began."""
    script = Script(tmp_path, world=2)
    for step in (100, 200, 300):
        for rank in (0, 1) if step < 300 else (0,):
            saved(tmp_path / f"ckpt_{step}_rank{rank}.pt", TRAINING, step)
            script.saves(step, f"ckpt_{step}_rank{rank}.pt", rank=rank)
        script.steps(step + 1, (0, 1) if step < 300 else (0,))
    script.record()
    assert chosen(tmp_path) == "ckpt_200_rank*.pt"


BARE, WORD = "ckpt_{}_{}.pt", "ckpt_{}_rank{}.pt"  # whether the names say that the last number is the rank
_TIMES = itertools.count()
BOTH = pytest.mark.parametrize("name", [BARE, WORD])


def round_of(directory: Path, world: int, *saves: tuple[int, Sequence[int]], name: str = BARE, killed: bool = False) -> None:
    """These ranks save a file each at these steps. killed: with no step since the last of them."""
    script = Script(directory, world)
    for step, ranks in saves:
        for rank in ranks:
            saved(directory / name.format(step, rank), TRAINING, next(_TIMES))
            script.saves(step, name.format(step, rank), rank=rank)
        if not (killed and (step, ranks) == saves[-1]):
            script.steps(step + 1)
    script.record()


@BOTH
@pytest.mark.parametrize("step", [300, 250])
def test_two_killed_rounds_make_no_save(tmp_path: Path, name: str, step: int) -> None:
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), name=name)
    round_of(tmp_path, 2, (300, (0,)), name=name, killed=True)
    round_of(tmp_path, 2, (step, (1,)), name=name, killed=True)
    assert chosen(tmp_path) == name.format(200, "*")


@BOTH
def test_a_killed_round_rewrites_one_ranks_file(tmp_path: Path, name: str) -> None:
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), (300, (0, 1)), name=name)
    round_of(tmp_path, 2, (300, (0,)), name=name, killed=True)
    assert chosen(tmp_path) == name.format(200, "*")


@BOTH
def test_files_of_ranks_without_one_moment_are_questions(tmp_path: Path, name: str) -> None:
    """Each rank removes its older file at once, and one was killed before its own new one."""
    round_of(tmp_path, 2, (200, (0, 1)), (300, (0,)), name=name, killed=True)
    (tmp_path / name.format(200, 0)).unlink()
    stored.AttemptRecord(open_storage(str(tmp_path)), 2).forget(name.format(200, 0))
    assert "each rank has saved a file of its own" in choice(tmp_path).question


def test_ranks_that_step_on_their_own_are_questions(tmp_path: Path) -> None:
    script = Script(tmp_path, world=2)
    for step in (100, 200):
        for rank in (0, 1):
            saved(tmp_path / f"ckpt_{step}_{rank}.pt", TRAINING, step)
            script.steps(step + 5 * rank, [rank]).saves(step + 5 * rank, f"ckpt_{step}_{rank}.pt", rank=rank)
        script.steps(step + 20)
    script.record()
    assert "each rank has saved a file of its own" in choice(tmp_path).question


def test_another_rank_saves_for_all_in_each_round(tmp_path: Path) -> None:
    """The last one of a pipeline."""
    round_of(tmp_path, 2, (100, (1,)), (200, (1,)), name="ckpt_{}.pt")
    round_of(tmp_path, 4, (300, (3,)), (400, (3,)), name="ckpt_{}.pt")
    assert chosen(tmp_path) == "ckpt_400.pt"


def test_scripts_without_seen_steps_save_per_rank(tmp_path: Path) -> None:
    """All saves are at count 0, so none is proved. Rank 0 was killed before its last one."""
    script = Script(tmp_path, world=2)
    for step in (100, 200, 300):
        for rank in (0, 1) if step < 300 else (1,):
            saved(tmp_path / f"ckpt_{step}_{rank}.pt", TRAINING, step)
            script.saves(0, f"ckpt_{step}_{rank}.pt", rank=rank)
    script.record()
    assert chosen(tmp_path) == "ckpt_200_*.pt"


def test_the_only_number_may_be_the_rank(tmp_path: Path) -> None:
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), name="state_{1}.pt")
    found = scenes.resumed(tmp_path)
    assert found.files == {rank: str(tmp_path / f"state_{rank}.pt") for rank in (0, 1)}


@pytest.mark.parametrize("name", ["ckpt_{}_{}", "step{}_rank{}"])
def test_a_directory_of_each_rank_is_a_question(tmp_path: Path, name: str) -> None:
    script = Script(tmp_path, world=2)
    for step in (100, 200):
        for rank in (0, 1):
            script.saves(step, folder(tmp_path / name.format(step, rank), at=step), rank=rank)
        script.steps(step + 1)
    script.record()
    assert "each rank has saved a file of its own" in choice(tmp_path).question


def test_directories_of_all_ranks_are_no_question(tmp_path: Path) -> None:
    """Two rounds were killed when one rank had begun to write, each another one."""
    script = Script(tmp_path, world=2)
    for step in (100, 200):
        name = folder(tmp_path / f"step_{step}", at=step)
        script.saves(step, f"{name}/model.pt").saves(step, f"{name}/optimizer.pt", rank=1).steps(step + 1)
    script.record()
    for rank, (step, file) in enumerate([(300, "model.pt"), (250, "optimizer.pt")]):
        Script(tmp_path, world=2).saves(step, folder(tmp_path / f"step_{step}", file, at=step), rank=rank).record()
    assert chosen(tmp_path) == "step_200"


@pytest.mark.parametrize("name", ["ckpt_{}_{}_{}.pt", "ckpt_{}_rank{}_{}.pt"])
@pytest.mark.parametrize(("world", "parts"), [(2, 2), (2, 3), (8, 2), (1, 2)])
@pytest.mark.parametrize("by_part", [False, True])
def test_parts_of_ranks_are_a_question(tmp_path: Path, name: str, world: int, parts: int, by_part: bool) -> None:
    """by_part: all ranks have written a part before the next one begins."""
    script = Script(tmp_path, world)
    for step in (100, 200):
        both = [(rank, part) for rank in range(world) for part in range(parts)]
        for rank, part in sorted(both, key=lambda each: each[by_part]):
            saved(tmp_path / name.format(step, rank, part), TRAINING, step)
            script.saves(step, name.format(step, rank, part), rank=rank)
        script.steps(step + 1)
    script.record()
    assert choice(tmp_path).question


def test_shards_counted_over_all_ranks_are_questions(tmp_path: Path) -> None:
    """Each of two ranks writes two of them."""
    script = Script(tmp_path, world=2)
    for step in (100, 200):
        for shard in range(4):
            saved(tmp_path / f"ckpt_{step}_{shard}.pt", TRAINING, step)
            script.saves(step, f"ckpt_{step}_{shard}.pt", rank=shard // 2)
        script.steps(step + 1)
    script.record()
    assert "ckpt_200_0.pt, ckpt_200_1.pt, ckpt_200_2.pt, ckpt_200_3.pt are of one moment" in choice(tmp_path).question


@pytest.mark.parametrize("name", ["ckpt_{}_{}_{}.pt", "ckpt_{}_tp{}_pp{}.pt"])
def test_a_grid_of_ranks_that_was_cut(tmp_path: Path, name: str) -> None:
    """Those that have written the last one differ in one number only."""
    script = Script(tmp_path, world=4)
    for step in (100, 200, 300):
        for rank in range(4 if step < 300 else 2):
            saved(tmp_path / name.format(step, rank % 2, rank // 2), TRAINING, step)
            script.saves(step, name.format(step, rank % 2, rank // 2), rank=rank)
        script.steps(step + 1, range(4) if step < 300 else [0])
    script.record()
    found = scenes.resumed(tmp_path)
    assert found.path == str(tmp_path / name.format(200, "*", "*"))
    assert found.files == {rank: str(tmp_path / name.format(200, rank % 2, rank // 2)) for rank in range(4)}


@BOTH
def test_one_rank_of_each_group_saves(tmp_path: Path, name: str) -> None:
    """By their names, those of ranks 1 and 3 are missing."""
    round_of(tmp_path, 4, (100, (0, 2)), (200, (0, 2)), (300, (2,)), name=name, killed=True)
    found = scenes.resumed(tmp_path)
    assert found.files == {rank: str(tmp_path / name.format(200, rank)) for rank in (0, 2)}


@BOTH
def test_a_rank_that_failed_to_save(tmp_path: Path, name: str) -> None:
    """Its disk was full, and the script went on. So what rank 0 has saved since is proved, and no whole checkpoint."""
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), (300, (0,)), (400, (0,)), name=name)
    assert chosen(tmp_path) == name.format(200, "*")


def test_the_record_goes_before_words_of_names(tmp_path: Path) -> None:
    """As a rule, the number after "shard" is that of the rank; here it is the epoch."""
    script = Script(tmp_path, world=2)
    for epoch in (0, 1):
        for rank in (0, 1):
            saved(tmp_path / f"shard_{epoch}_{rank}.pt", TRAINING, epoch)
            script.saves(10 + epoch, f"shard_{epoch}_{rank}.pt", rank=rank)
        script.steps(11 + epoch)
    script.record()
    found = scenes.resumed(tmp_path)
    assert found.path == str(tmp_path / "shard_1_*.pt")
    assert found.files == {rank: str(tmp_path / f"shard_1_{rank}.pt") for rank in (0, 1)}
    for epoch in (0, 1):
        (tmp_path / f"shard_{epoch}_1.pt").unlink()
    assert choice(tmp_path).resume is None


def test_a_question_of_other_files_is_none(tmp_path: Path) -> None:
    script = Script(tmp_path, world=2)
    for step in (100, 200):
        saved(tmp_path / f"ckpt_{step}.pt", TRAINING, step)
        for rank in (0, 1):
            script.saves(step, folder(tmp_path / f"eval_{step}_{rank}", "model.pt", at=step), rank=rank)
        script.saves(step, f"ckpt_{step}.pt").steps(step + 1)
    script.record()
    assert chosen(tmp_path) == "ckpt_200.pt"


@BOTH
@pytest.mark.parametrize(
    ("before", "world", "ranks", "step"), [(2, 4, 3, 200), (2, 4, 4, 300), (4, 2, 2, 300), (4, 2, 1, 200), (1, 4, 3, 200)]
)
def test_each_rank_of_the_round_counts(tmp_path: Path, name: str, before: int, world: int, ranks: int, step: int) -> None:
    """The job has grown, or shrunk, and was killed when so many ranks had saved."""
    round_of(tmp_path, before, (100, range(before)), (200, range(before)), name=name)
    round_of(tmp_path, world, (300, range(ranks)), name=name, killed=True)
    assert chosen(tmp_path) in (name.format(step, "*"), name.format(step, 0))


def test_more_files_without_the_record(tmp_path: Path) -> None:
    """How many ranks that run had is not known."""
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)))
    scenes.ranks(tmp_path, "ckpt_300_{}.pt", 3, 300)
    assert chosen(tmp_path) == "ckpt_200_*.pt"


@BOTH
def test_the_file_of_a_rank_has_gone(tmp_path: Path, name: str) -> None:
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), name=name)
    (tmp_path / name.format(200, 1)).unlink()
    assert chosen(tmp_path) == name.format(100, "*")
    assert "has gone" in choice(tmp_path).passed_over[0].reason


@BOTH
def test_nothing_but_a_part_has_stayed(tmp_path: Path, name: str) -> None:
    """A job would stop: it was whole."""
    round_of(tmp_path, 2, (200, (0, 1)), name=name)
    (tmp_path / name.format(200, 1)).unlink()
    found = choice(tmp_path)
    assert (found.resume, found.question) == (None, "")
    assert found.all_bad


@BOTH
@pytest.mark.parametrize(("world", "ranks"), [(2, (1,)), (4, (0, 1, 2))])
def test_a_first_save_of_few_ranks(tmp_path: Path, name: str, world: int, ranks: Sequence[int]) -> None:
    round_of(tmp_path, world, (100, ranks), name=name, killed=True)
    assert choice(tmp_path).resume is None


def test_saves_of_few_ranks_that_are_never_proved(tmp_path: Path) -> None:
    """One of each node, or the last one of a pipeline, where the record has a hole."""
    for name, ranks in (("ckpt_{}_{}.pt", (0, 8)), ("model_{}.pt", (7,))):
        directory = tmp_path / str(len(ranks))
        script = Script(directory, world=16)
        for step in (100, 200):
            for rank in ranks:
                saved(directory / name.format(step, rank), TRAINING, step)
                script.steps(step, ranks).saves(step, name.format(step, rank), rank=rank)
        script.record()
        assert chosen(directory) == name.format(200, "*")


def test_no_save_is_proved_and_one_cut(tmp_path: Path) -> None:
    """Rank 3 was killed before its file, and it is not known to have made a step."""
    script = Script(tmp_path, world=4)
    for step, ranks in ((100, range(4)), (200, range(3))):
        for rank in ranks:
            saved(tmp_path / f"ckpt_{step}_{rank}.pt", TRAINING, step)
            script.saves(step, f"ckpt_{step}_{rank}.pt", rank=rank)
        script.steps(step + 1, range(3))
    script.record()
    assert chosen(tmp_path) == "ckpt_100_*.pt"


@BOTH
def test_copies_beside_files_of_ranks(tmp_path: Path, name: str) -> None:
    """They are of no save, and belong to no rank."""
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), name=name)
    for step, rank in ((100, 7), (200, 7)):
        shutil.copyfile(tmp_path / name.format(100, 0), tmp_path / name.format(step, rank))
    assert chosen(tmp_path) == name.format(200, "*")
    assert sorted(files_by_rank(open_storage(str(tmp_path)), name.format(200, "*"))) == [0, 1]
    assert choice(tmp_path).resume.reason.startswith("last proved save")  # type: ignore[union-attr]


@BOTH
def test_copies_of_all_files_of_ranks(tmp_path: Path, name: str) -> None:
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), name=name)
    for rank in (0, 1):
        shutil.copyfile(tmp_path / name.format(100, rank), tmp_path / name.format(999, rank))
    assert chosen(tmp_path) == name.format(200, "*")


@BOTH
@pytest.mark.parametrize(("ranks", "step"), [((0, 1), 300), ((0,), 200)])
def test_a_job_that_has_shrunk_saves_again(tmp_path: Path, name: str, ranks: Sequence[int], step: int) -> None:
    """The files of the ranks that it had before are left over; but not those of a rank that was killed."""
    round_of(tmp_path, 4, (200, range(4)), (300, range(4)), name=name)
    round_of(tmp_path, 2, (300, ranks), name=name, killed=len(ranks) < 2)
    assert chosen(tmp_path) == name.format(step, "*")
    assert sorted(files_by_rank(open_storage(str(tmp_path)), name.format(300, "*"))) == [0, 1]


def test_rank_0_saves_for_all_from_now_on(tmp_path: Path) -> None:
    round_of(tmp_path, 2, (100, (0, 1)))
    round_of(tmp_path, 2, (200, (0,)), (300, (0,)))
    assert chosen(tmp_path) == "ckpt_300_0.pt"


def test_two_models_of_one_moment_are_a_question(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for name in ("G_100.pt", "D_100.pt"):
        saved(tmp_path / name, TRAINING, 100)
    script.saves(100, "G_100.pt", "D_100.pt").steps(101).record()
    assert "checkpoint_pattern" in choice(tmp_path).question


def test_quarantine_holds(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    assert main.main(["checkpoints", "quarantine", str(tmp_path), "step_200"]) == 0
    assert chosen(tmp_path) == "step_100"


def test_what_ls_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 100, 200).saves(300, folder(tmp_path / "step_300", "model.pt", at=300)).record()
    saved(tmp_path / "before_lr.pt", {**TRAINING, "step": 150}, 400)
    scenes.trainer(tmp_path / "checkpoint-50", 50)
    rows = {each.name: (each.known, each.ranks) for each in list_checkpoints(open_storage(str(tmp_path)))}
    assert rows == {
        "step_300": (Known.RECORDED, 1),
        "step_200": (Known.PROVED, 1),
        "step_100": (Known.PROVED, 1),
        "before_lr.pt": (Known.CONTENT, None),
        "checkpoint-50": (Known.CONTENT, None),
    }
    assert main.main(["checkpoints", "ls", str(tmp_path)]) == 0
    assert "proved" in capsys.readouterr().out


def test_ls_says_why_a_copy_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 100, 200).record()
    for name in ("step_200.bak", "step_50", "step_300"):  # the last one may be the next save, killed before it was recorded
        shutil.copytree(tmp_path / "step_200", tmp_path / name)
    assert main.main(["checkpoints", "ls", str(tmp_path)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "passed over: no save of it is recorded" in line]
    assert {line.split()[0] for line in said} == {"step_200.bak", "step_50"}


def test_ls_passes_nothing_over_without_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path / "step_100", *FILES, at=100)
    assert main.main(["checkpoints", "ls", str(tmp_path)]) == 0
    assert "passed over" not in capsys.readouterr().out


def test_prune_takes_only_what_is_recorded(tmp_path: Path) -> None:
    trained(tmp_path, 300, 400, 500).record()
    for step in (100, 200):
        folder(tmp_path / f"step_{step}", at=step)
    os.symlink("step_300", tmp_path / "best")
    assert main.main(["checkpoints", "prune", str(tmp_path), "--yes", "--keep-last=1"]) == 0
    assert {each.name for each in tmp_path.glob("step_*")} == {"step_100", "step_200", "step_300", "step_500"}
    assert main.main(["checkpoints", "prune", str(tmp_path), "step_100", "--yes", "--keep-last=1"]) == 0
    assert {each.name for each in tmp_path.glob("step_*")} == {"step_200", "step_300", "step_500"}


@BOTH
def test_files_of_ranks_go_together(tmp_path: Path, name: str) -> None:
    round_of(tmp_path, 2, (100, (0, 1)), (200, (0, 1)), (300, (0, 1)), name=name)
    assert [each.name for each in list_checkpoints(open_storage(str(tmp_path)))] == [
        name.format(300 - at, "*") for at in (0, 100, 200)
    ]
    assert main.main(["checkpoints", "quarantine", str(tmp_path), name.format(200, 1)]) == 0
    assert main.main(["checkpoints", "prune", str(tmp_path), "--yes", "--keep-last=1"]) == 0
    assert {name.format(300, rank) for rank in (0, 1)} <= {each.name for each in tmp_path.glob("ckpt_*")}
    assert main.main(["checkpoints", "quarantine", str(tmp_path), name.format(300, "*")]) == 0
    assert choice(tmp_path).resume is None


def test_the_record_of_what_is_gone_goes(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    shutil.rmtree(tmp_path / "step_100")
    for step, left in ((300, ["step_100", "step_200", "step_300"]), (400, ["step_200", "step_300", "step_400"])):
        trained(tmp_path, step).record()
        assert sorted(known_saves(open_storage(str(tmp_path)))) == left


def test_a_mixture_of_two_rounds_is_never_chosen(tmp_path: Path) -> None:
    Script(tmp_path).saves(200, folder(tmp_path / "last", *FILES, at=200)).steps(201).record()
    saved(tmp_path / "last" / "model.pt", WEIGHTS, 300)
    Script(tmp_path).saves(300, "last/model.pt").record()
    assert chosen(tmp_path) == ""


def test_what_was_not_seen_written_is_not_proved(tmp_path: Path) -> None:
    """By a process that nobody watches, or by C++ code. Its format still says that it is whole."""
    script = trained(tmp_path, 100)
    folder(tmp_path / "step_200", *FILES, at=200)
    script.saves(200, "step_200/model.pt", "step_200/optimizer.pt").steps(201).record()
    rows = {each.name: each.known for each in list_checkpoints(open_storage(str(tmp_path)))}
    assert rows == {"step_100": Known.PROVED, "step_200": Known.RECORDED}
    assert chosen(tmp_path) == "step_200"


def test_a_far_smaller_save_is_not_proved(tmp_path: Path) -> None:
    """The script has caught the error of a full disk, and trained on."""
    script = Script(tmp_path)
    for step, size in ((100, 4000), (200, 1000)):
        text(tmp_path / f"state_{step}.npz", "x" * size)
        script.saves(step, f"state_{step}.npz").steps(step + 1)
    script.record()
    found = known_saves(open_storage(str(tmp_path)))
    saves = {name: read_save(open_storage(str(tmp_path)), each) for name, each in found.items()}
    assert {name: each.proved for name, each in saves.items() if each} == {"state_100.npz": True, "state_200.npz": False}


def test_a_copy_by_the_script_is_no_newer(tmp_path: Path) -> None:
    """It copies an older save to `best`, and trains on."""
    script = trained(tmp_path, 100, 200)
    shutil.copytree(tmp_path / "step_100", tmp_path / "best")
    script.saves(210, "best").steps(211).record()
    assert chosen(tmp_path) == "step_200"


def test_a_person_goes_back_by_a_tracker(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    text(tmp_path / "latest", "step_100", 10**6)
    assert chosen(tmp_path) == "step_100"


def test_a_quarantine_holds_where_a_tool_names_another(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    text(tmp_path / "latest", "step_100", 300)
    assert main.main(["checkpoints", "quarantine", str(tmp_path), "step_200"]) == 0
    assert chosen(tmp_path) == "step_100"


def test_a_mixture_cannot_be_asked_for(tmp_path: Path) -> None:
    trained(tmp_path, 100).saves(200, folder(tmp_path / "last", *FILES, at=200)).steps(201).record()
    saved(tmp_path / "last" / "model.pt", WEIGHTS, 300)
    with pytest.raises(UsageError, match=r"last cannot be used: .*model\.pt was written long after the others"):
        choice(tmp_path, resume_from="last")


def test_files_of_ranks_can_be_asked_for(tmp_path: Path) -> None:
    """By the name that the log gives them, by that of one of them, and by their step."""
    of_ranks(tmp_path, 100, 200).record()
    for name in ("ckpt_100_*.pt", "ckpt_100_1.pt"):
        found = choice(tmp_path, resume_from=name).resume
        assert found is not None
        assert os.path.basename(found.path) == "ckpt_100_*.pt", name


def test_saves_before_a_step_are_no_newer(tmp_path: Path) -> None:
    """Each start of the script saves its first state, in full."""
    for step, start in ((0, "start_1.pt"), (9, "step_9.pt")):
        saved(tmp_path / start, {**TRAINING, "step": step}, step)
    Script(tmp_path).saves(0, "start_1.pt").steps(1).saves(9, "step_9.pt").steps(10).record()
    saved(tmp_path / "start_2.pt", {**TRAINING, "step": 0}, 100)
    Script(tmp_path).saves(0, "start_2.pt").steps(1).record()
    assert chosen(tmp_path) == "step_9.pt"


def test_files_of_ranks_in_place_of_two_saves(tmp_path: Path) -> None:
    script = Script(tmp_path, world=2)
    for name in ("step_5_rank{}.pt", "last_rank{}.pt"):
        for rank in (0, 1):
            saved(tmp_path / name.format(rank), TRAINING, 5)
            script.saves(5, name.format(rank), rank=rank)
    script.steps(6).record()
    saved(tmp_path / "last_rank0.pt", TRAINING, 300)
    assert chosen(tmp_path) == "step_5_rank*.pt"


def test_what_was_rewritten_gives_way(tmp_path: Path) -> None:
    """The host was lost within a save in place, and nothing says of how many saves it is."""
    script = trained(tmp_path, 100).saves(200, folder(tmp_path / "last", *FILES, at=200)).steps(201)
    script.record()
    folder(tmp_path / "last", *FILES, at=300)
    assert chosen(tmp_path) == "step_100"


def test_an_unreadable_record_stops_no_job(tmp_path: Path) -> None:
    trained(tmp_path, 100, 200).record()
    for known in known_saves(open_storage(str(tmp_path))).values():
        (tmp_path / known.file).unlink()
        (tmp_path / known.file).mkdir()
    assert chosen(tmp_path) == "step_200"


@pytest.mark.parametrize(("is_apart", "most"), [(True, 4), (False, 8)])
def test_many_recorded_saves_cost_little(tmp_path: Path, is_apart: bool, most: int) -> None:
    """A look at the newest, not one for each. A few more where all seem to be of one moment."""
    storage = open_storage(str(tmp_path))
    trained(tmp_path, 100).record()
    (known,) = known_saves(storage).values()
    save = read_save(storage, known)
    assert save is not None
    for order in range(1, 3000):
        (tmp_path / f"step_{100 + order}").mkdir()
        (tmp_path / replace(known, order=order, name=f"step_{100 + order}").file).write_text(
            records.encode(replace(save, count=100 + order * is_apart), stored.SCHEMA)
        )
    shutil.copytree(tmp_path / "step_100", tmp_path / "step_3099", dirs_exist_ok=True)
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "read_save", lambda storage, save: read.append(save.name) or read_save(storage, save))
        assert chosen(tmp_path) == "step_3099"
    assert len(read) <= most


def test_a_form_that_does_not_show_its_end(tmp_path: Path) -> None:
    """The record does: of torch before 1.6."""
    script = Script(tmp_path)
    for step in (100, 200, 300):
        torch.save({**TRAINING, "step": step}, tmp_path / f"step_{step}.pt", _use_new_zipfile_serialization=False)
        script.saves(step, f"step_{step}.pt")
        if step < 300:
            script.steps(step + 1)
    script.record()
    assert chosen(tmp_path) == "step_200.pt"


def of_moments(directory: Path) -> None:
    """Let all records say which ranks have saved at their moment, as those of several nodes do."""
    storage = open_storage(str(directory))
    for known in known_saves(storage).values():
        save = read_save(storage, known)
        assert save is not None
        storage.put(known.file, records.encode(replace(save, moment=(0, 1)), stored.SCHEMA).encode())


def test_a_file_without_those_of_its_moment(tmp_path: Path) -> None:
    """One file of each save has gone, with its record: the other one is no checkpoint."""
    of_ranks(tmp_path, 100, 200).record()
    of_moments(tmp_path)
    for name in ("ckpt_100_0.pt", "ckpt_200_1.pt"):
        (tmp_path / name).unlink()
        os.unlink(tmp_path / known_saves(open_storage(str(tmp_path)))[name].file)
    assert chosen(tmp_path) == ""
    assert "what rank 1 has saved then is not there" in choice(tmp_path).passed_over[0].reason


def test_one_file_after_a_save_that_was_cut(tmp_path: Path) -> None:
    """One of the two files of the last recorded save, the only one of its round, has no record. It is no example."""
    of_ranks(tmp_path, 100).record()
    of_ranks(tmp_path, 200).record()
    of_moments(tmp_path)
    os.unlink(tmp_path / known_saves(open_storage(str(tmp_path)))["ckpt_200_0.pt"].file)
    saved(tmp_path / "ckpt_300_1.pt", TRAINING, 300)
    assert chosen(tmp_path) == "ckpt_100_*.pt"
