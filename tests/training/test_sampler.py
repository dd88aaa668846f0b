"""The sampler whose position holds at another number of ranks: pure cases, torch's loaders, and a job that changes its size."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic_ext import ElasticSampler
from elastic_ext.base.errors import UsageError
from tests.jobs import AGENT, SCRIPTS, run


def of_all(size: int, ranks: int, state: dict[str, int] | None = None, **options: bool) -> list[ElasticSampler]:
    samplers = [ElasticSampler(range(size), seed=3, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for each in samplers if state is not None else ():
        each.load_state_dict(state)
    return samplers


def train(samplers: list[ElasticSampler], steps: int | None, batch: int) -> list[int]:
    """Return the samples that all ranks have trained on in so many steps, or until the end of the pass."""
    passes = [iter(each) for each in samplers]
    seen: list[int] = []
    for _ in range(steps) if steps is not None else itertools.count():
        batches = [list(itertools.islice(each, batch)) for each in passes]
        assert len({len(each) for each in batches}) == 1, "all ranks make the same steps"
        if not batches[0]:
            break
        for each, trained in zip(samplers, batches, strict=True):
            each.advance(len(trained))
        seen += [index for trained in batches for index in trained]
    return seen


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "ranks"), [(12, 3), (13, 3), (2, 5), (1, 1), (40, 7)])
def test_its_order_is_that_of_distributed_sampler(size, ranks, shuffle, drop_last):
    for rank in range(ranks):
        ours = ElasticSampler(range(size), seed=5, shuffle=shuffle, drop_last=drop_last, rank=rank, ranks=ranks)
        theirs = DistributedSampler(range(size), ranks, rank, seed=5, shuffle=shuffle, drop_last=drop_last)
        for epoch in (0, 1, 4):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert len(ours) == len(theirs)
            assert list(ours) == list(theirs)


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_comes_once_at_any_sizes(seed):
    """The number of ranks, the batch and the moment change at each start. Only the last start fills up its ranks."""
    chance = random.Random(seed)
    size = chance.randint(1, 200)
    state, seen = None, list[int]()
    for _ in range(chance.randint(0, 5)):
        ranks, batch = chance.randint(1, 8), chance.randint(1, 5)
        samplers = of_all(size, ranks, state, drop_last=True)
        seen += train(samplers, chance.randint(0, 4), batch)
        states = [each.state_dict() for each in samplers]
        state = states[0]
        assert states == [state] * ranks
    ranks = chance.randint(1, 8)
    rest = train(of_all(size, ranks, state), None, 3)
    left = Counter(range(size)) - Counter(seen)
    assert left.total() == size - len(seen)
    again = Counter(rest) - left
    assert (left - Counter(rest)).total() == 0
    assert again.total() < ranks


def test_the_next_epoch_begins_anew():
    [sampler] = of_all(6, 1)
    first = list(sampler)
    assert sampler.epoch == 0
    second = list(sampler)  # without set_epoch
    assert (sampler.epoch, sorted(second)) == (1, sorted(first))
    assert second != first
    sampler.set_epoch(1)
    assert list(sampler) == second, "an epoch that has ended can be repeated"


def test_a_save_at_an_epochs_end_repeats_nothing():
    [sampler] = of_all(6, 1)
    train([sampler], 3, 2)
    [resumed] = of_all(6, 1, sampler.state_dict())
    resumed.set_epoch(0)
    assert (len(resumed), list(resumed)) == (0, [])
    resumed.set_epoch(1)
    assert len(list(resumed)) == 6


def test_a_look_at_the_first_batch_changes_nothing():
    for advances in (False, True):
        [sampler] = of_all(10, 1)
        expected = list(of_all(10, 1)[0])
        if advances:
            train([sampler], 2, 2)
            expected = expected[4:]
        next(iter(sampler))
        assert list(sampler) == expected


@pytest.mark.seam
def test_what_a_loader_reads_ahead_does_not_count():
    [sampler] = of_all(40, 1)
    batches = iter(DataLoader(range(40), batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=3))
    trained = [next(batches).tolist() for _ in range(2)]
    assert sampler.position > 8
    for each in trained:
        sampler.advance(len(each))
    assert sampler.position == 8
    [resumed] = of_all(40, 1, sampler.state_dict())
    assert sorted(sum(trained, list(resumed))) == list(range(40))


@pytest.mark.seam
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_keeps_its_position(workers):
    [sampler] = of_all(20, 1)
    loader = StatefulDataLoader(range(20), batch_size=4, sampler=sampler, num_workers=workers)
    batches = iter(loader)
    seen = [index for _ in range(2) for index in next(batches).tolist()]
    state = loader.state_dict()
    again = StatefulDataLoader(range(20), batch_size=4, sampler=of_all(20, 1)[0], num_workers=workers)
    again.load_state_dict(state)
    rest = [index for batch in again for index in batch.tolist()]
    assert sorted(seen + rest) == list(range(20))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"samples": 9}, "samples=9, and this job has samples=8"),
        ({"seed": 1}, "seed=1, and this job has seed=3"),
        ({"shuffle": 0}, "shuffle=0, and this job has shuffle=1"),
    ],
)
def test_a_position_in_other_data_is_refused(change, text):
    [sampler] = of_all(8, 1)
    with pytest.raises(UsageError, match=text):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(UsageError, match="no position"):
        sampler.load_state_dict({"epoch": 1, "samples": 8, "seed": 3, "shuffle": 1})


def test_wrong_arguments_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="no samples"):
        ElasticSampler([], rank=0, ranks=1)
    with pytest.raises(UsageError, match="rank 2 of 2, expected 0 to 1"):
        ElasticSampler(range(4), rank=2, ranks=2)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UsageError, match="RANK is 'one'"):
        ElasticSampler(range(4), ranks=2)


@pytest.mark.full
def test_a_job_goes_on_at_another_size(tmp_path):
    """Two ranks stop in mid-epoch, three go on, and one ends the two epochs."""
    seen: dict[int, list[int]] = {0: [], 1: []}
    for ranks, steps in ((2, 4), (3, 3), (1, 0)):
        command = [
            *AGENT,
            f"--nproc-per-node={ranks}",
            "--rdzv-conf=checkpoint_dir=saves",
            SCRIPTS / "sampling_job.py",
            str(steps),
        ]
        done = run(command, tmp_path)
        assert done.returncode == 0, done.all
        for epoch, indices in re.findall(r"epoch (\d+): ([\d ]+)", done.out):
            seen[int(epoch)] += map(int, indices.split())
    assert {epoch: sorted(indices) for epoch, indices in seen.items()} == {0: list(range(60)), 1: list(range(60))}
    assert seen[0] != seen[1]
