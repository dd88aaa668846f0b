"""Load a copy in memory.

Where as many nodes run as many ranks as made it, each maps the parts of its node, checks them, and copies them into the state
in place; a node that lacks some gets them from others first. Else each saved piece of a tensor is a box in the whole tensor,
and so is what a rank needs of it: a rank reads the bytes of their overlaps, from whichever nodes have the parts
(`local_tier.PieceExchange`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.own_files import StoredFile, checksum_of
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.local_tier import FETCHED, Parts, PieceExchange, Range, merge_ranges, read_bytes
from elastic_ext.checkpoints.memory import part
from elastic_ext.checkpoints.memory.part import Box, Buffer, Index, PartError, Path, TensorPlace, open_mapped
from elastic_ext.checkpoints.ranks import Ranks
from elastic_ext.checkpoints.state import local_part
from elastic_ext.checkpoints.state.capture import StateDict, UnshardedState

logger = logging.getLogger(__name__)


def fetch_parts(parts: Parts, ranks: Ranks) -> Parts:
    """Get the parts of its own ranks that a node lacks, as one that has replaced another does; return which node has which then.

    Collective, for a copy that as many ranks on as many nodes have made. Raises CheckpointError on all ranks.
    """
    if parts.fit:
        return parts
    tier, name, manifest = parts.tier, parts.name, parts.manifest
    began, storage = time.monotonic(), tier.storage
    own = {memory_file(rank) for rank in tiers.ranks_of(tier.nodes, tier.node)}
    lacking = [file for file in manifest.files if file.name in own and not parts.has(tier.node, file.name)]

    def keep() -> None:
        if tier.first and lacking:
            os.makedirs(storage.path(name), mode=0o700, exist_ok=True)
            for file in lacking:
                os.replace(storage.path(f"{FETCHED}/{name}/{file.name}"), storage.path(f"{name}/{file.name}"))
            tiers.put_manifest(storage, name, manifest)
            logger.info("%s parts of %s came from other nodes in %.3g s", len(lacking), name, time.monotonic() - began)

    with PieceExchange(parts, ranks).with_files(lacking):
        ranks.run_on_all(keep)
    here = {memory_file(rank): node for node in range(len(tier.nodes)) for rank in tiers.ranks_of(tier.nodes, node)}
    holders = {file: tuple({*nodes, here.get(file, nodes[0])}) for file, nodes in parts.holders.items()}
    return replace(parts, holders=holders)


class MemoryCopy:
    """One copy, as one rank loads it on a node that has all its ranks' parts.

    Raises CheckpointError, on all ranks, if it must not be loaded. Collective.
    """

    def __init__(self, parts: Parts, ranks: Ranks) -> None:
        self._parts, self._ranks = parts, ranks
        self._buffers: dict[int, Buffer] = {}  # by rank, of this node
        ranks.run_on_all(self._check)

    def _check(self) -> None:
        """Map the parts of this node, and compare the checksum of this rank's. The others do the same with theirs."""
        tier, files = self._parts.tier, {file.name: file for file in self._parts.manifest.files}
        for rank in tiers.ranks_of(tier.nodes, tier.node):
            file = files[memory_file(rank)]
            self._buffers[rank] = buffer = open_mapped(tier.storage, f"{self._parts.name}/{file.name}", private=True)
            check_part(buffer, file, content=rank == self._ranks.rank)

    def saved(self, wanted: Iterable[int]) -> UnshardedState:
        """Return what is not sharded, with the own states of these ranks of this node. Only after all ranks have made this."""
        return UnshardedState(self._index(self._ranks.rank).shared, {rank: self._index(rank).own for rank in wanted})

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


def check_part(buffer: Buffer, file: StoredFile, content: bool = True) -> None:
    """Raise PartError unless the buffer holds what the manifest says. content: not only as many bytes."""
    if buffer.size != file.size:
        raise PartError(f"{file.name} has {buffer.size} bytes, expected {file.size}")
    if content and (found := checksum_of(buffer.bytes)) != file.checksum:
        raise PartError(f"{file.name} has checksum {found}, expected {file.checksum}")


def _copy(template: StateDict, found: Mapping[Path, Tensor]) -> None:
    for path, tensor in part.leaves(template):
        target, source = local_part(tensor), found.get(path)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            held = "nothing" if source is None else f"{source.dtype} {tuple(source.shape)}"
            raise PartError(f"{part.shown(path)} is {target.dtype} {tuple(target.shape)}, the copy has {held}")
        target.copy_(source)


def filled(template: StateDict, values: Mapping[Path, Any], tensors: Iterable[Path]) -> StateDict:
    """Return a template, whose tensors are loaded, with a copy's values between them. tensors: those that the copy has.

    Raises PartError if one of the two has what the other lacks: part of the state would be lost without a word.
    """
    wanted = {path for path, _ in part.other_leaves(template)}
    if missing := wanted - values.keys():
        raise PartError(f"the copy does not have {_some(missing)}")
    wanted |= {path for path, _ in part.leaves(template)}
    objects = {path[:2] for path in wanted}  # an object that the script no longer has at all is left out, as from disk
    if left := {path for path in {*values, *tensors} - wanted if path[:2] in objects}:
        raise PartError(f"there is no place for {_some(left)} of the copy")
    return cast(StateDict, _filled(template, (), values))


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
    place: TensorPlace


@dataclass(frozen=True)
class Read:
    """What one rank copies from one piece: the part `box` of the whole tensor into that of the target."""

    target: Tensor  # the rank's local part of the tensor, which is `target_box` of the whole
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

    def __init__(self, parts: Parts, ranks: Ranks) -> None:
        self._parts, self._ranks = parts, ranks
        own = ranks.run_on_all(self._check)
        self._indexes: dict[str, Index] = {}  # of all parts, by file
        for each in ranks.all_gather(own):
            self._indexes |= each
        self._indexes = {file.name: self._indexes[file.name] for file in parts.manifest.files}

    def _check(self) -> dict[str, Index]:
        """Check the parts that this rank answers for; return the indexes of those for which it answers alone."""
        found: dict[str, Index] = {}
        parts, tier, node = self._parts, self._parts.tier, self._parts.tier.node
        for file in parts.manifest.files:
            if not parts.has(node, file.name) or parts.responsible_rank(node, file.name) != self._ranks.rank:
                continue
            buffer = open_mapped(tier.storage, f"{parts.name}/{file.name}", private=True)
            check_part(buffer, file)
            if parts.holders[file.name][0] == node:
                found[file.name] = part.read_index(buffer.bytes)
        return found

    def saved(self, wanted: Iterable[int]) -> UnshardedState:
        """Return what is not sharded, with the own states of these ranks."""
        indexes = [self._indexes[memory_file(rank)] for rank in range(self._parts.manifest.world_size)]
        return UnshardedState(indexes[0].shared, {rank: indexes[rank].own for rank in wanted})

    def fill(self, template: StateDict) -> StateDict:
        """Copy the tensors into those of `template`; return it with the other values. Collective.

        Raises CheckpointError on all ranks if they do not fit.
        """
        reads = self._ranks.run_on_all(lambda: list(self._plan(template)))
        exchange = PieceExchange(self._parts, self._ranks)
        with exchange.with_files(()) as storage:

            def copy() -> None:
                for read in reads:
                    file, begin, end = read.range
                    data = torch.empty(end - begin, dtype=torch.uint8)
                    read_bytes(storage, f"{self._parts.name}/{file}", begin, data)
                    read.copy(data)

            exchange.fetch(merge_ranges(read.range for read in reads))
            with torch.no_grad():
                self._ranks.run_on_all(copy)
        values = {path: value for index in reversed(self._indexes.values()) for path, value in index.values.items()}
        tensors = {path for index in self._indexes.values() for path in index.tensors}
        return self._ranks.run_on_all(lambda: filled(template, values, tensors))

    def _plan(self, template: StateDict) -> Iterable[Read]:
        pieces = self._pieces()
        for path, tensor in part.leaves(template):
            target, box = local_part(tensor), part.box_of(tensor)
            if not target.numel():
                continue  # this rank has nothing of it, so there may be no box
            found = [each for each in pieces.get(path, ()) if len(each.box.begin) == len(box.begin)] if box is not None else []
            reads = [Read(target, box, each, shared) for each in found if box and (shared := overlap(box, each.box)) is not None]
            if box is None or sum(math.prod(read.box.size) for read in reads) != target.numel():
                raise PartError(f"the copy does not have all of {part.shown(path)}, {tuple(tensor.shape)}")
            if any(read.piece.place.dtype != target.dtype for read in reads):
                raise PartError(f"{part.shown(path)} is {target.dtype}, the copy has {found[0].place.dtype}")
            yield from reads

    def _pieces(self) -> dict[Path, list[Piece]]:
        """Return the pieces of each tensor, none twice: if several ranks have it, one that this node has is the first choice."""
        found: dict[Path, dict[Box, Piece]] = {}
        here = sorted(self._indexes, key=lambda file: not self._parts.has(self._parts.tier.node, file))
        for file in here:
            for path, place in self._indexes[file].tensors.items():
                if (box := self._indexes[file].boxes.get(path)) is not None:
                    found.setdefault(path, {}).setdefault(box, Piece(file, box, place))
        return {path: list(pieces.values()) for path, pieces in found.items()}
