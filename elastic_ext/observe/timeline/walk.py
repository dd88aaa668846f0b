"""What one agent did, from its events. Pure.

Between two events the agent is in the state that the first of them began. Some events tell later when a state had begun: of a
hang, and of the stop before a verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_ext.observe.goodput import WAITS_FOR_NODES_S
from elastic_ext.observe.timeline.clocks import Agent
from elastic_ext.observe.timeline.course import (
    BACKOFF,
    GONE,
    HANG,
    RENDEZVOUS,
    RUNNING,
    START,
    STARTUP,
    STOPPING,
    TRAINING,
    VERDICT,
    WAITING,
    Span,
)
from elastic_ext.observe.timeline.lines import Line

IN_ROUND = (STARTUP, TRAINING, RUNNING)  # while workers run


@dataclass(frozen=True)
class Walk:
    """What an agent did. Unix seconds, by the clock of all agents.

    Attributes:
        changes: when it entered which state; the last one lasts until something else tells its end.
        stopped: when the workers of a round were about to be stopped, by number of the round.
        ended: whether the agent has told of its end.
    """

    changes: tuple[tuple[float, str], ...]
    stopped: dict[int, float]
    ended: bool

    def spans(self, until: float, began: float) -> list[Span]:
        """Return the states as spans, in seconds since `began`. until: the end of the last one, unless the agent has ended."""
        ends = [at for at, _ in self.changes[1:]] + [until]
        found = []
        for (at, state), end in zip(self.changes, ends, strict=True):
            if state != GONE:
                found += _split(at - began, max(at, end) - began, state)
        return found


def _split(begin: float, end: float, state: str) -> list[Span]:
    """Return a rendezvous that lasts as what it is: waiting for nodes."""
    if state != RENDEZVOUS or end - begin <= WAITS_FOR_NODES_S:
        return [Span(begin, end, state)]
    return [Span(begin, begin + WAITS_FOR_NODES_S, state), Span(begin + WAITS_FOR_NODES_S, end, WAITING)]


@dataclass
class _Walker:
    run_state: str  # of workers before their first step
    changes: list[tuple[float, str]] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)
    floor: float = 0.0  # no state that is told of later began before this
    started: float | None = None  # when these workers ran
    over: float | None = None  # when the round was said to be over
    told: dict[str, float] = field(default_factory=dict)  # phases of this recovery, up to its last verdict
    leaves: bool = True  # the agent is about to end, unless something says that it goes on
    ended: bool = False

    def enter(self, state: str, at: float) -> None:
        """Enter a state, perhaps in the past: what was thought to come after that did not."""
        at = max(at, self.floor)
        while self.changes and self.changes[-1][0] >= at:
            self.changes.pop()
        if not self.changes or self.changes[-1][1] != state:
            self.changes.append((at, state))

    def runs(self) -> bool:
        return bool(self.changes) and self.changes[-1][1] in IN_ROUND

    def stop(self, at: float, round_: int) -> None:
        self.enter(STOPPING, at)
        self.stopped[round_] = min(at, self.stopped.get(round_, at))


def _agent_started(walker: _Walker, line: Line, at: float) -> None:
    walker.enter(RENDEZVOUS, at)


def _round_started(walker: _Walker, line: Line, at: float) -> None:
    walker.floor, walker.leaves, walker.over = at, True, None
    walker.enter(START, at)


def _workers_started(walker: _Walker, line: Line, at: float) -> None:
    walker.floor = walker.started = at
    walker.enter(walker.run_state, at)


def _first_step(walker: _Walker, line: Line, at: float) -> None:
    if walker.started is None:
        return
    moment = min(at, walker.started + (line.number("seconds") or 0.0))
    walker.told = {}
    later = [each for each in walker.changes if each[0] > moment]
    walker.enter(TRAINING, moment)
    walker.changes += later  # it was told of after the workers were stopped
    walker.floor = moment


def _hang(walker: _Walker, line: Line, at: float) -> None:
    quiet_s = line.number("seconds")
    if quiet_s is None:
        return
    over = walker.over if walker.over is not None else at
    walker.enter(HANG, at - quiet_s)
    walker.stop(max(over, at - quiet_s), line.round)


def _round_over(walker: _Walker, line: Line, at: float) -> None:
    walker.over = at
    walker.leaves = line.text("cause") == "closed"
    walker.stop(at, line.round)


def _failure(walker: _Walker, line: Line, at: float) -> None:
    if walker.runs():
        walker.stop(at, line.round)


def _decision(walker: _Walker, line: Line, at: float) -> None:
    phases = line.numbers("phases")
    stop_s, verdict_s = (max(0.0, phases.get(name, 0.0) - walker.told.get(name, 0.0)) for name in ("stop", "verdict"))
    walker.told = phases
    if stop_s or verdict_s:
        walker.stop(at - verdict_s - stop_s, line.round)
        walker.enter(VERDICT, at - verdict_s)
    elif walker.runs():
        walker.stop(at, line.round)
    walker.leaves = line.text("action") != "restart"
    if not walker.leaves and line.number("delay"):
        walker.enter(BACKOFF, at)


def _leaving(walker: _Walker, line: Line, at: float) -> None:
    walker.leaves = True
    walker.stop(at, line.round)


def _workers_stopped(walker: _Walker, line: Line, at: float) -> None:
    walker.stopped.setdefault(line.round, at)
    walker.started = None
    walker.floor = at
    walker.enter(STOPPING if walker.leaves else RENDEZVOUS, at)


def _agent_ended(walker: _Walker, line: Line, at: float) -> None:
    walker.floor, walker.ended = at, True
    walker.enter(GONE, at)


_STEPS: dict[str, Callable[[_Walker, Line, float], None]] = {
    "agent_started": _agent_started,
    "round_started": _round_started,
    "workers_started": _workers_started,
    "first_step": _first_step,
    "hang": _hang,
    "round_over": _round_over,
    "failure": _failure,
    "decision": _decision,
    "preemption_noticed": _leaving,
    "interrupted": _leaving,
    "workers_stopped": _workers_stopped,
    "agent_ended": _agent_ended,
}


def walk(agent: Agent, steps_told: bool) -> Walk:
    """Return what an agent did. steps_told: some agent of the job tells of first steps; else running workers just run."""
    walker = _Walker(STARTUP if steps_told else RUNNING)
    for line, at in zip(agent.lines, agent.times, strict=True):
        step = _STEPS.get(line.name)
        if step is not None:
            step(walker, line, at)
    changes = walker.changes or [(agent.times[0], RENDEZVOUS)]
    return Walk(tuple(changes), walker.stopped, walker.ended)
