"""Puts the clocks of several hosts over each other, for a picture: nothing is decided by it. Pure.

Within a host the monotonic clock counts. Between hosts, the moments at which nodes enter the same round are taken as one moment:
they are, to within what a rendezvous takes. Wall clocks only tell which of two rounds of one number is meant, after a requeue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic_ext.observe.timeline.told import Told

SAME_ROUND_S = 600.0  # by wall clocks; a round of the same number that is further away is of another start of the job
MENTIONED_S = 0.5  # corrections below it need no words


@dataclass(frozen=True)
class Aligned:
    """Events in the order of one clock, in Unix seconds of the reference host.

    Attributes:
        events: `wall` of each is by that clock.
        corrections: seconds added to the wall clock of a host.
        spread: the most by which a common round still differs between two hosts, in seconds.
        alone: hosts that share no round with the others, so that only their wall clocks tell.
    """

    events: tuple[Told, ...]
    corrections: dict[str, float]
    spread: float
    alone: tuple[str, ...]


def align(told: Sequence[Told]) -> Aligned:
    """Return the events by one clock: that of the host with the most rounds."""
    by_agent: dict[tuple[str, int], list[Told]] = defaultdict(list)
    for each in told:
        by_agent[each.node, each.pid].append(each)
    steady = [event for events in by_agent.values() for event in _steady(events)]
    rounds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in steady:
        rounds[each.node]  # a host without a round is a host, too
        if each.name == "round_started":
            rounds[each.node][each.round].append(each.wall)
    hosts = sorted(rounds, key=lambda host: (-sum(map(len, rounds[host].values())), host))
    corrections, alone, left = dict.fromkeys(hosts[:1], 0.0), [], [0.0]
    for host in hosts[1:]:
        differences = _differences(rounds[hosts[0]], rounds[host])
        corrections[host] = median(differences) if differences else 0.0
        left += [abs(each - corrections[host]) for each in differences]
        if not differences:
            alone.append(host)
    events = (replace(each, wall=each.wall + corrections[each.node]) for each in steady)
    return Aligned(tuple(sorted(events, key=lambda each: each.wall)), corrections, max(left), tuple(alone))


def _steady(events: Sequence[Told]) -> list[Told]:
    """Return the events of one agent, timed by its monotonic clock from its first event on: a clock that is set moves nothing."""
    first = min(events, key=lambda each: each.monotonic)
    return [replace(each, wall=first.wall + each.monotonic - first.monotonic) for each in events]


def _differences(of_reference: dict[int, list[float]], of_host: dict[int, list[float]]) -> list[float]:
    """Return what to add to the host's clock, by each round that both have entered."""
    found = []
    for round_, times in of_host.items():
        for at in times:
            nearest = min(of_reference.get(round_, []), key=lambda other: abs(other - at), default=None)
            if nearest is not None and abs(nearest - at) <= SAME_ROUND_S:
                found.append(nearest - at)
    return found
