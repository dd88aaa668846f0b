"""Several nodes in one process: a local directory and a copier each, one remote directory, and a clock that stands still."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from elastic_ext.base import records
from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.reports import CopyState
from elastic_ext.checkpoints.copying.script_saves import ScriptSaves
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, RecordedFile, StoredSave
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.copying.test_script_saves import chosen, content, nothing, torch_file
from tests.checkpoints.record.recording import Script

MOST_TURNS = 12  # of each node, until something has arrived


class Nodes:
    """What the nodes of a job have. Each save is of a round of its own."""

    def __init__(self, folder: Path, number: int = 2) -> None:
        self.remote = folder / "remote"
        self.local = [folder / f"node_{node}" for node in range(number)]
        for each in (self.remote, *self.local):
            each.mkdir()
        self.now, self.round = 0.0, 0
        self.copiers = [self.copier(node) for node in range(number)]
        self.whole: dict[str, list[dict[str, bytes]]] = {}  # by name: the saves that were whole, all files of each

    def copier(self, node: int, throttle: Callable[[int], None] = nothing) -> ScriptSaves:
        local, remote = LocalStorage(str(self.local[node])), LocalStorage(str(self.remote))
        return ScriptSaves(local, remote, "", throttle, clock=lambda: self.now)

    def restart(self, node: int, throttle: Callable[[int], None] = nothing) -> None:
        self.copiers[node] = self.copier(node, throttle)

    def turn(self, *nodes: int, finish: bool = False) -> list[CopyState]:
        return [self.copiers[node].turn(finish) for node in nodes or range(len(self.local))]

    def until(self, name: str, nodes: Sequence[int] = (), finish: bool = False) -> None:
        """All take turns until this is what a job would resume from, and all know that."""
        for _ in range(MOST_TURNS):
            reports = self.turn(*nodes, finish=finish)
            if chosen(self.remote) == name and not any(each.waiting for each in reports):
                return
        raise AssertionError(f"{name} has not arrived: {reports}")

    # What the script does.

    def save(self, step: int, name: str = "", files: int = 2, recorded: Sequence[int] = (), suffix: str = ".pt") -> str:
        """Each node writes its part of a directory. recorded: on which nodes; none: on all."""
        name, self.round = name or f"checkpoint-{step}", self.round + 1
        parts = []
        for node, local in enumerate(self.local):
            shutil.rmtree(local / name, ignore_errors=True)
            (local / name).mkdir()
            for number in range(files):
                torch_file(local / name / f"part_{node}_{number}{suffix}", step=step)
            Script(local).saves(step, name).steps(step + 1).record(least=self.round)
            parts.append(self._recorded(node, name))
        for node, (known, save) in enumerate(parts):
            others = [file for part, (_, each) in enumerate(parts) for file in each.files if part != node]
            elsewhere = tuple(RecordedFile(file.name, file.size, 0.0, file.rank) for file in others)
            ranks = tuple(range(len(parts)))
            part = replace(save, part=node, parts=len(parts), elsewhere=elsewhere, world=len(parts), ranks=ranks, here=1)
            self._put(node, known, part)
            if recorded and node not in recorded:
                os.unlink(self.local[node] / known.file)
        self.whole.setdefault(name, []).append(self.files(name))
        return name

    def save_files(self, step: int, ranks: int = 2, label: str = "rank", moment: bool = False) -> str:
        """Each rank writes a file of its own. Return what they are called together.

        moment: the record of each says which ranks have saved then, and that of rank 0 was the last.
        """
        self.round += 1
        names = []
        for node, local in enumerate(self.local):
            script = Script(local, world=ranks * len(self.local))
            for rank in range(node * ranks, (node + 1) * ranks):
                names.append(f"step_{step}_{label}_{rank}.pt")
                torch_file(local / names[-1], step=step)
                script.saves(step, names[-1], rank=rank)
            script.steps(step + 1).record(least=self.round)
            for name in names[-ranks:]:
                known, save = self._recorded(node, name)
                if not moment:
                    self._put(node, known, replace(save, here=ranks))
                    continue
                os.unlink(local / known.file)
                later = replace(known, order=known.order + len(self.local) - node)
                self._put(node, later, replace(save, here=ranks, moment=tuple(range(ranks * len(self.local)))))
        files = {name: (self.local[at // ranks] / name).read_bytes() for at, name in enumerate(names)}
        self.whole.setdefault(f"step_{step}_{label}_*.pt", []).append(files)
        return f"step_{step}_{label}_*.pt"

    def _recorded(self, node: int, name: str) -> tuple[KnownSave, StoredSave]:
        storage = LocalStorage(str(self.local[node]))
        known = stored.known_saves(storage)[name]
        save = stored.read_save(storage, known)
        assert save is not None
        return known, save

    def _put(self, node: int, known: KnownSave, save: StoredSave) -> None:
        LocalStorage(str(self.local[node])).put(known.file, records.encode(save, stored.SCHEMA).encode())

    def removes(self, name: str, nodes: Sequence[int] = (), seen: bool = True) -> None:
        """The script removes an entry. seen: the agents of these nodes have noted that."""
        for node in nodes or range(len(self.local)):
            path = self.local[node] / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if seen:
                notes.note_removed(LocalStorage(str(self.local[node])), name, recorded=True)

    def lose(self, node: int) -> None:
        """A new machine takes the place of this node."""
        shutil.rmtree(self.local[node])
        self.local[node].mkdir()
        self.restart(node)

    # What is there.

    def files(self, name: str) -> dict[str, bytes]:
        return {
            file: data for local in reversed(self.local) if (local / name).exists() for file, data in content(local, name).items()
        }

    def check(self) -> str:
        """Return what a job would resume from, which is one save, all of it."""
        name = chosen(self.remote)
        if name:
            fits = name.replace("*", "[0-9]*")
            found = (
                content(self.remote, name)
                if "*" not in name
                else {each.name: each.read_bytes() for each in self.remote.glob(fits)}
            )
            assert found in self.whole[name], f"{name} is no whole save: {sorted(found)}"
        return name
