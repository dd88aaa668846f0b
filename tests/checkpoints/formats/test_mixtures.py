"""A save over an older checkpoint that was killed inside; and whole checkpoints whose files have odd times."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.checkpoints.directory.catalogue import list_checkpoints
from elastic_ext.checkpoints.formats.layouts import younger_than
from elastic_ext.checkpoints.storage import Entry, open_storage
from elastic_ext.checkpoints.verifying import verify
from tests.checkpoints.choice.scenes import accelerate, deepspeed, entry_of, inspected, saved, tensors, trainer_of_fsdp
from tests.checkpoints.formats.test_formats import save_trainer

GB = 10**9
HOUR = 3600.0


def entry(name: str, mtime: float | None, size: int = GB) -> Entry:
    return Entry(name, f"/c/{name}", False, size, mtime)


@pytest.mark.parametrize(
    ("times", "named"),
    [
        # A mixture: minutes or hours lie between two saves.
        ({"a": 1000.0 + 600, "b": 990.0}, "a"),
        ({"a": 1000.0 + 600, "b": 1000.5}, "a"),  # as old as the marker, by another clock
        ({"a": 1000.0 + 700, "b": 990.0, "c": 1000.0 + 600}, "c"),
        # As saved: the marker is the last. Times may be in whole seconds, or all the same.
        ({"a": 999.9, "b": 1000.0}, ""),
        ({"a": 1000.0, "b": 1000.0}, ""),
        ({"a": 1000.5, "b": 1000.0}, ""),
        # A copy, at 10 MB/s: one file after the other in any order, or several at once.
        ({"a": 900.0, "b": 1000.0 + 100, "c": 1000.0 + 200}, ""),
        ({"a": 1000.0 + 100, "b": 1000.0 + 200}, ""),
        ({"a": 1000.0 + HOUR, "b": 1000.0 + 2 * HOUR}, ""),  # the large ones by git lfs, later; or a save that wrote all
        # A storage without times.
        ({"a": None, "b": 1000.0 + HOUR}, ""),
        ({"a": None, "b": 900.0, "c": 1000.0 + HOUR}, "c"),
        ({}, ""),
    ],
)
def test_what_the_times_show(times: dict[str, float | None], named: str) -> None:
    parts = [entry(name, mtime) for name, mtime in times.items()]
    said = younger_than(entry(".metadata", 1000.0, 100), parts)
    assert said.partition(" ")[0] == named
    assert younger_than(entry(".metadata", None), parts) == ""


def test_a_large_file_takes_longer_to_copy() -> None:
    times = [("b", 990.0), ("a", 1000.0 + 600)]
    for size, said in ((6 * GB, False), (5 * GB, True)):
        assert bool(younger_than(entry("m", 1000.0), [entry(name, mtime, size) for name, mtime in times])) is said


def age(path: Path, seconds: float) -> Path:
    """Set all times below a directory back."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (time.time() - seconds,) * 2)
    return path


def save_shards(path: Path, value: float = 1.0) -> Path:
    """By torch, in two files."""
    state = {"model": torch.full((64,), value), "optim": torch.full((64,), value)}
    dcp.save(state, storage_writer=FileSystemWriter(path, thread_count=2), no_dist=True)
    assert {each.name for each in path.iterdir()} == {".metadata", "__0_0.distcp", "__0_1.distcp"}
    return path


def is_mixed(directory: Path, name: str) -> bool:
    """Whether the times of its files alone make it incomplete."""
    found = inspected(directory, name)
    assert found.complete or (found.distrusted and found.compared and "a save over an older one" in found.reason), found
    return not found.complete


def test_shards_of_two_saves(tmp_path: Path) -> None:
    last = age(save_shards(tmp_path / "last"), HOUR)
    newer = save_shards(tmp_path / "other", 7.0)
    assert not is_mixed(tmp_path, "last")
    shutil.copyfile(newer / "__0_0.distcp", last / "__0_0.distcp")
    assert is_mixed(tmp_path, "last")
    assert resumed_from(tmp_path) == "other"
    assert [each.compared for each in list_checkpoints(open_storage(str(tmp_path))) if each.name == "last"] == [True]
    shutil.rmtree(newer)
    assert newest_complete(str(tmp_path)).all_bad  # a job must not begin from nothing beside it
    (last / ".metadata").touch()  # as the reason says, for a copy
    assert resumed_from(tmp_path) == "last"


def resumed_from(directory: Path) -> str:
    resume = newest_complete(str(directory)).resume
    return os.path.basename(resume.path) if resume is not None else ""


@pytest.mark.parametrize("newer", [("model.safetensors",), ("model.safetensors", "optimizer.pt")])
def test_a_trainers_checkpoint_written_over(tmp_path: Path, newer: tuple[str, ...]) -> None:
    path = age(save_trainer(tmp_path / "checkpoint-5", 5), HOUR)
    for part in ("rng_state.pth", "training_args.bin", "config.json", "scheduler.pt"):  # ranks do not wait for each other
        (path / part).touch()
    assert not is_mixed(tmp_path, "checkpoint-5")
    for part in newer:
        (path / part).touch()
    assert is_mixed(tmp_path, "checkpoint-5") is ("optimizer.pt" not in newer)


def test_weights_that_were_added_later(tmp_path: Path) -> None:
    """By zero_to_fp32.py, by PEFT's merge_and_unload."""
    path = save_trainer(tmp_path / "checkpoint-5", 5, without=["model.safetensors"])
    deepspeed(path, 5)
    age(path, HOUR)
    saved(path / "pytorch_model.bin", {}, time.time())
    assert not is_mixed(tmp_path, "checkpoint-5")
    path = save_trainer(tmp_path / "checkpoint-6", 6, without=["model.safetensors"])
    tensors(path / "adapter_model.safetensors")
    age(path, HOUR)
    tensors(path / "model.safetensors", time.time())
    assert not is_mixed(tmp_path, "checkpoint-6")
    (path / "adapter_model.safetensors").touch()
    assert is_mixed(tmp_path, "checkpoint-6")


def test_sharded_weights_of_a_newer_save(tmp_path: Path) -> None:
    """They are whole for themselves, and the optimizer beside them is older."""
    path = age(trainer_of_fsdp(tmp_path / "checkpoint-5", 5), HOUR)
    assert not is_mixed(tmp_path, "checkpoint-5")
    for each in (path / "pytorch_model_fsdp_0").iterdir():
        each.touch()
    assert is_mixed(tmp_path, "checkpoint-5")


def test_accelerate_over_an_older_state(tmp_path: Path) -> None:
    path = age(accelerate(tmp_path / "latest"), HOUR)
    saved(path / "custom_checkpoint_0.pkl", {}, time.time())
    assert not is_mixed(tmp_path, "latest")
    (path / "model.safetensors").touch()
    assert is_mixed(tmp_path, "latest")
    (path / "random_states_0.pkl").touch()
    assert not is_mixed(tmp_path, "latest")


class OfRank(FileSystemWriter):  # type: ignore[misc]
    """As dcp.save(use_collectives=False) has it on one rank of several."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.number = rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self.number, use_collectives=False)


def save_by_rank(path: Path, ranks: int) -> Path:
    for rank in range(ranks):
        state = {f"model.w{rank}": torch.ones(64), f"optim.m{rank}": torch.ones(64)}
        dcp.save(state, storage_writer=OfRank(path, rank), no_dist=True, use_collectives=False)
    assert {each.name for each in path.iterdir()} >= {f"__{rank}.metadata" for rank in range(ranks)}
    return path


def test_shards_without_a_common_metadata(tmp_path: Path) -> None:
    path = save_by_rank(tmp_path / "step_5", 2)
    found = inspected(tmp_path, "step_5")
    assert (found.complete, found.training) == (True, True), found.reason
    storage = open_storage(str(tmp_path))
    assert verify(storage, entry_of(storage, "step_5")).sound
    whole = (path / "__1_0.distcp").read_bytes()
    os.truncate(path / "__1_0.distcp", len(whole) - 1)
    assert inspected(tmp_path, "step_5").reason == f"__1_0.distcp has {len(whole) - 1} bytes of {len(whole)}"
    (path / "__1_0.distcp").write_bytes(bytes(len(whole)))
    assert [fault.file for fault in verify(storage, entry_of(storage, "step_5")).faults] == ["__1_0.distcp"]
    (path / "__1.metadata").rename(path / "__1.metadata.tmp")
    assert inspected(tmp_path, "step_5").reason == "no __1.metadata, the save did not finish"


def test_a_rank_that_had_not_begun(tmp_path: Path) -> None:
    """Nothing in it says how many there are, but for the one before it."""
    save_by_rank(tmp_path / "step_5", 2)
    save_by_rank(tmp_path / "step_6", 1)
    assert resumed_from(tmp_path) == "step_5"
    save_by_rank(tmp_path / "step_7", 2)
    assert resumed_from(tmp_path) == "step_7"


def test_ranks_of_two_saves(tmp_path: Path) -> None:
    path = age(save_by_rank(tmp_path / "last", 2), HOUR)
    assert not is_mixed(tmp_path, "last")
    for name in ("__0_0.distcp", "__0.metadata"):
        (path / name).touch()
    assert is_mixed(tmp_path, "last")


def test_adapters_in_folders_of_their_own(tmp_path: Path) -> None:
    path = save_trainer(tmp_path / "checkpoint-5", 5, without=["model.safetensors"])
    for name in ("policy", "reference"):
        tensors(path / name / "adapter_model.safetensors")
    assert inspected(tmp_path, "checkpoint-5").complete
    os.truncate(path / "policy" / "adapter_model.safetensors", 20)
    assert "policy/adapter_model.safetensors" in inspected(tmp_path, "checkpoint-5").reason


def test_shards_of_safetensors_by_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    path = tmp_path / "step_5"
    writer = HuggingFaceStorageWriter(path=str(path / "model"), save_distributed=True)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    dcp.save({"state.exp_avg": torch.ones(4)}, checkpoint_id=path / "optim", no_dist=True)
    first = path / "model" / "shard-00001-model-00001-of-00001.safetensors"
    assert inspected(tmp_path, "step_5").complete
    for number in ("2", "3"):  # other ranks
        shutil.copy(first, first.with_name(first.name.replace("shard-00001", f"shard-0000{number}")))
    assert inspected(tmp_path, "step_5").complete
    first.with_name(first.name.replace("shard-00001", "shard-00002")).unlink()
    assert "the file of rank 2, 1 is missing" in inspected(tmp_path, "step_5").reason
