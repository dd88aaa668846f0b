"""Which rank, or which host, keeps the others waiting? Decisions over plain values, standard library only.

Steps of synchronous training take equally long on all ranks, so step times show no straggler. What differs is when each rank
issues a collective, which torch's flight recorder knows (`workers.bootstrap.recorder`). A rank is late by how much later it
issues a collective than the first rank of the group does. After a collective all ranks go on at the same moment, so the
lateness at each adds up over a step. But ranks may run ahead: if the first rank issues a collective before the last one has
issued the collective before it, no rank has waited for that one yet, and only the growth of the lateness counts. The same holds
where lateness carries over from one collective to the next, as its small changes from step to step show: DDP issues the buckets
of a step one after another and waits at its end.

Two things are distinguished, per group and step: by how much a rank is later than the other ranks of its host, which one clock
shows exactly; and by how much a host, by its typical rank, is later than the typical host, by clocks that are aligned
(`Alignment`). Every collective that the ranks wait for adds the error of the alignment once more.

Invariant: what is named was late in NAMED_WINDOWS comparisons in a row, in each by SHARE of a step or more beyond the error, and
in three quarters of its steps by half of that: noise of a loaded machine comes and goes.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from elastic_ext.base import records

SHARE = 0.05  # of a step
NAMED_WINDOWS = 3
REPLACE_SHARE = 0.1  # of a step; a restart costs some steps, too
FORGET_WINDOWS = 2  # without lateness, after which what was named is no longer
# Comparisons that say nothing of it: its group is no longer used, its node gives no samples, or gives them more rarely. On a
# processor that is ten times as slow as the others, samples are as much dearer (`recorder.COST`), and so up to 16 times as rare.
FORGET_UNSEEN = 24
LEAST_STEPS = 8  # in a window, to find out where lateness carries over
CARRIED = 0.5  # of a change at one collective is seen at the next: all of it without a wait, none after one
OUTLIER = 4.0  # times the usual distance from the middle
SCHEMA = 1
MAX_LATE = 32  # named at most, the latest first

Microseconds = Annotated[int, records.Within(-(10**18), 10**18)]


@dataclass(frozen=True)
class Window:
    """When a rank issued collectives of a group."""

    group: records.Name  # its name, as `recorder.issued` makes it: of the same ranks everywhere
    first: records.Count  # number of the first collective; the others follow without a gap
    per_step: Annotated[float, records.Within(0, 1e9)]  # collectives of the group in an optimizer step
    # base_us, after_us: time.monotonic_ns() // 1000 of the first one; of each, counted from there
    base_us: Microseconds
    after_us: tuple[Microseconds, ...]


@dataclass(frozen=True)
class WorkerSample:
    """A worker's sample. step: number of steps since its start, the same in all samples to compare. step_us: of one step."""

    step: records.Count
    step_us: Microseconds
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True)
class RankSample:
    rank: records.Rank
    sample: WorkerSample


@dataclass(frozen=True)
class NodeSample:
    """The samples of a node's workers, all of one step. clock: hosts with the same text have the same monotonic clock."""

    host: records.NameOrEmpty
    clock: records.NameOrEmpty
    ranks: tuple[RankSample, ...]


def encode(sample: NodeSample) -> str:
    return records.encode(sample, SCHEMA)


def decode(text: str | bytes, what: str) -> NodeSample:
    """Read a node's sample. what: its key, for error messages. Raises RecordError."""
    return records.read(NodeSample, text, what, SCHEMA)


def decode_worker(text: str | bytes, what: str) -> WorkerSample:
    """Read a worker's sample. what: its file, for error messages. Raises RecordError."""
    return records.read(WorkerSample, text, what, SCHEMA)


# The clocks of hosts.


@dataclass(frozen=True)
class Ping:
    """One exchange with another host: when it was sent and answered by the own clock, and the time of the other clock between."""

    sent_us: int
    other_us: int
    answered_us: int


@dataclass(frozen=True)
class Alignment:
    """By how much another host's clock is ahead of the own one, and by how much this may be wrong; None: nothing is known."""

    ahead_us: float = 0.0
    error_us: float | None = 0.0


UNKNOWN_CLOCK = Alignment(error_us=None)


def aligned(pings: Iterable[Ping]) -> Alignment:
    """Return what the fastest exchange says: the other clock was read between its ends, so half of it is the most error."""
    best = min(pings, key=lambda each: each.answered_us - each.sent_us, default=None)
    if best is None:
        return UNKNOWN_CLOCK
    return Alignment(best.other_us - (best.sent_us + best.answered_us) / 2, (best.answered_us - best.sent_us) / 2)


# One comparison.


@dataclass(frozen=True)
class Late:
    """A rank that is later than the others of its host, or a host that is later than the others."""

    host: str
    rank: int  # -1: of a host with several ranks
    group: str
    # median_us, p90_us: per step, over the window
    median_us: float
    p90_us: float
    low_us: float  # in three quarters of the steps it was as late as this, or later
    error_us: float | None  # the error of the alignment; 0 within a host; None: nothing is known of a clock
    step_us: float  # of a step

    @property
    def share(self) -> float:
        return self.median_us / self.step_us if self.step_us > 0 else 0.0

    @property
    def counts(self) -> bool:
        least = SHARE * self.step_us
        return self.error_us is not None and self.median_us - self.error_us >= least and self.low_us >= least / 2

    def less(self, by_us: float) -> Late:
        return replace(self, median_us=self.median_us - by_us, p90_us=self.p90_us - by_us, low_us=self.low_us - by_us)


@dataclass(frozen=True)
class _Times:
    """One rank's window by the clock of the host that compares. place: index of its node."""

    place: int
    at_us: Sequence[float]


def compare(nodes: Sequence[NodeSample], clocks: Sequence[Alignment]) -> list[Late]:
    """Return by how much each rank and each host is late, by the group in which it is latest. clocks: of each node."""
    found: dict[tuple[str, int], Late] = {}
    for group, windows in _by_group(nodes).items():
        step_us = statistics.median(sample.step_us for _, _, sample, _ in windows)
        per_step = statistics.median(each.per_step for *_, each in windows)
        times = {
            rank: _Times(place, [each.base_us + after - clocks[place].ahead_us for after in each.after_us])
            for place, rank, _, each in windows
        }
        for late in _of_group(group, times, per_step, step_us, nodes, clocks):
            before = found.get((late.host, late.rank))
            if before is None or late.median_us > before.median_us:
                found[late.host, late.rank] = late
    return _without_their_ranks(found.values())


def _without_their_ranks(found: Iterable[Late]) -> list[Late]:
    """Take from the lateness of each host that of its latest rank, for which its others may have waited in another group."""
    found = list(found)
    latest: dict[str, float] = {}
    for each in found:
        if each.rank >= 0 and each.counts:
            latest[each.host] = max(latest.get(each.host, 0.0), each.median_us)
    return [each.less(latest.get(each.host, 0.0)) if each.rank < 0 else each for each in found]


def _by_group(nodes: Sequence[NodeSample]) -> dict[str, list[tuple[int, int, WorkerSample, Window]]]:
    """Return the windows that most ranks of a group have, with index of the node, rank and sample."""
    found: dict[str, list[tuple[int, int, WorkerSample, Window]]] = {}
    for place, node in enumerate(nodes):
        for each in node.ranks:
            for window in each.sample.windows:
                found.setdefault(window.group, []).append((place, each.rank, each.sample, window))
    chosen = {}
    for group, windows in found.items():
        (first, length), _ = Counter((each.first, len(each.after_us)) for *_, each in windows).most_common(1)[0]
        same = [each for each in windows if (each[3].first, len(each[3].after_us)) == (first, length)]
        if len(same) > 1 and length > 1:
            chosen[group] = same
    return chosen


def _of_group(
    group: str,
    times: Mapping[int, _Times],
    per_step: float,
    step_us: float,
    nodes: Sequence[NodeSample],
    clocks: Sequence[Alignment],
) -> list[Late]:
    ranks_of: dict[int, list[int]] = {}  # by place
    for rank, each in times.items():
        ranks_of.setdefault(each.place, []).append(rank)
    found = []
    for place, ranks in ranks_of.items():
        if len(ranks) > 1:
            for rank, late_us in _beyond_typical(_per_step({each: times[each].at_us for each in ranks}, per_step)[0]).items():
                found.append(_late(nodes[place].host, rank, group, late_us, 0.0, step_us))
    if len(ranks_of) > 1:
        late, waits = _per_step({rank: each.at_us for rank, each in times.items()}, per_step)
        typical = {place: _lower_median([late[rank] for rank in ranks]) for place, ranks in ranks_of.items()}
        for place, late_us in _beyond_typical(typical).items():
            error_us = _error_us(place, {each: clocks[each] for each in ranks_of}, waits)
            rank = nodes[place].ranks[0].rank if len(nodes[place].ranks) == 1 else -1
            found.append(_late(nodes[place].host, rank, group, late_us, error_us, step_us))
    return found


def _late(host: str, rank: int, group: str, late_us: Sequence[float], error_us: float | None, step_us: float) -> Late:
    ordered = sorted(late_us)
    p90_us, low_us = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], ordered[len(ordered) // 4]
    return Late(host, rank, group, statistics.median(ordered), p90_us, low_us, error_us, step_us)


def _lateness(at_us: Mapping[int, Sequence[float]], per_step: int) -> tuple[dict[int, list[float]], list[bool]]:
    """Return by how much each rank issued each collective after the first rank did, and whether they may have waited before it.

    They have not where the first rank ran ahead, nor where lateness carries over at this place of a step. No list: there are too
    few steps to look at each place alone, and by all places together it carries over.
    """
    first, last = ([pick(column) for column in zip(*at_us.values(), strict=True)] for pick in (min, max))
    late = {rank: [mine - earliest for mine, earliest in zip(times, first, strict=True)] for rank, times in at_us.items()}
    places = per_step if per_step * LEAST_STEPS <= len(first) else 1
    carried = [_carries_over(late.values(), place, places) for place in range(places)]
    if places < per_step and carried[0]:
        return late, []
    waited = [first[at] >= last[at - 1] and not carried[at % places] for at in range(1, len(first))]
    return late, [False, *waited]


def _carries_over(late: Iterable[Sequence[float]], place: int, places: int) -> bool:
    """Return whether a rank that is later than usual at one collective is so at the next, at this place of a step.

    After a wait all ranks begin at the same time: how late a rank is says nothing of how late it was before.
    """
    products = squares = 0.0
    for times in late:
        begin = place or places
        pairs = [_deviations(times[at::places]) for at in (begin - 1, begin)]
        for before, now in zip(*pairs, strict=False):
            products += before * now
            squares += before * before
    return squares > 0 and products / squares > CARRIED


def _deviations(values: Sequence[float]) -> list[float]:
    """Return how far each is from the middle one; outliers, as of a pause, count as a few times the usual distance."""
    if len(values) < LEAST_STEPS:
        return []
    middle = statistics.median(values)
    most = OUTLIER * statistics.median(abs(each - middle) for each in values)
    return [max(-most, min(most, each - middle)) for each in values]


def _per_step(at_us: Mapping[int, Sequence[float]], per_step: float) -> tuple[dict[int, list[float]], float]:
    """Return the lateness of each rank in each step, and how many collectives of a step all may have waited for.

    A step is any `per_step` collectives in a row; a part of one is scaled, and so is one collective in several steps. Where
    lateness carries over all through a step it counts once: the mean.
    """
    whole = max(1, round(per_step))
    late_us, waited = _lateness(at_us, whole)
    found = {}
    for rank, late in late_us.items():
        added = [late[at] if waited[at] else late[at] - late[at - 1] for at in range(1, len(late))] if waited else late
        size = min(whole, len(added))
        scale = per_step / size if waited else 1 / size
        found[rank] = [sum(added[at : at + size]) * scale for at in range(0, len(added) - size + 1, size)]
    share = sum(waited) / (len(waited) - 1) if waited else 0.0
    return found, max(min(1.0, per_step), per_step * share)


def _lower_median(values: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each step, the middle one of these: of an even number the lower one, so that half of them may be late."""
    return [sorted(column)[(len(column) - 1) // 2] for column in zip(*values, strict=True)]


def _beyond_typical(late_us: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    typical = _lower_median(list(late_us.values()))
    return {key: [mine - usual for mine, usual in zip(values, typical, strict=True)] for key, values in late_us.items()}


def _error_us(place: int, clocks: Mapping[int, Alignment], waits: float) -> float | None:
    """Return by how much the lateness of a host in a step may be wrong. clocks: of the hosts in the group. waits: per step."""
    if clocks[place].error_us is None:
        return None
    errors = sorted(math.inf if each.error_us is None else each.error_us for other, each in clocks.items() if other != place)
    usual = errors[(len(errors) - 1) // 2]
    return None if math.isinf(usual) else (clocks[place].error_us + usual) * waits  # type: ignore[operator]


# From one comparison to the next.


@dataclass(frozen=True)
class Streak:
    late: Late
    count: int  # comparisons in which it was late
    missed: int  # how many it has not been late in since
    since: float  # monotonic seconds of the first
    named: bool  # it is
    unseen: int = 0  # how many since the last one say nothing of it
    much_since: float | None = None  # monotonic seconds since when it has been late by REPLACE_SHARE or more; None: it is not
    much_missed: int = 0  # how many it has not been so in since


Streaks = Mapping[tuple[str, int], Streak]  # by host and rank


def follow(before: Streaks, found: Iterable[Late], now: float) -> dict[tuple[str, int], Streak]:
    """Return what is late after another comparison. now: monotonic seconds. What it could not see stays, for a while."""
    after = {key: replace(each, unseen=each.unseen + 1) for key, each in before.items() if each.unseen < FORGET_UNSEEN}
    for late in found:
        key = late.host, late.rank
        streak = after.get(key)
        if late.counts:
            count = streak.count + 1 if streak is not None else 1
            since = streak.since if streak is not None else now
            is_named = count >= NAMED_WINDOWS or (streak is not None and streak.named)
            after[key] = _much(streak, Streak(late, count, 0, since, is_named), now)
        elif streak is not None:
            missed = streak.missed + 1
            if streak.named and missed < FORGET_WINDOWS:
                after[key] = _much(streak, replace(streak, late=late, missed=missed, unseen=0), now)
            else:
                del after[key]
    return after


def _much(before: Streak | None, after: Streak, now: float) -> Streak:
    """Return `after` with since when it has been late by REPLACE_SHARE; one comparison without does not end that."""
    since, missed = (before.much_since, before.much_missed) if before is not None else (None, 0)
    if after.late.counts and after.late.share >= REPLACE_SHARE:
        return replace(after, much_since=now if since is None else since, much_missed=0)
    if since is not None and missed + 1 < FORGET_WINDOWS:
        return replace(after, much_since=since, much_missed=missed + 1)
    return replace(after, much_since=None, much_missed=0)


def named(streaks: Streaks) -> list[Streak]:
    found = [each for each in streaks.values() if each.named]
    return sorted(found, key=lambda each: -each.late.share)[:MAX_LATE]


def to_replace(found: Iterable[Streak], now: float, after_s: float) -> Streak | None:
    """Return what has been late by REPLACE_SHARE for so long, and still is, that its host is worth a restart; the latest.

    found: see `named`.
    """
    still = (each for each in found if not (each.unseen or each.missed or each.much_missed))
    return next((each for each in still if each.much_since is not None and now - each.much_since >= after_s), None)
