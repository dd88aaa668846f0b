"""A barrier that names the missing ranks, for scripts that check from time to time that all ranks are healthy."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from elastic_ext.base import round_store
from elastic_ext.base.errors import RanksMissing, UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_S = timedelta(seconds=30)  # time for the store to answer
MAX_SHOWN = 16  # ranks named in a message
_stores: dict[int, TCPStore] = {}  # by pid, as below
_reached: dict[int, int] = {}  # barriers that this process has reached, by pid: a child forked by the script is not a rank


def health_barrier(timeout_s: float) -> None:
    """Wait until every rank of the job has reached this barrier and its CUDA device is idle.

    The barrier uses the store that torchrun's workers share, not a collective, so a rank that is stuck in a collective cannot
    block this one. Every rank must call this the same number of times. A call costs each rank two requests to the store.

    timeout_s: how long to wait for the other ranks. Raises RanksMissing: a rank did not arrive in time, or the store does not
    answer; `ranks` and the message name the ranks. Raises UsageError: torchrun did not start this process, or the timeout is not
    positive.
    """
    if not timeout_s > 0:
        raise UsageError(f"health_barrier({timeout_s!r}): expected a number of seconds greater than 0")
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UsageError(f"health_barrier() is for processes that torchrun has started; the environment lacks {error}") from error
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    number = _reached[os.getpid()] = _reached.get(os.getpid(), 0) + 1
    prefix = f"{round_store.PREFIX}/{round_store.health(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), number)}"
    _wait_for_all(where, prefix, rank, world, timeout_s)


def _wait_for_all(where: tuple[str, int], prefix: str, rank: int, world: int, timeout_s: float) -> None:
    try:
        store = _connected(where)
        store.set(f"{prefix}/{rank}", "")
        if store.add(f"{prefix}/count", 1) == world:
            store.set(f"{prefix}/all", "")
        missing = _missing(store, prefix, world, timeout_s)
    except (RuntimeError, ValueError) as error:
        raise RanksMissing(
            f"health barrier: the store of the job at {where[0]}:{where[1]} does not answer: {error}", ()
        ) from error
    if missing:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        shown = ", ".join(map(str, missing[:MAX_SHOWN])) + more
        raise RanksMissing(f"health barrier: rank {shown} of {world} did not arrive within {timeout_s:g} s", missing)


def _connected(where: tuple[str, int]) -> TCPStore:
    """Return the only connection of this process to the store."""
    from torch.distributed import TCPStore

    if os.getpid() not in _stores:
        _stores[os.getpid()] = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=STORE_S)
    return _stores[os.getpid()]


def _missing(store: TCPStore, prefix: str, world: int, timeout_s: float) -> list[int]:
    try:
        store.wait([f"{prefix}/all"], timedelta(seconds=timeout_s))
    except RuntimeError:  # a timeout, or the store is gone, in which case the next call also fails
        return [rank for rank in range(world) if not store.check([f"{prefix}/{rank}"])]
    return []
