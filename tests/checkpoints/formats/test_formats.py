"""Each format as its own library writes it; then parts of it missing, cut short or damaged."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from xxhash import xxh3_64_hexdigest

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints import formats
from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, ManifestError, StoredFile, decode, encode
from elastic_ext.checkpoints.formats import detect, single_files
from elastic_ext.checkpoints.formats.candidates import DCP, HUGGING_FACE, LIGHTNING, OWN, TORCH_SAVE, Inspection, directory_name
from elastic_ext.checkpoints.formats.layouts import parse_metadata
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage
from elastic_ext.checkpoints.verifying import verify
from tests.checkpoints.choice import scenes
from tests.checkpoints.choice.scenes import chosen, inspected, resume_in, step_in


def save_own(root: Path | Storage, step: int, generation: int = 1, **fields: Any) -> str:
    """A checkpoint as our Checkpointer lays it out: shards, a file in a folder, the manifest."""
    storage = root if isinstance(root, Storage) else open_storage(str(root))
    name = directory_name(step, generation)
    chance = random.Random(step)
    contents = {file: chance.randbytes(1000 + step % 100) for file in ("__0_0.distcp", "__1_0.distcp", "rank_00000/sampler.pt")}
    for file, data in contents.items():
        storage.put(f"{name}/{file}", data)
    files = tuple(StoredFile(file, len(data), xxh3_64_hexdigest(data)) for file, data in contents.items())
    storage.put(f"{name}/{MANIFEST}", encode(Manifest(step, generation, files, world_size=2, **fields)))
    return name


@pytest.mark.parametrize("file", ["__0_0.distcp", "rank_00000/sampler.pt"])
def test_our_own_whole_and_without_a_part(tmp_path: Path, file: str) -> None:
    name = save_own(tmp_path, 120, 3, epoch=7)
    found = inspected(tmp_path, name)
    assert (found.complete, found.format, found.step, found.epoch, found.size) == (True, OWN, 120, 7, 3060)
    assert "3 files of the right size" in found.reason
    path = tmp_path / name / file
    path.write_bytes(path.read_bytes()[:-1])
    assert inspected(tmp_path, name).reason == f"{file} has 1019 bytes, expected 1020"
    path.unlink()
    assert inspected(tmp_path, name).reason == f"{file} is missing"
    path.mkdir()
    assert not inspected(tmp_path, name).complete
    shutil.rmtree(path.parent if "/" in file else path)
    assert inspected(tmp_path, name).reason == f"{file} is missing"
    (tmp_path / name / MANIFEST).unlink()
    (tmp_path / directory_name(5, 1)).mkdir()
    for torn in (name, directory_name(5, 1)):  # an empty directory of ours is ours, too
        assert inspected(tmp_path, torn) == Inspection(False, OWN, f"no {MANIFEST}, the save did not finish")


def test_one_file_is_counted_as_one(tmp_path: Path) -> None:
    (tmp_path / "step_5").mkdir()
    torch.save({"step": 5, "model": {}, "optimizer": {}}, tmp_path / "step_5" / "state.pt")
    assert inspected(tmp_path, "step_5").reason == "whole: 1 file"


def test_a_later_group_is_newer_whatever_its_step(tmp_path: Path) -> None:
    save_own(tmp_path, 900, 1)
    newest = save_own(tmp_path, 50, 2)
    save_own(tmp_path, 40, 2)
    resume = resume_in(tmp_path)
    assert (resume.path, resume.step) == (str(tmp_path / newest), 50)
    assert "of 3 named step_#.g# of elastic_ext" in resume.reason


def test_a_name_that_only_looks_like_ours(tmp_path: Path) -> None:
    """Too few digits: the numbers of such a name are somebody else's."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "step_5.g7", no_dist=True)
    assert resume_in(tmp_path).step == 5
    assert inspected(tmp_path, "step_5.g7").format == DCP


def test_every_bit_of_a_manifest_matters(tmp_path: Path) -> None:
    """It is the one file of ours whose checksum is not in another."""
    name = save_own(tmp_path, 3, extra={"loss": 1.5}, nodes=(1, 1))
    data = (tmp_path / name / MANIFEST).read_bytes()
    whole = decode(data)
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            try:
                assert decode(bytes(flipped)) == whole, (place, bit)  # white space
            except ManifestError:
                continue


@pytest.mark.parametrize(
    ("saved", "step", "epoch"),
    [
        ({"model": {"w": torch.ones(2)}, "epoch": 3, "step": 70}, 70, 3),
        ({"epoch": 3}, None, 3),
        ({"model": {"step": 5}, "step": 8}, 8, None),  # the same word twice in the pickle, which keeps it once
        ({"optimizer": {"state": {0: {"step": 5}}}}, None, None),
        ({"step": torch.tensor(5), "epoch": True, "global_step": -1}, None, None),
        ([1, 2], None, None),
        (torch.ones(3), None, None),
        ({"epoch": 1, "global_step": 42, "pytorch-lightning_version": "2.6.0", "state_dict": {}, "loops": {}}, 42, 1),
    ],
)
def test_the_step_in_a_file(tmp_path: Path, saved: Any, step: int | None, epoch: int | None) -> None:
    format = LIGHTNING if isinstance(saved, dict) and "loops" in saved else TORCH_SAVE
    for name, of_name in (("latest.pt", None), ("checkpoint_epoch_5.pt", 5)):  # the content counts before the name
        torch.save(saved, tmp_path / name)
        found = inspected(tmp_path, name)
        assert (found.complete, found.format, found.step, found.epoch) == (True, format, step, epoch)
        assert step_in(tmp_path) == (of_name if step is None else step)
        (tmp_path / name).unlink()


def test_a_file_from_before_torch_1_6(tmp_path: Path) -> None:
    """Nothing in it shows its end. So it counts only if you name it, or the job was seen to save it."""
    for step in (3, 9):
        path = tmp_path / f"step_{step}.pt"
        torch.save({"model": torch.ones(7), "step": step}, path, _use_new_zipfile_serialization=False)
    assert chosen(tmp_path) is None
    assert chosen(tmp_path, resume_from="step_3.pt") == chosen(tmp_path, pattern="step_3*") == ("step_3.pt", 3)
    storage = open_storage(str(tmp_path))
    found = verify(storage, scenes.entry_of(storage, "step_3.pt"))
    assert (found.sound, [note.reason for note in found.notes]) == (True, ["no checksum is known: only the size was checked"])


@pytest.mark.parametrize(
    ("saved", "training"),
    [
        ({"model": {}, "optimizer": {}}, True),
        ({"state_dict": {}, "optimizer_states": []}, True),
        ({"state": {"model": {}, "optimizers": {}}, "rng": []}, True),
        ({"model": {}, "epoch": 3}, False),
        (torch.nn.Linear(2, 2).state_dict(), False),
        (torch.optim.SGD([torch.ones(2)]).state_dict(), False),
        ({"optimizer": {}, "epoch": 3}, False),  # and nothing that it trains
        ([torch.ones(2)], False),
        ({}, False),
    ],
)
def test_whether_an_optimizer_is_in_it(tmp_path: Path, saved: Any, training: bool | None) -> None:
    torch.save(saved, tmp_path / "a.pt")
    found = inspected(tmp_path, "a.pt")
    assert (found.complete, found.training) == (True, training)
    assert ("no optimizer is in it" in found.reason or "an optimizer alone" in found.reason) is (training is False)


def test_an_optimizer_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    for name, keys in (("step_1", ("model.w", "optimizer.state.w.exp_avg")), ("step_2", ("model.w",))):
        dcp.save(dict.fromkeys(keys, torch.ones(2)), checkpoint_id=tmp_path / name, no_dist=True)
    assert (inspected(tmp_path, "step_1").training, inspected(tmp_path, "step_2").training) == (True, False)


def test_a_directory_whose_metadata_tells_of_more(tmp_path: Path) -> None:
    dcp.save({"model": torch.ones(64)}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    shard = tmp_path / "step_1" / "__0_0.distcp"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    assert inspected(tmp_path, "step_1").reason == f"__0_0.distcp has {size - 1} bytes of {size}"
    (tmp_path / "step_1" / "__7_0.distcp").write_bytes(b"x")
    shard.unlink()
    assert inspected(tmp_path, "step_1").reason == f"__0_0.distcp has 0 bytes of {size}"


def peak_of(data: bytes) -> int:
    """Bytes of memory that a look into a pickle takes at most."""
    tracemalloc.start()
    try:
        single_files.peek(data)
    except single_files.PeekError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x80\x04}" + put + b"." for put in (b"r\xff\xff\xff\x00", b"p99999999\n", b"q\xff")),  # the memo's index
        *(b"\x80\x04" + op + (1 << 28).to_bytes(4, "little") + b"few" for op in (b"B", b"T", b"X", b"\x8b")),
        *(b"\x80\x05" + op + (1 << 28).to_bytes(8, "little") + b"few" for op in (b"\x96", b"\x8e", b"\x8d", b"\x95")),
        b"\x80\x04}p" + b"9" * 5000 + b"\n.",
    ],
)
def test_a_pickle_that_claims_too_much(data: bytes) -> None:
    with pytest.raises(single_files.PeekError):
        single_files.peek(data)
    assert peak_of(data) < 100_000


def test_numbers_that_cannot_be_printed(tmp_path: Path) -> None:
    """Of a million digits: no step, and no size of a file."""
    assert single_files.number({"step": 1 << 3_000_000, "iteration": 7}, "step", "iteration") == 7
    info = _StorageInfo("__0_0.distcp", 0, 1 << 3_000_000)
    assert parse_metadata(pickle.dumps(Metadata({}, None, {MetadataIndex("w"): info}))) == ([], [])


def test_a_damaged_zip_directory_is_not_read_whole(tmp_path: Path) -> None:
    """Its end says that it is a gigabyte long, in a file that is as long."""
    path = tmp_path / "step_5.pt"
    torch.save({"step": 5}, path)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x05\x06") + 12
    data[at : at + 4] = (1 << 30).to_bytes(4, "little")
    if (at := data.rfind(b"PK\x06\x06")) >= 0:  # the 64-bit end, which counts where there is one: torch 2.13 writes it
        data[at + 40 : at + 48] = (1 << 30).to_bytes(8, "little")
    with open(path, "wb") as file:
        file.seek(1 << 30)
        file.write(data)
    os.truncate(path, (1 << 30) + len(data))
    tracemalloc.start()
    found = inspected(tmp_path, path.name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not found.complete
    assert peak < 300 << 20


def test_a_directory_of_lightning(tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=9.ckpt"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 0, "global_step": 9, "pytorch-lightning_version": "2.6.0"}, path / "meta.pt")
    found = inspected(tmp_path, path.name)
    assert (found.complete, found.format, found.step) == (True, LIGHTNING, 9)
    os.truncate(path / "meta.pt", 100)
    assert "meta.pt: its zip directory" in inspected(tmp_path, path.name).reason
    for last in (".metadata", "meta.pt"):
        (path / last).unlink()
        assert inspected(tmp_path, path.name).reason == f"no {last}, the save did not finish"


def save_trainer(path: Path, step: int = 500, without: Collection[str] = ()) -> Path:
    """What transformers' Trainer leaves, part by part; its own run is in the tests of the integration."""
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    save_file({"w": torch.ones(100), "b": torch.zeros(3)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": torch.ones(4)}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.5, "log_history": []}))
    (path / "config.json").write_text("{}")
    for name in without:
        (path / name).unlink()
    return path


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Path]:
    """Makes the checkpoint; `of_trainer` inspects it."""
    return partial(save_trainer, tmp_path / "checkpoint-5", 5)


def of_trainer(tmp_path: Path) -> Inspection:
    return inspected(tmp_path, "checkpoint-5")


PARTS = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("part", PARTS)
def test_a_trainers_checkpoint_without_a_part(tmp_path: Path, trainer: Callable[..., Path], part: str) -> None:
    path = trainer() / part
    size = path.stat().st_size
    for length in {0, 1, size // 2, size - 1}:
        os.truncate(path, length)
        found = of_trainer(tmp_path)
        assert (found.complete, found.format) == (False, HUGGING_FACE)
        assert part in found.reason, length
    path.unlink()
    assert of_trainer(tmp_path).complete is (part == "rng_state.pth")  # which a load can do without
    shutil.rmtree(path.parent)
    trainer(without=("optimizer.pt", "scheduler.pt", "rng_state.pth"))  # of the model only
    assert of_trainer(tmp_path).complete


def test_weights_in_several_files(tmp_path: Path, trainer: Callable[..., Path]) -> None:
    path = trainer()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (path / "model.safetensors").rename(path / first)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": first, "v": second}}))
    assert f"{second} is missing, although model.safetensors.index.json lists it" in of_trainer(tmp_path).reason
    shutil.copy(path / first, path / second)
    assert of_trainer(tmp_path).complete
    index.write_text("[]")
    assert "model.safetensors.index.json is damaged" in of_trainer(tmp_path).reason


def test_a_trainers_checkpoint_within_a_distributed_one(tmp_path: Path, trainer: Callable[..., Path]) -> None:
    path = trainer(without=("model.safetensors", "optimizer.pt", "scheduler.pt"))
    assert of_trainer(tmp_path).reason == "no model weights, the save did not finish"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path / "distributed", no_dist=True)
    assert of_trainer(tmp_path).complete
    os.truncate(path / "distributed" / "__0_0.distcp", 5)
    assert "distributed: __0_0.distcp has 5 bytes" in of_trainer(tmp_path).reason


def test_a_trainers_checkpoint_of_deepspeed(tmp_path: Path, trainer: Callable[..., Path]) -> None:
    path = trainer(without=("model.safetensors", "optimizer.pt", "scheduler.pt"))
    (path / "global_step5").mkdir()
    assert "global_step5 holds no .pt file" in of_trainer(tmp_path).reason
    part = path / "global_step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({}, part)
    assert of_trainer(tmp_path).complete
    os.truncate(part, 50)
    assert part.name in of_trainer(tmp_path).reason


def found_names(directory: Path, pattern: str) -> list[tuple[str, int | None]]:
    """All that may be chosen, best first, each with the step that is told."""
    storage = open_storage(str(directory))
    found: list[tuple[str, int | None]] = []
    while best := chosen(directory, pattern=pattern):
        found.append(best)
        own_files.quarantine(storage, found[-1][0], "found")
    for name, _ in found:
        own_files.lift_quarantine(storage, name)
    return found


def test_a_pattern_of_the_users(tmp_path: Path) -> None:
    for name in ("w_9_v2.dat", "w_10_v2.dat", "w_5_v11.dat", "other.dat", "x_99.pt"):
        (tmp_path / name).write_bytes(b"data")
    assert found_names(tmp_path, "w_{step}_v*.dat") == [("w_10_v2.dat", 10), ("w_9_v2.dat", 9), ("w_5_v11.dat", 5)]
    name = save_own(tmp_path / "own", 3)
    assert found_names(tmp_path / "own", "x_{step}.pt") == [(name, 3)]  # whatever the pattern
    shutil.rmtree(tmp_path / "own")
    assert found_names(tmp_path, "*.weights") == []
    assert [name for name, _ in found_names(tmp_path, "other.???")] == ["other.dat"]
    (tmp_path / "e1_s900.dat").write_bytes(b"x")
    (tmp_path / "e2_s5.dat").write_bytes(b"x")
    assert found_names(tmp_path, "e{epoch}_s{step}.dat") == [("e2_s5.dat", 5), ("e1_s900.dat", 900)]


@pytest.mark.parametrize("pattern", ["a/b", "{step}{step}", "*a*b*c*d*e*", ""])
def test_what_is_no_pattern(tmp_path: Path, pattern: str) -> None:
    from elastic_ext.base.settings import compile_pattern

    with pytest.raises(UsageError, match="checkpoint_pattern"):
        compile_pattern(pattern)


class Numbered:
    """Files of digits only; complete if not empty."""

    def claims(self, entry: Entry) -> bool:
        return entry.name.isdigit()

    def check(self, storage: Storage, entry: Entry) -> Inspection:
        data = storage.read(entry.name)
        return Inspection(bool(data), "numbered", "read it", entry.mtime, step=int(entry.name))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers an entry point as an installed package would."""

    def register(value: str) -> None:
        point = EntryPoint("mine", value, detect.ENTRY_POINTS)
        monkeypatch.setattr(detect, "entry_points", lambda group: [point] if group == detect.ENTRY_POINTS else [])
        detect.plugins.cache_clear()

    yield register
    detect.plugins.cache_clear()


def test_a_format_of_the_users(tmp_path: Path, plugin: Any) -> None:
    """By the names that a plug-in imports."""
    assert (formats.Inspection, formats.Entry, formats.Storage) == (Inspection, Entry, Storage)
    assert isinstance(formats.Format, type)
    plugin(f"{__name__}:Numbered")
    (tmp_path / "0007").write_bytes(b"x")
    (tmp_path / "0008").write_bytes(b"")
    resume = resume_in(tmp_path)
    assert (resume.path, resume.step) == (str(tmp_path / "0007"), 7)
    assert inspected(tmp_path, "0007").format == "numbered"


class Broken:
    def claims(self, entry: Entry) -> bool:
        raise KeyError("oops")

    def check(self, storage: Storage, entry: Entry) -> Inspection:
        raise AssertionError


BROKEN = ("Broken", r"format Broken failed on 7: KeyError\('oops'\)")


@pytest.mark.parametrize(("value", "said"), [BROKEN, ("Nothing", "cannot be loaded"), ("Path", "has no method claims")])
def test_a_plug_in_that_fails_is_named(tmp_path: Path, plugin: Any, value: str, said: str) -> None:
    (tmp_path / "7").write_bytes(b"x")
    plugin(f"{__name__}:{value}")
    with pytest.raises(UsageError, match=said):
        newest_complete(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"step": 200, "history": [1, 2', "state.json is cut short"),
        ("", "state.json is cut short"),
        ('{"step": 200}', ""),
        ('{"step": 1}\n{"step": 2}\n', ""),  # lines of JSON
    ],
)
def test_a_json_file_that_was_cut_is_torn(tmp_path: Path, text: str, reason: str) -> None:
    scenes.saved(tmp_path / "step_200" / "model.pt")
    (tmp_path / "step_200" / "state.json").write_text(text)
    found = inspected(tmp_path, "step_200")
    assert found.complete == (not reason), found
    assert reason in found.reason


def test_weights_in_parts_need_their_index(tmp_path: Path) -> None:
    """`save_pretrained` writes it last."""
    folder = tmp_path / "step_200"
    for part in (1, 2):
        scenes.tensors(folder / f"model-0000{part}-of-00002.safetensors")
    scenes.saved(folder / "optimizer.pt", scenes.OPTIMIZER)
    assert "no model.safetensors.index.json" in inspected(tmp_path, "step_200").reason
    weights = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    assert inspected(tmp_path, "step_200").complete
