"""Directories of checkpoints with a record: what a job of these events would leave, written by the product's own parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_ext.checkpoints.record.journal import NOWHERE, JournalLine, SaveJournal, SavePath
from elastic_ext.checkpoints.record.proof import prove
from elastic_ext.checkpoints.record.stored import AttemptRecord
from elastic_ext.checkpoints.storage import open_storage


class Script:
    """The events of the ranks of one round, whose files are there already."""

    def __init__(self, directory: Path, world: int = 1) -> None:
        self._directory, self._world = directory, world
        self._events: list[list[JournalLine]] = [[JournalLine("s", 1, 0, number=1)] for _ in range(world)]

    def _note(self, rank: int, kind: str, count: int, path: str = "", number: int = 0) -> None:
        place = SavePath(0, path) if path else NOWHERE
        self._events[rank].append(JournalLine(kind, count, len(self._events[rank]), 0, False, place, NOWHERE, number))

    def saves(self, count: int, *paths: str, rank: int = 0) -> Script:
        """A rank writes these files; of a directory, all that is in it."""
        for path in paths:
            found = sorted(each for each in (self._directory / path).rglob("*") if each.is_file()) or [self._directory / path]
            for file in found:
                self._note(rank, "w", count, str(file.relative_to(self._directory)))
        return self

    def loads(self, path: str) -> Script:
        self._note(0, "r", 0, path)
        return self

    def steps(self, count: int, ranks: Sequence[int] = ()) -> Script:
        """All ranks make a step, or these."""
        for rank in ranks or range(self._world):
            self._note(rank, "s", count, number=1)
        return self

    def journals(self, at: int = 0) -> list[SaveJournal]:
        """at: the number of the directory."""
        moved = [[event._replace(place=event.place._replace(at=at)) for event in of] for of in self._events]
        return [SaveJournal(rank, 10 + rank, 0, tuple(of)) for rank, of in enumerate(moved if at else self._events)]

    def record(self, least: int = 1) -> None:
        """The round is over, and its agent records it. least: see `AttemptRecord`."""
        attempt = AttemptRecord(open_storage(str(self._directory)), self._world, least)
        record = prove(self.journals(), {}, before=attempt.before)
        for save in record.saves:
            found = attempt.listed(save)
            if save.proved and not save.gone and found:
                attempt.write(save, found, record.reads)
            elif not save.gone:
                attempt.write_unproved(save, record.reads)
