"""What is kept of saves beside the checkpoints, and whether it still holds."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from elastic_ext.base import records
from elastic_ext.checkpoints.record.journal import SavePath
from elastic_ext.checkpoints.record.proof import RecordedSave
from elastic_ext.checkpoints.record.stored import (
    SAVES,
    SCHEMA,
    AttemptRecord,
    KnownSave,
    RecordBook,
    RecordedFile,
    StoredSave,
    Trust,
    files_at,
    kept_of,
    known_saves,
    read_save,
    trust,
    unwritten_of,
)
from elastic_ext.checkpoints.storage import Entry, open_storage
from tests.checkpoints.record.recording import Script

SAVE = StoredSave(True, "a step since", 5, (0,), 1, 2, 0, (RecordedFile("a", 10, 100.25, 0), RecordedFile("b", 20, 101.5, 0)))


def there(**files: tuple[int, float | None]) -> dict[str, Entry]:
    return {name: Entry(name, name, False, size, mtime) for name, (size, mtime) in files.items()}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (there(a=(10, 100.25), b=(20, 101.5)), Trust.PROVED),
        (there(a=(10, 100.25), b=(20, 101.5), note=(5, 900.0)), Trust.PROVED),  # people leave notes
        (there(a=(10, 100.0), b=(20, 101.0)), Trust.PROVED),  # tar cuts times to whole seconds
        (there(a=(10, 100.0), b=(20, 100.0)), Trust.PROVED),  # FAT to every second one
        (there(a=(10, 100.25), b=(20, 99.0)), Trust.TORN),
        (there(a=(10, 100.25), b=(21, 101.5)), Trust.TORN),
        (there(a=(10, 100.25)), Trust.TORN),
        (there(a=(10, 100.25), b=(20, 101.75)), Trust.TORN),  # written again within a second
        (there(a=(10, 101.0), b=(20, 101.5)), Trust.TORN),  # a storage of whole seconds, written again within one
        (there(a=(10, 300.0), b=(20, 301.0)), Trust.CHANGED),  # all written anew, or copied
        (there(a=(10, None), b=(20, None)), Trust.CHANGED),
        ({}, Trust.CHANGED),
    ],
)
def test_a_record_holds_while_files_do(found: dict[str, Entry], wanted: Trust) -> None:
    got, why = trust(SAVE, found)
    assert got is wanted
    assert why


def test_an_unproved_save_with_old_files_is_torn() -> None:
    same = there(a=(10, 100.25), b=(20, 101.5))
    for kept, wanted in ((0, Trust.UNPROVED), (1, Trust.TORN)):
        save = StoredSave(False, "no step since", 5, (0,), 1, 1, kept, SAVE.files)
        assert trust(save, same)[0] is wanted


def test_what_a_save_has_not_written_was_kept() -> None:
    """By the record, and by no time: a copy may keep an old one."""
    entry = SavePath(0, "last")
    save = RecordedSave(0, entry, {"last/a": 0, "last/c": 0}, frozenset({"last/a"}), 5, (0,), False, "no step since")
    found = there(a=(11, 50.0), b=(20, 101.5), c=(1, 40.0), unseen=(1, 1.0))
    assert kept_of(found, save, None) == 1  # c, of its round
    assert kept_of(found, save, SAVE) == 2  # and b, as it was recorded
    assert kept_of(there(a=(11, 50.0), b=(20, 300.0)), save, SAVE) == 0
    found = there(a=(10, 100.25), b=(20, 300.0))
    assert kept_of(found, save, SAVE) == 0
    assert unwritten_of(found, save, SAVE) == {"a"}  # which it was about to write
    assert kept_of(found, save, SAVE, {"a"}) == 1
    assert kept_of(there(a=(10, 100.25)), save, SAVE, {"a"}) == 0  # all there is


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_file_that_keeps_its_time(tmp_path: Path, where: str) -> None:
    """Below a URL, to write it may have failed. On a disk it was copied with its time."""
    storage = open_storage(str(tmp_path) if where == "local" else f"memory://bucket/{tmp_path.name}")
    for content in (b"one", b"another"):
        attempt = AttemptRecord(storage, 1)
        storage.put("last/a", content)
        if content == b"one":
            storage.put("last/b", b"data")
        paths = {"last/a": 0, "last/b": 0}
        save = RecordedSave(0, SavePath(0, "last"), paths, frozenset(paths), 5, (0,), True, "a step since")
        for _ in range(2):  # its own record is not that of an older save
            attempt.write(save, attempt.listed(save), [])
            stored = read_save(storage, known_saves(storage)["last"])
            assert stored is not None
            assert stored.proved is (where == "local" or content == b"one"), stored.why
    verdict = trust(stored, files_at(storage, "last"))[0]
    assert verdict is (Trust.PROVED if where == "local" else Trust.TORN)


def test_an_entry_that_is_as_before(tmp_path: Path) -> None:
    """It was moved away and back: it is the older save."""
    storage = open_storage(str(tmp_path))
    storage.put("last/a", b"data")
    os.utime(tmp_path / "last" / "a", (100.25, 100.25))
    for _ in range(2):
        Script(tmp_path).saves(1, "last").steps(2).record()
        assert known_saves(storage)["last"].attempt == 1


def test_the_last_save_of_an_entry_counts(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for name in ("000001.00000007.last.pt", "000002.00000000.last.pt", "000001.00000003.a.b", "x", "1.2.y", "000001.00000001."):
        storage.put(f"{SAVES}/{name}", b"{}")
    assert known_saves(storage) == {"last.pt": KnownSave(2, 0, "last.pt"), "a.b": KnownSave(1, 3, "a.b")}
    assert KnownSave(2, 0, "a") > KnownSave(1, 9, "b")


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"schema":9}', b'{"schema":1,"proved":1}', b"[" * 10_000])
def test_a_damaged_record_says_nothing(tmp_path: Path, data: bytes) -> None:
    storage, known = open_storage(str(tmp_path)), KnownSave(1, 0, "a.pt")
    storage.put(known.file, data)
    assert read_save(storage, known) is None
    (tmp_path / "a.pt").write_bytes(b"x")
    (entry,) = [each for each in storage.entries() if each.name == "a.pt"]
    assert RecordBook(storage).verdict(entry).trust is Trust.UNPROVED


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    storage, known = open_storage(str(tmp_path)), KnownSave(3, 4, "step_7")
    storage.put(known.file, records.encode(SAVE, SCHEMA).encode())
    assert read_save(storage, known) == SAVE
    assert SAVE.kinds == Counter({"a": 1, "b": 1})


def test_links_and_hidden_files_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "step_1.pt").write_bytes(b"x")
    os.symlink("step_1.pt", tmp_path / "latest.pt")
    (tmp_path / ".cache").write_bytes(b"x")
    (tmp_path / ("n" * 250)).write_bytes(b"x")  # its record would have too long a name
    names = ("step_1.pt", "latest.pt", ".cache", "n" * 250)
    Script(tmp_path).saves(1, *names).steps(2).record()
    storage = open_storage(str(tmp_path))
    assert list(known_saves(storage)) == ["step_1.pt"]
    assert files_at(storage, "nothing") == {}
