"""Copy the training state to separate memory, so that training continues while the copy is written."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.writing import pickling
from elastic_ext.checkpoints.writing.errors import FailureKind, SaveFailure
from elastic_ext.checkpoints.writing.extra_state import digests
from elastic_ext.checkpoints.writing.state import EXTRA, Objects, StateDict, capture

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staged:
    """One rank's part of a save, in separate memory.

    Attributes:
        tensors: tensors that torch.distributed.checkpoint shards.
        shared: pickled state that is equal on all ranks; rank 0 has it, the others have b"".
        own: this rank's own state, pickled.
        extra: by extra object with tensors, a checksum of their keys, types and shapes; rank 0's must be the same.
        failure: why staging failed; the rest is then empty.
    """

    tensors: Mapping[str, Any] = field(default_factory=dict)
    shared: bytes = b""
    own: bytes = b""
    extra: Mapping[str, str] = field(default_factory=dict)
    failure: SaveFailure | None = None


class Stager:
    """Stages one save after another. Reuses the memory, because page faults cost more than the copy."""

    def __init__(self, objects: Objects, rank: int) -> None:
        self._objects, self._rank = objects, rank
        self._copies = HostCopies()

    def stage(self, step: int, accumulation: int) -> tuple[Staged, UsageError | None]:
        """Copy the state of `step`. The previous staged state must no longer be in use.

        Never raises, because the other ranks wait for this one's part: an error becomes `Staged.failure`. A UsageError is also
        returned, for the caller to raise once all ranks know of it.
        """
        try:
            taken = capture(self._objects, self._rank, accumulation)
            shared = pickling.saved(taken.shared, common=True) if self._rank == 0 else b""
            own = pickling.saved(taken.own, common=False)
            extra = digests(taken.tensors.get(EXTRA, {}))
            return Staged(self._copies.take(taken.tensors), shared, own, extra), None
        except UsageError as error:
            return Staged(failure=SaveFailure(FailureKind.OTHER, str(error), self._rank)), error
        except Exception as error:  # training continues
            logger.exception("the state of step %s could not be copied to host memory", step)
            return Staged(failure=SaveFailure(FailureKind.OTHER, f"{type(error).__name__}: {error}", self._rank)), None


class HostCopies:
    """Copies of tensors in host memory that the next copies reuse."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def take(self, tensors: StateDict) -> StateDict:
        """Return a copy that training does not change. The previous copy must no longer be in use."""
        kept: dict[tuple[Any, ...], Tensor] = {}
        copied: StateDict = self._copy(tensors, (), kept)
        self._kept = kept
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # copies from the device are asynchronous
        return copied

    def _copy(self, value: Any, path: tuple[Any, ...], kept: dict[tuple[Any, ...], Tensor]) -> Any:
        if isinstance(value, Tensor):
            kept[path] = _copied(value.detach(), self._kept.get(path))
            return kept[path]
        if isinstance(value, Mapping):
            return {key: self._copy(each, (*path, key), kept) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            copies = [self._copy(each, (*path, number), kept) for number, each in enumerate(value)]
            return copies if isinstance(value, list) else tuple(copies)
        return copy.deepcopy(value)


def _copied(value: Tensor, room: Tensor | None) -> Tensor:
    """Copy into `room` if it fits, else into new memory."""
    fits = room is not None and type(room) is type(value) and room.shape == value.shape and room.dtype == value.dtype
    if not fits or (isinstance(room, DTensor) and room.placements != value.placements):
        room = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    assert room is not None
    return room.copy_(value, non_blocking=value.is_cuda)
