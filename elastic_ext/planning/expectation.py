"""Where the time of a job goes when failures interrupt it: a closed form. Pure.

The assumptions, without which it is only an estimate: failures come at one constant rate, independently of each other and of what
the job does (a Poisson process), so one may also hit a recovery, which then begins again; each class of failures takes the same
time each time; nodes fail one at a time.

With T between two saves that do not stall training, w = 0 and one class, this is Daly's complete model. `meta_ratio` is the first
order of it, as published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

PRODUCTIVE, LOST_STEPS, STALLS, WAITING = "productive", "lost steps", "saves", "waiting for nodes"
MAX_SPARES = 1_000_000


@dataclass(frozen=True)
class FailureClass:
    """Failures that a job recovers from in the same way."""

    name: str
    share: float  # of all failures, from 0 to 1
    phases: Mapping[str, float]  # seconds from the failure until training goes on, by phase, in order
    every_s: float  # running time from one copy to the next of those that the job resumes from
    ready_s: float = 0.0  # seconds after which a copy can be used
    replaces: bool = False  # whether a node leaves for repair

    @property
    def recovery_s(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class Supply:
    """Nodes beyond those that the job runs on. spares: None if there is always one. repair_s: mean time until a node is back."""

    spares: int | None = None
    repair_s: float = 0.0


@dataclass(frozen=True)
class Expectation:
    """Shares of the job's time, which add up to 1."""

    productive: float  # the effective training time ratio, ETTR
    # the other shares by what takes them; phases of recoveries by their names
    lost: Mapping[str, float] = field(default_factory=dict)
    held: float = 0.0  # productive share of the time of all nodes that the job holds, spares included

    @property
    def dominates(self) -> str:
        """The greatest loss; "" if nothing is lost."""
        return max(self.lost, key=lambda name: self.lost[name]) if any(self.lost.values()) else ""


def expect(
    classes: Sequence[FailureClass], rate_s: float, nodes: int, stalled: float = 0.0, supply: Supply | None = None
) -> Expectation:
    """Return what to expect.

    classes: their shares add up to 1. rate_s: failures of the whole job in a second, more than 0. stalled: share of the running
    time for which saves hold up training.
    """
    supply = supply or Supply()
    again = sum(each.share * -math.expm1(-rate_s * each.recovery_s) for each in classes)
    running = 1.0 - again  # share of the time; the rest is recovery. The time of a cycle is 1 / (rate_s * running)
    kept = sum(each.share * _kept(rate_s, each) for each in classes)
    lost: dict[str, float] = {LOST_STEPS: running * (1.0 - stalled) * (1.0 - kept), STALLS: running * stalled}
    for each in classes:
        for name, share in _in_phases(rate_s, each):
            lost[name] = lost.get(name, 0.0) + each.share * share
    waiting = waiting_share(out_for_repair(classes, rate_s, supply), supply.spares)
    lost = {name: share * (1.0 - waiting) for name, share in lost.items()}
    productive = running * (1.0 - stalled) * kept * (1.0 - waiting)
    return Expectation(productive, {**lost, WAITING: waiting}, productive * nodes / (nodes + (supply.spares or 0)))


def _kept(rate_s: float, each: FailureClass) -> float:
    """Return the share of the running time since the last recovery that is in the newest copy when a failure comes."""
    exponent = rate_s * each.every_s
    return math.exp(-rate_s * each.ready_s) * (exponent / math.expm1(exponent) if 0 < exponent < 700 else float(not exponent))


def _in_phases(rate_s: float, each: FailureClass) -> Iterator[tuple[str, float]]:
    """Yield each phase with its share of the time, if all failures were of this class: a failure may come before it ends."""
    began_s = 0.0
    for name, seconds in each.phases.items():
        yield name, math.exp(-rate_s * began_s) * -math.expm1(-rate_s * seconds)
        began_s += seconds


def out_for_repair(classes: Sequence[FailureClass], rate_s: float, supply: Supply) -> float:
    """Return how many nodes are out for repair on average, if the job never waits."""
    return rate_s * supply.repair_s * sum(each.share for each in classes if each.replaces)


def waiting_share(out: float, spares: int | None) -> float:
    """Return the share of the time for which a job lacks a node.

    It runs as long as no more nodes than it has spares are out, and none fails while it waits: Erlang's loss formula for one
    server more than spares, for any distribution of the repair times.

    out: see `out_for_repair`.
    """
    if spares is None or out <= 0:
        return 0.0
    blocked = 1.0
    for servers in range(1, spares + 2):
        blocked = out * blocked / (servers + out * blocked)
    return blocked


def spares_for(out: float, share: float) -> int:
    """Return how many spares keep the time without a node below `share`. out: see `out_for_repair`."""
    blocked, servers = 1.0, 0
    while servers < MAX_SPARES:
        servers += 1
        blocked = out * blocked / (servers + out * blocked)
        if blocked <= share:
            break
    return servers - 1


def most_within(mean: float, risk: float) -> int:
    """Return the number that a Poisson variable of this mean exceeds with a probability of `risk` at most. Both are above 0."""
    log_term = -mean
    below, number = math.exp(log_term), 0
    while 1.0 - below > risk and number < mean + 50 * (1 + math.sqrt(mean)):
        number += 1
        log_term += math.log(mean / number)
        below += math.exp(log_term)
    return number


def meta_ratio(nodes: int, failures_node_day: float, restart_s: float, every_s: float, save_s: float) -> float:
    """Return the expected ETTR by Meta's formula (arXiv 2410.21680), a first order: it holds while failures cost little.

    failures_node_day: failures of one node in a day. restart_s: u0, from a failure until training goes on. every_s: time from one
    checkpoint to the next. save_s: how long one stalls training.
    """
    rate_s = nodes * failures_node_day / 86400
    return (1.0 - rate_s * (restart_s + every_s / 2)) / (1.0 + save_s / every_s)
