"""A sampler whose position holds at another number of ranks, in mid-epoch: each sample of an epoch is trained on once.

In place of `torch.utils.data.DistributedSampler`, with the same order for the same seed:

    sampler = elastic_ext.ElasticSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    checkpointer = elastic_ext.Checkpointer(model=model, optimizer=optimizer, extra={"sampler": sampler})
    checkpointer.load()
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            ...
            sampler.advance(len(batch))  # what this rank has trained on

All ranks have the same state, so that of any rank is right for all. Rank r of w takes each w-th sample from the position on, so
what w ranks have trained on after equal batches is the beginning of the epoch's order, and w' ranks can go on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import islice

from elastic_ext.base.errors import UsageError
from elastic_ext.training import all_ranks

_STATE = ("epoch", "position", "samples", "seed", "shuffle")


class ElasticSampler:
    """The indices of this rank's samples, from the position on.

    Invariant: the position is the same on all ranks whenever each has advanced by as much.
    """

    def __init__(
        self,
        data: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """
        Args:
            data: a map-style dataset, or anything with its length.
            seed: of the order, which is another one in each epoch. Equal on all ranks.
            drop_last: leave out what does not fill all ranks at the end of an epoch. Otherwise some get samples from its
                beginning again, as with DistributedSampler.
            rank, ranks: by default those of torch.distributed if it is initialized, else RANK and WORLD_SIZE, else 0 of 1.

        Raises UsageError.
        """
        self._rank = all_ranks.own_rank() if rank is None else rank
        self._ranks = all_ranks.world_size() if ranks is None else ranks
        if not 0 <= self._rank < self._ranks:
            raise UsageError(f"ElasticSampler: rank {self._rank} of {self._ranks}, expected 0 to {self._ranks - 1}")
        self._samples, self._seed, self._shuffle, self._drop_last = len(data), seed, shuffle, drop_last
        if not self._samples:
            raise UsageError("ElasticSampler: the data has no samples, expected 1 or more")
        self._epoch = 0
        self._start = 0  # of this pass over the data, in the epoch's order
        self._advanced: int | None = None  # since then, over all ranks; None: `advance` is not called
        self._given = 0  # samples that this rank was given in this pass
        self._ended = False  # this pass has given all

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch have been trained on, over all ranks.

        If `advance` is never called: how many were given out, which is more where processes of a data loader read ahead.
        """
        done = self._given * self._ranks if self._advanced is None else self._advanced
        return min(self._start + done, self._samples)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; go on where the job was, if it is in this epoch and has not ended it."""
        if epoch != self._epoch or self._ended:
            self._begin(epoch, 0)

    def advance(self, samples: int) -> None:
        """Count what this rank has trained on. All ranks must call this with the same numbers. samples: of this rank."""
        self._advanced = (self._advanced or 0) + samples * self._ranks

    def __len__(self) -> int:
        """The samples that this rank gets in this pass, from where it starts."""
        left = self._samples - self._start
        return left // self._ranks if self._drop_last else -(-left // self._ranks)

    def __iter__(self) -> Iterator[int]:
        """Give this rank's samples from the position on; after a pass that has given all, those of the next epoch.

        What another iterator has given counts only by `advance`: a look at the first batch changes nothing.
        """
        if self._ended:
            self._begin(self._epoch + 1, 0)
        else:
            self._begin(self._epoch, self._start if self._advanced is None else self.position)
        return self._pass(self._order(), self._start, len(self))

    def _begin(self, epoch: int, start: int) -> None:
        counts = self._advanced is not None
        self._epoch, self._start, self._given, self._ended = epoch, start, 0, False
        self._advanced = 0 if counts else None

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._samples))
        import torch

        generator = torch.Generator().manual_seed(self._seed + self._epoch)  # as DistributedSampler does
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return order

    def _pass(self, order: list[int], start: int, count: int) -> Iterator[int]:
        for place in islice(range(start + self._rank, start + count * self._ranks, self._ranks), count):
            self._given += 1
            self._ended = self._given == count
            yield order[place % self._samples]
        self._ended = True

    def state_dict(self) -> dict[str, int]:
        return dict(zip(_STATE, (self._epoch, self.position, self._samples, self._seed, int(self._shuffle)), strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the position of a checkpoint. Raises UsageError: it is that of other data, or in another order."""
        if missing := [name for name in _STATE if name not in state]:
            raise UsageError(f"ElasticSampler: the state has no {', '.join(missing)}, expected that of an ElasticSampler")
        for name, own in (("samples", self._samples), ("seed", self._seed), ("shuffle", int(self._shuffle))):
            if state[name] != own:
                raise UsageError(
                    f"ElasticSampler: the checkpoint's position is for {name}={state[name]}, and this job has {name}={own}: "
                    "use the same data and order, or do not load the sampler's state"
                )
        self._begin(state["epoch"], state["position"])
