"""How an agent reads the journals of its workers while they grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ext.checkpoints.record.journal import MAX_PART, VERSION, JournalTail
from elastic_ext.workers.bootstrap import saves

HEAD = b"elastic_ext-saves 1 3 17 0\n"


def line(name: str) -> bytes:
    return b"w\t5\t100\t0\t0\t" + name.encode() + b"\n"


def names(tail: JournalTail) -> list[str]:
    return [event.place.path for part in tail.read() for event in part.parsed().events]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """And whole lines: the last one may be on its way."""
    file, tail = tmp_path / "saves.17.1", JournalTail(str(tmp_path / "saves"))
    assert tail.read() == []
    file.write_bytes(HEAD[:10])
    assert tail.read() == []
    file.write_bytes(HEAD + line("a") + line("b")[:-4])
    assert names(tail) == ["a"]
    with file.open("ab") as more:
        more.write(line("b")[-4:] + line("c"))
    (tmp_path / "saves.18.1").write_bytes(HEAD.replace(b"17 0", b"18 17") + line("of a child"))
    (first, second) = tail.read()
    assert [(each.rank, each.pid, each.parent) for each in (first, second)] == [(3, 17, 0), (3, 18, 17)]
    assert [event.place.path for event in first.parsed().events] == ["b", "c"]
    assert tail.read() == []


def test_the_memory_of_what_was_read_is_free(tmp_path: Path) -> None:
    """Its size stays, because the worker appends."""
    file, tail = tmp_path / "saves.17.1", JournalTail(str(tmp_path / "saves"))
    lines = [line(f"{number:04}") for number in range(10_000)]
    file.write_bytes(HEAD + b"".join(lines))
    assert file.stat().st_size < MAX_PART
    before = os.stat(file)
    assert len(names(tail)) == 10_000
    after = os.stat(file)
    assert after.st_size == before.st_size
    assert after.st_blocks <= 4 * 8 or after.st_blocks == before.st_blocks  # where the filesystem can do that
    with file.open("ab") as more:
        more.write(line("last"))
    assert names(tail) == ["last"]


def test_a_large_journal_comes_in_parts(tmp_path: Path) -> None:
    file, tail = tmp_path / "saves.17.1", JournalTail(str(tmp_path / "saves"))
    file.write_bytes(HEAD + b"".join(line(f"{number:06}") for number in range(100_000)))
    found: list[str] = []
    while more := names(tail):
        found += more
    assert found == [f"{number:06}" for number in range(100_000)]


@pytest.mark.parametrize("data", [line("a"), b"x" * 4096, HEAD + line("x" * MAX_PART)], ids=["line", "page", "endless"])
def test_what_is_no_journal_is_a_fault(tmp_path: Path, data: bytes) -> None:
    """Else it would hold back for ever what comes after it. Those beside it are read."""
    tail = JournalTail(str(tmp_path / "saves"))
    for number in (17, 19):
        (tmp_path / f"saves.{number}.1").write_bytes(HEAD + line(str(number)))
    (tmp_path / "saves.18.1").write_bytes(data)
    assert names(tail) == ["17", "19"]
    assert "saves.18.1 is no journal of saves" in tail.fault


def test_a_journal_that_loses_lines_is_a_fault(tmp_path: Path) -> None:
    file, tail = tmp_path / "saves.17.1", JournalTail(str(tmp_path / "saves"))
    file.write_bytes(HEAD + line("a") + line("b"))
    assert (names(tail), tail.fault) == (["a", "b"], "")
    file.write_bytes(HEAD + line("a"))
    assert names(tail) == []
    assert "saves.17.1 is shorter than it was" in tail.fault


@pytest.mark.parametrize("lines", [b"", line("a")], ids=["no line", "a line"])
def test_a_journal_that_has_gone_is_a_fault(tmp_path: Path, lines: bytes) -> None:
    file, tail = tmp_path / "saves.17.1", JournalTail(str(tmp_path / "saves"))
    file.write_bytes(HEAD + lines)
    tail.read()
    file.unlink()
    tail.read()
    assert "saves.17.1 has gone" in tail.fault


def test_a_folder_that_has_gone_is_a_fault(tmp_path: Path) -> None:
    """`glob` would find nothing, as where there is no journal yet."""
    tail = JournalTail(str(tmp_path / "gone" / "saves"))
    assert tail.read() == []
    assert "No such file" in tail.fault


def test_a_fault_stays(tmp_path: Path) -> None:
    """Steps may have been counted in the meantime whose lines were not there."""
    tail = JournalTail(str(tmp_path / "saves"))
    (tmp_path / "saves.17.1").write_bytes(HEAD + line("a"))
    (tmp_path / "saves.18.1").mkdir()
    assert names(tail) == ["a"]
    (tmp_path / "saves.18.1").rmdir()
    assert names(tail) == []
    assert "Is a directory" in tail.fault


def test_both_sides_know_one_version() -> None:
    """The bootstrap imports nothing of ours, and the checkpoints nothing of the workers."""
    assert saves.VERSION == VERSION


def test_a_line_of_no_form_ends_a_journal(tmp_path: Path) -> None:
    (tmp_path / "saves.17.1").write_bytes(HEAD + line("a") + b"anything\n" + line("b"))
    (part,) = JournalTail(str(tmp_path / "saves")).read()
    journal = part.parsed("host")
    assert ([each.place.path for each in journal.events], journal.damaged, journal.host) == (["a"], True, "host")
