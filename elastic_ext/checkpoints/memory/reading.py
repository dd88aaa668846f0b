"""Load a copy in memory: map the parts of this node's ranks, check them, and copy them into the state in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.manifest import Manifest
from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.memory.buffers import Buffer, open_mapped
from elastic_ext.checkpoints.memory.part import Index, PartError, Path
from elastic_ext.checkpoints.writing.errors import CheckpointError
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.state import Saved, StateDict


class MemoryCopy:
    """One copy, as one rank loads it. Raises CheckpointError, on all ranks, if it must not be loaded here. Collective."""

    def __init__(self, tier: LocalTier, name: str, ranks: Ranks) -> None:
        self._tier, self._name, self._ranks = tier, name, ranks
        self.manifest = self._agreed_manifest()
        self._buffers: dict[int, Buffer] = {}  # by rank, of this node
        ranks.run_on_all(self._check)

    def _agreed_manifest(self) -> Manifest:
        tier, path, ranks = self._tier, self._tier.storage.path(self._name), self._ranks
        read = ranks.run_on_all(lambda: tiers.manifest_of(tier.storage, self._name))
        digests = ranks.all_gather(tiers.digest(read[1]) if read is not None else "")
        if read is None or len(set(digests)) > 1:
            raise CheckpointError(f"{path}: the nodes do not have the same {'manifest' if any(digests) else 'copy'}")
        if (read[0].world_size, read[0].nodes) != (ranks.world, tier.nodes):
            raise CheckpointError(f"{path} was saved by {read[0].nodes} ranks of each node, and {tier.nodes} are to load it")
        return read[0]

    def _check(self) -> None:
        """Map the parts of this node, and compare the checksum of this rank's. The others do the same with theirs."""
        files = {file.name: file for file in self.manifest.files}
        for rank in tiers.ranks_of(self._tier.nodes, self._tier.node):
            name = memory_file(rank)
            self._buffers[rank] = buffer = open_mapped(self._tier.storage, f"{self._name}/{name}", private=True)
            if buffer.size != files[name].size:
                raise PartError(f"{name} has {buffer.size} bytes, expected {files[name].size}")
        own = memory_file(self._ranks.rank)
        found = xxhash.xxh3_64_hexdigest(self._buffers[self._ranks.rank].bytes)
        if found != files[own].checksum:
            raise PartError(f"{own} has checksum {found}, expected {files[own].checksum}")

    def saved(self) -> Saved:
        """Return what is not sharded. Only after all ranks have made this object."""
        own = self._index(self._ranks.rank)
        return Saved(own.shared, {self._ranks.rank: own.own})

    def fill(self, template: StateDict) -> StateDict:
        """Copy the tensors into those of `template`; return it with the other values. Raises PartError if they do not fit."""
        rank = self._ranks.rank
        found: dict[Path, Tensor] = {}
        for each in (*(other for other in self._buffers if other != rank), rank):  # its own last: that part is right for it
            memory = self._buffers[each].tensor
            places = self._index(each).tensors
            found |= {path: part.view(memory, place) for path, place in places.items()}
        with torch.no_grad():
            filled: StateDict = _filled(template, (), found, self._index(rank).values)
        return filled

    def _index(self, rank: int) -> Index:
        return part.read_index(self._buffers[rank].bytes)


def _filled(value: Any, path: Path, tensors: Mapping[Path, Tensor], values: Mapping[Path, Any]) -> Any:
    if isinstance(value, Tensor):
        target, source = part.local_part(value), tensors.get(path)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            held = "nothing" if source is None else f"{source.dtype} {tuple(source.shape)}"
            raise PartError(f"{'.'.join(map(str, path))} is {target.dtype} {tuple(target.shape)}, the copy has {held}")
        target.copy_(source)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(each, (*path, key), tensors, values) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(each, (*path, number), tensors, values) for number, each in enumerate(value)]
    return values.get(path, value)
