"""The local directories of several nodes, with the records that their agents would write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import IO

from elastic_ext.base import records
from elastic_ext.checkpoints.choice.decisions import Choice
from elastic_ext.checkpoints.choice.listing import Wanted, newest_in
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, RecordedFile, StoredSave, files_at
from elastic_ext.checkpoints.sharing.all_nodes import AllNodes
from elastic_ext.checkpoints.sharing.catalogue import Catalogue, KeptParts, catalogue_of, decode, encode
from elastic_ext.checkpoints.sharing.mirror_plan import is_unchanged, next_step
from elastic_ext.checkpoints.sharing.mirrored import (
    commit_part,
    fetch_part,
    kept_in,
    mirrored_parts,
    remove_leftovers,
    revoke,
)
from elastic_ext.checkpoints.sharing.part_requests import PartPlace
from elastic_ext.checkpoints.sharing.part_server import open_served
from elastic_ext.checkpoints.sharing.peers import NodePeer
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.choice.scenes import put


class PeerOnDisk(NodePeer):
    """A peer without a socket: what its server would send."""

    def __init__(self, directory: Path, node: int) -> None:
        super().__init__(PartPlace("disk", 1, "key"), node=node)
        self.directory, self.requests = directory, 0

    def read_into(self, name: str, offset: int, data: memoryview, whole: int) -> None:
        self.requests += 1
        with open_served(str(self.directory), name) as file:
            assert os.fstat(file.fileno()).st_size == whole
            file.seek(offset)
            data[:] = file.read(len(data))

    def copy(self, name: str, size: int, file: IO[bytes], throttle: Callable[[int], None] = lambda size: None) -> None:
        self.requests += 1
        with open_served(str(self.directory), name) as source:
            file.write(source.read())


class SeveralNodes:
    def __init__(self, folder: Path, count: int = 2) -> None:
        self.directories = [folder / f"node_{number}" for number in range(count)]
        for each in self.directories:
            each.mkdir()
        self.attempt, self.order = 1, 0
        self.mirrors = False  # nodes keep parts of each other

    def __getitem__(self, node: int) -> Path:
        return self.directories[node]

    def storage(self, node: int) -> LocalStorage:
        return LocalStorage(str(self.directories[node]))

    def peers(self) -> dict[int, NodePeer]:
        return {node: PeerOnDisk(each, node) for node, each in enumerate(self.directories)}

    def catalogues(self) -> dict[int, Catalogue]:
        """As they are after the wire."""
        return {node: self.catalogue(node) for node in range(len(self.directories))}

    def catalogue(self, node: int) -> Catalogue:
        local = self.storage(node)
        kept = kept_in(local) if self.mirrors else KeptParts()
        found = replace(catalogue_of(local), directory=kept.directory, mirrored=kept.parts)
        return decode(encode(found), "a test")

    def mirror(self, node: int, source: int, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
        """A node keeps what another one has of the newest save; return what it keeps then. meanwhile: before it counts."""
        local, peer = self.storage(node), PeerOnDisk(self.directories[source], source)
        while True:
            plan = next_step(self.catalogue(source), (), mirrored_parts(local), lambda entry: True)
            revoke(local, plan.free)
            remove_leftovers(local)
            for part in plan.fetch:
                fetch_part(local, part, peer.copy)
            meanwhile()
            there = self.catalogue(source)
            same = [part for part in plan.fetch if is_unchanged(part, there)]
            for part in same:
                commit_part(local, part)
            if len(same) < len(plan.fetch) or not plan.fetch:
                return sorted(each.name for each in mirrored_parts(local))

    def lose(self, node: int) -> None:
        """Another host takes its place, without its disk."""
        shutil.rmtree(self.directories[node])
        self.directories[node].mkdir()

    def seen_by(self, own: int = 0) -> AllNodes:
        return AllNodes(self.storage(own), own, self.catalogues(), self.peers())

    def choice(self, own: int = 0) -> Choice:
        return newest_in(self.seen_by(own), Wanted(of_scripts=True))

    def chosen(self, own: int = 0) -> str:
        found = self.choice(own).resume
        return os.path.basename(found.path) if found is not None else ""

    def recorded(
        self,
        name: str,
        count: int = 5,
        proved: bool = True,
        ranks: tuple[int, ...] = (),
        nodes: Collection[int] = (),
        world: int = 2,
        kept: Collection[tuple[int, str]] = (),
        moment: tuple[int, ...] = (),
    ) -> KnownSave:
        """The round has saved this entry: each node that has files of it records its part.

        nodes: only those record it. moment: see `StoredSave`. kept: files, each with its node, that the save has not written.
        """
        self.order += 1
        known = KnownSave(self.attempt, self.order, name)
        there = {node: found for node in range(len(self.directories)) if (found := files_at(self.storage(node), name))}
        wanted = tuple(nodes) or tuple(there)
        files = {
            node: tuple(
                RecordedFile(path, each.size, each.mtime or 0.0, -1 if (node, path) in kept else wanted.index(node))
                for path, each in sorted(found.items())
            )
            for node, found in there.items()
            if node in wanted
        }
        counting: dict[str, int] = {}
        for node, of in sorted(files.items()):
            for file in of:
                counting.setdefault(file.name, node)
        for part, (node, of) in enumerate(sorted(files.items())):
            others = [each for other, their in files.items() if other != node for each in their if counting[each.name] == other]
            save = StoredSave(
                proved=proved,
                why="a step since" if proved else "no step since",
                count=count,
                ranks=tuple(ranks) or (wanted.index(node),),
                world=world,
                written=len(of),
                kept=0,
                files=of,
                part=part,
                parts=len(files),
                elsewhere=tuple(RecordedFile(each.name, each.size, 0.0, each.rank) for each in others),
                moment=moment,
            )
            self.storage(node).put(known.file, records.encode(save, stored.SCHEMA).encode())
        return known

    def recorded_and_gone(self, name: str) -> KnownSave:
        """As `recorded`, but the entry is removed."""
        put(self[0] / name / "a.pt", b"1")
        known = self.recorded(name)
        shutil.rmtree(self[0] / name)
        return known
