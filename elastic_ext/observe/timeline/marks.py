"""What ended the rounds of a job: one mark for each, whoever told of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from elastic_ext.base.kinds import HANG, PREEMPTION, USER_STOP
from elastic_ext.observe.timeline.clocks import JOINED, Agent, Aligned
from elastic_ext.observe.timeline.course import MEMBERSHIP
from elastic_ext.observe.timeline.lines import Line
from elastic_ext.observe.timeline.walk import Walk

NODE_LOST, ERROR = "node lost", "error"
SENT_AWAY = {"node_refused": "refused", "node_drained": "drained"}  # by event
SILENT = "nothing more was heard of it: it was killed, or its host was lost"
CLOSED = "closed"


@dataclass(frozen=True)
class Found:
    """A mark before it has a place in the picture. at: Unix seconds. agent: index of whose it is; None: unknown."""

    at: float
    agent: int | None
    node: str
    rank: int | None
    round: int
    kind: str
    decision: str
    reason: str
    after: str


@dataclass(frozen=True)
class _Told:
    """What an agent told of the end of a round."""

    agent: int
    at: float
    line: Line


class Ends:
    """The ends of the rounds of a job."""

    def __init__(self, aligned: Aligned, walks: Sequence[Walk]) -> None:
        self._aligned, self._walks = aligned, walks
        self._ranks = {
            (index, line.round): line.own.get("ranks")
            for index, agent in enumerate(aligned.agents)
            for line in agent.lines
            if line.name == JOINED
        }
        self._next = self._next_rounds()
        self._last: dict[int, int] = {}
        for (member, _), round_ in sorted(aligned.of.items(), key=lambda each: aligned.rounds[each[1]].at):
            self._last[member] = round_
        self._of_node: dict[str, list[int]] = {}
        for index, agent in enumerate(aligned.agents):
            self._of_node.setdefault(agent.node, []).append(index)

    def marks(self) -> list[Found]:
        """Return the marks in the order of time."""
        by_round = list(self._by_round().values())
        found = [self._mark(told) for told in by_round]
        explained = {(each.agent, each.line.round) for told in by_round for each in told}
        found += self._others(explained, {each.agent for each in found if each.kind == NODE_LOST})
        return sorted(found, key=lambda each: each.at)

    def gone_at(self, index: int) -> float | None:
        """Return when an agent that told of no end was gone; None if it may still be there.

        It is gone if its peers are in another round, or have ended, or another agent of its node is in a round. Its peers then
        stopped because of it, and that is the earliest that anybody noticed.
        """
        agents, agent, round_ = self._aligned.agents, self._aligned.agents[index], self._last_round(index)
        if self._walks[index].ended:
            return agent.times[-1]
        ends = [
            agents[number].times[0]
            for number in self._of_node[agent.node]
            if agents[number].times[0] > agent.times[-1] and self._last_round(number) not in (None, round_)
        ]
        if round_ is not None:
            whole = self._aligned.rounds[round_]
            peers = [each for each in whole.members if each != index]
            if round_ in self._next or (peers and all(self._walks[each].ended for each in peers)):
                stopped = [self._walks[each].stopped.get(whole.number) for each in peers]
                ends += [at for at in stopped if at is not None]
        return max(agent.times[-1], min(ends)) if ends else None

    def _next_rounds(self) -> dict[int, int]:
        """Return which round followed which, by index: the next one of any of its members."""
        of_agent: dict[int, list[int]] = {}
        for (member, _), index in self._aligned.of.items():
            of_agent.setdefault(member, []).append(index)
        found: dict[int, int] = {}
        for indexes in of_agent.values():
            indexes.sort(key=lambda index: self._aligned.rounds[index].at)
            for before, after in itertools.pairwise(indexes):
                found[before] = min(found.get(before, after), after, key=lambda index: self._aligned.rounds[index].at)
        return found

    def _by_round(self) -> dict[tuple[str, int, int], list[_Told]]:
        """Return what was told of each round; an agent that never joined it stands for itself."""
        found: dict[tuple[str, int, int], list[_Told]] = {}
        for index, agent in enumerate(self._aligned.agents):
            for line, at in zip(agent.lines, agent.times, strict=True):
                if line.name in _CHOOSE and line.text("cause") != CLOSED:
                    round_ = self._aligned.of.get((index, line.round))
                    key = ("round", round_, 0) if round_ is not None else ("agent", index, line.round)
                    found.setdefault(key, []).append(_Told(index, at, line))
        return found

    def _mark(self, told: Sequence[_Told]) -> Found:
        best = min(told, key=lambda each: (_CHOOSE.index(each.line.name), each.at))
        same = [each for each in told if each.line.name == best.line.name]
        index = self._aligned.of.get((best.agent, best.line.round))
        stops = [self._walks[each.agent].stopped.get(best.line.round) for each in told]
        at = min([each for each in stops if each is not None], default=best.at)
        agent, rank, kind, decision, reason = self._what(best, index)
        if best.line.name in _SIGNALS:
            reason += self._and_others([each.agent for each in same if each.agent != best.agent])
        after = self._after(index) if index is not None else ""
        node = self._aligned.agents[agent].node if agent is not None else best.line.text("culprit_host")
        return Found(at, agent, node, rank, best.line.round, kind, decision, reason, after)

    def _what(self, best: _Told, index: int | None) -> tuple[int | None, int | None, str, str, str]:
        """Return agent, rank, kind, decision and reason of a mark."""
        line = best.line
        goes_on = "new round" if index is not None and index in self._next else ""
        if line.name == "decision":
            rank, code = line.whole("culprit_rank"), line.whole("exit_code")
            rank = rank if rank is not None and rank >= 0 else None
            decision = line.text("decision") + (f", exit code {code}" if code is not None else "")
            culprit = self._culprit(best, rank)
            kind = NODE_LOST if rank is None and culprit in self._lost(index) else line.text("kind")
            return culprit, rank, kind, decision, line.text("reason")
        if line.name == "failure":
            return best.agent, line.whole("rank"), line.text("kind"), goes_on, line.text("reason")
        if line.name in _SIGNALS:
            last = self._aligned.agents[best.agent].lines[-1]
            left = f"left with exit code {code}" if (code := last.whole("exit_code")) is not None else "leaves"
            return best.agent, None, _SIGNALS[line.name], left, f"its agent was told to end by {line.text('signal')}"
        lost = self._lost(index)
        if not lost:
            return None, None, HANG if line.name == "hang" else MEMBERSHIP, goes_on, line.text("reason")
        return lost[0], None, NODE_LOST, goes_on, line.text("reason") + self._and_others(lost[1:])

    def _and_others(self, members: Sequence[int]) -> str:
        """Return words for more nodes of which the same is true; "" if there is none."""
        nodes = list(dict.fromkeys(self._aligned.agents[each].node for each in members))
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        return f"; likewise {', '.join(nodes[:3])}{more}" if nodes else ""

    def _culprit(self, best: _Told, rank: int | None) -> int | None:
        index, line = self._aligned.of.get((best.agent, best.line.round)), best.line
        members = self._aligned.rounds[index].members if index is not None else (best.agent,)
        for member in members:
            ranks = self._ranks.get((member, line.round))
            if rank is not None and isinstance(ranks, list) and rank in ranks:
                return member
        host = line.text("culprit_host")
        return next((member for member in members if self._aligned.agents[member].node == host), None)

    def _lost(self, index: int | None) -> list[int]:
        """Return the members that told of no end, and that the round after this one lacks."""
        if index is None or index not in self._next:
            return []
        after = set(self._aligned.rounds[self._next[index]].members)
        return [
            member
            for member in self._aligned.rounds[index].members
            if member not in after and not self._walks[member].ended and self._last_round(member) == index
        ]

    def _last_round(self, index: int) -> int | None:
        """Return the index of the last round that an agent joined; None: it never did."""
        return self._last.get(index)

    def _after(self, index: int) -> str:
        """Return what the round after this one resumed from."""
        if index not in self._next:
            return ""
        following = self._aligned.rounds[self._next[index]]
        for member in following.members:
            for line in self._aligned.agents[member].lines:
                if line.name == "checkpoint_chosen" and line.round == following.number:
                    step = line.whole("step")
                    from_ = "nothing" if line.own.get("path") is None else "a checkpoint" if step is None else f"step {step}"
                    return f"resumed from {from_}"
        return ""

    def _others(self, explained: Set[tuple[int, int]], lost: Set[int | None]) -> Iterator[Found]:
        """Return the marks of agents whose end no round explains.

        explained: agents that have told of the end of a round, with its number. lost: agents that a mark shows as lost.
        """
        groups: dict[tuple[str, str, int | None], list[int]] = {}  # agents that share an end: one mark is enough
        for index, agent in enumerate(self._aligned.agents):
            if (end := self._end(index, agent, explained)) is not None:
                groups.setdefault((*end, self._last_round(index)), []).append(index)
        for (kind, reason, _), members in groups.items():
            if kind != NODE_LOST or not lost & set(members):
                first = self._aligned.agents[members[0]]
                at, round_ = self.gone_at(members[0]), first.lines[-1].round
                why = reason + self._and_others(members[1:])
                yield Found(at or first.times[-1], members[0], first.node, None, round_, kind, "", why, "")

    def _end(self, index: int, agent: Agent, explained: Set[tuple[int, int]]) -> tuple[str, str] | None:
        """Return kind and reason of an agent's end that is its own; None if there is none."""
        last = agent.lines[-1]
        away = next((line for line in agent.lines if line.name in SENT_AWAY), None)
        if away is not None:
            return SENT_AWAY[away.name], away.text("reason")
        if last.name == "agent_ended" and last.text("state") == "error" and (index, last.round) not in explained:
            return ERROR, last.text("error") or "its agent ended with an error"
        if not self._walks[index].ended and self.gone_at(index) is not None:
            return NODE_LOST, SILENT
        return None


# The first of them that was told explains a round's end best.
_SIGNALS: Mapping[str, str] = {"preemption_noticed": PREEMPTION, "interrupted": USER_STOP}
_CHOOSE = ("decision", "failure", "preemption_noticed", "interrupted", "hang", "round_over")
