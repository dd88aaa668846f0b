"""What concerns all ranks of a job: a barrier that names the missing ones, for scripts that check from time to time that all are
healthy; and how a job keeps its global batch when their number changes: other micro-steps per optimizer step.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

from elastic_ext.base import printable, round_store
from elastic_ext.base.errors import RanksMissing, UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

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
        missing = []
        try:
            store.wait([f"{prefix}/all"], timedelta(seconds=timeout_s))
        except RuntimeError:  # a timeout, or the store is gone, in which case the next call also fails
            missing = [rank for rank in range(world) if not store.check([f"{prefix}/{rank}"])]
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


_warned: set[str] = set()  # reasons that this process has logged


@dataclass(frozen=True)
class Accumulation:
    """The micro-steps of each optimizer step."""

    micro_steps: int  # forward and backward passes of each rank for one optimizer step
    global_batch: int  # samples of one optimizer step, over all ranks: what was asked for, or the nearest that is possible
    # multiply the mean loss of each micro-batch by this before `backward`. DDP and FSDP average gradients over the ranks, so the
    # gradient is then the mean over the samples of `global_batch`
    loss_factor: float
    reason: str  # one line: how these follow from what was asked for


def accumulation(global_batch: int, micro_batch: int, ranks: int | None = None) -> Accumulation:
    """Return the micro-steps that keep the global batch with the present number of ranks.

    Where no number of micro-steps gives exactly this global batch, rank 0 logs a warning, once.

    global_batch: samples of one optimizer step, over all ranks. micro_batch: samples of one forward and backward pass on one
    rank. ranks: how many ranks train on different samples. Default: all, by torch.distributed where it is initialized, else by
    WORLD_SIZE, else 1. With tensor or pipeline parallelism give the size of the data-parallel group.

    Raises UsageError: an argument, or WORLD_SIZE, is not a whole number of 1 or more.
    """
    if ranks is None:
        ranks = world_size()
    plan = micro_steps_of(global_batch, micro_batch, ranks)
    if plan.global_batch != global_batch and plan.reason not in _warned and os.environ.get("RANK", "0") == "0":
        _warned.add(plan.reason)
        logger.warning("%s", plan.reason)
    return plan


def micro_steps_of(global_batch: int, micro_batch: int, ranks: int) -> Accumulation:
    """Return the micro-steps whose global batch is nearest to what is asked for; of two as near, the larger. Pure."""
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("ranks", ranks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"accumulation: {name} is {value!r}, expected a whole number, 1 or more")
    at_once = micro_batch * ranks
    micro_steps = max(1, (2 * global_batch + at_once) // (2 * at_once))
    used = micro_steps * at_once
    made = f"{printable.counted(micro_steps, 'micro-step')} of {micro_batch} samples on each of {ranks} ranks"
    if used == global_batch:
        reason = f"the global batch of {global_batch} is {made}"
    else:
        reason = (
            f"the global batch is {used}, not {global_batch}: {made} is the nearest; for an exact one, choose a micro-batch "
            "whose product with each possible number of ranks divides the global batch"
        )
    return Accumulation(micro_steps, used, 1 / micro_steps, reason)


def world_size() -> int:
    """Return the number of ranks: by torch.distributed if it is initialized, else by WORLD_SIZE, else 1. Raises UsageError."""
    group = _initialized()
    return int(group.get_world_size()) if group is not None else _whole_number("WORLD_SIZE", 1)


def own_rank() -> int:
    """Return the rank of this process, by torch.distributed if it is initialized, else by RANK, else 0. Raises UsageError."""
    group = _initialized()
    return int(group.get_rank()) if group is not None else _whole_number("RANK", 0)


def _initialized() -> ModuleType | None:
    """Return torch.distributed if it has a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def _whole_number(name: str, least: int) -> int:
    text = os.environ.get(name, str(least))
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise UsageError(f"{name} is {text!r}, expected a whole number, {least} or more")
    return int(text)
