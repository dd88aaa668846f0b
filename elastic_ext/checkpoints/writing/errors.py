"""Errors of saves and loads, and the values in which ranks send them to each other."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch.distributed.checkpoint.api import CheckpointException

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory.generations import StaleGroup

MOST_CAUSES = 4  # that a message tells
MOST_SHOWN = 500  # characters of each


class CheckpointError(ElasticExtError):
    """A checkpoint could not be loaded: it is damaged or does not fit this model.

    Attributes:
        by_rank: (rank, cause), if all ranks have told each other.
    """

    by_rank: Sequence[tuple[int, str]] = ()

    @classmethod
    def of_ranks(cls, by_rank: Sequence[tuple[int, str]]) -> CheckpointError:
        """Return one error of all ranks' causes."""
        error = cls(summary(by_rank))
        error.by_rank = by_rank
        return error


class StorageFailed(CheckpointError):
    """A checkpoint could not be read because its storage failed. It may be whole: to load an older one would lose work."""


class Rank0Failed(ElasticExtError):
    """What rank 0 was to decide for all failed in a way that nobody has foreseen. Raised on all ranks, which are in step."""


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
    **dict.fromkeys((errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.EIO, errno.ETIMEDOUT, errno.ESTALE), FailureKind.THROTTLED),
    **dict.fromkeys(
        (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETUNREACH), FailureKind.THROTTLED
    ),
}


@dataclass(frozen=True)
class SaveFailure:
    """Why one rank could not do its part of a save. Has only plain values, because ranks pickle it."""

    kind: FailureKind
    reason: str
    rank: int = 0


def failure_of(error: BaseException, rank: int) -> SaveFailure:
    """Convert an error to a failure. Pure.

    s3fs raises EBUSY for 503 SlowDown; our storage raises EIO for errors that are not OSError.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StaleGroup):
        return SaveFailure(FailureKind.STALE, str(error), rank)
    if isinstance(error, Rank0Failed):
        return SaveFailure(FailureKind.OTHER, str(error), 0)
    if isinstance(error, (TimeoutError, ConnectionError)):
        return SaveFailure(FailureKind.THROTTLED, text, rank)
    number = error.errno if isinstance(error, OSError) else None
    return SaveFailure(_KINDS.get(number or 0, FailureKind.OTHER), text, rank)


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
    told = text if isinstance(error, ElasticExtError) and text else f"{type(error).__name__}: {text}"
    return [(rank, told if len(told) <= MOST_SHOWN else f"{told[:MOST_SHOWN]}...")]


def summary(failures: Iterable[tuple[int, str]]) -> str:
    """Return one message of (rank, cause): each cause once, then the ranks that have it. Pure."""
    ranks_of: dict[str, set[int]] = {}
    for rank, cause in failures:
        ranks_of.setdefault(cause, set()).add(rank)
    told = [f"{cause} ({ranks_in_words(ranks)})" for cause, ranks in ranks_of.items()]
    others = len(told) - MOST_CAUSES
    more = [f"{others} more {'cause' if others == 1 else 'causes'} on other ranks"] if others > 0 else []
    return "; ".join(told[:MOST_CAUSES] + more)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return such as "rank 3" or "ranks 0 to 3, 7". Pure."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"rank {words}" if words.isdigit() else f"ranks {words}"
