"""Puts the events of several machines on one clock. Pure.

The clocks of machines differ, so no time of one is compared with a time of another. What they share is the start of a round:
it comes right after an agreement of all its nodes, so it is the same moment on each. Within an agent the monotonic clock counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic_ext.observe.timeline.lines import Line

JOINED = "round_started"
BORN = "agent_started"


@dataclass(frozen=True)
class Agent:
    """One agent. times: of its lines, in order, in Unix seconds by one clock for all of them."""

    node: str
    pid: int
    lines: tuple[Line, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class Round:
    """A round. number: several rounds have it, if a job began again under its run id. members: indexes of agents, by time."""

    number: int
    at: float
    members: tuple[int, ...]


@dataclass(frozen=True)
class Clocks:
    """How the clocks were aligned. Seconds.

    Attributes:
        nodes: how many were aligned with others.
        largest: the largest correction of a node, against the median clock of those that it shares rounds with.
        residual: by how much the starts of one round differ after that, at most.
        alone: nodes that share no round with another one; their own clocks count.
    """

    nodes: int
    largest: float
    residual: float
    alone: tuple[str, ...]


@dataclass(frozen=True)
class Aligned:
    """Agents on one clock, and their rounds by number of the agent and of the round."""

    agents: tuple[Agent, ...]
    rounds: tuple[Round, ...]
    of: Mapping[tuple[int, int], int]
    clocks: Clocks


def agents_of(lines: Iterable[Line]) -> list[Agent]:
    """Return the agents, each by its host's clock, which may be set while it runs: its monotonic clock counts."""
    by_process: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        by_process.setdefault((line.node, line.pid), []).append(line)
    found = []
    for (node, pid), of in by_process.items():
        for own in _lives(sorted(of, key=lambda line: line.at)):
            ahead = median(line.at - line.monotonic for line in own)
            own.sort(key=lambda line: line.monotonic)
            found.append(Agent(node, pid, tuple(own), tuple(line.monotonic + ahead for line in own)))
    return sorted(found, key=lambda agent: agent.times[0])


def _lives(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of each agent that had this process id: containers all start with 1."""
    found: list[list[Line]] = []
    for line in lines:
        if not found or line.name == BORN:
            found.append([])
        found[-1].append(line)
    return found


def aligned(agents: Sequence[Agent]) -> Aligned:
    """Return the agents on one clock: a component of nodes that share rounds keeps the median of its clocks."""
    groups = _rounds(agents)
    starts: dict[str, dict[int, float]] = {}  # by node and index of the round
    for index, group in enumerate(groups):
        for number, at in group.starts.items():
            starts.setdefault(agents[number].node, {})[index] = at
    ahead, moments, clocks = _corrections(starts)
    found = tuple(
        replace(agent, times=tuple(at + ahead.get(agent.node, 0.0) for at in agent.times)) if agent.node in ahead else agent
        for agent in agents
    )
    alone = sorted({agent.node for agent in agents} - ahead.keys())
    rounds = tuple(
        Round(group.number, moments.get(index, min(group.starts.values())), tuple(group.starts))
        for index, group in enumerate(groups)
    )
    of = {(member, group.number): index for index, group in enumerate(groups) for member in group.starts}
    one = len({agent.node for agent in agents}) == 1
    return Aligned(found, rounds, of, replace(clocks, alone=() if one else tuple(alone)))


@dataclass(frozen=True)
class _Group:
    number: int
    starts: Mapping[int, float]  # when the agent with this index started it, by its own clock


@dataclass(frozen=True)
class _Joined:
    agent: int
    node: str
    at: float
    rank: int | None


def _rounds(agents: Sequence[Agent]) -> list[_Group]:
    """Return the rounds. Those of one number are the same round, unless a node has started it several times.

    Then its n-th start goes with the n-th of the others if all have as many. If not, some were not there each time: a round is
    over when a rank comes again, by the hosts' clocks, which must then differ less than the two rounds do.
    """
    by_number: dict[int, list[_Joined]] = {}
    for index, agent in enumerate(agents):
        for line, at in zip(agent.lines, agent.times, strict=True):
            if line.name == JOINED:
                by_number.setdefault(line.round, []).append(_Joined(index, agent.node, at, line.whole("node_rank")))
    found = []
    for number, joined in sorted(by_number.items()):
        joined.sort(key=lambda each: each.at)
        for group in _by_turn(joined) or _by_rank(joined):
            found.append(_Group(number, {each.agent: each.at for each in group}))
    return sorted(found, key=lambda group: min(group.starts.values()))


def _by_turn(joined: Sequence[_Joined]) -> list[list[_Joined]]:
    """Return the rounds, if each place on a node has as many starts; else nothing."""
    turns: dict[tuple[str, int | None], list[_Joined]] = {}
    for each in joined:
        turns.setdefault((each.node, each.rank), []).append(each)
    counts = {len(each) for each in turns.values()}
    if len(counts) != 1 or len({rank for _, rank in turns}) != len(turns):
        return []
    return [list(each) for each in zip(*turns.values(), strict=True)]


def _by_rank(joined: Sequence[_Joined]) -> list[list[_Joined]]:
    found: list[list[_Joined]] = []
    ranks: set[int | None] = set()
    for each in joined:
        if not found or each.rank in ranks:
            found.append([])
            ranks = set()
        ranks.add(each.rank)
        found[-1].append(each)
    return found


def _corrections(starts: Mapping[str, Mapping[int, float]]) -> tuple[dict[str, float], dict[int, float], Clocks]:
    """Return what to add to each node's clock, the moments of the rounds, and how well that fits.

    starts: when each node started which round, by its own clock.
    """
    left = {node: of for node, of in starts.items() if of}
    ahead: dict[str, float] = {}
    moments: dict[int, float] = {}
    while left:
        anchor = max(left, key=lambda node: len(left[node]))
        component = _component(anchor, left)
        if len(component) > 1:
            middle = median(component.values())
            ahead |= {node: correction - middle for node, correction in component.items()}
        for node in component:
            del left[node]
    of_round: dict[int, list[float]] = {}
    for node, correction in ahead.items():
        for index, at in starts[node].items():
            of_round.setdefault(index, []).append(at + correction)
    moments = {index: median(times) for index, times in of_round.items()}
    residual = max((abs(at - moments[index]) for index, times in of_round.items() for at in times), default=0.0)
    largest = max((abs(each) for each in ahead.values()), default=0.0)
    return ahead, moments, Clocks(len(ahead), largest, residual, ())


def _component(anchor: str, left: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the corrections of all nodes that share rounds with the anchor, or with such nodes, against its clock."""
    found = {anchor: 0.0}
    known = dict(left[anchor])
    near = [node for node in left if node != anchor]
    while near:
        far = []
        for node in near:
            shared = [known[index] - at for index, at in left[node].items() if index in known]
            if not shared:
                far.append(node)
                continue
            found[node] = median(shared)
            known = {index: at + found[node] for index, at in left[node].items()} | known
        if len(far) == len(near):
            break
        near = far
    return found
