"""Errors of saves and loads, and the values in which ranks send them to each other."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory.generations import StaleGroup


class CheckpointError(ElasticExtError):
    """A checkpoint could not be loaded: it is damaged or does not fit this model."""


class StorageFailed(CheckpointError):
    """A checkpoint could not be read because its storage failed. It may be whole: to load an older one would lose work."""


class FailureKind(str, Enum):
    """Why a save failed. Reactions differ, but training always continues."""

    FULL = "full"  # disk or quota: free space
    PERMISSION = "permission"
    THROTTLED = "throttled"  # the storage asks to retry later, or does not answer
    STALE = "stale"  # another group of workers has taken over
    GROUP = "group"  # ranks can no longer communicate
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
    if isinstance(error, (TimeoutError, ConnectionError)):
        return SaveFailure(FailureKind.THROTTLED, text, rank)
    number = error.errno if isinstance(error, OSError) else None
    return SaveFailure(_KINDS.get(number or 0, FailureKind.OTHER), text, rank)
