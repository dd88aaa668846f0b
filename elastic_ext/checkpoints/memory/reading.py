"""Load a copy in memory: map the parts of this node's ranks, check them, and copy them into the state in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.manifest import Manifest, StoredFile, checksum_of
from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.memory.buffers import Buffer, open_mapped
from elastic_ext.checkpoints.memory.part import Index, PartError, Path
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.state import Saved, StateDict


class MemoryCopy:
    """One copy, as one rank loads it on a node that has all its ranks' parts.

    Raises CheckpointError, on all ranks, if it must not be loaded. Collective.
    """

    def __init__(self, tier: LocalTier, name: str, manifest: Manifest, ranks: Ranks) -> None:
        self._tier, self._name, self._manifest, self._ranks = tier, name, manifest, ranks
        self._buffers: dict[int, Buffer] = {}  # by rank, of this node
        ranks.run_on_all(self._check)

    def _check(self) -> None:
        """Map the parts of this node, and compare the checksum of this rank's. The others do the same with theirs."""
        files = {file.name: file for file in self._manifest.files}
        for rank in tiers.ranks_of(self._tier.nodes, self._tier.node):
            file = files[memory_file(rank)]
            self._buffers[rank] = buffer = open_mapped(self._tier.storage, f"{self._name}/{file.name}", private=True)
            if rank == self._ranks.rank:
                check_part(buffer, file)
            elif buffer.size != file.size:
                raise PartError(f"{file.name} has {buffer.size} bytes, expected {file.size}")

    def saved(self, wanted: Iterable[int]) -> Saved:
        """Return what is not sharded, with the own states of these ranks of this node. Only after all ranks have made this."""
        return Saved(self._index(self._ranks.rank).shared, {rank: self._index(rank).own for rank in wanted})

    def fill(self, template: StateDict) -> StateDict:
        """Copy the tensors into those of `template`; return it with the other values. Raises PartError if they do not fit."""
        rank = self._ranks.rank
        found: dict[Path, Tensor] = {}
        for each in (*(other for other in self._buffers if other != rank), rank):  # its own last: that part is right for it
            memory = self._buffers[each].tensor
            places = self._index(each).tensors
            found |= {path: part.view(memory, place) for path, place in places.items()}
        with torch.no_grad():
            _copy(template, found)
        return filled(template, self._index(rank).values, found)

    def _index(self, rank: int) -> Index:
        return part.read_index(self._buffers[rank].bytes)


def check_part(buffer: Buffer, file: StoredFile) -> None:
    """Raise PartError unless the buffer holds what the manifest says."""
    if buffer.size != file.size:
        raise PartError(f"{file.name} has {buffer.size} bytes, expected {file.size}")
    found = checksum_of(buffer.bytes)
    if found != file.checksum:
        raise PartError(f"{file.name} has checksum {found}, expected {file.checksum}")


def _copy(template: StateDict, found: Mapping[Path, Tensor]) -> None:
    for path, tensor in part.leaves(template):
        target, source = part.local_part(tensor), found.get(path)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            held = "nothing" if source is None else f"{source.dtype} {tuple(source.shape)}"
            raise PartError(f"{part.shown(path)} is {target.dtype} {tuple(target.shape)}, the copy has {held}")
        target.copy_(source)


def filled(template: StateDict, values: Mapping[Path, Any], tensors: Iterable[Path]) -> StateDict:
    """Return a template, whose tensors are loaded, with a copy's values between them. tensors: those that the copy has.

    Raises PartError if one of the two has what the other lacks: part of the state would be lost, and nobody told.
    """
    wanted = {path for path, _ in part.other_leaves(template)}
    if missing := wanted - values.keys():
        raise PartError(f"the copy does not have {_some(missing)}")
    if left := surplus({*wanted, *(path for path, _ in part.leaves(template))}, {*values, *tensors}):
        raise PartError(f"there is no place for {_some(left)} of the copy")
    return cast(StateDict, _filled(template, (), values))


def surplus(wanted: Set[Path], copied: Set[Path]) -> Set[Path]:
    """Return what is copied of wanted objects, but not wanted. What a script no longer has at all is left out, as from disk."""
    objects = {path[:2] for path in wanted}
    return {path for path in copied - wanted if path[:2] in objects}


def _filled(value: Any, path: Path, values: Mapping[Path, Any]) -> Any:
    if isinstance(value, Tensor):
        return value
    if not part.is_nested(value):
        return values[path]
    if isinstance(value, Mapping):
        return {key: _filled(each, (*path, key), values) for key, each in value.items()}
    items = [_filled(each, (*path, number), values) for number, each in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def _some(paths: Set[Path]) -> str:
    return part.shown(min(paths, key=part.shown))
