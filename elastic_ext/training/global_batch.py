"""How a job keeps its global batch when its number of ranks changes: other micro-steps per optimizer step."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import counted

logger = logging.getLogger(__name__)
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

    Raises UsageError: an argument is no whole number of 1 or more, or WORLD_SIZE is none.
    """
    if ranks is None:
        ranks = _world_size()
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
    made = f"{counted(micro_steps, 'micro-step')} of {micro_batch} samples on each of {ranks} ranks"
    if used == global_batch:
        reason = f"the global batch of {global_batch} is {made}"
    else:
        reason = (
            f"the global batch is {used}, not {global_batch}: {made} is the nearest; for an exact one, choose a micro-batch "
            "whose product with each possible number of ranks divides the global batch"
        )
    return Accumulation(micro_steps, used, 1 / micro_steps, reason)


def _world_size() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"accumulation: WORLD_SIZE is {text!r}, expected a whole number, 1 or more")
    return int(text)
