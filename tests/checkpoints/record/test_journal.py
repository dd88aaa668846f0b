"""How an agent reads the journals of its workers while they grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ext.checkpoints.record.journal import MAX_PART, JournalTail

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
    lines = [line(f"{number:04}") for number in range(20_000)]
    file.write_bytes(HEAD + b"".join(lines))
    assert file.stat().st_size < MAX_PART
    before = os.stat(file)
    assert len(names(tail)) == 20_000
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


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "saves.17.1").write_bytes(line("a"))
    with pytest.raises(OSError, match="is no journal of saves"):
        JournalTail(str(tmp_path / "saves")).read()


def test_a_line_of_no_form_ends_a_journal(tmp_path: Path) -> None:
    (tmp_path / "saves.17.1").write_bytes(HEAD + line("a") + b"anything\n" + line("b"))
    (part,) = JournalTail(str(tmp_path / "saves")).read()
    journal = part.parsed("host")
    assert ([each.place.path for each in journal.events], journal.damaged, journal.host) == (["a"], True, "host")
