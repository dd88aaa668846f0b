"""Where a job of Lightning is in its data, and its random generators: what Lightning does not restore.

`take` is called as a checkpoint is made. `restore` is called when training begins: the fit loop has made the iterator over the
data, which has drawn from the generators, and has restored its counters. It uses names of Lightning's loops that begin with an
underscore, and says so where they are not there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from elastic_ext.training import all_ranks, generators

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fetchers import _DataFetcher

logger = logging.getLogger(__name__)

State = Mapping[str, Any]  # in a checkpoint: tensors and plain values


@dataclass(frozen=True)
class EpochPosition:
    """How far this rank is in the present epoch."""

    samples: int  # to leave out
    batches: int  # that count as done


@dataclass(frozen=True)
class ReaderNow:
    """How the ranks read an epoch now. samples: of each rank. drop_last: an incomplete batch at the end is left out."""

    batch_size: int
    ranks: int
    samples: int
    drop_last: bool = False

    def batches_of(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


def position_after(batches: int, batch_size: int, ranks: int, now: ReaderNow) -> EpochPosition:
    """Return where each rank goes on after `ranks` of them have trained on so many batches of this size each. Pure."""
    skipped = min(now.samples, -(-batches * batch_size * ranks // now.ranks))
    return EpochPosition(skipped, now.batches_of(now.samples) - now.batches_of(now.samples - skipped))


def take(trainer: Trainer) -> State:
    """Return it, with the generators of all ranks. Collective."""
    own = generators.take()
    if "numpy" in own:
        kind, keys, *rest = own["numpy"]
        own = {**own, "numpy": (kind, torch.from_numpy(keys.astype("int64")), *rest)}
    ranks = all_ranks.world_size()
    of_all = [own] * ranks
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_gather_object(of_all, own)
    loaders = _loaders(trainer)
    return {
        "generators": of_all,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        "batch_size": getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None,
        "ranks": ranks,
    }


def restore(trainer: Trainer, state: State) -> None:
    """Leave out what this epoch has trained on, and restore this rank's generators."""
    fetcher, loaders = getattr(trainer.fit_loop, "_data_fetcher", None), _loaders(trainer)
    if fetcher is None or not loaders:
        logger.warning("this version of Lightning has other loops: the epoch begins with its first batch again")
    elif all(hasattr(each, "load_state_dict") for each in loaders):
        _restore_generators(state)  # Lightning has restored the position
    elif _ended(trainer):
        _restore_generators(state)  # before the next epoch's iterator draws from them, as in a run without a failure
        _begin_epoch(trainer, loaders, fetcher)
        if trainer.num_training_batches != math.inf:
            _set_done(trainer, int(trainer.num_training_batches))
    else:
        _leave_out(trainer, state, loaders, fetcher)
        _restore_generators(state)


def _loaders(trainer: Trainer) -> list[DataLoader]:
    return list(getattr(getattr(trainer.fit_loop, "_combined_loader", None), "flattened", ()))


def _ended(trainer: Trainer) -> bool:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


def _set_done(trainer: Trainer, batches: int) -> None:
    """Set how many batches of the epoch are done. The batch at whose end the checkpoint was saved is not `completed` in it."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    progress.completed += batches - progress.ready
    progress.ready = progress.started = progress.processed = batches


def _begin_epoch(trainer: Trainer, loaders: Sequence[DataLoader], fetcher: _DataFetcher) -> None:
    """Make the iterator again: Lightning made it before it knew the epoch, and before the generators were restored."""
    for each in loaders:
        sampler: Sampler = getattr(each, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
    iter(fetcher)


def _leave_out(trainer: Trainer, state: State, loaders: Sequence[DataLoader], fetcher: _DataFetcher) -> None:
    batches, ranks = int(state["batches"]), all_ranks.world_size()
    sampler: Sampler = loaders[0].batch_sampler if len(loaders) == 1 else None
    if type(sampler) is BatchSampler and state["batch_size"] is not None:
        if isinstance(sampler.sampler, RandomSampler) and sampler.sampler.generator is None:
            logger.warning(
                "this epoch goes on in another order: give Trainer strategy='ddp', also for one rank, or a seeded sampler"
            )
        now = ReaderNow(sampler.batch_size, ranks, len(sampler.sampler), sampler.drop_last)
        found = position_after(batches, state["batch_size"], state["ranks"], now)
        sampler.sampler = _LaterSamples(sampler.sampler, found.samples)
        _begin_epoch(trainer, loaders, fetcher)
        _set_done(trainer, found.batches)
    elif state["ranks"] != ranks:
        logger.warning(
            "%s ranks saved in mid-epoch, and %s go on: the epoch begins with its first batch again; for the exact position, use "
            "one data loader with a map-style dataset",
            state["ranks"],
            ranks,
        )
    else:
        _begin_epoch(trainer, loaders, fetcher)
        for _ in range(batches):
            next(fetcher)
        fetcher.fetched = 0  # Lightning adds the batches that are done


class _LaterSamples:
    """A sampler without its first samples, once; later passes are whole."""

    def __init__(self, sampler: Sampler, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __len__(self) -> int:
        return len(self._sampler)  # Lightning counts the batches of the whole epoch

    def __iter__(self) -> Iterator[object]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self._sampler), skipped, None)


def _restore_generators(state: State) -> None:
    of_all, rank, ranks = state["generators"], all_ranks.own_rank(), all_ranks.world_size()
    if len(of_all) != ranks:
        generators.seed("lightning", *map(str, (state["batches"], rank, ranks)))
        return
    own = dict(of_all[rank])
    if "numpy" in own:
        kind, keys, *rest = own["numpy"]
        own["numpy"] = (kind, keys.numpy().astype("uint32"), *rest)
    generators.restore(own)
