"""Collectives by which the ranks of a job agree on a save or a load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.errors import CheckpointError, Rank0Failed, StorageFailed, causes, summary

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Ranks:
    """All ranks, in a separate gloo group, because background saves must not mix their messages with those of training.

    Every method is a collective unless it says otherwise. Values are pickled; all ranks run the same version of this package.

    Attributes:
        group: None for a single process.
        lost: whether a collective has failed, so that the ranks can no longer communicate.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Make the group. Collective. timeout: how long a rank waits for the others before torch raises RuntimeError."""
        together = dist.is_available() and dist.is_initialized()
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout) if together else None
        self.rank: int = dist.get_rank() if together else 0
        self.world: int = dist.get_world_size() if together else 1
        self.lost = False

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Note whether the collectives in this context fail. Not a collective itself."""
        try:
            yield
        except Exception:
            self.lost = True
            raise

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.world
        with self.communicating():
            dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value; the values of other ranks are ignored."""
        if self.group is None:
            return value
        values = [value]
        with self.communicating():
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def from_rank_0(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0 and return its result, or raise its exception, on all ranks: Rank0Failed if it is unforeseen."""
        found: tuple[T | None, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                found = decide(), None
            except (ElasticExtError, OSError) as error:
                found = None, error
            except Exception as error:  # of some class that perhaps cannot be pickled
                logger.exception("unforeseen failure on rank 0")
                found = None, Rank0Failed(causes(error, 0)[0][1])
        value, raised = self.broadcast(found)
        if raised is not None:
            raise raised
        return cast(T, value)

    def run_on_all(self, do: Callable[[], T], reads: Storage | None = None) -> T:
        """Run `do` on every rank. Raises CheckpointError on all ranks if it failed on one, so that none continues alone.

        reads: the storage that it does little else but read, if what that raises does not mean damage. If it is to blame on
        every rank that failed, that is StorageFailed.
        """
        result: T | None = None
        failed: tuple[list[tuple[int, str]], bool] | None = None
        try:
            result = do()
        except (Exception, CheckpointException) as error:
            blamed = reads is not None and _is_to_blame(reads, error)
            failed = causes(error, self.rank), blamed or isinstance(error, StorageFailed)
            logger.debug("checkpoint load failed", exc_info=True)
        failures = [each for each in self.all_gather(failed) if each is not None]
        if failures:
            told = [cause for each, _ in failures for cause in each]
            if all(blamed for _, blamed in failures):
                logger.warning("the storage failed: %s", summary(told))
                raise StorageFailed(told[0][1])  # of one rank: the same failure must read the same, on however many
            raise CheckpointError.of_ranks(told)
        return cast(T, result)

    def send_tensor(self, data: torch.Tensor, source: int, targets: tuple[int, ...]) -> None:
        """Copy `data` from one rank to others. With one target, only the two ranks involved need to call this; else all ranks."""
        if len(targets) > 1:
            dist.broadcast(data, src=source, group=self.group)
        elif self.rank == source:
            dist.send(data, dst=targets[0], group=self.group)
        elif self.rank in targets:
            dist.recv(data, src=source, group=self.group)


def _is_to_blame(storage: Storage, error: BaseException) -> bool:
    """Return whether it did not answer, or refused. A file that is missing is damage. torch wraps what its reader raises."""
    if isinstance(error, CheckpointException):
        return all(_is_to_blame(storage, wrapped) for wrapped, _ in error.failures.values())
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not storage.means_damage(error)
