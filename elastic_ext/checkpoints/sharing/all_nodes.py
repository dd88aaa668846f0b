"""The local directories of all nodes as one `Storage`, so that what chooses a checkpoint sees one directory. It is read-only.

`merging` decides what is in it. A file is read from the node whose file counts; those of this node from its disk. It shows a
moment: what nodes write after their catalogues were made is not in it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import BufferedReader

from elastic_ext.checkpoints.directory.own_files import QUARANTINE
from elastic_ext.checkpoints.formats.candidates import ANY, rank_name
from elastic_ext.checkpoints.sharing.catalogue import Catalogue
from elastic_ext.checkpoints.sharing.merging import SharedEntry, SharedFile, merged, path_in
from elastic_ext.checkpoints.sharing.peers import NodePeer
from elastic_ext.checkpoints.storage import Entry, LocalStorage, Storage


class AllNodes(Storage):
    """See the module. Its methods that write do nothing but raise NotImplementedError."""

    def __init__(
        self, local: LocalStorage, own_node: int, catalogues: Mapping[int, Catalogue], peers: Mapping[int, NodePeer]
    ) -> None:
        """catalogues, peers: by group rank; of this node, too, but it needs no peer."""
        super().__init__(local.address)
        self._local, self._own, self._peers = local, own_node, peers
        self._shared = merged(catalogues)
        self._entries: dict[str, Entry] = {}  # by path
        self._folders: dict[str, set[str]] = {"": set()}  # names in each
        self._places: dict[str, tuple[int, str, int]] = {}  # of files, by path: the node, its path there, its size
        self._texts: dict[str, bytes] = {}  # the content of other files, by path
        for shared in self._shared.values():
            self._add(shared)

    def files_of_save(self, name: str) -> tuple[SharedFile, ...]:
        """Return which node has each file of an entry, or of the files of all ranks; none if it is not there.

        The first one of a name counts. Another node that has one of that name, of the same save, keeps its own.
        """
        fits = self._shared if ANY in name else ()
        names = [each for each in fits if _stands_for(name, each)] or [name]
        return tuple(file for each in names if each in self._shared for file in self._shared[each].shared_files)

    def number_of(self, name: str) -> int:
        """Return a number for what an entry holds now. Another save has another one, also where a lost disk makes rounds count
        from the beginning again.
        """
        names = {each.name.partition("/")[0] for each in self.files_of_save(name)}
        found = [self._shared[each] for each in sorted(names)]
        files = [(file, of.size, of.mtime) for each in found for file, (_, of) in sorted(each.files.items())]
        text = repr((name, files, [each.record for each in found]))
        return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)

    def entries(self, child: str = "") -> Iterator[Entry]:
        folder = child.rstrip("/")
        if folder not in self._folders:
            number = errno.ENOTDIR if folder in self._entries else errno.ENOENT
            raise OSError(number, os.strerror(number), self.path(folder))
        for name in sorted(self._folders[folder]):
            yield replace(self._entries[f"{folder}/{name}" if folder else name], name=name)

    def stat(self, name: str) -> Entry | None:
        return self._entries.get(name.rstrip("/"))

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        if name in self._texts:
            yield BufferedReader(io.BytesIO(self._texts[name]))
            return
        if name not in self._places:
            number = errno.EISDIR if name in self._folders else errno.ENOENT
            raise OSError(number, os.strerror(number), self.path(name))
        node, place, size = self._places[name]
        with self._local.open(place) if node == self._own else self._peer(node).open(place, size) as opened:
            yield opened

    def means_damage(self, error: OSError) -> bool:
        return not isinstance(error, (ConnectionError, TimeoutError)) and self._local.means_damage(error)

    def _peer(self, node: int) -> NodePeer:
        if node not in self._peers:
            raise ConnectionError(f"node {node} serves no files")
        return self._peers[node]

    def _add(self, shared: SharedEntry) -> None:
        if shared.is_there:
            self._add_files(shared)
        if shared.known is not None and shared.record:
            self._add_text(shared.known.file, shared.record.encode())
        if shared.mark is not None:
            self._add_text(f"{QUARANTINE}/{shared.name}.json", json.dumps(asdict(shared.mark)).encode())

    def _add_files(self, shared: SharedEntry) -> None:
        name = shared.name
        if shared.is_dir:
            self._add_entry(Entry(name, self.path(name), True, 0, shared.mtime, torn=shared.torn))
        for file, (node, found) in shared.files.items():
            path = path_in(name, file)
            of_ranks = shared.torn if not shared.is_dir and shared.known is None and rank_name(name) is not None else ""
            torn = "" if shared.is_dir else shared.torn
            # unusable: else it would be one of the files of all ranks, of which each counts as whole
            self._add_entry(Entry(path, self.path(path), False, found.size, found.mtime, of_ranks, torn=torn))
            self._places[path] = node, shared.at.get(file, path), found.size

    def _add_text(self, path: str, data: bytes) -> None:
        self._add_entry(Entry(path, self.path(path), False, len(data), 0.0))
        self._texts[path] = data

    def _add_entry(self, entry: Entry) -> None:
        """Add an entry by its path, and the folders above it, of which each has the time of its newest file."""
        self._entries[entry.name] = entry
        if entry.is_dir:
            self._folders.setdefault(entry.name, set())
        folder, _, name = entry.name.rpartition("/")
        self._folders.setdefault(folder, set()).add(name)
        above = self._entries.get(folder)
        if folder and above is None:
            self._add_entry(Entry(folder, self.path(folder), True, 0, entry.mtime))
        elif above is not None and "/" in folder and (entry.mtime or 0.0) > (above.mtime or 0.0):
            self._add_entry(replace(above, mtime=entry.mtime))


def _stands_for(name: str, file: str) -> bool:
    return re.fullmatch(re.escape(name).replace(re.escape(ANY), r"\d+"), file) is not None
