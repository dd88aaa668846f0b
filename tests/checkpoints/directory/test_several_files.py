"""Checkpoints of several files, by the commands: removed, copied and verified as one, and what is not understood stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice.discovery import newest_complete
from elastic_ext.checkpoints.choice.listing import list_checkpoints
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
