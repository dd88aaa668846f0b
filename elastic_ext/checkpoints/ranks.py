"""What the ranks of a job do together for a save or a load: their collectives, and the errors that they send each other."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.printable import ranks_in_words
from elastic_ext.checkpoints.directory.generations import StaleGroup
from elastic_ext.checkpoints.storage import Storage, is_away

logger = logging.getLogger(__name__)


DESCRIPTION = "elastic_ext"  # of a group, for torch and its logs; `workers.bootstrap.recorder` knows it
MOST_CAUSES = 4  # that a message names
MOST_SHOWN = 500  # characters of each


class CheckpointError(ElasticExtError):
    """A checkpoint could not be loaded: it is damaged or does not fit this model."""

    by_rank: Sequence[tuple[int, str]] = ()  # (rank, cause), if all ranks have exchanged them

    @classmethod
    def of_ranks(cls, by_rank: Sequence[tuple[int, str]]) -> CheckpointError:
        error = cls(summary(by_rank))
        error.by_rank = by_rank
        return error


class StorageFailed(CheckpointError):
    """A checkpoint could not be read because its storage failed. It may be whole: to load an older one would lose work."""


class Rank0Failed(ElasticExtError):
    """What rank 0 was to decide for all failed in an unforeseen way. Raised on all ranks, which are in step."""


class FailureKind(str, Enum):
    """Why a save failed. Reactions differ, but training always continues."""

    FULL = "full"  # disk or quota: free space
    PERMISSION = "permission"
    THROTTLED = "throttled"  # the storage asks to retry later, or does not answer
    STALE = "stale"  # another group of workers has taken over
    GROUP = "group"  # ranks can no longer communicate, or may not be in step
    OTHER = "other"


_KINDS: Mapping[int, FailureKind] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FailureKind.FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), FailureKind.PERMISSION),
    **dict.fromkeys((errno.EAGAIN, errno.EINTR), FailureKind.THROTTLED),
}


@dataclass(frozen=True)
class SaveFailure:
    """Why one rank could not do its part of a save. Has only plain values, because ranks pickle it."""

    kind: FailureKind
    reason: str
    rank: int = 0


def failure_of(error: BaseException, rank: int) -> SaveFailure:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StaleGroup):
        return SaveFailure(FailureKind.STALE, str(error), rank)
    if isinstance(error, Rank0Failed):
        return SaveFailure(FailureKind.OTHER, str(error), 0)
    if not isinstance(error, OSError):
        return SaveFailure(FailureKind.OTHER, text, rank)
    kind = FailureKind.THROTTLED if is_away(error) else _KINDS.get(error.errno or 0, FailureKind.OTHER)
    return SaveFailure(kind, text, rank)


def group_failure(error: BaseException, rank: int, lost: bool) -> SaveFailure:
    """Return why the ranks can do nothing together any more, after an error that has not been shared between them. Pure.

    lost: whether it is a collective that has failed. If not, the other ranks may wait in one for this rank.
    """
    why = "the ranks can no longer communicate" if lost else "unforeseen, and the other ranks may have gone on"
    [(_, cause), *_] = causes(error, rank)
    return SaveFailure(FailureKind.GROUP, f"{cause} ({why})", rank)


def causes(error: BaseException, rank: int) -> list[tuple[int, str]]:
    """Return (rank, cause in one line) of what a rank has caught: of all ranks, where it holds what they have raised. Pure.

    torch's CheckpointException holds that with tracebacks, which are left out.
    """
    if isinstance(error, CheckpointException) and error.failures:
        return [(each, cause) for each, (wrapped, _) in sorted(error.failures.items()) for _, cause in causes(wrapped, each)]
    if isinstance(error, CheckpointError) and error.by_rank:
        return list(error.by_rank)
    text = " ".join(str(error).split())
    cause = text if isinstance(error, ElasticExtError) and text else f"{type(error).__name__}: {text}"
    return [(rank, cause if len(cause) <= MOST_SHOWN else f"{cause[:MOST_SHOWN]}...")]


def summary(failures: Iterable[tuple[int, str]]) -> str:
    """Return one message of (rank, cause): each cause once, then the ranks that have it. Pure."""
    ranks_of: dict[str, set[int]] = {}
    for rank, cause in failures:
        ranks_of.setdefault(cause, set()).add(rank)
    found = [f"{cause} ({ranks_in_words(ranks)})" for cause, ranks in ranks_of.items()]
    others = len(found) - MOST_CAUSES
    more = [f"{others} more {'cause' if others == 1 else 'causes'} on other ranks"] if others > 0 else []
    return "; ".join(found[:MOST_CAUSES] + more)


T = TypeVar("T")


class Ranks:
    """All ranks, in a separate gloo group, because background saves must not mix their messages with those of training.

    Every method is a collective unless it says otherwise. Values are pickled; all ranks run the same version of this package.
    After `leave`, those of this rank raise RuntimeError.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Make the group. Collective. timeout: how long a rank waits for the others before torch raises RuntimeError."""
        together = dist.is_available() and dist.is_initialized()
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=DESCRIPTION) if together else None
        self.group: dist.ProcessGroup | None = group  # None for a single process
        self.rank: int = dist.get_rank() if together else 0
        self.world: int = dist.get_world_size() if together else 1
        self.timeout_s = timeout.total_seconds()  # how long a collective waits for the others
        self.lost = False  # whether a collective has failed, so that the ranks can no longer communicate

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Note whether the collectives in this context fail. Not a collective itself."""
        try:
            yield
        except Exception:
            self.lost = True
            raise

    def leave(self) -> None:
        """Leave the group, so that no rank waits for this one: the collectives of the others fail at once. Not a collective.

        Only after an error, and once nothing of this process waits in the group.
        """
        group, self.group, self.lost = self.group, None, True
        if group is None:
            return
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError) as error:  # the script has destroyed all groups, say
            logger.debug("the group is left as it is: %s", error)

    def _alone(self, value: T) -> T:
        if self.world > 1:
            raise RuntimeError("this rank has left the group")
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.group is None:
            return [self._alone(value)]
        values: list[T | None] = [None] * self.world
        with self.communicating():
            dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value; the values of other ranks are ignored."""
        if self.group is None:
            return self._alone(value)
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
            found = [cause for each, _ in failures for cause in each]
            if all(blamed for _, blamed in failures):
                logger.warning("the storage failed: %s", summary(found))
                raise StorageFailed(found[0][1])  # of one rank: the same failure must read the same, on however many
            raise CheckpointError.of_ranks(found)
        return cast(T, result)

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send a tensor to one rank, which has called `receive`. Only these two call this, and `receive`."""
        with self.communicating():
            dist.send(data, dst=target, group=self.group)

    def receive(self, data: torch.Tensor, source: int) -> dist.Work:
        """Begin to receive a tensor; return what waits for it."""
        with self.communicating():
            work = dist.irecv(data, src=source, group=self.group)
        assert work is not None, "this rank is of the group"
        return work

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
