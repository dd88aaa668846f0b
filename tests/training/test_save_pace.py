"""When a trainer's own save is due: what it may cost, and that all ranks save at the same steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.base.save_cost import SHARE
from elastic_ext.training.own_saves import OwnSaves, remove
from elastic_ext.training.save_pace import FIRST_EVERY, SavePace, SaveTiming, interval


@pytest.mark.parametrize(
    ("timings", "every_s", "every", "reason"),
    [
        ([SaveTiming()], None, FIRST_EVERY, "nothing is measured"),
        ([SaveTiming(0.5)], None, FIRST_EVERY, "nothing is measured"),
        ([SaveTiming(0.5, 1.0)], None, 200, "a save stalls for 1 s, 1% of 200 steps of 0.5 s"),
        ([SaveTiming(0.5, 1.0), SaveTiming(0.4, 3.0)], None, 750, "a save stalls for 3 s"),
        ([SaveTiming(0.5, 1.0, 80_000), SaveTiming(0.5, 1.0, 90_000)], None, 800, "nothing has failed for 8e+04 s"),
        ([SaveTiming(0.5, 1.0, 1e9)], None, 6667, "nothing has failed"),
        ([SaveTiming(0.5, 0.0)], None, 1, "a save stalls for 0 s"),
        ([SaveTiming(0.5)], 30.0, 60, "every_s=30"),
        ([SaveTiming(0.5), SaveTiming(0.6, 9.0)], 30.0, 50, "every_s=30"),
        ([SaveTiming(90.0)], 30.0, 1, "every_s=30"),
    ],
)
def test_the_interval_follows_from_the_slowest_save(timings, every_s, every, reason):
    found = interval(timings, every_s)
    assert found[0] == every
    assert reason in found[1]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def train(pace: SavePace, clock: Clock, steps: range, step_s: Callable[[int], float], save_s: float) -> list[int]:
    """Return the steps that were saved."""
    saves = []
    for step in steps:
        clock.now += step_s(step)
        if pace.due(step):
            saves.append(step)
            clock.now += save_s
            pace.saved(step, save_s)
    return saves


def test_saves_cost_no_more_than_their_share():
    clock = Clock()
    pace = SavePace(exchange=lambda own: [own], clock=clock)
    saves = train(pace, clock, range(1, 20_001), lambda step: 0.1, 0.5)
    assert saves[0] == FIRST_EVERY
    assert len(saves) > 5
    assert 0.5 * len(saves) <= SHARE * clock.now + 0.5


def test_slower_steps_bring_the_next_save_nearer():
    """Steps of 0.01 s lead to a save in 5,000 steps; at 1 s each that would be 80 minutes, at a cost of 0.01 %."""
    clock = Clock()
    pace = SavePace(exchange=lambda own: [SaveTiming(own.step_s, own.stall_s)], clock=clock)
    saves = train(pace, clock, range(1, 4_000), lambda step: 0.01 if step < 500 else 1.0, 0.5)
    first, second, third = saves[:3]
    assert (first, third - second) == (FIRST_EVERY, 50)
    assert second < 2_600


def test_ranks_that_differ_save_at_the_same_steps():
    """Each rank measures on its own. If one came to an exchange that the other does not reach, the barrier would break."""
    barrier, posted = threading.Barrier(2, timeout=60), [SaveTiming(), SaveTiming()]
    found: list[list[int]] = [[], []]

    def run(rank: int) -> None:
        def exchange(own: SaveTiming) -> list[SaveTiming]:
            posted[rank] = own
            barrier.wait()
            seen = list(posted)
            barrier.wait()
            return seen

        clock = Clock()
        pace = SavePace(exchange=exchange, clock=clock)
        pace.begins(100)
        found[rank] = train(pace, clock, range(101, 5_000), lambda step: 0.1 + 0.03 * rank, (0.01, 0.4)[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not barrier.broken
    assert found[0] == found[1]
    assert found[0][0] == 100 + FIRST_EVERY
    assert len(found[0]) > 3


def test_an_interval_in_steps_asks_no_rank():
    def exchange(own: SaveTiming) -> list[SaveTiming]:
        raise AssertionError("no exchange is needed")

    clock = Clock()
    pace = SavePace(every=7, exchange=exchange, clock=clock)
    pace.begins(10)
    assert train(pace, clock, range(11, 30), lambda step: 1.0, 100.0) == [14, 21, 28]


def test_an_interval_in_seconds_is_kept():
    clock = Clock()
    pace = SavePace(every_s=10.0, exchange=lambda own: [own], clock=clock)
    saves = train(pace, clock, range(1, 200), lambda step: 0.5, 3.0)
    assert {later - earlier for earlier, later in pairwise(saves[1:])} == {20}


def test_a_save_on_demand_delays_the_next():
    clock = Clock()
    pace = SavePace(exchange=lambda own: [SaveTiming(0.1, 0.1)], clock=clock)
    assert train(pace, clock, range(1, 80), lambda step: 0.1, 0.1) == []
    pace.saved(79, 0.1)
    assert train(pace, clock, range(80, 190), lambda step: 0.1, 0.1) == [179]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 5, "every_s": 5.0}, "expected one of them"),
        ({"every": 0}, "every=0: expected more than 0"),
        ({"every_s": -1.0}, "every_s=-1.0: expected more than 0"),
    ],
)
def test_intervals_that_mean_nothing_are_refused(arguments, text):
    with pytest.raises(UsageError, match=text):
        SavePace(**arguments)


def test_the_newest_own_saves_stay(tmp_path):
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    own = OwnSaves(2)
    own.add("a")
    own.add("b")
    resumed = OwnSaves(2)
    resumed.load(own.state_dict())
    for name in "bcd":
        resumed.add(name)
    resumed.discard("c")  # another part of the trainer has asked for it, too
    resumed.add("e")
    old = resumed.take_old()
    assert (old, resumed.take_old()) == (["a", "b"], [])
    remove(str(tmp_path), [*old, "never there"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "d"]
    kept = OwnSaves(None)
    kept.add("a")
    assert kept.take_old() == []
    with pytest.raises(UsageError, match="keep=0: expected 1 or more"):
        OwnSaves(0)
