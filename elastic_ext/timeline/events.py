"""Reads events from files, and puts those of several machines on one clock. Pure.

The clocks of machines differ, so no time of one is compared with a time of another. What they share is the start of a round:
it comes right after an agreement of all its nodes, so it is the same moment on each. Within an agent the monotonic clock counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import TypeVar

from elastic_ext.base.printable import shown
from elastic_ext.events.event_table import SCHEMA

MAX_NAME = 80  # characters of a name that is shown
LATEST, LONGEST_S = 2**33, 2**32  # the year 2242, and 136 years: dates end somewhere
BORN, JOINED = "agent_started", "round_started"  # names of events

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class TimelineEvent:
    """An event. at: Unix seconds by its host's clock. own: all its fields, of any type."""

    name: str
    at: float
    monotonic: float
    run_id: str
    node: str
    pid: int
    round: int
    own: Mapping[str, object]

    def number(self, field: str) -> float | None:
        """Return a field that holds a finite number, else None."""
        return _number(self.own.get(field))

    def whole(self, field: str) -> int | None:
        """Return a field that holds a whole number, else None."""
        value = self.own.get(field)
        return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None

    def text(self, field: str) -> str:
        """Return a field that holds a text, in one line that is safe to show; else ""."""
        value = self.own.get(field)
        return shown(value) if isinstance(value, str) else ""

    def numbers(self, field: str) -> dict[str, float]:
        """Return the finite numbers that are not negative in a field that holds an object, by name."""
        value = self.own.get(field)
        found = {str(name): _number(each) for name, each in value.items()} if isinstance(value, Mapping) else {}
        return {name: each for name, each in found.items() if each is not None and each >= 0}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 else None


def parse(text: str, file: str) -> tuple[list[TimelineEvent], list[str]]:
    """Return the events of a file, and for each other line its number and what is wrong. The last line may be half written."""
    events: list[TimelineEvent] = []
    faults: list[str] = []
    *whole, last = text.split("\n")  # not splitlines(): a JSON text may hold other line breaks
    for number, line in enumerate(whole, 1):
        try:
            events += [_event(line)] if line.strip() else []
        except ValueError as error:
            faults.append(f"{file}:{number}: {shown(str(error))}")
    with contextlib.suppress(ValueError):  # its writer has not finished it
        events += [_event(last)] if last.strip() else []
    return events, faults


def _event(line: str) -> TimelineEvent:
    """Raises ValueError, with a reason that does not repeat the line."""
    try:
        found = json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {type(found).__name__}")
    if found.get("schema") != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, found {str(found.get('schema'))[:20]}: another version wrote it")
    monotonic = _number(found.get("monotonic"))
    if monotonic is None or abs(monotonic) >= LONGEST_S:
        raise ValueError("monotonic is missing, or not a number of seconds")
    return TimelineEvent(
        name=_text(found, "event"),
        at=_unix(_text(found, "time")),
        monotonic=monotonic,
        run_id=_text(found, "run_id")[:MAX_NAME],
        node=_text(found, "node")[:MAX_NAME],
        pid=_count(found, "pid"),
        round=_count(found, "round"),
        own=found,
    )


def _text(found: Mapping[str, object], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is missing, or not text")
    return shown(value)


def _count(found: Mapping[str, object], name: str) -> int:
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError(f"{name} is missing, or not a number from 0 on")
    return value


def _unix(time: str) -> float:
    try:
        at = datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError("time is not as RFC 3339 says") from None
    if at.tzinfo is None:
        raise ValueError("time has no zone")
    if not 0 <= at.timestamp() < LATEST:
        raise ValueError("time is out of range")
    return at.timestamp()


def _refuse(constant: str) -> float:
    raise ValueError(f"not JSON: {constant}")


@dataclass(frozen=True)
class Agent:
    """One agent. times: of its events, in order, in seconds by one clock for all of them."""

    node: str
    pid: int
    events: tuple[TimelineEvent, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Round:
    """A round. number: several rounds have it, if a job began again under its run id. members: indexes of agents, by time."""

    number: int
    at: float
    members: tuple[int, ...]


@dataclass(frozen=True)
class Aligned:
    """The agents of a job on one clock. Times are seconds since the first event, at Unix time `began`."""

    began: float
    agents: tuple[Agent, ...]
    rounds: tuple[Round, ...]
    round_of: Mapping[tuple[int, int], int]  # the index of a round, by index of the agent and number of the round
    nodes: int  # how many were aligned with others
    largest: float  # the largest correction of a node, against the median clock of those that it shares rounds with
    residual: float  # by how much the starts of one round differ after that, at most
    alone: tuple[str, ...]  # nodes that share no round with another one; their own clocks count

    def all(self, *names: str) -> Iterator[tuple[int, TimelineEvent, float]]:
        """Yield index of the agent, event and time of all events of these names."""
        for index, agent in enumerate(self.agents):
            for event, at in zip(agent.events, agent.times, strict=True):
                if event.name in names:
                    yield index, event, at


def aligned(events: Iterable[TimelineEvent]) -> Aligned:
    """Return the agents of a job on one clock: a component of nodes that share rounds keeps the median of its clocks."""
    agents = _agents(events)
    groups = _rounds(agents)
    starts: dict[str, dict[int, float]] = {}  # by node and index of the round: when it started, by the node's own clock
    for index, (_, members) in enumerate(groups):
        for member, at in members.items():
            starts.setdefault(agents[member].node, {})[index] = at
    ahead = _corrections(starts)
    of_round: dict[int, list[float]] = {}
    for node, correction in ahead.items():
        for index, at in starts[node].items():
            of_round.setdefault(index, []).append(at + correction)
    moments = {index: median(times) for index, times in of_round.items()}
    began = min(agent.times[0] + ahead.get(agent.node, 0.0) for agent in agents)
    names = {agent.node for agent in agents}
    return Aligned(
        began=began,
        agents=tuple(
            replace(agent, times=tuple(at + ahead.get(agent.node, 0.0) - began for at in agent.times)) for agent in agents
        ),
        rounds=tuple(
            Round(number, moments.get(index, min(members.values())) - began, tuple(members))
            for index, (number, members) in enumerate(groups)
        ),
        round_of={(member, number): index for index, (number, members) in enumerate(groups) for member in members},
        nodes=len(ahead),
        largest=max((abs(each) for each in ahead.values()), default=0.0),
        residual=max((abs(at - moments[index]) for index, times in of_round.items() for at in times), default=0.0),
        alone=tuple(sorted(names - ahead.keys())) if len(names) > 1 else (),
    )


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _agents(events: Iterable[TimelineEvent]) -> list[Agent]:
    """Return the agents, each by its host's clock, which may be set while it runs: its monotonic clock counts."""
    found = []
    for (node, pid), of_process in _grouped(((each.node, each.pid), each) for each in events).items():
        lives: list[list[TimelineEvent]] = []  # of the agents that had this process id: containers all start with 1
        for event in sorted(of_process, key=lambda each: each.at):
            if not lives or event.name == BORN:
                lives.append([])
            lives[-1].append(event)
        for own in lives:
            ahead = median(each.at - each.monotonic for each in own)
            own.sort(key=lambda each: each.monotonic)
            found.append(Agent(node, pid, tuple(own), tuple(each.monotonic + ahead for each in own)))
    return sorted(found, key=lambda agent: agent.times[0])


@dataclass(frozen=True)
class _Start:
    agent: int
    node: str
    at: float
    rank: int | None


def _rounds(agents: Sequence[Agent]) -> list[tuple[int, dict[int, float]]]:
    """Return number of each round, and when its agents started it, each by its own clock.

    Rounds of one number are the same round, unless a node has started it several times. Then its n-th start goes with the n-th
    of the others if all have as many. If not, some were not there each time: a round is over when a rank comes again, by the
    hosts' clocks, which must then differ less than the two rounds do.
    """
    starts = _grouped(
        (event.round, _Start(index, agent.node, at, event.whole("node_rank")))
        for index, agent in enumerate(agents)
        for event, at in zip(agent.events, agent.times, strict=True)
        if event.name == JOINED
    )
    found = []
    for number, of_number in sorted(starts.items()):
        of_number.sort(key=lambda each: each.at)
        for group in _by_turn(of_number) or _by_rank(of_number):
            found.append((number, {each.agent: each.at for each in group}))
    return sorted(found, key=lambda each: min(each[1].values()))


def _by_turn(starts: Sequence[_Start]) -> list[list[_Start]]:
    """Return the rounds, if each place on a node has as many starts; else nothing."""
    turns = _grouped(((each.node, each.rank), each) for each in starts)
    if len({len(each) for each in turns.values()}) != 1 or len({rank for _, rank in turns}) != len(turns):
        return []
    return [list(each) for each in zip(*turns.values(), strict=True)]


def _by_rank(starts: Sequence[_Start]) -> list[list[_Start]]:
    found: list[list[_Start]] = []
    ranks: set[int | None] = set()
    for each in starts:
        if not found or each.rank in ranks:
            found.append([])
            ranks = set()
        ranks.add(each.rank)
        found[-1].append(each)
    return found


def _corrections(starts: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return what to add to the clock of each node that shares a round. starts: by node and round, by the node's own clock."""
    left = dict(starts)
    ahead: dict[str, float] = {}
    while left:
        component = _component(max(left, key=lambda node: len(left[node])), left)
        if len(component) > 1:
            middle = median(component.values())
            ahead |= {node: correction - middle for node, correction in component.items()}
        for node in component:
            del left[node]
    return ahead


def _component(anchor: str, starts: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the corrections of all nodes that share rounds with the anchor, or with such nodes, against its clock."""
    found = {anchor: 0.0}
    known = dict(starts[anchor])
    near = [node for node in starts if node != anchor]
    while near:
        far = []
        for node in near:
            shared = [known[index] - at for index, at in starts[node].items() if index in known]
            if not shared:
                far.append(node)
                continue
            found[node] = median(shared)
            known = {index: at + found[node] for index, at in starts[node].items()} | known
        if len(far) == len(near):
            break
        near = far
    return found
