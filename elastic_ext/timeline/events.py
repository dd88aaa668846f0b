"""Reads events from files, and puts those of several machines on one clock. Pure.

The clocks of machines differ, so no time of one is compared with a time of another. What they share is the start of a round:
it comes right after an agreement of all its nodes, so it is the same moment on each. Within an agent the monotonic clock counts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from statistics import median
from typing import Annotated

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import shown
from elastic_ext.base.records import Count, Rank, RecordError, Seconds, Within, build
from elastic_ext.events.event_table import FIELDS, SCHEMA

LATEST = 2**33  # Unix seconds: the year 2242, since dates end somewhere


@dataclass(frozen=True)
class TimelineEvent:
    """A line of a file. The last fields are those of some events only, as `events.schema.json` has them."""

    event: str
    time: str
    monotonic: Annotated[float, Within(0, 2**32)]
    run_id: str
    node: str
    pid: Count
    round: Count
    at: Annotated[float, Within(0, LATEST)]  # Unix seconds by its host's clock; in Aligned: seconds since the beginning
    action: str = ""
    cause: str = ""
    count: int = 0
    culprit_host: str = ""
    culprit_rank: Rank = -1
    decision: str = ""
    delay: float = 0.0
    error: str | None = None
    exit_code: int | None = None
    kind: str = ""
    max_restarts: int = -1
    save: str = ""
    node_rank: Count = 0
    path: str | None = None
    reason: str = ""
    restarts: int = 0
    seconds: Seconds | None = None
    signal: str | None = None
    state: str = ""
    step: int | None = None
    stop: Seconds = 0.0  # of the phases of a decision, as `verdict`
    verdict: Seconds = 0.0


def parse(text: str, file: str) -> tuple[list[TimelineEvent], list[str]]:
    """Return the events of a file, and what is wrong with each other line. The last line may be half written."""
    events: list[TimelineEvent] = []
    faults: list[str] = []
    *whole, last = text.split("\n")  # not splitlines(): a JSON text may hold other line breaks
    for number, line in enumerate(whole, 1):
        try:
            events += _events(line, f"{file}:{number}")
        except UsageError as error:
            faults.append(str(error))
    with contextlib.suppress(UsageError):  # its writer has not finished it
        events += _events(last, file)
    return events, faults


def _events(line: str, where: str) -> list[TimelineEvent]:
    """Return the event of a line; nothing for an empty one, and for an event that this version does not know.

    Raises UsageError: it is not an event. The reason does not repeat the line.
    """
    if not line.strip():
        return []
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: expected an event, found what is not JSON") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UsageError(f"{where}: expected an event of schema {SCHEMA}: something else, or another version wrote this")
    if isinstance(name := found.get("event"), str) and name not in FIELDS:
        return []
    given = {**phases, **found} if isinstance(phases := found.get("phases"), dict) else found
    given = {name: shown(value) if isinstance(value, str) else value for name, value in given.items()}
    try:
        at = datetime.fromisoformat(str(given.get("time")).replace("Z", "+00:00"))
        event = build(TimelineEvent, {**given, "at": at.timestamp()}, where)
    except RecordError as error:
        raise UsageError(f"{where}: expected an event: {error.__cause__}") from None
    except ValueError:
        raise UsageError(f"{where}: time is not as RFC 3339 says") from None
    if at.tzinfo is None:
        raise UsageError(f"{where}: time has no zone")
    return [event]


@dataclass(frozen=True)
class Agent:
    """One agent; its events in order."""

    node: str
    pid: int
    events: tuple[TimelineEvent, ...]
    ahead: float  # what to add to its monotonic clock

    @property
    def begin(self) -> float:
        return self.events[0].at

    @property
    def last(self) -> TimelineEvent:
        return self.events[-1]

    @cached_property
    def end(self) -> TimelineEvent | None:
        return next((event for event in self.events if event.event == "agent_ended"), None)


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
    agents: tuple[Agent, ...]  # those of a node by time
    rounds: tuple[Round, ...]  # by time
    correction: float  # the largest of a node's clock, against the median of those of the first round
    residual: float  # by how much the starts of one round differ after that, at most
    alone: tuple[str, ...]  # nodes that share no round with another one; their own clocks count

    def all(self, *names: str) -> Iterator[tuple[int, TimelineEvent]]:
        """Yield index of the agent and event, for all events of these names, by time."""
        found = ((index, each) for index, agent in enumerate(self.agents) for each in agent.events if each.event in names)
        yield from sorted(found, key=lambda each: each[1].at)


def aligned(events: Iterable[TimelineEvent]) -> Aligned:
    """Return the agents of a job on one clock: each node is aligned by the first round that it shares with others."""
    agents = _agents(events)
    rounds = _rounds(agents)
    ahead: dict[str, float] = {}  # what to add to the clock of each node
    together: set[str] = set()
    moments, residual = [], 0.0
    for _, members in rounds:
        starts = {agents[member].node: at for member, at in members.items()}
        moment = median([at + ahead[node] for node, at in starts.items() if node in ahead] or starts.values())
        for node, at in starts.items():
            ahead.setdefault(node, moment - at)
            residual = max(residual, abs(at + ahead[node] - moment))
        together |= starts.keys() if len(starts) > 1 else set()
        moments.append(moment)
    agents = [replace(agent, ahead=agent.ahead + ahead.get(agent.node, 0.0)) for agent in agents]
    began = min(agent.events[0].monotonic + agent.ahead for agent in agents)
    found = (Round(number, at - began, tuple(members)) for (number, members), at in zip(rounds, moments, strict=True))
    nodes = {agent.node for agent in agents}
    return Aligned(
        began=began,
        agents=tuple(_by_own_clock(agent, began) for agent in agents),
        rounds=tuple(sorted(found, key=lambda each: each.at)),
        correction=max(map(abs, ahead.values()), default=0.0),
        residual=residual,
        alone=tuple(sorted(nodes - together)) if len(nodes) > 1 else (),
    )


def _by_own_clock(agent: Agent, began: float) -> Agent:
    return replace(agent, events=tuple(replace(each, at=each.monotonic + agent.ahead - began) for each in agent.events))


def _agents(events: Iterable[TimelineEvent]) -> list[Agent]:
    """Return the agents, each by its host's clock, which may be set while it runs: its monotonic clock counts."""
    lives: dict[tuple[str, int], list[list[TimelineEvent]]] = {}  # containers all start with process id 1
    for event in sorted(events, key=lambda each: each.at):
        of_process = lives.setdefault((event.node, event.pid), [])
        if not of_process or event.event == "agent_started":
            of_process.append([])
        of_process[-1].append(event)
    found = []
    for (node, pid), of_process in lives.items():
        for own in of_process:
            own.sort(key=lambda each: each.monotonic)
            found.append(Agent(node, pid, tuple(own), median(each.at - each.monotonic for each in own)))
    return sorted(found, key=lambda agent: agent.events[0].monotonic + agent.ahead)


def _rounds(agents: Sequence[Agent]) -> list[tuple[int, dict[int, float]]]:
    """Return number of each round, and when its agents started it, each by its own clock; rounds by time.

    Starts of one number are the same round, until a rank comes again: then the job began again under its run id. Only there do
    clocks have to differ less than the two rounds do.
    """
    starts = [(each, index) for index, agent in enumerate(agents) for each in agent.events if each.event == "round_started"]
    found: list[tuple[int, dict[int, float]]] = []
    ranks: set[int] = set()
    for event, index in sorted(starts, key=lambda each: (each[0].round, each[0].monotonic + agents[each[1]].ahead)):
        if not found or found[-1][0] != event.round or event.node_rank in ranks:
            found.append((event.round, {}))
            ranks = set()
        ranks.add(event.node_rank)
        found[-1][1][index] = event.monotonic + agents[index].ahead
    return sorted(found, key=lambda each: min(each[1].values()))
