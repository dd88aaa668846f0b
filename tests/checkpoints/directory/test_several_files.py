"""Checkpoints of several files, by the commands: removed, copied and verified as one, and what is not understood stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice.discovery import list_checkpoints, newest_complete
from elastic_ext.checkpoints.directory import marks, pruning, transfer
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.cli import main
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, WEIGHTS, half, saved, tensors, text
from tests.checkpoints.choice.test_tools import chosen, ranks


def pruned(directory: Path, *options: str) -> list[str]:
    """What is left."""
    assert main.main(["checkpoints", "prune", str(directory), "--yes", *options]) == 0
    return sorted(os.listdir(directory))


def test_prune_takes_all_files_of_a_step_or_none(tmp_path: Path) -> None:
    for step in (100, 200):
        ranks(tmp_path, f"ep0-ba{step}-rank{{}}.pt", 8, step)
    before = sorted(os.listdir(tmp_path))
    assert pruned(tmp_path, "--keep-last=3") == before
    assert pruned(tmp_path, "--keep-last=1") == [f"ep0-ba200-rank{rank}.pt" for rank in range(8)]


def test_prune_keeps_what_is_pinned_of_all_ranks(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", 2)
    assert main.main(["checkpoints", "pin", str(tmp_path), "s_1_rank1.pt"]) == 0  # by the name of one of its files
    left = pruned(tmp_path, "--keep-last=1")
    assert [name for name in left if name.startswith("s_")] == [f"s_{step}_rank{rank}.pt" for step in (1, 3) for rank in (0, 1)]


def test_a_step_without_all_its_ranks_counts_for_none(tmp_path: Path) -> None:
    for step in (1, 2):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", 4)
    ranks(tmp_path, "s_3_rank{}.pt", 3)
    assert len(pruned(tmp_path, "--keep-last=1")) == 7  # of step 2, and what may still be written


def test_prune_never_takes_what_is_not_understood(tmp_path: Path) -> None:
    for step in range(5):
        text(tmp_path / f"state-{step}" / "weights.npz", "data")
        text(tmp_path / f"state-{step}.dat", "data")
        tensors(tmp_path / f"checkpoint-{step}" / "model.safetensors")  # torn, or another tool's
    scenes.trainer(tmp_path / "checkpoint-9", 9)
    for name in ("model.safetensors", "training_args.bin", "pytorch_model.bin"):
        saved(tmp_path / name)
    before = sorted(os.listdir(tmp_path))
    assert pruned(tmp_path, "--keep-last=1") == before
    assert pruned(tmp_path, "--keep-last=1", "--pattern=state-*") == before


def test_prune_counts_a_step_of_families_that_belong_together_once(tmp_path: Path) -> None:
    for step in range(1, 6):
        for name, value in (("model", WEIGHTS), ("ema", WEIGHTS), ("optimizer", OPTIMIZER)):
            saved(tmp_path / f"{name}_{step}.pt", value, step)
    half(tmp_path / "optimizer_5.pt")
    left = pruned(tmp_path, "--keep-last=2")
    assert left == sorted(f"{name}_{step}.pt" for name in ("model", "ema", "optimizer") for step in (3, 4, 5))


def test_prune_keeps_each_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        for step in (10, 20):
            saved(tmp_path / f"step{step}-seed{seed}.pt", TRAINING, step)
    assert pruned(tmp_path, "--keep-last=1") == ["step20-seed1.pt", "step20-seed2.pt"]


@pytest.mark.parametrize("make", [lambda path: scenes.verl(path / "step_1"), lambda path: ranks(path, "s_1_rank{}.pt", 3)])
def test_a_removal_that_is_cut_off_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    assert callable(make)
    make(tmp_path)
    storage = open_storage(str(tmp_path))
    (row,) = list_checkpoints(storage)
    removed: list[str] = []

    def remove(path: str) -> None:
        removed.append(path)
        if len(removed) > 1 or os.path.isdir(path):
            raise KeyboardInterrupt
        os.unlink(path)

    monkeypatch.setattr(storage, "remove_tree", lambda name, first=(): remove(storage.path(name)))
    with pytest.raises(KeyboardInterrupt):
        pruning.delete_entry(storage, row.entry)
    assert newest_complete(str(tmp_path)).resume is None
    monkeypatch.undo()
    pruning.delete_entry(storage, row.entry) if row.entry.is_dir else None
    assert not row.entry.is_dir or os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["s_1_rank*.pt", "step_1"])
def test_a_copy_counts_once_it_is_whole(tmp_path: Path, name: str) -> None:
    source, target = open_storage(str(tmp_path / "a")), open_storage(str(tmp_path / "b"))
    ranks(tmp_path / "a", "s_1_rank{}.pt", 3)
    scenes.verl(tmp_path / "a" / "step_1")
    entry = next(row.entry for row in list_checkpoints(source) if row.name == name)

    def stop(count: int) -> None:
        if (tmp_path / "b").exists() and sum(path.suffix == ".pt" for path in (tmp_path / "b").rglob("*")) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer.copy(source, target, entry, throttle=stop)
    assert newest_complete(target.address).resume is None
    assert transfer.copy(source, target, entry) > 0
    resume = newest_complete(target.address).resume
    assert resume is not None
    assert resume.path == target.path(name)
    assert not any(path.name.endswith("-unfinished") for path in (tmp_path / "b").iterdir())


def test_verify_reads_the_files_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, "s_1_rank{}.pt", 3)
    assert main.main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert "s_1_rank*.pt: sound, 3 files" in capsys.readouterr().out
    data = bytearray((tmp_path / "s_1_rank1.pt").read_bytes())
    data[data.index(b"optimizer")] ^= 1
    (tmp_path / "s_1_rank1.pt").write_bytes(data)
    assert main.main(["checkpoints", "verify", str(tmp_path), "s_1_rank*.pt"]) == 1
    assert "DAMAGED s_1_rank1.pt" in capsys.readouterr().out


def test_a_quarantine_is_of_all_ranks(tmp_path: Path) -> None:
    for step in (1, 2):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", 2)
    marks.quarantine(open_storage(str(tmp_path)), "s_2_rank*.pt", "NaN")
    assert chosen(tmp_path) == ("s_1_rank*.pt", 1)


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, "s_1_rank{}.pt", 2)
    tensors(tmp_path / "step_200.safetensors", 9)
    scenes.accelerate(tmp_path / "checkpoint_7")
    assert main.main(["checkpoints", "ls", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name: (row["step"], row["format"], row["state"]) for name, row in rows.items()} == {
        "s_1_rank*.pt": (1, "torch.save", "complete"),
        "step_200.safetensors": (200, "safetensors", "complete, no optimizer is in it"),
        "checkpoint_7": (7, "accelerate", "complete"),
    }
    assert all(row["complete"] for row in rows.values())
    assert rows["s_1_rank*.pt"]["path"] == str(tmp_path / "s_1_rank*.pt")
    assert "together" not in rows["checkpoint_7"]


# Prune never takes what a job needs.


def steps(directory: Path, name: str, value: object, *numbers: int, content: int = 0) -> None:
    """Files of these steps. content: their steps by their content are so many times larger; 0: it says none."""
    for step in numbers:
        saved(directory / name.format(step), {**value, "step": step * content} if content else value, step)  # type: ignore[dict-item]


def test_prune_keeps_what_a_job_resumes_from(tmp_path: Path) -> None:
    """Although it has no part in the newest step, and whatever the pattern."""
    steps(tmp_path, "ema_{}.pt", WEIGHTS, 500, 1000, 1500)
    steps(tmp_path, "checkpoint_{}.pt", TRAINING, 500, 1000)
    left = ["checkpoint_1000.pt", "ema_1000.pt", "ema_1500.pt"]
    assert pruned(tmp_path, "--keep-last=1") == left
    assert pruned(tmp_path, "--keep-last=1", "--pattern=ema_{step}.pt") == left


def test_prune_keeps_what_a_job_without_the_pattern_resumes_from(tmp_path: Path) -> None:
    for at, name in enumerate(("run_1_100.pt", "run_2_100.pt", "run_1_300.pt")):
        saved(tmp_path / name, TRAINING, at)
    assert pruned(tmp_path, "--keep-last=1", "--pattern=run_{step}_*.pt") == ["run_1_300.pt", "run_2_100.pt"]


def test_what_is_resumed_from_stays_with_all_of_its_step() -> None:
    """Whatever else is known of them."""
    rows = [pruning.PruneCandidate(f"{name}_{step}", name, step, "x", True) for name in "ab" for step in (3, 2, 1)]
    plan = pruning.plan_prune(rows, 1, resumed=("a_2",))
    assert {each.name: each.reason for each in plan if not each.remove} == {
        "a_3": "among the newest 1",
        "a_2": "a job would resume from it",
        "b_3": "among the newest 1",
        "b_2": "of the step that a job would resume from",
    }


@pytest.mark.parametrize("pattern", ["", "*_{step}.pt"])
def test_a_step_that_lacks_a_family_counts_for_none(tmp_path: Path, pattern: str) -> None:
    for name in ("model", "opt"):
        steps(tmp_path, f"{name}_{{}}.pt", OPTIMIZER if name == "opt" else WEIGHTS, 100, 200)
    steps(tmp_path, "model_{}.pt", WEIGHTS, 300)
    steps(tmp_path, "ema_{}.pt", WEIGHTS, 200, 300)  # begun later
    left = pruned(tmp_path, "--keep-last=1", f"--pattern={pattern}")
    assert left == ["ema_200.pt", "ema_300.pt", "model_200.pt", "model_300.pt", "opt_200.pt"]


def test_a_step_before_a_family_began_counts() -> None:
    numbers = {"a": (4, 3, 2, 1), "b": (4, 3)}
    rows = [
        pruning.PruneCandidate(f"{name}_{step}", name, step, "x", True, together="a")
        for name in numbers
        for step in numbers[name]
    ]
    assert [each.name for each in pruning.plan_prune(rows, 3) if each.remove] == ["a_1"]


def test_a_step_that_lacks_a_node_counts_for_none(tmp_path: Path) -> None:
    for step, nodes in ((100, 2), (200, 1)):
        for node in range(nodes):
            ranks(tmp_path, f"step{step}_node{node}_rank{{}}.pt", 2, step)
    assert len(pruned(tmp_path, "--keep-last=1")) == 6


def test_a_state_whose_newest_is_missing_stays(tmp_path: Path) -> None:
    for step in (500, 1000, 1500):
        tensors(tmp_path / f"my-step{step:08}.safetensors", step)
        if step < 1500:
            scenes.accelerate(tmp_path / f"my-step{step:08}-state")
    left = [name for name in pruned(tmp_path, "--keep-last=1") if name != ".elastic_ext"]
    assert left == [f"my-step0000{name}" for name in ("1000-state", "1000.safetensors", "1500.safetensors")]


def test_prune_counts_families_by_the_numbers_in_their_names(tmp_path: Path) -> None:
    """Though one says by its content that it is of step 3000, it is of epoch 3. A pin is of all of a step."""
    steps(tmp_path, "model_epoch_{}.pt", WEIGHTS, 1, 2, 3)
    steps(tmp_path, "trainer_epoch_{}.pt", OPTIMIZER, 1, 2, 3, content=1000)
    assert main.main(["checkpoints", "pin", str(tmp_path), "trainer_epoch_1.pt"]) == 0
    left = [name for name in pruned(tmp_path, "--keep-last=1") if name.endswith(".pt")]
    assert left == [f"{name}_epoch_{epoch}.pt" for name in ("model", "trainer") for epoch in (1, 3)]


@pytest.mark.parametrize("best", ["best_epoch_{}.pth", "best_coco_bbox_mAP_epoch_{}.pth"])
def test_prune_keeps_the_best(tmp_path: Path, best: str) -> None:
    steps(tmp_path, "epoch_{}.pth", TRAINING, *range(15, 21))
    steps(tmp_path, best, TRAINING, 17)
    assert pruned(tmp_path, "--keep-last=1") == sorted([best.format(17), "epoch_20.pth"])


def test_prune_by_a_pattern_cuts_no_step_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("model", WEIGHTS), ("ema", WEIGHTS), ("opt", OPTIMIZER)):
        steps(tmp_path, f"{name}_{{}}.pt", value, 100, 200)
    before = sorted(os.listdir(tmp_path))
    assert pruned(tmp_path, "--keep-last=1", "--pattern=model_{step}.pt") == before
    assert "which the pattern leaves out" in capsys.readouterr().out
    assert len(pruned(tmp_path, "--keep-last=1", "--pattern=*_{step}.pt")) == 3


def test_prune_keeps_what_only_looks_torn_beside_others(tmp_path: Path) -> None:
    for step, key in ((100, "optimizer"), (200, "model"), (300, "optimizer")):
        scenes.shards(tmp_path / f"step_{step}", key)
    assert pruned(tmp_path, "--keep-last=5") == ["step_100", "step_200", "step_300"]
    text(tmp_path / "step_100-unfinished", "")  # the directory is whole
    assert pruned(tmp_path, "--keep-last=5") == ["step_100", "step_100-unfinished", "step_200", "step_300"]
    (tmp_path / "step_100-unfinished").unlink()
    (tmp_path / "step_200" / "__0_0.distcp").unlink()  # torn by itself
    assert pruned(tmp_path, "--keep-last=5") == ["step_100", "step_300"]
