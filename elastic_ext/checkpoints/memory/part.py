"""One rank's part of a copy in memory: the content of one buffer, the files of memory that are its buffers, and how it is loaded.

Version 1, in the byte order of the host, because a part never leaves hosts of one kind:

    8 bytes    MAGIC, with the version
    2 words    unsigned 64-bit: where the index begins, and its length
    tensors    each at a multiple of ALIGNMENT, contiguous
    index      pickled: an `Index`
    the rest of the file means nothing, but its checksum covers it

Of tensors that all ranks share, each rank of a node keeps a share, so that a node keeps one copy however many ranks it has; a
load puts them together. As in torch.distributed.checkpoint, these are all that are not DTensors. Of DTensors, each rank keeps its
own local part. Gradients of single ranks stay with them.

A load: where as many nodes run as many ranks as made the copy, each rank maps the parts of its node, checks them, and copies them
into the state in place; a node that lacks some gets them from others first. Else each saved piece of a tensor is a box in the
whole tensor, and so is what a rank needs of it: a rank reads the bytes of their overlaps, from whichever nodes have the parts
(`ranks.PieceExchange`).
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import pickle
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_ext.checkpoints.directory import own_files, tiers
from elastic_ext.checkpoints.ranks import FETCHED, Parts, PieceExchange, Range, Ranks, merge_ranges, read_bytes
from elastic_ext.checkpoints.state import Capture, StateDict, UnshardedState, dumps, local_part
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

MAGIC = b"EXTMEM\0\1"
ALIGNMENT = 64  # bytes
SLACK = 64 << 10  # bytes; the index of the next copy may be a little longer
PAGE = 4096
_HEAD = struct.Struct("=8sQQ")

Path = tuple[Any, ...]
"""Where a value is in the nested state: keys of mappings, indices of lists."""

Common = tuple[Path, torch.dtype, tuple[int, ...]]


class PartError(ValueError):
    """A buffer does not hold the part of a copy, or the part does not fit the state."""


@dataclass(frozen=True)
class TensorPlace:
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True)
class Box:
    """A part of a tensor: the index of its first element, and its shape."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.begin, self.size, strict=True))


@dataclass(frozen=True)
class Index:
    tensors: Mapping[Path, TensorPlace]  # where they are
    boxes: Mapping[Path, Box]  # what they are of the whole tensors; without those whose local parts are no single box
    values: Mapping[Path, Any]  # those between the tensors
    shared: StateDict  # the state that all ranks share
    own: StateDict  # this rank's own


@dataclass(frozen=True)
class Planned:
    """A part before it is written."""

    tensors: Mapping[Path, Tensor]  # live, by path, in the order of their places
    places: Mapping[Path, TensorPlace]
    index: bytes  # pickled
    common: Sequence[Common] = ()  # path, type and shape of the tensors of which each rank of the node keeps a share

    @property
    def end(self) -> int:
        """Where the tensors end and the index begins."""
        return max((each.offset + each.size for each in self.places.values()), default=ALIGNMENT)

    @property
    def size(self) -> int:
        """Bytes that the part needs."""
        return self.end + len(self.index)

    @property
    def capacity(self) -> int:
        """Bytes that a new buffer for this part and later ones should have."""
        return -(-(self.end + len(self.index) * 5 // 4 + SLACK) // PAGE) * PAGE


def plan(captured: Capture, local_rank: int, local_world: int) -> Planned:
    """Lay out the part of the rank with this local rank, of local_world ranks on the node. Copies nothing but small values.

    Raises TypeError for tensors that are not strided, and any error of pickling.
    """
    tensors, values = dict(leaves(captured.tensors)), dict(other_leaves(captured.tensors))
    for path, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise TypeError(f"{shown(path)} is a {tensor.layout} tensor; only strided ones can be copied to memory")
    # What all ranks share.
    common = [path for path, tensor in tensors.items() if not isinstance(tensor, DTensor) and path[0] != "rank_gradients"]
    owners = shares([(path, tensors[path].nbytes) for path in common], local_world)
    elsewhere = {path for path, owner in zip(common, owners, strict=True) if owner != local_rank}
    mine = {path: local_part(tensor) for path, tensor in tensors.items() if path not in elsewhere}
    places, offset = {}, ALIGNMENT
    for path, tensor in mine.items():
        places[path] = TensorPlace(offset, tensor.dtype, tuple(tensor.shape))
        offset += -(-places[path].size // ALIGNMENT) * ALIGNMENT
    boxes = {path: box for path in mine if (box := box_of(tensors[path])) is not None}
    index = Index(places, boxes, values, captured.shared, captured.own)
    kinds = [(path, tensors[path].dtype, tuple(tensors[path].shape)) for path in common]
    return Planned(mine, places, dumps(index), kinds)


# Of each way in which tensors are sharded. For a long dimension torch needs more time to say this than it takes to copy the part.
_BOXES: dict[tuple[Any, ...], Box | None] = {}


def shares(common: Sequence[tuple[Path, int]], owners: int) -> Iterator[int]:
    """Yield, for each of these tensors, which of the owners keeps it: the one with the fewest bytes so far. Pure."""
    loads = [0] * owners
    for _, size in common:
        owner = loads.index(min(loads))
        loads[owner] += max(size, 1)
        yield owner


def box_of(tensor: Tensor) -> Box | None:
    """Return what this rank's part of a tensor is of the whole; None if it is no single box."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    key = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    if key not in _BOXES:
        chunks = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint calls
        one = len(chunks) == 1 and tuple(chunks[0].sizes) == tuple(local_part(tensor).shape)
        _BOXES[key] = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if one else None
    return _BOXES[key]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested mappings and lists."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, each in _children(value):
            yield from leaves(each, (*path, key))


def other_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the values between the tensors."""
    if is_nested(value):
        for key, each in _children(value):
            yield from other_leaves(each, (*path, key))
    elif not isinstance(value, Tensor):
        yield path, value


def is_nested(value: Any) -> bool:
    """Return whether each item of a value has a path of its own, as in a mapping or a list with tensors.

    Any other list is one value, as for torch.distributed.checkpoint: it may be longer than the one that a load begins with.
    """
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and any(True for _ in leaves(value)))


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def view(memory: Tensor, place: TensorPlace) -> Tensor:
    """Return the tensor at a place in a buffer. memory: its bytes."""
    return memory[place.offset : place.offset + place.size].view(place.dtype).view(place.shape)


def write_index(memory: memoryview, planned: Planned) -> None:
    """Write what is not a tensor. The tensors are written to their places before or after."""
    memory[planned.end : planned.size] = planned.index
    memory[: _HEAD.size] = _HEAD.pack(MAGIC, planned.end, len(planned.index))


def read_index(memory: memoryview) -> Index:
    """Return the index of a part whose checksum is right. It unpickles, as for any checkpoint. Raises PartError."""
    if len(memory) < _HEAD.size:
        raise PartError(f"it has {len(memory)} bytes, expected a part of a copy in memory")
    magic, begin, length = _HEAD.unpack(memory[: _HEAD.size])
    if magic != MAGIC or begin + length > len(memory):
        raise PartError(f"it begins with {magic!r}, expected {MAGIC!r}: it is not a part of a copy in memory of this version")
    index = pickle.loads(memory[begin : begin + length])
    if not isinstance(index, Index):
        raise PartError(f"its index is a {type(index).__name__}, expected an Index")
    return index


def shown(path: Path) -> str:
    return ".".join(map(str, path))


# Buffers.

SPARE = f"{own_files.MARKERS}/spare"
BUFFERS = 2  # per rank
SLICE = 64 << 20  # bytes, see `populate`


@dataclass(frozen=True)
class Buffer:
    """A mapped file. name: in the tier's directory. tensor: all its bytes."""

    name: str
    tensor: Tensor

    @property
    def size(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self.tensor.numpy())


def create(storage: Storage, name: str, size: int) -> Buffer:
    """Make a buffer. All its memory is taken now: a hole that a full tmpfs cannot fill would kill the writer. Raises OSError."""
    path = storage.path(name)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        tensor = torch.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    populate(tensor)
    return Buffer(name, tensor)


def populate(memory: Tensor) -> None:
    """Touch each page, so that the first copy does not wait for page faults.

    With MAP_POPULATE the kernel would do it, but Python keeps its lock for as long, and training stands still; torch does not.
    For a slice, torch takes no more than one thread.
    """
    for slice_ in memory.split(SLICE):
        slice_[:: mmap.PAGESIZE].zero_()


def open_mapped(storage: Storage, name: str, private: bool = False) -> Buffer:
    """Map an existing buffer. private: what is written to the mapping does not reach the file. Raises OSError."""
    descriptor = os.open(storage.path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            raise OSError(errno.EIO, "it is empty", storage.path(name))
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    return Buffer(name, torch.frombuffer(memory, dtype=torch.uint8))


class Buffers:
    def __init__(self, storage: Storage, rank: int, limit: int) -> None:
        """limit: bytes that the buffers may have together."""
        self._storage, self._rank, self._limit = storage, rank, limit
        self._kept: Buffer | None = None
        self._spares: list[Buffer] = []
        self._made = 0
        self.kept = ""  # name of the last committed copy, the only one that must not be overwritten; "" before the first

    def tensors(self) -> list[Tensor]:
        """Return the bytes of each buffer."""
        return [each.tensor for each in (self._kept, *self._spares) if each is not None]

    def fit(self, size: int) -> bool:
        """Return whether a part of this size can be written now."""
        return self.spare_size >= size

    @property
    def spare(self) -> Buffer:
        """The next buffer. Only if one is free, see `spare_size`."""
        return self._spares[0]

    @property
    def spare_size(self) -> int:
        """Bytes of the next buffer; 0: no buffer is free."""
        return self._spares[0].size if self._spares else 0

    def size_for(self, planned: Planned) -> int:
        """Return the size of a new buffer for a part: that of the kept one if the part fits it, so that all are alike."""
        kept = self._kept.size if self._kept is not None else 0
        return kept if kept >= planned.size else planned.capacity

    def keep(self, name: str, reuse: bool = True) -> None:
        """Take the buffers as an earlier worker of this rank has left them. Only this copy still exists. Raises OSError.

        name: of the copy that was loaded; "" for none. reuse: whether a buffer of this rank holds its part, and is to be written
        again.
        """
        self._spares = []
        self._kept = open_mapped(self._storage, f"{name}/{tiers.memory_file(self._rank)}") if name and reuse else None
        self.kept = name

    @property
    def keeps_others(self) -> bool:
        """Whether the copy that is kept was made by other ranks. It takes the memory of a buffer of each, but cannot be one."""
        return bool(self.kept) and self._kept is None

    def allocate(self, capacity: int) -> None:
        """Make the buffers that are missing, or too small. Raises OSError, with none of them left.

        A copy that is kept takes the place of one.
        """
        self.release()
        if capacity * BUFFERS > self._limit:
            raise OSError(
                errno.ENOMEM,
                f"two copies of its state need {capacity * BUFFERS} bytes, its share of memory_limit is {self._limit}",
            )
        try:
            for _ in range(BUFFERS - bool(self.kept)):
                self._spares.append(create(self._storage, self._spare_name(), capacity))
        except OSError:
            self.release()
            raise

    def _spare_name(self) -> str:
        self._made += 1
        return f"{SPARE}/{os.getpid()}.{self._made}.{tiers.memory_file(self._rank)}"

    def rest(self) -> None:
        """Move the buffers that hold nothing out of the copies in which they are. Raises OSError."""
        self._spares = [each if each.name.startswith(SPARE) else self._moved(each, self._spare_name()) for each in self._spares]

    def _moved(self, buffer: Buffer, name: str) -> Buffer:
        path = self._storage.path(name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.rename(self._storage.path(buffer.name), path)
        return replace(buffer, name=name)

    def release(self) -> None:
        """Give back the memory of the buffers that hold nothing."""
        for spare in self._spares:
            try:
                os.unlink(self._storage.path(spare.name))
            except FileNotFoundError:
                continue
        self._spares = []

    def begin(self, name: str) -> Buffer:
        """Return the buffer for a new copy, after moving it out of the older copy that it holds. Raises OSError."""
        self._spares[0] = self._moved(self._spares[0], f"{name}/{tiers.memory_file(self._rank)}")
        return self._spares[0]

    def committed(self, name: str) -> None:
        """Note that the copy of the last `begin` is committed. The buffer of the copy before it is next."""
        before, self._kept = self._kept, self._spares.pop(0)
        if before is not None:
            self._spares.append(before)
        self.kept = name

    def free(self) -> None:
        """Let the buffer that is kept be written again: a newer copy is committed, of which these buffers hold no part."""
        if self._kept is not None:
            self._spares.append(self._kept)
        self._kept, self.kept = None, ""


# A load.


def fetch_parts(parts: Parts, ranks: Ranks) -> Parts:
    """Get the parts of its own ranks that a node lacks, as one that has replaced another does; return which node has which then.

    Collective, for a copy that as many ranks on as many nodes have made. Raises CheckpointError on all ranks.
    """
    if parts.fit:
        return parts
    tier, name, manifest = parts.tier, parts.name, parts.manifest
    began, storage = time.monotonic(), tier.storage
    own = {tiers.memory_file(rank) for rank in tiers.ranks_of(tier.nodes, tier.node)}
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
    here = {tiers.memory_file(rank): node for node in range(len(tier.nodes)) for rank in tiers.ranks_of(tier.nodes, node)}
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
            file = files[tiers.memory_file(rank)]
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
            found |= {path: view(memory, place) for path, place in places.items()}
        with torch.no_grad():
            _copy(template, found)
        return filled(template, self._index(rank).values, found)

    def _index(self, rank: int) -> Index:
        return read_index(self._buffers[rank].bytes)


def check_part(buffer: Buffer, file: own_files.StoredFile, content: bool = True) -> None:
    """Raise PartError unless the buffer holds what the manifest says. content: not only as many bytes."""
    if buffer.size != file.size:
        raise PartError(f"{file.name} has {buffer.size} bytes, expected {file.size}")
    if content and (found := own_files.checksum_of(buffer.bytes)) != file.checksum:
        raise PartError(f"{file.name} has checksum {found}, expected {file.checksum}")


def _copy(template: StateDict, found: Mapping[Path, Tensor]) -> None:
    for path, tensor in leaves(template):
        target, source = local_part(tensor), found.get(path)
        if source is None or source.shape != target.shape or source.dtype != target.dtype:
            held = "nothing" if source is None else f"{source.dtype} {tuple(source.shape)}"
            raise PartError(f"{shown(path)} is {target.dtype} {tuple(target.shape)}, the copy has {held}")
        target.copy_(source)


def filled(template: StateDict, values: Mapping[Path, Any], tensors: Iterable[Path]) -> StateDict:
    """Return a template, whose tensors are loaded, with a copy's values between them. tensors: those that the copy has.

    Raises PartError if one of the two has what the other lacks: part of the state would be lost without a word.
    """
    wanted = {path for path, _ in other_leaves(template)}
    if missing := wanted - values.keys():
        raise PartError(f"the copy does not have {_some(missing)}")
    wanted |= {path for path, _ in leaves(template)}
    objects = {path[:2] for path in wanted}  # an object that the script no longer has at all is left out, as from disk
    if left := {path for path in {*values, *tensors} - wanted if path[:2] in objects}:
        raise PartError(f"there is no place for {_some(left)} of the copy")
    return cast(StateDict, _filled(template, (), values))


def _filled(value: Any, path: Path, values: Mapping[Path, Any]) -> Any:
    if isinstance(value, Tensor):
        return value
    if not is_nested(value):
        return values[path]
    if isinstance(value, Mapping):
        return {key: _filled(each, (*path, key), values) for key, each in value.items()}
    items = [_filled(each, (*path, number), values) for number, each in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def _some(paths: Set[Path]) -> str:
    return shown(min(paths, key=shown))


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
                found[file.name] = read_index(buffer.bytes)
        return found

    def saved(self, wanted: Iterable[int]) -> UnshardedState:
        """Return what is not sharded, with the own states of these ranks."""
        indexes = [self._indexes[tiers.memory_file(rank)] for rank in range(self._parts.manifest.world_size)]
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
        for path, tensor in leaves(template):
            target, box = local_part(tensor), box_of(tensor)
            if not target.numel():
                continue  # this rank has nothing of it, so there may be no box
            found = [each for each in pieces.get(path, ()) if len(each.box.begin) == len(box.begin)] if box is not None else []
            reads = [Read(target, box, each, shared) for each in found if box and (shared := overlap(box, each.box)) is not None]
            if box is None or sum(math.prod(read.box.size) for read in reads) != target.numel():
                raise PartError(f"the copy does not have all of {shown(path)}, {tuple(tensor.shape)}")
            if any(read.piece.place.dtype != target.dtype for read in reads):
                raise PartError(f"{shown(path)} is {target.dtype}, the copy has {found[0].place.dtype}")
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
