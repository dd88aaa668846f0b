"""One save, from staged tensors to the committed manifest, and the way back; run on all ranks, each with its share.

No exception passes through the collectives of torch.distributed.checkpoint: what a rank cannot write it notes, and tells rank 0
with the list of what it wrote. (torch sends exceptions to rank 0 pickled; one that cannot be pickled leaves the others waiting.)
Checksums are computed of the bytes on their way to the storage; nothing is read again.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory.generations import StaleGroup, refuse_stale
from elastic_ext.checkpoints.directory.layout import MARKERS
from elastic_ext.checkpoints.directory.tiers import rank_of, ranks_of
from elastic_ext.checkpoints.formats.files import checksum
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, StoredFile, encode
from elastic_ext.checkpoints.storage import Entry, Storage

logger = logging.getLogger(__name__)

SHARED_FILE = "shared.pt"


class CheckpointError(ElasticExtError):
    """A checkpoint could not be loaded: damaged, or not one of this model's."""


class Kind(str, Enum):
    """Why a save failed. What to do differs; training goes on in every case."""

    FULL = "full"  # disk or quota: free space
    PERMISSION = "permission"
    THROTTLED = "throttled"  # the storage asks to come back later, or does not answer
    STALE = "stale"  # another group of workers has taken over
    GROUP = "group"  # ranks cannot talk to each other any more
    OTHER = "other"


_KINDS: Mapping[int, Kind] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Kind.FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Kind.PERMISSION),
    **dict.fromkeys((errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.EIO, errno.ETIMEDOUT, errno.ESTALE), Kind.THROTTLED),
    **dict.fromkeys((errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETUNREACH), Kind.THROTTLED),
}


@dataclass(frozen=True)
class SaveFailure:
    """One rank's, in plain values."""

    kind: Kind
    reason: str
    rank: int = 0


def failure_of(error: BaseException, rank: int) -> SaveFailure:
    """Pure. EBUSY is what s3fs makes of 503 SlowDown, EIO what our storage makes of errors that are no OSError."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StaleGroup):
        return SaveFailure(Kind.STALE, str(error), rank)
    if isinstance(error, (TimeoutError, ConnectionError)):
        return SaveFailure(Kind.THROTTLED, text, rank)
    number = error.errno if isinstance(error, OSError) else None
    return SaveFailure(_KINDS.get(number or 0, Kind.OTHER), text, rank)


T = TypeVar("T")


class Ranks:
    """A group of its own for the saves in the background: their messages must not meet the training's."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: None for a single process."""
        self.group = group
        self.rank = dist.get_rank() if group is not None else 0
        self.world = dist.get_world_size() if group is not None else 1

    def all_gather(self, value: T) -> list[T]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value; the others' is ignored."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def from_rank_0(self, decide: Callable[[], T]) -> T:
        """What `decide` returns on rank 0, on all ranks; or the error that it raised."""
        found: tuple[T | None, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                found = decide(), None
            except (ElasticExtError, OSError) as error:
                found = None, error
        value, raised = self.broadcast(found)
        if raised is not None:
            raise raised
        return value  # type: ignore[return-value]

    def together(self, do: Callable[[], T]) -> T:
        """Do it on every rank. Raises CheckpointError on all of them if one could not, so that none goes on alone."""
        result: T | None = None
        failed = ""
        try:
            result = do()
        except (Exception, CheckpointException) as error:
            failed = f"rank {self.rank}: {type(error).__name__}: {error}"
            logger.debug("checkpoint load failed", exc_info=True)
        failures = [each for each in self.all_gather(failed) if each]
        if failures:
            raise CheckpointError("; ".join(failures))
        return result  # type: ignore[return-value]


# The storage as torch.distributed.checkpoint wants it.


class _Hashed(io.RawIOBase):
    """A file to write to, which knows the checksum and the size of what went through.

    error: the storage's, which torch.save hides: its archive, closed too early, raises a RuntimeError instead.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        left = view
        try:
            while left:  # what it does not take at once it takes in pieces
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    @property
    def checksum(self) -> str:
        return str(self._hash.hexdigest())


class _Files(FileSystemBase):
    """`Storage` behind torch's file interface. written: by name in the checkpoint."""

    def __init__(self, storage: Storage, checkpoint: str) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self._temporary: dict[str, io.BytesIO] = {}  # torch renames one small file; on an object store that would be a copy
        self.written: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path)
        if mode == "rb":
            with self._storage.open(name) as file:
                yield file
        elif name.endswith(".tmp"):
            self._temporary[name] = io.BytesIO()
            yield _Unclosed(self._temporary[name])
        else:
            with self._storage.write(name) as file:
                hashed = _Hashed(file)
                try:
                    yield hashed
                except Exception:
                    if hashed.error is not None:
                        raise hashed.error from None
                    raise
            self._note(name, hashed.size, hashed.checksum)

    def put(self, name: str, data: bytes) -> None:
        self._storage.put(name, data)
        self._note(name, len(data), xxhash.xxh3_64_hexdigest(data))

    def _note(self, name: str, size: int, checksum: str) -> None:
        inner = name.removeprefix(f"{self._checkpoint}/")
        self.written[inner] = StoredFile(inner, size, checksum)

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        self.put(str(new_path), self._temporary.pop(str(path)).getvalue())

    def init_path(self, path: Any) -> str:
        return str(path)

    def mkdir(self, path: Any) -> None:
        """The storage makes directories as they are needed."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        """Asked for what an earlier save may have left. What is written replaces what is there."""
        return False

    def rm_file(self, path: Any) -> None:
        self._storage.remove(str(path))


class _Unclosed(io.RawIOBase):
    """The buffer outlives torch's file."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer = buffer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._buffer.write(data)


class _Writer(FileSystemWriter):
    """torch's writer on our storage. failure: why something is missing; torch itself is told that all went well."""

    def __init__(self, files: _Files, checkpoint: str, rank: int) -> None:
        # The storage syncs. Copying ahead would use CUDA from this thread; all tensors are on the CPU already.
        super().__init__(checkpoint, sync_files=False, per_thread_copy_ahead=0)
        self.fs = files  # as torch's FsspecWriter does
        self.path = checkpoint
        self._own_rank = rank
        self.failure: SaveFailure | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001  (told with the report)
            self._failed(error)
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except Exception as error:  # noqa: BLE001  (told with the report)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failure = self.failure or failure_of(error, self._own_rank)
        logger.debug("writing %s failed", self.path, exc_info=True)


class _Reader(FileSystemReader):
    def __init__(self, files: _Files, checkpoint: str) -> None:
        super().__init__(checkpoint)
        self.fs = files
        self.path = checkpoint


# Save.


@dataclass(frozen=True)
class Staged:
    """One rank's part, in memory of its own. failure: why it could not be staged."""

    tensors: Mapping[str, Any] = field(default_factory=dict)
    shared: bytes = b""
    own: bytes = b""
    failure: SaveFailure | None = None


@dataclass(frozen=True)
class Outcome:
    """Of one attempt, the same on all ranks. failure None: committed. size: bytes of the checkpoint."""

    failure: SaveFailure | None
    size: int = 0


def own_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def save(storage: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks) -> Outcome:
    """Write and commit; on all ranks. manifest: without files, rank 0's counts.

    Raises RuntimeError, of torch, when the ranks cannot talk to each other.
    """
    failures = [failure for failure in ranks.all_gather(staged.failure) if failure]
    if failures:
        return Outcome(failures[0])
    files = _Files(storage, name)
    failure = _write(files, name, staged, ranks)
    reports = ranks.all_gather((list(files.written.values()), failure))
    outcome = Outcome(None)
    if ranks.rank == 0:
        failures = [failure for _, failure in reports if failure]
        complete = replace(manifest, files=tuple(file for written, _ in reports for file in written), saved_at=time.time())
        outcome = Outcome(failures[0]) if failures else _commit(storage, name, complete)
    return ranks.broadcast(outcome)


@dataclass(frozen=True)
class LocalTier:
    """This rank's node. nodes: ranks of each, in order; node: this one's number. first: this rank writes what all of it share."""

    storage: Storage
    nodes: tuple[int, ...]
    node: int
    first: bool


def save_on_nodes(tier: LocalTier, fence: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks) -> Outcome:
    """As `save`, each node to its own disk; what all ranks need goes to each. Committed once rank 0's has the manifest."""
    failures = [failure for failure in ranks.all_gather(staged.failure) if failure]
    if failures:
        return Outcome(failures[0])
    files = _Files(tier.storage, name)
    failure = _write(files, name, staged, ranks)
    reports = ranks.all_gather((list(files.written.values()), failure))
    failures = [failure for _, failure in reports if failure]
    if failures:
        return Outcome(failures[0])
    complete = replace(
        manifest, files=tuple(file for written, _ in reports for file in written), saved_at=time.time(), nodes=tier.nodes
    )
    try:
        common = ranks.from_rank_0(lambda: _common(tier.storage, fence, name, complete))
    except (ElasticExtError, OSError) as error:
        return Outcome(failure_of(error, 0))
    for leads in (False, True):  # rank 0's node is the one that puts the manifest to the remote directory
        failure = None
        if tier.first and (ranks.rank == 0) is leads:
            failure = _put_common(tier.storage, name, {MANIFEST: common[MANIFEST]} if leads else common, ranks.rank)
        failures = [failure for failure in ranks.all_gather(failure) if failure]
        if failures:
            return Outcome(failures[0])
    return Outcome(None, complete.size)


def _common(local: Storage, fence: Storage, name: str, manifest: Manifest) -> dict[str, bytes]:
    """The small files that every node has, the manifest last."""
    refuse_stale(fence, manifest.generation)
    names = [file.name for file in manifest.files if rank_of(file.name) is None]
    return {**{each: local.read(f"{name}/{each}") for each in names}, MANIFEST: encode(manifest)}


def _put_common(local: Storage, name: str, files: Mapping[str, bytes], rank: int) -> SaveFailure | None:
    try:
        for file, data in files.items():
            local.put(f"{name}/{file}", data)
    except Exception as error:  # noqa: BLE001  (told with the report)
        return failure_of(error, rank)
    return None


def _write(files: _Files, name: str, staged: Staged, ranks: Ranks) -> SaveFailure | None:
    writer = _Writer(files, name, ranks.rank)
    try:
        dcp.save(dict(staged.tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as error:  # in the planning, and then on all ranks
        return SaveFailure(Kind.OTHER, "; ".join(f"rank {rank}: {each[0]}" for rank, each in error.failures.items()), ranks.rank)
    try:
        files.put(f"{name}/{own_file(ranks.rank)}", staged.own)
        if ranks.rank == 0:
            files.put(f"{name}/{SHARED_FILE}", staged.shared)
    except Exception as error:  # noqa: BLE001  (told with the report)
        return writer.failure or failure_of(error, ranks.rank)
    return writer.failure


def _commit(storage: Storage, name: str, manifest: Manifest) -> Outcome:
    try:
        refuse_stale(storage, manifest.generation)
        storage.put(f"{name}/{MANIFEST}", encode(manifest))
    except Exception as error:
        logger.debug("committing %s failed", name, exc_info=True)
        return Outcome(failure_of(error, 0))
    return Outcome(None, manifest.size)


# Load.


def damage(storage: Storage, name: str, file: StoredFile, checksums: bool) -> str:
    """What is wrong with one file, "" if nothing is."""
    path = f"{name}/{file.name}"
    try:
        found = storage.stat(path)
        if found is None:
            return f"{file.name} is missing"
        if found.size != file.size:
            return f"{file.name} has {found.size} bytes, expected {file.size}"
        if not checksums:
            return ""
        with storage.open(path) as stream:
            found_sum = checksum(stream)
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    return "" if found_sum == file.checksum else f"{file.name} has checksum {found_sum}, expected {file.checksum}"


def read_objects(storage: Storage, name: str, file: str) -> Any:
    """A file of values that are no tensors to reshard. It is unpickled: a checkpoint is trusted as the training script is."""
    return torch.load(io.BytesIO(storage.read(f"{name}/{file}")), map_location="cpu", weights_only=False)


def read_tensors(storage: Storage, name: str, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Fill in `tensors`, each rank what it holds of them. Raises CheckpointException, KeyError ... of torch's."""
    reader = _Reader(_Files(storage, name), name)
    dcp.load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)


@dataclass(frozen=True)
class Parts:
    """Who has which files of a checkpoint of the local tier, the same on all ranks.

    Attributes:
        nodes: ranks of each node of this round; node: this rank's.
        holders: nodes that have a file, by its name.
    """

    nodes: tuple[int, ...]
    node: int
    holders: Mapping[str, tuple[int, ...]]

    def has(self, node: int, file: str) -> bool:
        return node in self.holders.get(file, ())

    def agent(self, node: int, file: str) -> int:
        """The rank of a node that reads a file there, or keeps what is sent of it: they share the work. Pure."""
        ranks = ranks_of(self.nodes, node)
        return ranks[(rank_of(file) or 0) % len(ranks)]


@contextmanager
def of_all_nodes(tier: LocalTier, parts: Parts, name: str, ranks: Ranks, files: Iterable[StoredFile]) -> Iterator[Storage]:
    """The local directory, with what this node lacks of these small files, as the other nodes have sent it. Collective.

    What is sent is kept in the local directory until the context ends. Raises CheckpointError on all ranks.
    """
    ranks.together(lambda: _remove_fetched(tier.storage) if tier.first else None)
    try:
        _fetch(tier, parts, name, ranks, [(file.name, 0, file.size) for file in files if not parts.has(tier.node, file.name)])
        yield _WithFetched(tier.storage)
    finally:
        try:
            if tier.first:
                _remove_fetched(tier.storage)
        except OSError as error:  # the next load removes it
            logger.warning("what other nodes have sent stays in %s: %s", tier.storage.path(FETCHED), error)


def read_tensors_of_nodes(
    tier: LocalTier, storage: Storage, parts: Parts, name: str, tensors: dict[str, Any], ranks: Ranks
) -> None:
    """As `read_tensors`, from the nodes' own disks: what a rank needs of another node's files that node sends.

    storage: of `of_all_nodes`, with `.metadata`. A replicated tensor is written by one rank only.
    """
    reader = _NodesReader(_Files(storage, name), name, tier, parts, ranks)
    dcp.load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)


FETCHED = f"{MARKERS}/fetched"
SENT_AT_ONCE = 64 << 20  # bytes of memory that it costs each rank
NEAR = 1 << 20  # two ranges that are no further apart are sent as one


def _remove_fetched(local: Storage) -> None:
    try:
        local.remove_tree(FETCHED)
    except FileNotFoundError:
        pass


Range = tuple[str, int, int]
"""(file, first byte, first byte behind it)."""


def joined(ranges: Iterable[Range], near: int = NEAR) -> list[Range]:
    """The same bytes in fewer ranges, sorted, with the gaps up to `near` between them. Pure."""
    found: list[Range] = []
    for file, begin, end in sorted(ranges):
        if found and found[-1][0] == file and begin - found[-1][2] <= near:
            found[-1] = file, found[-1][1], max(end, found[-1][2])
        else:
            found.append((file, begin, end))
    return found


class _WithFetched(Storage):
    """A node's local directory, and before it what other nodes have sent of their files."""

    def __init__(self, local: Storage) -> None:
        super().__init__(local.address)
        self._local = local

    def path(self, name: str) -> str:
        return self._local.path(name)

    def stat(self, name: str) -> Entry | None:
        return self._local.stat(f"{FETCHED}/{name}") or self._local.stat(name)

    def open(self, name: str) -> Any:
        fetched = f"{FETCHED}/{name}"
        return self._local.open(fetched if self._local.stat(fetched) is not None else name)


class _NodesReader(_Reader):
    def __init__(self, files: _Files, checkpoint: str, tier: LocalTier, parts: Parts, ranks: Ranks) -> None:
        super().__init__(files, checkpoint)
        self._tier, self._parts, self._ranks = tier, parts, ranks

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Collective. Raises OSError on all ranks if one could not read or keep what was sent."""
        places = [self.storage_data[item.storage_index] for item in plan.items]
        wanted = [
            (place.relative_path, place.offset, place.offset + place.length)
            for place in places
            if not self._parts.has(self._tier.node, place.relative_path)
        ]
        _fetch(self._tier, self._parts, self.path, self._ranks, joined(wanted))
        return super().read_data(plan, planner)


@dataclass(frozen=True, order=True)
class Piece:
    """What is sent at once. number: of its place in its file; keepers: ranks that keep it, one of each node that wants it."""

    number: int
    file: str
    begin: int
    end: int
    sender: int
    keepers: tuple[int, ...]


def pieces(parts: Parts, asked: Sequence[tuple[int, Sequence[Range]]], most: int = SENT_AT_ONCE) -> list[Piece]:
    """What is sent, in the order in which all ranks take part. Pure.

    asked: (node, ranges) of each rank. First pieces come first: so all pairs of nodes send side by side, where each node of a row
    wants its neighbour's files.
    """
    wanting: dict[str, list[tuple[int, Range]]] = {}
    for node, ranges in asked:
        for found in ranges:
            wanting.setdefault(found[0], []).append((node, found))
    sent = []
    for file, wanted in wanting.items():
        for _, begin, end in joined(found for _, found in wanted):
            for number, first in enumerate(range(begin, end, most)):
                last = min(end, first + most)
                nodes = sorted({node for node, found in wanted if found[1] < last and first < found[2]})
                if not nodes:
                    continue  # a gap between two ranges
                holder = parts.holders[file][nodes[0] % len(parts.holders[file])]
                keepers = tuple(parts.agent(node, file) for node in nodes)
                sent.append(Piece(number, file, first, last, parts.agent(holder, file), keepers))
    return sorted(sent)


def _fetch(tier: LocalTier, parts: Parts, name: str, ranks: Ranks, wanted: Sequence[Range]) -> None:
    """Collective. Raises CheckpointError on all ranks if one could not read or keep what was sent."""
    failed = ""
    for piece in pieces(parts, ranks.all_gather((tier.node, wanted))):
        try:
            _send(tier.storage, name, piece, ranks)
        except OSError as error:
            failed = failed or f"rank {ranks.rank}: {piece.file}: {error}"
    failures = [each for each in ranks.all_gather(failed) if each]
    if failures:
        raise CheckpointError("; ".join(failures))


def _send(local: Storage, name: str, piece: Piece, ranks: Ranks) -> None:
    """From the node that has it to those that want it. Raises OSError once it is through: the others take part in it."""
    alone = len(piece.keepers) == 1
    if alone and ranks.rank not in (piece.sender, *piece.keepers):
        return
    data = torch.zeros(piece.end - piece.begin, dtype=torch.uint8)
    failure: OSError | None = None
    if ranks.rank == piece.sender:
        try:
            _read(local, f"{name}/{piece.file}", piece.begin, data)
        except OSError as error:
            failure = error
    if not alone:
        dist.broadcast(data, src=piece.sender, group=ranks.group)
    elif ranks.rank == piece.sender:
        dist.send(data, dst=piece.keepers[0], group=ranks.group)
    else:
        dist.recv(data, src=piece.sender, group=ranks.group)
    if failure is not None:
        raise failure
    if ranks.rank in piece.keepers:
        _keep(local.path(f"{FETCHED}/{name}/{piece.file}"), piece.begin, data)


def _read(local: Storage, path: str, first: int, piece: torch.Tensor) -> None:
    with local.open(path) as stream:
        stream.seek(first)
        if stream.readinto(memoryview(piece.numpy())) != len(piece):
            raise OSError(errno.EIO, f"it ends before byte {first + len(piece)}")


def _keep(path: str, first: int, piece: torch.Tensor) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.seek(first)
        file.write(memoryview(piece.numpy()))


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
