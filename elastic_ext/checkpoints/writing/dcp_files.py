"""Our storage behind the file interfaces of torch.distributed.checkpoint.

No exception passes through torch's collectives; `Writer` records what a rank cannot write. (torch pickles exceptions for rank 0;
an unpicklable one would leave the other ranks waiting.) Checksums are computed while the bytes are written; nothing is read back.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from elastic_ext.checkpoints.directory.own_files import StoredFile, checksum_of
from elastic_ext.checkpoints.ranks import PieceExchange, Ranks, SaveFailure, failure_of, merge_ranges
from elastic_ext.checkpoints.state import StateDict
from elastic_ext.checkpoints.storage import Storage

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc from Python 3.12 on

logger = logging.getLogger(__name__)

# mypy: allow-subclassing-any


class HashedFile(io.RawIOBase):
    """A writable file that counts and hashes the bytes.

    error: the storage's first error. torch.save hides it, because closing its unfinished archive raises a RuntimeError.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        left = view
        try:
            while left:  # a short write
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


class Files(FileSystemBase):
    """`Storage` as torch's file system. written: the files written so far, by name in the checkpoint."""

    def __init__(self, storage: Storage, checkpoint: str) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self._temporary: dict[str, io.BytesIO] = {}  # torch renames one small file, which would be a copy on an object store
        self.written: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(self, path: object, mode: str) -> Iterator[IO[bytes] | io.RawIOBase]:
        name = str(path)
        if mode == "rb":
            with self._storage.open(name) as file:
                yield file
        elif name.endswith(".tmp"):
            self._temporary[name] = _KeptBuffer()
            yield self._temporary[name]
        else:
            with self._storage.write(name) as file:
                hashed = HashedFile(file)
                try:
                    yield hashed
                except Exception:
                    if hashed.error is not None:
                        raise hashed.error from None
                    raise
            self._note(name, hashed.size, hashed.checksum)

    def put(self, name: str, data: bytes) -> None:
        """Write a whole file. Raises OSError."""
        self._storage.put(name, data)
        self._note(name, len(data), checksum_of(data))

    def _note(self, name: str, size: int, checksum: str) -> None:
        inner = name.removeprefix(f"{self._checkpoint}/")
        self.written[inner] = StoredFile(inner, size, checksum)

    def concat_path(self, path: object, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: object, new_path: object) -> None:
        self.put(str(new_path), self._temporary.pop(str(path)).getvalue())

    def init_path(self, path: object) -> str:
        return str(path)

    def mkdir(self, path: object) -> None:
        """Do nothing: the storage makes directories as needed."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def exists(self, path: object) -> bool:
        """Return False. torch asks about leftovers of an earlier save, which a write replaces anyway."""
        return False

    def rm_file(self, path: object) -> None:
        self._storage.remove(str(path))


class _KeptBuffer(io.BytesIO):
    def close(self) -> None:
        """Do nothing: torch closes the file before it renames it."""


class Writer(FileSystemWriter):
    """torch's writer on our storage. failure: why files are missing; torch sees a write that succeeded."""

    def __init__(self, files: Files, checkpoint: str, rank: int) -> None:
        # The storage syncs. Copy-ahead would use CUDA from this thread, and all tensors are already on the CPU.
        super().__init__(checkpoint, sync_files=False, per_thread_copy_ahead=0)
        self.fs = files  # as torch's FsspecWriter does
        self.path = checkpoint
        self._own_rank = rank
        self.failure: SaveFailure | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001  (reported with the files)
            self._note_failure(error)
            nothing: Future[list[WriteResult]] = Future()
            nothing.set_result([])
            return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except Exception as error:  # noqa: BLE001  (reported with the files)
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        self.failure = self.failure or failure_of(error, self._own_rank)
        logger.debug("writing %s failed", self.path, exc_info=True)


class Reader(FileSystemReader):
    """torch's reader on our storage. exchange: lets other nodes send the byte ranges that this node lacks."""

    def __init__(self, files: Files, checkpoint: str, exchange: PieceExchange | None) -> None:
        super().__init__(checkpoint)
        self.fs = files
        self.path = checkpoint
        self._exchange = exchange

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch missing data and read. Collective. Raises CheckpointError on all ranks if one cannot read or store a piece."""
        if self._exchange is not None:  # only one rank wrote the replicated tensors, so all nodes may want their ranges
            places = [self.storage_data[item.storage_index] for item in plan.items]
            ranges = ((place.relative_path, place.offset, place.offset + place.length) for place in places)
            self._exchange.fetch(merge_ranges(ranges))
        return super().read_data(plan, planner)


def read_objects(storage: Storage, name: str, file: str) -> Any:
    """Return the content of a file of values that are not resharded.

    This unpickles: a checkpoint is trusted as much as the training script.
    """
    data = io.BytesIO(storage.read(f"{name}/{file}"))
    return torch.load(data, map_location="cpu", weights_only=False)


def read_tensors(storage: Storage, name: str, tensors: StateDict, ranks: Ranks, exchange: PieceExchange | None = None) -> None:
    """Fill in `tensors`, each rank its own part. Collective. Raises torch's CheckpointException, KeyError and others.

    exchange: for a checkpoint in the local tier, lets other nodes send the byte ranges that this node lacks. `storage` is then
    the one from `PieceExchange.with_files`, with `.metadata`.
    """
    reader = Reader(Files(storage, name), name, exchange)
    dcp.load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)
