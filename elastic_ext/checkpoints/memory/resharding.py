"""Load a copy in memory on other nodes or another number of ranks than made it: from whichever nodes have the parts.

Each saved piece of a tensor is a box in the whole tensor, and so is what a rank needs of it. A rank reads the bytes of their
overlaps; those of another node come by `PieceExchange`, as from a local tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.manifest import Manifest
from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.memory.buffers import open_mapped
from elastic_ext.checkpoints.memory.part import Box, Index, PartError, Path, Place
from elastic_ext.checkpoints.memory.reading import check_part, filled
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.exchange import Parts, PieceExchange, Range, merge_ranges
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.state import Saved, StateDict


def overlap(one: Box, other: Box) -> Box | None:
    """Return the box that both have, or None."""
    begins = tuple(map(max, one.begin, other.begin))
    ends = tuple(map(min, one.end, other.end))
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(begins, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True)
class Piece:
    """A saved piece of a tensor. box: what it is of the whole tensor. place: where it is in the file."""

    file: str
    box: Box
    place: Place


@dataclass(frozen=True)
class Read:
    """What one rank copies from one piece: the part `box` of the whole tensor into that of the target.

    Attributes:
        target: the rank's local part of the tensor, which is `target_box` of the whole.
    """

    target: Tensor
    target_box: Box
    piece: Piece
    box: Box

    @property
    def range(self) -> Range:
        """The bytes of the file from the first element to the last."""
        strides = self._strides
        first = sum(stride * at for stride, at in zip(strides, self._begin, strict=True))
        last = first + sum(stride * (size - 1) for stride, size in zip(strides, self.box.size, strict=True))
        width, offset = self.piece.place.dtype.itemsize, self.piece.place.offset
        return self.piece.file, offset + first * width, offset + (last + 1) * width

    @property
    def _begin(self) -> tuple[int, ...]:
        """Where the box begins in the piece."""
        return tuple(at - begin for at, begin in zip(self.box.begin, self.piece.box.begin, strict=True))

    @property
    def _strides(self) -> tuple[int, ...]:
        shape = self.piece.box.size
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    def copy(self, data: Tensor) -> None:
        """Copy into the target. data: the bytes of the range."""
        source = data.view(self.piece.place.dtype).as_strided(self.box.size, self._strides)
        target = self.target
        for dim, (at, begin, size) in enumerate(zip(self.box.begin, self.target_box.begin, self.box.size, strict=True)):
            target = target.narrow(dim, at - begin, size)
        target.copy_(source)


class ReshardedCopy:
    """One copy, as one rank loads it. Raises CheckpointError, on all ranks, if it must not be loaded. Collective."""

    def __init__(self, tier: LocalTier, name: str, manifest: Manifest, parts: Parts, ranks: Ranks) -> None:
        self._tier, self._name, self._parts, self._ranks = tier, name, parts, ranks
        self._manifest = manifest
        own = ranks.run_on_all(self._check)
        self._indexes: dict[str, Index] = {}  # of all parts, by file
        for each in ranks.all_gather(own):
            self._indexes |= each
        self._indexes = {file.name: self._indexes[file.name] for file in manifest.files}

    def _check(self) -> dict[str, Index]:
        """Check the parts that this rank answers for; return the indexes of those for which it answers alone."""
        found: dict[str, Index] = {}
        parts, node = self._parts, self._tier.node
        for file in self._manifest.files:
            if not parts.has(node, file.name) or parts.responsible_rank(node, file.name) != self._ranks.rank:
                continue
            buffer = open_mapped(self._tier.storage, f"{self._name}/{file.name}", private=True)
            check_part(buffer, file)
            if parts.holders[file.name][0] == node:
                found[file.name] = part.read_index(buffer.bytes)
        return found

    def saved(self, wanted: Iterable[int]) -> Saved:
        """Return what is not sharded, with the own states of these ranks."""
        indexes = [self._indexes[memory_file(rank)] for rank in range(self._manifest.world_size)]
        return Saved(indexes[0].shared, {rank: indexes[rank].own for rank in wanted})

    def fill(self, template: StateDict) -> StateDict:
        """Copy the tensors into those of `template`; return it with the other values. Collective.

        Raises CheckpointError on all ranks if they do not fit.
        """
        reads = self._ranks.run_on_all(lambda: list(self._plan(template)))
        exchange = PieceExchange(self._tier, self._parts, self._name, self._ranks)
        with exchange.with_files(()) as storage:
            exchange.fetch(merge_ranges(read.range for read in reads))
            with torch.no_grad():
                self._ranks.run_on_all(lambda: _copy(storage, self._name, reads))
        values = {path: value for index in reversed(self._indexes.values()) for path, value in index.values.items()}
        tensors = {path for index in self._indexes.values() for path in index.tensors}
        return self._ranks.run_on_all(lambda: filled(template, values, tensors))

    def _plan(self, template: StateDict) -> Iterable[Read]:
        pieces = self._pieces()
        for path, tensor in part.leaves(template):
            target, box = part.local_part(tensor), part.box_of(tensor)
            if not target.numel():
                continue  # this rank has nothing of it, so there may be no box
            found = [each for each in pieces.get(path, ()) if len(each.box.begin) == len(box.begin)] if box is not None else []
            reads = [Read(target, box, each, shared) for each in found if box and (shared := overlap(box, each.box)) is not None]
            if box is None or sum(math.prod(read.box.size) for read in reads) != target.numel():
                raise PartError(f"the copy does not have all of {'.'.join(map(str, path))}, {tuple(tensor.shape)}")
            if any(read.piece.place.dtype != target.dtype for read in reads):
                raise PartError(f"{'.'.join(map(str, path))} is {target.dtype}, the copy has {found[0].place.dtype}")
            yield from reads

    def _pieces(self) -> dict[Path, list[Piece]]:
        """Return the pieces of each tensor, none twice: if several ranks have it, one that this node has is the first choice."""
        found: dict[Path, dict[Box, Piece]] = {}
        here = sorted(self._indexes, key=lambda file: not self._parts.has(self._tier.node, file))
        for file in here:
            for path, place in self._indexes[file].tensors.items():
                if (box := self._indexes[file].boxes.get(path)) is not None:
                    found.setdefault(path, {}).setdefault(box, Piece(file, box, place))
        return {path: list(pieces.values()) for path, pieces in found.items()}


def _copy(storage: Storage, name: str, reads: Sequence[Read]) -> None:
    for read in reads:
        file, begin, end = read.range
        data = torch.empty(end - begin, dtype=torch.uint8)
        with storage.open(f"{name}/{file}") as stream:
            stream.seek(begin)
            if stream.readinto(memoryview(data.numpy())) != len(data):
                raise PartError(f"{file} ends before byte {end}")
        read.copy(data)
