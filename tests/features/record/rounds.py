"""The agents of a round, and what their workers note of their saves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from elastic_ext.agent.companion import LocalWorkers, RoundPlace
from elastic_ext.base import round_store
from elastic_ext.checkpoints.record.stored import StoredSave, known_saves, read_save
from elastic_ext.checkpoints.storage import LocalStorage
from elastic_ext.features.record.watch import AgentSide, SaveWatch
from elastic_ext.workers import progress_layout as layout
from elastic_ext.workers.progress import ProgressTable


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """That of the round, for all its nodes."""
    made = HashStore()
    monkeypatch.setattr(round_store, "connect", lambda host, port: made)
    monkeypatch.setattr("elastic_ext.features.record.watch.LOOK_S", 0.01)
    monkeypatch.setattr("elastic_ext.features.record.orders.EVERY_S", 0.01)
    return made


@pytest.fixture
def checkpoints(tmp_path: Path) -> LocalStorage:
    (tmp_path / "checkpoints").mkdir()
    return LocalStorage(str(tmp_path / "checkpoints"))


class Node:
    """The agent of a node, and what its workers note. ranks: theirs."""

    def __init__(
        self,
        folder: Path,
        storage: LocalStorage,
        place: RoundPlace,
        *ranks: int,
        local: LocalStorage | None = None,
        rounds: int = 0,
    ) -> None:
        """local: this node's own directory, if its script saves there. rounds: that were recorded before."""
        self._folder, self._storage = folder / f"node_{place.node}_{rounds}", storage
        self._folder.mkdir()
        self.local = local
        self.place, self._ranks, self._lines = place, ranks, 0
        self.watch = SaveWatch(
            place, storage, {slot: f"{self._folder}/saves_{slot}" for slot in range(len(ranks))}, local, AgentSide(rounds)
        )
        table = ProgressTable(f"{self._folder}/progress", len(ranks))
        processes = SimpleNamespace(running=(), pids={})
        self._workers = LocalWorkers(processes, table, dict(enumerate(ranks)), {}, {})  # type: ignore[arg-type]
        self.watch._workers = self._workers

    def __enter__(self) -> Node:
        self.watch.workers_started(self._workers)
        return self

    def __exit__(self, *exc: object) -> None:
        self.watch.workers_ended(self._workers)

    def journal(self, rank: int) -> Path:
        return self._folder / f"saves_{self._ranks.index(rank)}.{10 + rank}.1"

    def note(self, rank: int, kind: str, count: int, *fields: object) -> None:
        if not self.journal(rank).exists():
            self.journal(rank).write_text(f"elastic_ext-saves 1 {rank} {10 + rank} 0\n")
        self._lines += 1
        with self.journal(rank).open("a") as file:
            file.write("\t".join(map(str, (kind, count, self._lines, 0, *fields))) + "\n")

    def saves(self, rank: int, count: int, path: str, data: bytes = b"x") -> None:
        self.note(rank, "w", count, 0, path)
        self._storage.put(path, data)

    def saves_apart(self, rank: int, count: int, path: str, data: bytes = b"x") -> None:
        """In this node's own directory."""
        assert self.local is not None
        self.note(rank, "w", count, 1, path)
        self.local.put(path, data)

    def removes_apart(self, rank: int, count: int, entry: str) -> None:
        assert self.local is not None
        self.note(rank, "d", count, 1, entry)
        self.local.remove_tree(entry)

    def steps(self, count: int, *ranks: int) -> None:
        """And one more, which is not noted: it shows nothing new but that the rank is past this count."""
        for rank in ranks or self._ranks:
            self.note(rank, "s", count, 1)
            self._set(rank, layout.STEPS, count + 1)

    def breaks(self, rank: int) -> None:
        self._set(rank, layout.RECORD_BROKEN, 1)

    def _set(self, rank: int, word: int, value: int) -> None:
        with (self._folder / "progress").open("r+b") as file:
            file.seek(self._ranks.index(rank) * layout.ROW_BYTES + 8 * word)
            file.write(value.to_bytes(8, sys.byteorder))


def recorded(storage: LocalStorage) -> dict[str, StoredSave]:
    found = {name: read_save(storage, each) for name, each in known_saves(storage).items()}
    return {name: each for name, each in found.items() if each is not None}


def proved(storage: LocalStorage) -> list[str]:
    return sorted(name for name, each in recorded(storage).items() if each.proved)
