"""Damage is found: in each file of each format, at each kind of place."""

from __future__ import annotations

import io
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import elastic_ext
from elastic_ext.checkpoints.directory.own_files import MANIFEST, checksum, checksum_of
from elastic_ext.checkpoints.formats import detect, single_files
from elastic_ext.checkpoints.storage import Entry, Storage, files_of, open_storage
from elastic_ext.checkpoints.verifying import Mode, Verification, verify
from tests.checkpoints.choice.scenes import entry_of, flip, inspected
from tests.checkpoints.formats.test_formats import save_own, save_trainer


def look(storage: Storage, name: str, *options: Any) -> Verification:
    return verify(storage, entry_of(storage, name), *options)


def bad(storage: Storage, name: str) -> bool:
    """Would this be kept from being used?"""
    entry = entry_of(storage, name)
    return not detect.check(storage, entry).complete or not verify(storage, entry).sound


def flips(data: bytes, count: int) -> list[bytes]:
    """With one bit flipped; the first and the last byte among the places."""
    chance = random.Random(len(data))
    places = {0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(count))}
    found = []
    for place in sorted(places):
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        found.append(bytes(flipped))
    return found


@pytest.mark.full("s3")
def test_a_bit_flipped_in_each_file_in_turn(where: str) -> None:
    storage = open_storage(where)
    name = save_own(storage, 5)
    assert look(storage, name).sound
    for file in [file for file, _ in files_of(storage, name)]:
        whole = storage.read(f"{name}/{file}")
        for data in flips(whole, 5):
            if file == MANIFEST and json_of(data) == json_of(whole):
                continue  # white space
            storage.put(f"{name}/{file}", data)
            assert bad(storage, name), file
        storage.put(f"{name}/{file}", whole)
    assert not bad(storage, name)


def json_of(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


def test_what_is_said_of_each_bad_file(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    name = save_own(tmp_path, 5)
    path = tmp_path / name
    os.truncate(path / "__0_0.distcp", 10)
    (path / "rank_00000" / "sampler.pt").unlink()
    (path / "note.txt").write_text("mine")
    flip(path / "__1_0.distcp")
    found = look(storage, name)
    assert [fault.file for fault in found.faults] == ["__0_0.distcp", "__1_0.distcp", "rank_00000/sampler.pt"]
    cut, flipped, gone = (fault.reason for fault in found.faults)
    assert (cut, gone) == ("it has 10 bytes, expected 1005", "it is missing")
    assert flipped.startswith("its checksum is ")
    assert [(note.file, note.reason) for note in found.notes] == [("note.txt", f"not in {MANIFEST}")]
    (path / MANIFEST).write_bytes(b"{")
    assert look(storage, name).faults[0].file == MANIFEST


def test_a_sample_reads_some_and_knows_all_sizes(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    name = save_own(tmp_path, 5)
    seen: list[tuple[int, int]] = []
    found = verify(storage, next(storage.entries()), Mode.SAMPLED, progress=lambda *counts: seen.append(counts), seed=1)
    assert (found.sound, found.files, found.size) == (True, 3, 1005)
    assert seen[-1] == (1005, 1005)
    os.truncate(tmp_path / name / "__1_0.distcp", 3)
    assert not look(storage, name, Mode.SAMPLED).sound
    assert look(storage, name, Mode.OFF).sound


def test_torch_save_by_its_crcs(tmp_path: Path) -> None:
    """A flipped bit is found, or torch.load refuses the file, or it changes nothing that is loaded."""
    storage = open_storage(str(tmp_path))
    torch.save({"w": torch.arange(500)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    assert not bad(storage, "a.pt")
    missed = 0
    for data in flips(whole, 500):
        (tmp_path / "a.pt").write_bytes(data)
        if bad(storage, "a.pt"):
            continue
        try:
            loaded = torch.load(tmp_path / "a.pt")
        except RuntimeError:
            missed += 1
        else:
            assert torch.equal(loaded["w"], torch.arange(500))
    assert missed < 5
    start = whole.index(torch.arange(500).numpy().tobytes())
    for place in range(start, start + 4000, 97):
        (tmp_path / "a.pt").write_bytes(whole)
        assert bad(storage, flip(tmp_path / "a.pt", place).name)


def test_each_byte_of_a_zip_directory(tmp_path: Path) -> None:
    """zipfile overlooks much of it, and alone would let a wrong tensor be loaded."""
    saved = io.BytesIO()
    torch.save({"w": torch.arange(50)}, saved)
    whole = saved.getvalue()
    for place in range(whole.index(b"PK\x01\x02"), len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            entry = Entry("a.pt", "a.pt", False, len(data), 0.0)
            if not single_files.check(entry, io.BytesIO(data)).complete or single_files.read_torch_save(io.BytesIO(data)).fault:
                continue
            try:
                loaded = torch.load(io.BytesIO(data))
            except RuntimeError:
                continue  # refused by torch
            assert torch.equal(loaded["w"], torch.arange(50)), (place, bit)


def test_torch_save_without_crcs_is_called_unverified(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(5), "step": 7}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    inspection = inspected(tmp_path, "a.pt")
    assert (inspection.complete, inspection.step) == (True, 7)
    found = look(open_storage(str(tmp_path)), "a.pt")
    assert found.sound
    assert "written without a CRC" in found.notes[0].reason


def test_dcp_by_the_crcs_of_its_items(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    values = {f"w{number}": torch.arange(300) + number for number in range(3)}
    dcp.save({**values, "step": 3}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    assert not bad(storage, "step_1")
    shard = tmp_path / "step_1" / "__0_0.distcp"
    whole = shard.read_bytes()
    for value in values.values():
        data = bytearray(whole)
        data[whole.index(value.numpy().tobytes()) + 1001] ^= 64
        shard.write_bytes(data)
        found = look(storage, "step_1")
        assert [fault.file for fault in found.faults] == ["__0_0.distcp"]
        assert "Bad CRC-32" in found.faults[0].reason
    shard.unlink()
    assert look(storage, "step_1").faults[0].reason == "it is missing"


def test_a_trainers_checkpoint_and_what_cannot_be_told(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    path = save_trainer(tmp_path / "checkpoint-5")
    found = look(storage, "checkpoint-5")
    assert found.sound
    said = {note.file: note.reason for note in found.notes}
    assert said["model.safetensors"] == "safetensors has no checksums: only header and size were checked"
    for name, place in (("optimizer.pt", 0.4), ("trainer_state.json", 0.0), ("model.safetensors", 0.0)):
        whole = (path / name).read_bytes()
        flip(path / name, int(len(whole) * place))
        assert bad(storage, "checkpoint-5"), name
        (path / name).write_bytes(whole)


def test_a_checksum_is_that_of_xxh3(tmp_path: Path) -> None:
    import xxhash

    data = os.urandom((9 << 20) + 17)
    (tmp_path / "a").write_bytes(data)
    with open(tmp_path / "a", "rb") as file:
        assert checksum(file) == xxhash.xxh3_64(data).hexdigest() == checksum_of(data)


def test_no_checksum_call_keeps_pythons_lock() -> None:
    """As xxhash 3 does, which pyproject.toml allows: training would stand still while a thread looks at a copy of its state."""
    whole = re.compile(r"xxh\w+_(hex|int)?digest\(")
    package = Path(elastic_ext.__file__).parent
    assert [path.name for path in package.rglob("*.py") if whole.search(path.read_text())] == []
