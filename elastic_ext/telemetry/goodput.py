"""The goodput ledger of one agent: every second from its start in exactly one state. Pure; `base.goodput` names the states.

A span of time is settled when its state can no longer change: the agent's own states at once, the time of running workers with
their next step, progress report or change of phase. What is not settled yet is shown apart, so that no counter ever falls and
the settled seconds and the unsettled ones together are the time since the start, whenever one looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base import goodput
from elastic_ext.telemetry import families
from elastic_ext.workers import progress, progress_layout

WAITS_FOR_NODES_S = 2.0  # a thousand nodes that are all there form a round in 1.3 s: what takes longer waits for some
ENOUGH = 3  # interruptions and saves, for an interval that is more than a guess: the error of a mean of 3 is still 60 %

_OF_AGENT = {
    "rendezvous": goodput.RENDEZVOUS,
    families.STARTING: goodput.STARTUP,
    "stop": goodput.STOPPING,
    "verdict": goodput.STOPPING,
    families.BACKOFF: goodput.BACKOFF,
    families.ENDED: goodput.IDLE,
}
_BEFORE_DECISION = ("stop", "verdict")  # the state of what was not settled is known after these


@dataclass(frozen=True)
class Tail:
    """The end of a worker's time, which it did not settle itself."""

    now_in: str
    seconds: float
    step_s: float  # its mean time from one step to the next; math.inf before the second
    rest: str  # the state of what is longer than a step, unless the verdict is a hang
    share: float  # of this worker in the node

    def states(self, hung: bool) -> dict[str, float]:
        """Return how it counts. hung: the job's verdict is a hang."""
        if self.now_in == goodput.STOPPING:
            return {goodput.STOPPING: self.seconds}
        if self.now_in not in (goodput.PRODUCTIVE, goodput.LOST):
            return {goodput.HANG if hung else self.now_in: self.seconds}
        unfinished_s = 0.0 if hung and math.isinf(self.step_s) else min(self.seconds, self.step_s)
        return {goodput.LOST: unfinished_s, goodput.HANG if hung else self.rest: self.seconds - unfinished_s}


@dataclass(frozen=True)
class Look:
    """The ledger at one moment. unsettled_s: time whose state is not known yet. tokens, flops: since the start of this agent."""

    spent: goodput.Spent
    unsettled_s: float
    tokens: int = 0
    flops: float = 0.0


class TimeLedger:
    """The time of one agent. The caller holds a lock where several threads use it. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._state, self._since = "rendezvous", now
        self._by_state = dict.fromkeys(goodput.STATES, 0.0)
        self._counts = goodput.Spent()
        self._shown = dict(self._by_state)
        self._tails: list[Tail] = []
        self._resumed_at: int | None = None  # optimizer steps of the job before this round's first
        self._tokens, self._flops = 0, 0.0

    def resume(self, step: int | None) -> int:
        """Note the step at which the next round starts, if known; return how many of its optimizer steps are not new."""
        self._resumed_at = position_of(step, self._counts.positions) if step is not None else None
        return max(0, int(self._counts.reached) - self._resumed_at) if self._resumed_at is not None else 0

    def learn(self, others: goodput.Spent) -> None:
        """Note how far other agents of this job have come, and which checkpoints they have seen."""
        counts = self._counts
        positions = goodput.newest_positions((*others.positions, *counts.positions))
        self._counts = replace(counts, reached=max(counts.reached, others.reached), positions=positions)

    def enter(self, state: str, now: float, workers: Sequence[progress.Progress] = ()) -> None:
        """Note what the agent does from now on: one of families.STATES. workers: those that run, if known."""
        now = max(now, self._since)
        if self._state == families.RUNNING:
            # A signal ends the workers without a state of its own.
            self._end_round(now, workers, goodput.DETECTION if state in _BEFORE_DECISION else goodput.STOPPING)
        else:
            self._add(self._own(now))
        self._state, self._since = state, now
        if state not in _BEFORE_DECISION:
            self.decide(hung=False)

    def decide(self, hung: bool) -> None:
        """Settle what the end of the last round has left open. hung: the verdict is a hang. A second call does nothing."""
        for tail in self._tails:
            self._add(tail.states(hung), tail.share)
        self._tails = []

    def at(self, now: float, workers: Sequence[progress.Progress] = ()) -> Look:
        """Return the ledger as of now. workers: see `enter`."""
        now = max(now, self._since)
        by_state, counts = dict(self._by_state), self._counts
        unsettled_s = sum(tail.seconds * tail.share for tail in self._tails)
        tokens, flops = self._tokens, self._flops
        if self._state == families.RUNNING:
            settled = _mean(workers, self._since, now)
            unsettled_s += max(0.0, now - self._since - sum(settled.values()))
            counts = self._counted(workers)
            self._counts = replace(self._counts, positions=counts.positions)  # the workers show only their last one
            tokens, flops = tokens + sum(each.tokens for each in workers), flops + sum(each.flops for each in workers)
        else:
            settled = self._own(now)
        for state, seconds in settled.items():
            by_state[state] += seconds
        # Sums of floats in another order may be less by a rounding error, which Prometheus would take for a new counter.
        self._shown = {state: max(seconds, self._shown[state]) for state, seconds in by_state.items()}
        return Look(replace(counts, seconds=goodput.seconds_of(self._shown)), unsettled_s, tokens, flops)

    def _own(self, now: float) -> dict[str, float]:
        seconds = now - self._since
        state = _OF_AGENT[self._state]
        if state != goodput.RENDEZVOUS:
            return {state: seconds}
        return {state: min(seconds, WAITS_FOR_NODES_S), goodput.WAITING: max(0.0, seconds - WAITS_FOR_NODES_S)}

    def _end_round(self, now: float, workers: Sequence[progress.Progress], rest: str) -> None:
        """rest: see `Tail`."""
        ran_s = now - self._since
        well = rest != goodput.DETECTION and all(each.phase == "exit" and not each.ends_with for each in workers)
        if not workers:
            self._add({goodput.PRODUCTIVE: ran_s})
        for each in workers:
            settled, share = _settled(each, self._since, now), 1 / len(workers)
            self._add(settled, share)
            left_s = max(0.0, ran_s - sum(settled.values()))
            if each.ended_ns:  # it failed: from then on the process only ends
                ending_s = min(left_s, max(0.0, now - each.ended_ns / 1e9))
                self._add({goodput.STOPPING: ending_s}, share)
                left_s -= ending_s
            step_s = math.inf if each.step_s is None else each.step_s
            self._tails.append(Tail(each.account, left_s, step_s, rest, share))
        counts = self._counted(workers)
        self._counts = replace(counts, starts=counts.starts + 1, interruptions=counts.interruptions + (not well))
        self._tokens += sum(each.tokens for each in workers)
        self._flops += sum(each.flops for each in workers)

    def _counted(self, workers: Sequence[progress.Progress]) -> goodput.Spent:
        if not workers:
            return self._counts
        counts, before = self._counts, self._resumed_at
        saves = counts.saves + max(each.saves for each in workers)
        if before is None:
            return replace(counts, saves=saves)
        reached = max(counts.reached, before + max(each.steps for each in workers))
        seen = [(each.saved_step, before + each.saved_after) for each in workers if each.saved_step is not None]
        positions = goodput.newest_positions((*counts.positions, *(goodput.CheckpointPosition(*each) for each in seen)))
        return replace(counts, saves=saves, reached=reached, positions=positions)

    def _add(self, by_state: Mapping[str, float], share: float = 1.0) -> None:
        for state, seconds in by_state.items():
            self._by_state[state] += seconds * share


def position_of(step: int, known: Sequence[goodput.CheckpointPosition]) -> int:
    """Return how many optimizer steps of the job are in the checkpoint of this step.

    Scripts number their checkpoints as they like: by optimizer step, by iteration with two optimizers, by epoch. What was seen of
    others shows how many optimizer steps a number stands for; if nothing was, one.
    """
    by_step = {each.step: each.at for each in known}
    if step in by_step:
        return int(by_step[step])
    first = goodput.CheckpointPosition(1, 1)
    nearest = min((each for each in known if each.step > 0), key=lambda each: abs(each.step - step), default=first)
    return round(step * nearest.at / nearest.step)


def _settled(worker: progress.Progress, since: float, until: float) -> dict[str, float]:
    """Return the seconds that a worker has settled between two moments, by state.

    What was settled before `since` is start-up, as far as there is any.
    """
    began_at = worker.began_ns / 1e9
    if not began_at:
        return {}
    late_s = max(0.0, min(began_at, until) - since)  # the process began after the agent saw it run
    found, early_s = {}, max(0.0, since - began_at)
    spent = zip(progress_layout.ACCOUNTS, worker.spent_ns, strict=True)
    for state, ns in sorted(spent, key=lambda item: item[0] != goodput.STARTUP):
        dropped = min(ns / 1e9, early_s)
        found[state], early_s = ns / 1e9 - dropped, early_s - dropped
    if any(found.values()):
        found[goodput.STARTUP] += late_s
    over_s = sum(found.values()) - (until - since)
    for state in found if over_s > 0 else ():  # a worker has settled more after `until` was read
        dropped = min(found[state], over_s)
        found[state], over_s = found[state] - dropped, over_s - dropped
    return found


def _mean(workers: Sequence[progress.Progress], since: float, until: float) -> dict[str, float]:
    """Return the workers' settled seconds by state, each worker having the same share of the node."""
    mean: dict[str, float] = {}
    for each in workers:
        for state, seconds in _settled(each, since, until).items():
            mean[state] = mean.get(state, 0.0) + seconds / len(workers)
    return mean


@dataclass(frozen=True)
class Interval:
    seconds: float | None  # None while too little is known
    reason: str  # why, or what is missing
    stall_s: float = 0.0  # mean stall of a save
    restart_s: float = 0.0  # mean time from an interruption to the next step
    between_s: float = 0.0  # mean time in which the job runs between two interruptions


def advised_interval(spent: goodput.Spent, hosts: int) -> Interval:
    """Return Daly's optimum of what was measured, see `goodput.best_interval_s`.

    It needs ENOUGH interruptions and ENOUGH saves, and training must stand for them at all. All of `spent` are sums over hosts,
    and every host sees every interruption and every save, so each quotient is that of the job.
    """
    seconds = spent.by_state
    interruptions, saves = spent.interruptions / max(1, hosts), spent.saves / max(1, hosts)
    if interruptions < ENOUGH or saves < ENOUGH:
        return Interval(None, f"{interruptions:.3g} interruptions and {saves:.3g} saves so far, expected {ENOUGH} of each")
    stall_s = seconds[goodput.SAVE] / spent.saves
    running_s = sum(seconds[state] for state in (goodput.PRODUCTIVE, goodput.LOST, goodput.DATA, goodput.SAVE))
    restart_s = (spent.total_s - running_s - seconds[goodput.IDLE]) / spent.starts if spent.starts else 0.0
    between_s = running_s / spent.interruptions
    if stall_s <= 0 or between_s <= 0:
        return Interval(
            None, "saves do not stall training, or no script reports them: any interval is as good", stall_s, restart_s, between_s
        )
    reason = (
        f"a save stalls {stall_s:.3g} s, a restart takes {restart_s:.3g} s, {between_s:.3g} s of running between interruptions"
    )
    return Interval(goodput.best_interval_s(stall_s, between_s), reason, stall_s, restart_s, between_s)
