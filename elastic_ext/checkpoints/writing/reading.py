# mypy: allow-subclassing-any
"""Read the content of a checkpoint: tensors through torch.distributed.checkpoint, the rest by unpickling."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from elastic_ext.checkpoints.formats.manifest import StoredFile, checksum
from elastic_ext.checkpoints.state import Moment
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.dcp_files import Files, Reader
from elastic_ext.checkpoints.writing.exchange import PieceExchange, merge_ranges
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.state import StateDict

# Our classes that checkpoints hold pickled, by the modules that they were in in some versions.
_MOVED = {
    ("elastic_ext.checkpoints.writing.state", "Moment"): Moment,
    ("elastic_ext.checkpoints.writing.optimizer_state", "Moment"): Moment,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _MOVED.get((module, name)) or super().find_class(module, name)


class _PickleModule:
    """The part of a pickle module that torch.load uses."""

    Unpickler = _Unpickler


def read_objects(storage: Storage, name: str, file: str) -> Any:
    """Return the content of a file of values that are not resharded.

    This unpickles: a checkpoint is trusted as much as the training script.
    """
    data = io.BytesIO(storage.read(f"{name}/{file}"))
    return torch.load(data, map_location="cpu", pickle_module=_PickleModule, weights_only=False)


def read_tensors(storage: Storage, name: str, tensors: StateDict, ranks: Ranks, exchange: PieceExchange | None = None) -> None:
    """Fill in `tensors`, each rank its own part. Collective. Raises torch's CheckpointException, KeyError and others.

    exchange: for a checkpoint in the local tier, lets other nodes send the byte ranges that this node lacks. `storage` is then
    the one from `PieceExchange.with_files`, with `.metadata`.
    """
    files = Files(storage, name)
    reader = Reader(files, name) if exchange is None else _ExchangingReader(files, name, exchange)
    dcp.load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)


class _ExchangingReader(Reader):
    def __init__(self, files: Files, checkpoint: str, exchange: PieceExchange) -> None:
        super().__init__(files, checkpoint)
        self._exchange = exchange

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch missing data and read. Collective. Raises CheckpointError on all ranks if one cannot read or store a piece."""
        places = [self.storage_data[item.storage_index] for item in plan.items]
        # Only one rank wrote the replicated tensors, so all nodes may want their ranges.
        self._exchange.fetch(merge_ranges((place.relative_path, place.offset, place.offset + place.length) for place in places))
        return super().read_data(plan, planner)


def find_damage(storage: Storage, name: str, file: StoredFile, checksums: bool) -> str:
    """Return how a file differs from its manifest entry, or "". Raises OSError.

    checksums: also read the file; else only compare the size.
    """
    path = f"{name}/{file.name}"
    found = storage.stat(path)
    if found is None:
        return f"{file.name} is missing"
    if found.size != file.size:
        return f"{file.name} has {found.size} bytes, expected {file.size}"
    if not checksums:
        return ""
    with storage.open(path) as stream:
        found_sum = checksum(stream)
    return "" if found_sum == file.checksum else f"{file.name} has checksum {found_sum}, expected {file.checksum}"
