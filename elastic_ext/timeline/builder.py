"""The timeline of a job: from the events of its agents, or from its status at one moment, which holds less. Pure.

Between two events an agent is in the state that the first of them began. Some events say later when a state had begun: of a
hang, and of the stop before a verdict.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime

from elastic_ext.base.diagnosis import HANG, PREEMPTION, USER_STOP
from elastic_ext.base.goodput import PRODUCTIVE, StateSeconds
from elastic_ext.base.printable import counted, shown
from elastic_ext.status.job_status import ENDED_STATES, Document, Failure, NodeStatus
from elastic_ext.telemetry import families, goodput
from elastic_ext.timeline import model
from elastic_ext.timeline.events import BORN, JOINED, Agent, Aligned, TimelineEvent, aligned

SHORTEST_S = 0.001  # of a picture: one event has no length
NO_RANK = 2**31
IN_ROUND = (model.STARTUP, model.TRAINING, model.RUNNING)  # while workers run
NODE_LOST, ERROR = "node lost", "error"
SENT_AWAY = {"node_refused": "refused", "node_drained": "drained"}  # by event
SILENT = "nothing more was heard of it: it was killed, or its host was lost"
CLOSED = "closed"
_SIGNALS: Mapping[str, str] = {"preemption_noticed": PREEMPTION, "interrupted": USER_STOP}
_EXPLAIN = ("decision", "failure", *_SIGNALS, "hang", "round_over")  # the first that there is explains a round's end best


def from_events(events: Sequence[TimelineEvent]) -> model.Timeline:
    """Return the timeline of one job. events: at least one, all of one run id, in any order; repeated ones count once."""
    job = aligned({(each.node, each.pid, each.monotonic, each.name): each for each in events}.values())
    steps_known = any(job.all("first_step"))
    tracks = [Track(agent, model.STARTUP if steps_known else model.RUNNING) for agent in job.agents]
    length = max(*(agent.times[-1] for agent in job.agents), SHORTEST_S)
    ends = Ends(job, tracks)
    places = _places(job.agents, ends)
    rows = _rows(job.agents, tracks, ends, places, length)
    row_of = {index: number for number, members in enumerate(places) for index in members}
    whole = model.job_spans(rows, length)
    return model.Timeline(
        run_id=events[0].run_id,
        began_unix=job.began,
        length=length,
        end=_end(job.agents, tracks),
        restarts=_restarts(job),
        rows=rows,
        nodes=len(rows),
        spent=model.shares(rows),
        job=whole,
        trained=sum(each.seconds for each in whole if each.state in (model.TRAINING, model.RUNNING)) / length,
        trained_is="Trained {} of the time, steps done twice included"
        if steps_known
        else "Workers ran {} of the time; steps are not reported",
        rounds=tuple(model.Start(each.at, each.number) for each in sorted(job.rounds, key=lambda each: each.at)),
        interruptions=tuple(ends.interruptions(row_of)),
        saved=_saved(job),
        notes=_notes(job),
    )


class Track:
    def __init__(self, agent: Agent, first_state: str) -> None:
        """first_state: of workers before their first step."""
        self.changes: list[tuple[float, str]] = []  # when it entered which state; the last one lasts until something else ends it
        self.stopped: dict[int, float] = {}  # when the workers of a round were about to be stopped, by number of the round
        self.ended = False  # whether the agent has reported its end
        self._first_state = first_state
        self._floor = -float("inf")  # no state that is reported later began before this
        self._started: float | None = None  # when these workers ran
        self._over: float | None = None  # when the round was said to be over
        self._reported: dict[str, float] = {}  # phases of this recovery, up to its last verdict
        self._leaves = True  # the agent is about to end, unless an event says that it goes on
        for event, at in zip(agent.events, agent.times, strict=True):
            self._take(event, at)
        self.changes = self.changes or [(agent.times[0], model.RENDEZVOUS)]

    def spans(self, until: float) -> Iterator[model.Span]:
        """Yield the states. until: the end of the last one, unless the agent has ended."""
        ends = [at for at, _ in self.changes[1:]] + [until]
        for (begin, state), end in zip(self.changes, ends, strict=True):
            end = max(begin, end)
            if state == model.RENDEZVOUS and end - begin > goodput.WAITS_FOR_NODES_S:  # from then on it waits for nodes
                yield model.Span(begin, begin + goodput.WAITS_FOR_NODES_S, state)
                yield model.Span(begin + goodput.WAITS_FOR_NODES_S, end, model.WAITING)
            elif state != model.GONE:
                yield model.Span(begin, end, state)

    def _enter(self, state: str, at: float) -> None:
        """Enter a state, perhaps in the past: what was thought to come after that did not."""
        at = max(at, self._floor)
        while self.changes and self.changes[-1][0] >= at:
            self.changes.pop()
        if not self.changes or self.changes[-1][1] != state:
            self.changes.append((at, state))

    def _runs(self) -> bool:
        return bool(self.changes) and self.changes[-1][1] in IN_ROUND

    def _stop(self, at: float, round_: int) -> None:
        self._enter(model.STOPPING, at)
        self.stopped[round_] = min(at, self.stopped.get(round_, at))

    def _take(self, event: TimelineEvent, at: float) -> None:
        match event.name:
            case "agent_started":
                self._enter(model.RENDEZVOUS, at)
            case "round_started":
                self._floor, self._leaves, self._over = at, True, None
                self._enter(model.START, at)
            case "workers_started":
                self._floor = self._started = at
                self._enter(self._first_state, at)
            case "first_step" if self._started is not None:
                self._first_step(min(at, self._started + (event.number("seconds") or 0.0)))
            case "hang" if (quiet_s := event.number("seconds")) is not None:
                self._enter(model.HANG, at - quiet_s)
                self._stop(max(self._over if self._over is not None else at, at - quiet_s), event.round)
            case "round_over":
                self._over = at
                self._leaves = event.text("cause") == CLOSED
                self._stop(at, event.round)
            case "failure" if self._runs():
                self._stop(at, event.round)
            case "decision":
                self._decision(event, at)
            case "preemption_noticed" | "interrupted":
                self._leaves = True
                self._stop(at, event.round)
            case "workers_stopped":
                self.stopped.setdefault(event.round, at)
                self._started, self._floor = None, at
                self._enter(model.STOPPING if self._leaves else model.RENDEZVOUS, at)
            case "agent_ended":
                self._floor, self.ended = at, True
                self._enter(model.GONE, at)

    def _first_step(self, moment: float) -> None:
        self._reported = {}
        later = [each for each in self.changes if each[0] > moment]  # the step is reported after the workers were stopped
        self._enter(model.TRAINING, moment)
        self.changes += later
        self._floor = moment

    def _decision(self, event: TimelineEvent, at: float) -> None:
        phases = event.numbers("phases")
        stop_s, verdict_s = (max(0.0, phases.get(name, 0.0) - self._reported.get(name, 0.0)) for name in ("stop", "verdict"))
        self._reported = phases
        if stop_s or verdict_s:
            self._stop(at - verdict_s - stop_s, event.round)
            self._enter(model.VERDICT, at - verdict_s)
        elif self._runs():
            self._stop(at, event.round)
        self._leaves = event.text("action") != "restart"
        if not self._leaves and event.number("delay"):
            self._enter(model.BACKOFF, at)


@dataclass(frozen=True)
class _Report:
    """An agent's report of the end of a round."""

    agent: int
    at: float
    event: TimelineEvent


class Ends:
    """The ends of the rounds of a job, and of its agents."""

    def __init__(self, job: Aligned, tracks: Sequence[Track]) -> None:
        self._job, self._tracks = job, tracks
        self._ranks = {(index, event.round): event.own.get("ranks") for index, event, _ in job.all(JOINED)}
        self._of_node: dict[str, list[int]] = {}
        for index, agent in enumerate(job.agents):
            self._of_node.setdefault(agent.node, []).append(index)
        self._joined: dict[int, list[int]] = {}  # rounds by agent, in the order of time
        for (member, _), round_ in sorted(job.round_of.items(), key=lambda each: job.rounds[each[1]].at):
            self._joined.setdefault(member, []).append(round_)
        self._next: dict[int, int] = {}  # which round followed which: the next one of any of its members
        for joined in self._joined.values():
            for before, after in itertools.pairwise(joined):
                self._next[before] = min(self._next.get(before, after), after, key=lambda each: job.rounds[each].at)

    def interruptions(self, row_of: Mapping[int, int]) -> list[model.Interruption]:
        """Return one interruption for each end, in the order of time, however many agents report it. row_of: by agent."""
        by_round = list(self._by_round().values())
        found = [self._interruption(reports) for reports in by_round]
        explained = {(each.agent, each.event.round) for reports in by_round for each in reports}
        found += self._unexplained(explained, {agent for agent, each in found if each.kind == NODE_LOST})
        placed = [replace(each, row=row_of[agent]) if agent is not None else each for agent, each in found]
        return sorted(placed, key=lambda each: each.at or 0.0)

    def gone_at(self, index: int) -> float | None:
        """Return when an agent that has not reported its end was gone; None if it may still be there.

        It is gone if its peers are in another round, or have ended, or another agent of its node is in a round. Its peers then
        stopped because of it, and that is the earliest that an agent noticed.
        """
        agents, agent, round_ = self._job.agents, self._job.agents[index], self._last_round(index)
        if self._tracks[index].ended:
            return agent.times[-1]
        ends = [
            agents[other].times[0]
            for other in self._of_node[agent.node]
            if agents[other].times[0] > agent.times[-1] and self._last_round(other) not in (None, round_)
        ]
        if round_ is not None:
            whole = self._job.rounds[round_]
            peers = [each for each in whole.members if each != index]
            if round_ in self._next or (peers and all(self._tracks[each].ended for each in peers)):
                stopped = [self._tracks[each].stopped.get(whole.number) for each in peers]
                ends += [at for at in stopped if at is not None]
        return max(agent.times[-1], min(ends)) if ends else None

    def _last_round(self, index: int) -> int | None:
        """Return the index of the last round that an agent joined; None: it joined none."""
        return self._joined[index][-1] if index in self._joined else None

    def _by_round(self) -> dict[tuple[str, int, int], list[_Report]]:
        """Return the reports of each round; an agent that never joined it stands for itself."""
        found: dict[tuple[str, int, int], list[_Report]] = {}
        for index, event, at in self._job.all(*_EXPLAIN):
            if event.text("cause") != CLOSED:
                round_ = self._job.round_of.get((index, event.round))
                key = ("round", round_, 0) if round_ is not None else ("agent", index, event.round)
                found.setdefault(key, []).append(_Report(index, at, event))
        return found

    def _interruption(self, reports: Sequence[_Report]) -> tuple[int | None, model.Interruption]:
        """Return the end of a round with the agent that it concerns, if that is known."""
        best = min(reports, key=lambda each: (_EXPLAIN.index(each.event.name), each.at))
        round_, event = self._job.round_of.get((best.agent, best.event.round)), best.event
        stops = [self._tracks[each.agent].stopped.get(event.round) for each in reports]
        agent, rank, kind, decision, reason = self._what(best, round_)
        if event.name in _SIGNALS:
            same = [each.agent for each in reports if each.event.name == event.name and each.agent != best.agent]
            reason += self._and_others(same)
        return agent, model.Interruption(
            at=min([each for each in stops if each is not None], default=best.at),
            row=None,
            node=self._job.agents[agent].node if agent is not None else event.text("culprit_host"),
            rank=rank,
            round=event.round,
            kind=kind,
            decision=decision,
            reason=reason,
            after=self._resumed(round_),
        )

    def _what(self, best: _Report, round_: int | None) -> tuple[int | None, int | None, str, str, str]:
        """Return agent, rank, kind, decision and reason of an interruption. round_: index of the round."""
        event, reason = best.event, best.event.text("reason")
        goes_on = "new round" if round_ in self._next else ""
        lost = self._lost(round_)
        if event.name == "decision":
            rank, code = event.whole("culprit_rank"), event.whole("exit_code")
            rank = rank if rank is not None and rank >= 0 else None
            culprit = self._culprit(best, round_, rank)
            kind = NODE_LOST if rank is None and culprit in lost else event.text("kind")
            return culprit, rank, kind, event.text("decision") + (f", exit code {code}" if code is not None else ""), reason
        if event.name == "failure":
            return best.agent, event.whole("rank"), event.text("kind"), goes_on, reason
        if event.name in _SIGNALS:
            code = self._job.agents[best.agent].events[-1].whole("exit_code")
            left = f"left with exit code {code}" if code is not None else "leaves"
            return best.agent, None, _SIGNALS[event.name], left, f"its agent received {event.text('signal')}"
        if lost:
            return lost[0], None, NODE_LOST, goes_on, reason + self._and_others(lost[1:])
        return None, None, HANG if event.name == "hang" else model.MEMBERSHIP, goes_on, reason

    def _and_others(self, members: Sequence[int]) -> str:
        """Return words for the other nodes of which the same is true; "" without any."""
        nodes = list(dict.fromkeys(self._job.agents[each].node for each in members))
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        return f"; likewise {', '.join(nodes[:3])}{more}" if nodes else ""

    def _culprit(self, best: _Report, round_: int | None, rank: int | None) -> int | None:
        members = self._job.rounds[round_].members if round_ is not None else (best.agent,)
        for member in members:
            ranks = self._ranks.get((member, best.event.round))
            if rank is not None and isinstance(ranks, list) and rank in ranks:
                return member
        host = best.event.text("culprit_host")
        return next((member for member in members if self._job.agents[member].node == host), None)

    def _lost(self, round_: int | None) -> list[int]:
        """Return the members that reported no end, and that the round after this one lacks."""
        if round_ is None or round_ not in self._next:
            return []
        after = self._job.rounds[self._next[round_]].members
        return [
            member
            for member in self._job.rounds[round_].members
            if member not in after and not self._tracks[member].ended and self._last_round(member) == round_
        ]

    def _resumed(self, round_: int | None) -> str:
        """Return what the round after this one resumed from."""
        if round_ is None or round_ not in self._next:
            return ""
        following = self._job.rounds[self._next[round_]]
        for member in following.members:
            for event in self._job.agents[member].events:
                if event.name == "checkpoint_chosen" and event.round == following.number:
                    step = event.whole("step")
                    from_ = "nothing" if event.own.get("path") is None else "a checkpoint" if step is None else f"step {step}"
                    return f"resumed from {from_}"
        return ""

    def _unexplained(self, explained: Set[tuple[int, int]], lost: Set[int | None]) -> Iterator[tuple[int, model.Interruption]]:
        """Yield the ends of agents that no end of a round explains.

        explained: agents that have reported the end of a round, with its number. lost: agents that are shown as lost.
        """
        alike: dict[tuple[str, str, int | None], list[int]] = {}  # agents that share an end: one interruption is enough
        for index, agent in enumerate(self._job.agents):
            if (end := self._own_end(index, agent, explained)) is not None:
                alike.setdefault((*end, self._last_round(index)), []).append(index)
        for (kind, reason, _), (first, *others) in alike.items():
            if kind != NODE_LOST or not lost & {first, *others}:
                agent = self._job.agents[first]
                at, why = self.gone_at(first) or agent.times[-1], reason + self._and_others(others)
                yield first, model.Interruption(at, None, agent.node, None, agent.events[-1].round, kind, "", why)

    def _own_end(self, index: int, agent: Agent, explained: Set[tuple[int, int]]) -> tuple[str, str] | None:
        """Return kind and reason if an agent ended for a reason of its own; else None."""
        last = agent.events[-1]
        away = next((event for event in agent.events if event.name in SENT_AWAY), None)
        if away is not None:
            return SENT_AWAY[away.name], away.text("reason")
        if last.name == "agent_ended" and last.text("state") == "error" and (index, last.round) not in explained:
            return ERROR, last.text("error") or "its agent ended with an error"
        if not self._tracks[index].ended and self.gone_at(index) is not None:
            return NODE_LOST, SILENT
        return None


def _places(agents: Sequence[Agent], ends: Ends) -> list[list[int]]:
    """Return the agents of each row: those of one node that did not run side by side, in order; rows by first rank."""
    rows: list[list[int]] = []
    of_node: dict[str, list[list[int]]] = {}
    for index, agent in enumerate(agents):  # in the order of time
        mine = of_node.setdefault(agent.node, [])
        free = next((row for row in mine if (gone_at := ends.gone_at(row[-1])) is not None and gone_at <= agent.times[0]), None)
        if free is None:
            free = []
            rows.append(free)
            mine.append(free)
        free.append(index)
    return sorted(rows, key=lambda row: (_first_rank(agents, row), agents[row[0]].times[0], agents[row[0]].node))


def _first_rank(agents: Sequence[Agent], row: Sequence[int]) -> int:
    joined = (event for index in row for event in agents[index].events if event.name == JOINED)
    rank = next((event.whole("node_rank") for event in joined), None)
    return NO_RANK if rank is None else rank


def _rows(
    agents: Sequence[Agent], tracks: Sequence[Track], ends: Ends, places: Sequence[Sequence[int]], length: float
) -> tuple[model.Row, ...]:
    names = [agents[row[0]].node for row in places]
    found = []
    for row, name in zip(places, names, strict=True):
        spans: list[model.Span] = []
        for index in row:
            gone_at = ends.gone_at(index)
            for span in tracks[index].spans(length if gone_at is None else gone_at):
                begin = max(span.begin, spans[-1].end if spans else 0.0)
                if spans and begin > spans[-1].end:
                    spans.append(model.Span(spans[-1].end, begin, model.GONE))
                spans.append(replace(span, begin=begin, end=max(begin, span.end)))
        if spans and spans[-1].end < length:
            spans.append(model.Span(spans[-1].end, length, model.GONE))
        pid = f" (pid {agents[row[0]].pid})" if names.count(name) > 1 else ""
        found.append(model.Row(f"{name}{pid}", model.merged(spans)))
    return tuple(found)


def _saved(job: Aligned) -> tuple[model.Saved, ...]:
    """Return the checkpoints, each as the first agent of a round saw it."""
    found: dict[tuple[int | None, int], model.Saved] = {}
    for index, event, at in job.all("checkpoint_saved"):
        if (step := event.whole("step")) is not None:
            key = job.round_of.get((index, event.round)), step
            if key not in found or at < found[key].at:
                found[key] = model.Saved(at, step, event.number("seconds"))
    return tuple(sorted(found.values(), key=lambda each: each.at))


def _end(agents: Sequence[Agent], tracks: Sequence[Track]) -> str:
    newest = {agent.node: index for index, agent in enumerate(agents)}
    ended = [agents[index] for index in newest.values() if tracks[index].ended]
    if not ended or max(agent.times[-1] for agent in agents) > max(agent.times[-1] for agent in ended):
        return "as of its last event"
    last = [agent.events[-1] for agent in ended]
    if any(event.text("state") == "succeeded" for event in last):
        return "ended: succeeded"
    codes = sorted({code for event in last if (code := event.whole("exit_code"))})
    return "ended" + (f" with exit code {', '.join(map(str, codes))}" if codes else "")


def _restarts(job: Aligned) -> str:
    rounds = {job.round_of.get((index, event.round)) for index, event, _ in job.all("workers_started")}
    count = max(0, len(rounds) - 1)
    verdicts = [event for _, event, _ in sorted(job.all("decision"), key=lambda each: each[2])]
    charged, limit = (verdicts[-1].whole(name) for name in ("restarts", "max_restarts")) if verdicts else (None, None)
    of = f" of {limit}" if limit is not None and limit >= 0 else ""
    return counted(count, "restart") + (f" ({charged}{of} charged)" if charged is not None else "")


def _notes(job: Aligned) -> tuple[str, ...]:
    alone = ", ".join(job.alone[:5]) + (f" and {len(job.alone) - 5} more" if len(job.alone) > 5 else "")
    dropped = sum(event.whole("count") or 0 for _, event, _ in job.all("events_dropped"))
    torn = sum(agent.events[0].name != BORN for agent in job.agents)
    notes = (
        (
            job.nodes,
            f"The clocks of {job.nodes} nodes are aligned by the starts of their rounds: the largest correction is "
            f"{job.largest:.3f} s, and at most {job.residual:.3f} s stay unexplained.",
        ),
        (alone, f"These share no round with the others, so their own clocks count: {alone}."),
        (dropped, f"Events that were never written: {dropped}. So something may be missing."),
        (torn, f"The beginning of {counted(torn, 'agent')} is missing."),
    )
    return tuple(note for is_so, note in notes if is_so)


# What a node does now, by the state of its agent.
NOW = {
    "rendezvous": model.RENDEZVOUS,
    families.STARTING: model.START,
    families.RUNNING: model.RUNNING,
    "stop": model.STOPPING,
    "verdict": model.VERDICT,
    families.BACKOFF: model.BACKOFF,
    families.ENDED: model.GONE,
}
SHORTEST_STATUS_S = 1.0
JUDGED = "%Y-%m-%d %H:%M:%S%z"  # as verdicts have it
WITHOUT_EVENTS = "Only events (setting events_file) show what each node did before, and the checkpoints."
BY_JUDGES = "No agent reports when the rounds were: failures are placed by the clocks of the agents that judged them."


def from_status(document: Document, now_unix: float) -> model.Timeline:
    """Return the timeline, with notes of what is missing. now_unix: the reader's clock; all ages count back from it."""
    job, rounds, nodes = document.job, document.rounds, document.nodes
    ages = [*(each.began_s for each in rounds), *(each.age_s for each in document.goodput_points)]
    oldest = max([*ages, *(each.state_s or 0.0 for each in nodes if each.state != families.ENDED), 0.0])
    began = now_unix - oldest
    if not rounds and (judged := [at for each in document.failures if (at := _judged(each)) is not None]):
        began, oldest = min(judged), max(judged) - min(judged)
    length = max(oldest, SHORTEST_STATUS_S)
    over_time = _goodput_over_time(document, length)
    above = [model.Row("goodput, all nodes", over_time)] if over_time else []
    row_of = {each.name: len(above) + number for number, each in enumerate(nodes)}
    spent = {each.state: each.seconds for each in document.goodput}
    total = sum(spent.values())
    limit = f" of {job.restarts_limit}" if job.restarts_limit is not None else ""
    return model.Timeline(
        run_id=shown(job.run_id),
        began_unix=began,
        length=length,
        end=f"{'ended: ' if job.state in ENDED_STATES and job.state != 'ended' else ''}{shown(job.state)}",
        restarts=f"round {job.round}, {counted(job.restarts_charged, 'restart')}{limit} charged",
        rows=(*above, *(_node_row(each, length) for each in nodes)),
        nodes=len(nodes),
        spent={state: seconds / total for state, seconds in spent.items() if state in model.STATES} if total else {},
        job=_rounds_run(document, length),
        trained=spent.get(PRODUCTIVE, 0.0) / total if total else None,
        trained_is="Goodput {} of all nodes' time since the job began",
        rounds=tuple(model.Start(length - each.began_s, each.round) for each in rounds),
        interruptions=tuple(_of_failure(each, document, row_of.get(each.host), began, length) for each in document.failures),
        notes=_status_notes(document),
    )


def _rounds_run(document: Document, length: float) -> tuple[model.Span, ...]:
    """Return when the workers ran, as seen by the node that reports the rounds."""
    found: list[model.Span] = []
    for each in document.rounds:
        begin, end = length - each.began_s, length - (each.ended_s or 0.0)
        if found:
            found.append(model.Span(found[-1].end, begin, model.BETWEEN))
        found.append(model.Span(begin, end, model.RUNNING))
    if found and found[-1].end < length and document.job.state not in ENDED_STATES:
        found.append(model.Span(found[-1].end, length, model.BETWEEN))
    return model.merged(found)


def _goodput_over_time(document: Document, length: float) -> tuple[model.Span, ...]:
    """Return the goodput of the job, each stretch between two known moments divided by states."""
    points = [*((length - each.age_s, each.goodput) for each in document.goodput_points), (length, document.goodput)]
    return tuple(
        span
        for (begin, before), (end, after) in itertools.pairwise(points)
        if end > begin
        for span in _divided(begin, end, before, after)
    )


def _divided(begin: float, end: float, before: Sequence[StateSeconds], after: Sequence[StateSeconds]) -> Iterator[model.Span]:
    earlier = {each.state: each.seconds for each in before}
    spent = {each.state: max(0.0, each.seconds - earlier.get(each.state, 0.0)) for each in after}
    total, low = sum(spent.values()), 0.0
    for state in model.STATES:
        if spent.get(state, 0.0) > 0:
            high = low + spent[state] / total
            yield model.Span(begin, end, state, low, high)
            low = high


def _node_row(node: NodeStatus, length: float) -> model.Row:
    since = length - min(length, node.state_s or 0.0)
    rank = f"rank {node.node_rank}: " if node.node_rank >= 0 else ""
    spans = (model.Span(0.0, since, model.UNKNOWN), model.Span(since, length, NOW.get(node.state, model.UNKNOWN)))
    return model.Row(shown(f"{rank}{node.name or node.id}"), tuple(each for each in spans if each.end > each.begin))


def _of_failure(failure: Failure, document: Document, row: int | None, began: float, length: float) -> model.Interruption:
    """row: of its host. began: Unix time at which the timeline begins."""
    ended = next((each.ended_s for each in document.rounds if each.round == failure.round), None)
    judged = _judged(failure) if not document.rounds else None
    at = length - ended if ended is not None else judged - began if judged is not None else None
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
    return model.Interruption(
        at=at,
        row=row,
        node=shown(failure.host),
        rank=failure.rank if failure.rank >= 0 else None,
        round=failure.round,
        kind=shown(failure.kind),
        decision=shown(failure.decision) + code,
        reason=shown(failure.reason),
        after="" if at is not None or not failure.at else f"at {shown(failure.at)}",
    )


def _judged(failure: Failure) -> float | None:
    try:
        return datetime.strptime(failure.at, JUDGED).timestamp()
    except ValueError:
        return None


def _status_notes(document: Document) -> tuple[str, ...]:
    found = [WITHOUT_EVENTS]
    if document.rounds_by:
        found.append(f"Rounds are as {document.rounds_by} saw them, {len(document.rounds)} of them.")
    if document.failures and not document.rounds:
        found.append(BY_JUDGES)
    found += [f"Not known: {each.what}: {each.why}." for each in document.unknown]
    found += [f"{each.host} may not come back yet: {each.why}" for each in document.refused]
    return tuple(map(shown, found))
