"""Which rank or host is late: made-up jobs whose clocks differ, by what torch's flight recorder says of real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from elastic_ext.features.stragglers import decide
from elastic_ext.features.stragglers.decide import (
    UNKNOWN_CLOCK,
    Alignment,
    Late,
    NodeSample,
    Ping,
    RankSample,
    Window,
    WorkerSample,
    aligned,
    compare,
    follow,
)
from elastic_ext.workers.bootstrap import recorder

MS = 1000
STEP_US = 60 * MS
LATENCY_US = 300


def issued(
    work_us: Callable[[int, int], float], ranks: int, steps: int, per_step: int, waits: Sequence[bool] | None = None
) -> dict[int, list[float]]:
    """Return when each rank issues each collective.

    Args:
        work_us: of a rank before collective number n.
        waits: whether all ranks wait after the n-th of a step; by default at the end of a step only, as DDP does.
    """
    waits = waits or [False] * (per_step - 1) + [True]
    at = dict.fromkeys(range(ranks), 0.0)
    jitter_us = random.Random(7).gauss
    found: dict[int, list[float]] = {rank: [] for rank in at}
    for number in range(steps * per_step):
        for rank in at:
            at[rank] += work_us(rank, number) + jitter_us(0, 50)
            found[rank].append(at[rank])
        if waits[number % per_step]:
            at = dict.fromkeys(at, max(at.values()) + LATENCY_US)
    return found


def samples(
    times: Mapping[int, Sequence[float]],
    per_node: int,
    per_step: float,
    ahead_us: Mapping[int, float] | None = None,
    first: int = 256,
) -> list[NodeSample]:
    """Return them as the nodes report them, each by its own clock. ahead_us: of the clock of a node."""
    nodes = []
    for place in range(len(times) // per_node):
        own = []
        for rank in range(place * per_node, (place + 1) * per_node):
            begin = int(times[rank][0] + (ahead_us or {}).get(place, 0.0)) + 10**9
            after = tuple(int(each - times[rank][0]) for each in times[rank])
            own.append(RankSample(rank, WorkerSample(512, STEP_US, (Window("gloo 0 0 4", first, per_step, begin, after),))))
        nodes.append(NodeSample(f"n{place}", f"clock {place}", tuple(own)))
    return nodes


def late_by(found: Sequence[Late]) -> dict[tuple[str, int], float]:
    """Return those that count, in ms."""
    return {(each.host, each.rank): round(each.median_us / MS, 1) for each in found if each.counts}


EXACT = [Alignment(), Alignment()]


def test_only_a_rank_that_sleeps_is_late():
    """As measured: it issues the first collective of a step late, and all that follow, since no rank waits between them."""
    times = issued(lambda rank, number: 20 * MS if number % 3 else 20 * MS + 21 * MS * (rank == 1), 4, 80, 3)
    assert late_by(compare(samples(times, 2, 3), EXACT)) == {("n0", 1): 21.0}


def test_a_rank_late_at_many_collectives():
    times = issued(lambda rank, number: 1 * MS + 200 * (rank == 2), 4, 5, 50, [True] * 50)
    assert late_by(compare(samples(times, 2, 50), EXACT)) == {("n1", 2): pytest.approx(10.0, rel=0.05)}


@pytest.mark.parametrize(
    ("waits", "expected_ms"), [([False, False, True], 6), ([True, True, True], 18), ([False, True, True], 12)]
)
def test_lateness_without_a_waiting_rank_counts_once(waits, expected_ms):
    """The ranks issue collectives so far apart that none runs ahead. Only changes from step to step tell one from the other."""

    def work_us(rank: int, number: int) -> float:
        late = number % 3 == 0 or waits[number % 3 - 1]  # else it still is, by what it was late by before
        return 20 * MS + 6 * MS * (rank == 1 and late)

    (found,) = late_by(compare(samples(issued(work_us, 4, 80, 3, waits), 2, 3), EXACT)).values()
    assert found == pytest.approx(expected_ms, rel=0.05)


@pytest.mark.parametrize("per_step", [40, 128])
@pytest.mark.parametrize(("late_ms", "expected"), [(0, {}), (2, {}), (21, {("n0", 1): pytest.approx(21, rel=0.05)})])
def test_lateness_carried_over_counts_once_in_long_steps(per_step, late_ms, expected):
    """DDP with many buckets: a window of 256 collectives holds a few steps, and the ranks wait at the end of each."""
    times = issued(
        lambda rank, number: 5 * MS + late_ms * MS * (rank == 1 and number % per_step == 0), 4, 256 // per_step, per_step
    )
    assert late_by(compare(samples(times, 2, per_step), EXACT)) == expected


def test_lateness_at_one_collective_is_shared_by_steps():
    """As of a barrier after each hundredth step, before which rank 0 writes its log."""
    times = issued(lambda rank, number: 100 * STEP_US + 30 * MS * (rank == 0), 4, 80, 1)
    found = {each.rank: each.median_us for each in compare(samples(times, 2, 0.01), EXACT) if each.host == "n0"}
    assert found[0] == pytest.approx(0.3 * MS, rel=0.05)


def test_many_collectives_compare_as_quickly():
    times = issued(lambda rank, number: 1 * MS, 4, 1, 64)
    assert late_by(compare(samples(times, 2, 10**9), EXACT)) == {}  # looking at each place of a step would take an hour


def test_a_host_is_late_with_all_its_ranks():
    times = issued(lambda rank, number: 20 * MS + 6 * MS * (rank >= 2 and number % 3 == 0), 4, 80, 3)
    (found,) = (each for each in compare(samples(times, 2, 3), EXACT) if each.counts)
    assert (found.host, found.rank, round(found.median_us / MS)) == ("n1", -1, 6)


def test_a_one_rank_host_is_named_as_rank():
    times = issued(lambda rank, number: 20 * MS + 6 * MS * (rank == 1), 3, 80, 1)
    assert late_by(compare(samples(times, 1, 1), [*EXACT, Alignment()])) == {("n1", 1): 6.0}


@pytest.mark.parametrize(("late", "expected"), [({3}, {("n1", 3): 20}), ({2, 3}, {("n1", -1): 20})])
def test_a_rank_its_host_awaits_is_named_instead(late, expected):
    """Tensor parallel within each host, four collectives a step; data parallel across three hosts, once a step."""
    at, jitter_us = dict.fromkeys(range(6), 0.0), random.Random(1).gauss
    within: dict[int, list[float]] = {rank: [] for rank in at}
    across: dict[int, list[float]] = {rank: [] for rank in at}
    for _ in range(40):
        for _ in range(4):
            for rank in at:
                at[rank] += 4 * MS + jitter_us(0, 50) + 5 * MS * (rank in late)
                within[rank].append(at[rank])
            at = {rank: max(at[rank // 2 * 2], at[rank // 2 * 2 + 1]) + LATENCY_US for rank in at}
        for rank in at:
            across[rank].append(at[rank])
        at = {rank: max(at[other] for other in at if other % 2 == rank % 2) + LATENCY_US for rank in at}

    def window(group: str, times: Sequence[float], per_step: int) -> Window:
        return Window(group, 0, per_step, int(times[0]), tuple(int(each - times[0]) for each in times))

    def sample(rank: int) -> RankSample:
        windows = window(f"0 1 {rank // 2} 2", within[rank], 4), window(f"0 2 {rank % 2} 3", across[rank], 1)
        return RankSample(rank, WorkerSample(512, STEP_US, windows))

    nodes = [NodeSample(f"n{place}", f"clock {place}", (sample(2 * place), sample(2 * place + 1))) for place in range(3)]
    assert late_by(compare(nodes, [*EXACT, Alignment()])) == {key: pytest.approx(ms, rel=0.05) for key, ms in expected.items()}


def test_differing_clocks_are_aligned_with_an_error():
    times = issued(lambda rank, number: 20 * MS + 6 * MS * (rank >= 2 and number % 3 == 0), 4, 80, 3)
    nodes = samples(times, 2, 3, {1: -7_000_000.0})
    found = compare(nodes, [Alignment(), Alignment(-7_000_000.0, 500.0)])
    assert late_by(found) == {("n1", -1): 6.0}
    assert next(each.error_us for each in found if each.counts) == pytest.approx(500, rel=0.05)
    wrong_by = Alignment(-7_000_000.0, 5 * MS)
    assert late_by(compare(nodes, [Alignment(), wrong_by])) == {}, "it may be an error of the clocks"
    assert late_by(compare(nodes, [Alignment(), UNKNOWN_CLOCK])) == {}


def test_the_clocks_error_counts_at_each_collective():
    times = issued(lambda rank, number: 1 * MS, 4, 5, 50, [True] * 50)
    found = compare(samples(times, 2, 50, {1: 200.0}), [Alignment(), Alignment(0.0, 250.0)])
    assert max(each.median_us for each in found) == pytest.approx(10 * MS, rel=0.05)
    assert late_by(found) == {}


def test_within_a_host_no_clock_of_another_matters():
    times = issued(lambda rank, number: 20 * MS if number % 3 else 20 * MS + 21 * MS * (rank == 3), 4, 80, 3)
    assert late_by(compare(samples(times, 2, 3, {1: 123_456_789.0}), [Alignment(), UNKNOWN_CLOCK])) == {("n1", 3): 21.0}


def test_a_part_of_a_step_represents_it():
    times = issued(lambda rank, number: 1 * MS + 200 * (rank == 2), 4, 1, 25, [True] * 25)
    ((_, found),) = late_by(compare(samples(times, 2, 50), EXACT)).items()
    assert found == pytest.approx(10.0, rel=0.05)


def test_what_some_ranks_did_not_sample_is_omitted():
    times = issued(lambda rank, number: 20 * MS + 21 * MS * (rank == 1), 4, 80, 3)
    apart = [*samples(times, 2, 3)[:1], *samples(times, 2, 3, first=512)[1:]]
    assert late_by(compare(apart, EXACT)).keys() == {("n0", 1)}
    assert compare([], []) == []
    assert compare(samples({0: times[0]}, 1, 3), EXACT[:1]) == []


def test_noise_is_nobodys_fault():
    """Each rank is late now and then, by up to a quarter of a step."""
    for seed in range(20):
        noise_us = random.Random(seed).expovariate
        times = issued(lambda rank, number, noise_us=noise_us: 20 * MS + noise_us(1 / (5 * MS)), 4, 80, 3)
        assert late_by(compare(samples(times, 2, 3), EXACT)) == {}


def test_an_exchange_shows_how_clocks_differ():
    assert aligned([Ping(1000, 51_700, 3000), Ping(5000, 55_100, 5400)]) == Alignment(49_900.0, 200.0)
    assert aligned([]) == UNKNOWN_CLOCK


def late(median_us: float, rank: int = 5) -> Late:
    return Late("n2", rank, "g", median_us, median_us, median_us, 0.0, STEP_US)


def test_naming_takes_three_comparisons_and_ends_after_two():
    streaks: Mapping = {}
    for count, named in ((1, 0), (2, 0), (3, 1)):
        streaks = follow(streaks, [late(20 * MS)], count * 10.0)
        assert len(decide.named(streaks)) == named
    assert decide.named(streaks)[0].since == 10.0
    streaks = follow(streaks, [], 40.0)  # it was not seen
    streaks = follow(streaks, [late(1 * MS)], 50.0)
    assert decide.named(streaks)
    assert not decide.named(follow(streaks, [late(1 * MS)], 60.0))
    assert decide.named(follow(streaks, [late(20 * MS)], 60.0))
    streaks = follow(follow({}, [late(20 * MS)], 1.0), [late(1 * MS)], 2.0)
    assert not streaks, "one noisy comparison names nobody"


def test_a_sample_survives_the_way_to_another_node():
    (node, _) = samples(issued(lambda rank, number: 20 * MS, 4, 80, 3), 2, 3)
    assert decide.decode(decide.encode(node), "late/512/0") == node


def test_what_no_comparison_says_anything_of_is_forgotten():
    streaks: Mapping = {}
    for count in range(3):
        streaks = follow(streaks, [late(20 * MS)], count * 10.0)
    for count in range(decide.FORGET_UNSEEN):
        streaks = follow(streaks, [], 30.0 + count)
    assert decide.named(streaks)
    assert not follow(streaks, [], 40.0)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.2] * 31, True),
        ([0.2] * 30, False),
        ([0.2] * 30 + [None], False),  # nothing is known of it now
        ([0.2] * 4 + [None] * 5 + [0.2] * 22, True),
        ([0.2] * 30 + [0.07], False),
        ([0.07] * 30 + [0.2], False),  # it has been late, but not by so much
        ([0.2] * 10 + [0.07] + [0.2] * 20, True),  # one comparison may be wrong
        ([0.2] * 10 + [0.01] + [0.2] * 20, True),
        ([0.2] * 10 + [0.07] * 2 + [0.2] * 20, False),
        ([0.2] * 4 + [None] * 40, False),
    ],
)
def test_long_and_large_lateness_is_worth_a_restart(shares, expected):
    """shares: of a step, every 10 seconds; None: the comparison could not see it."""
    streaks: Mapping = {}
    for count, share in enumerate(shares):
        streaks = follow(streaks, [] if share is None else [late(share * STEP_US)], now := count * 10.0)
    found = decide.to_replace(decide.named(streaks), now, 300.0)
    assert (found is not None) == expected


@pytest.mark.parametrize("step_s", [0.1, 0.7, 6.0])
def test_a_slow_host_that_samples_rarely_is_named(step_s):
    """Its processor is ten times as slow, and so are its samples: most comparisons are without it."""
    usual, slow = (recorder.steps_apart(int(step_s * 1e9), int(cost_s * 1e9)) for cost_s in (0.02, 0.2))
    assert slow >= 8 * usual
    streaks: Mapping = {}
    for count in range(1, 3 * slow // usual + 1):
        streaks = follow(streaks, [late(20 * MS)] if count % (slow // usual) == 0 else [], count * 10.0)
    assert decide.named(streaks)
