"""Makes the timeline of a job from its events: what each node did when, and what happened. Pure.

Between two events an agent is in the state that the first of them began. Some events say later when a state had begun: of a
hang, of the stop before a verdict, of a first step. Why a round ended is what its verdict says; without one, what an event says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.diagnosis import HANG, NODE_LOST, PREEMPTION, USER_STOP
from elastic_ext.base.printable import counted, named_job
from elastic_ext.events.event_table import MEMBERSHIP
from elastic_ext.telemetry import goodput
from elastic_ext.timeline.events import Agent, Aligned, TimelineEvent, aligned

# States, by what they are called for people.
TRAINING, RUNNING = "training", "workers run, steps not reported"
STARTUP, START = "start-up: imports, load, first step", "starting workers"
RENDEZVOUS, WAITING, BACKOFF, GONE = "rendezvous", "waiting for nodes", "backoff", "no agent"
STOPPING, VERDICT, HUNG, BETWEEN = "stopping", "verdict", "hang", "not training"
STATES = (TRAINING, RUNNING, STARTUP, START, RENDEZVOUS, WAITING, STOPPING, VERDICT, HUNG, BACKOFF, BETWEEN, GONE)
STOPS_THE_JOB = {STARTUP, START, STOPPING, VERDICT, HUNG, BACKOFF}  # no other node can train while one does this

SHORTEST_S = 0.001  # of a timeline: one event has no length
SILENT = "nothing more was heard of it: it was killed, or its host was lost"
# What explains the end of a round, or of an agent, the best first, with its kind; "": the event has it.
EXPLAINS = {"decision": "", "node_drained": "drained", "node_refused": "refused", "preemption_noticed": PREEMPTION}
EXPLAINS |= {"interrupted": USER_STOP, "hang": HANG, "round_over": "", "agent_ended": "error"}


@dataclass(frozen=True)
class Span:
    """A stretch of time in one state."""

    begin: float
    end: float
    state: str


@dataclass(frozen=True)
class Row:
    """A node. spans: in order, without gaps."""

    label: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Interruption:
    """The end of a round, or of an agent. row: index of its node's row; None: none, or not known. Texts: "" where unknown."""

    at: float
    round: int
    kind: str
    reason: str
    row: int | None = None
    node: str = ""
    rank: int = -1  # -1: of no rank
    decision: str = ""
    after: str = ""  # what followed, e.g. "resumed from step 40", or "a later start resumed from step 40"

    @property
    def is_change(self) -> bool:
        """Whether nothing failed: nodes came or left."""
        return self.kind == MEMBERSHIP


@dataclass(frozen=True)
class Timeline:
    """Times are seconds since its beginning."""

    headline: str
    began_unix: float
    length: float
    trained: float  # part of the time in which the job as a whole trained; where no agent reports steps: in which workers ran
    rows: tuple[Row, ...]  # by first rank
    job: tuple[Span, ...]  # whether the job trains as a whole
    shares: Mapping[str, float]  # part of the nodes' time in each state that occurs; that of no agent does not count
    rounds: tuple[tuple[float, str], ...]  # when each began, and its number
    interruptions: tuple[Interruption, ...]
    saved: tuple[tuple[float, str], ...]  # when each checkpoint was committed, and which
    notes: tuple[str, ...]  # what is not known, and how sure the rest is


def timeline(events: Sequence[TimelineEvent]) -> Timeline:
    """Return the timeline of one job. events: at least one, all of one run id, in any order; repeated ones count once."""
    job = aligned({(each.node, each.pid, each.monotonic, each.event): each for each in events}.values())
    first = STARTUP if any(job.all("first_step")) else RUNNING
    tracks = [Track(agent, first) for agent in job.agents]
    length = max(*(agent.last.at for agent in job.agents), SHORTEST_S)
    ends = Ends(job, tracks)
    places = _places(job.agents, ends.gone)
    nodes = Counter(job.agents[place[0]].node for place in places)
    rows = []
    for place in places:
        of = job.agents[place[0]]
        lives = [tracks[index].spans(length if (gone := ends.gone[index]) is None else gone) for index in place]
        rows.append(Row(of.node + (f" (pid {of.pid})" if nodes[of.node] > 1 else ""), _joined(lives, length)))
    whole = whole_job(rows, length)
    saved: dict[tuple[int, int | None], tuple[float, str]] = {}
    for _, each in job.all("checkpoint_saved"):  # as the first agent of a round saw it
        saved.setdefault((each.round, each.step), (each.at, f"step {each.step}"))
    if not saved:
        saved = {(each.round, index): (each.at, each.save) for index, (_, each) in enumerate(job.all("save_recorded"))}
    return Timeline(
        headline=_headline(job, length),
        began_unix=job.began,
        length=length,
        trained=sum(each.end - each.begin for each in whole if each.state in (TRAINING, RUNNING)) / length,
        rows=tuple(rows),
        job=whole,
        shares=_shares(rows),
        rounds=tuple((each.at, str(each.number)) for each in job.rounds),
        interruptions=ends.interruptions({index: number for number, place in enumerate(places) for index in place}),
        saved=tuple(saved.values()),
        notes=_notes(job),
    )


class Track:
    """What one agent did. stopped: when the workers of each round were about to stop."""

    def __init__(self, agent: Agent, first: str) -> None:
        """first: state of workers before their first step."""
        self.stopped: dict[int, float] = {}
        self._changes = [(agent.begin, RENDEZVOUS)]  # when it entered which state
        self._first, self._started = first, agent.begin  # when the workers last did
        self._reported = (0.0, 0.0)  # phases of this recovery, up to its last verdict
        self._leaves = True  # the agent is about to end, unless an event says that it goes on
        for event in agent.events:
            self._take(event)

    def _take(self, event: TimelineEvent) -> None:
        match event.event:
            case "round_started":
                self._leaves = True
                self._enter(START, event.at)
            case "workers_started":
                self._started = event.at
                self._enter(self._first, event.at)
            case "first_step":
                self._reported = (0.0, 0.0)
                self._enter(TRAINING, min(event.at, self._started + (event.seconds or 0.0)))
            case "hang" if event.seconds is not None:
                self._enter(HUNG, event.at - event.seconds)
            case "round_over" | "preemption_noticed" | "interrupted":
                self._leaves = event.event != "round_over" or event.cause == "closed"
                self._stop(event, event.at)
            case "decision":
                phases = zip((event.stop, event.verdict), self._reported, strict=True)
                stop_s, verdict_s = (max(0.0, seconds - before) for seconds, before in phases)
                self._reported = event.stop, event.verdict
                self._stop(event, event.at - verdict_s - stop_s)
                if verdict_s:
                    self._enter(VERDICT, event.at - verdict_s)
                self._leaves = event.action != "restart"
                if not self._leaves and event.delay:
                    self._enter(BACKOFF, event.at)
            case "workers_stopped":
                self.stopped.setdefault(event.round, event.at)
                self._enter(STOPPING if self._leaves else RENDEZVOUS, event.at)

    def _stop(self, event: TimelineEvent, at: float) -> None:
        self._enter(STOPPING, at)
        self.stopped[event.round] = min(at, self.stopped.get(event.round, at))

    def _enter(self, state: str, at: float) -> None:
        self._changes.append((max(at, self._started), state))

    def spans(self, until: float) -> Iterator[Span]:
        """Yield the states. What an event said later may have begun before."""
        changes = sorted(self._changes, key=lambda each: each[0])
        for (begin, state), (end, _) in itertools.pairwise([*changes, (until, GONE)]):
            begin, end = min(begin, until), min(end, until)
            waits = min(end, begin + goodput.WAITS_FOR_NODES_S) if state == RENDEZVOUS else end
            yield Span(begin, waits, state)
            yield Span(waits, end, WAITING)


class Ends:
    """The ends of the rounds of a job, and of its agents. gone: when each agent was gone; None: it may still be there."""

    def __init__(self, job: Aligned, tracks: Sequence[Track]) -> None:
        self._job, self._tracks = job, tracks
        self._last = {member: index for index, each in enumerate(job.rounds) for member in each.members}  # round of each agent
        self.gone = [self._gone(index, agent) for index, agent in enumerate(job.agents)]

    def _gone(self, index: int, agent: Agent) -> float | None:
        """Return when an agent was gone that may not have said so.

        It is gone if the job is in another round, or its peers have ended: they stopped because of it, and that is the earliest
        that an agent noticed. It is gone, too, if another agent of its node is in a later round.
        """
        agents, rounds, last = self._job.agents, self._job.rounds, self._last.get(index, -1)
        later = (other for number, other in enumerate(agents) if other.node == agent.node and self._last.get(number, -1) > last)
        ends = [other.begin for other in later if other.begin > agent.last.at]
        peers = [each for each in rounds[last].members if each != index] if last >= 0 else []
        if peers and (last + 1 < len(rounds) or all(agents[each].end for each in peers)):
            stops = (self._tracks[each].stopped.get(rounds[last].number) for each in peers)
            ends += [at for at in stops if at is not None]
        return agent.last.at if agent.end is not None else max(agent.last.at, min(ends)) if ends else None

    def interruptions(self, row_of: Mapping[int, int]) -> tuple[Interruption, ...]:
        """Return one for each end, in the order of time, however many agents report it. row_of: by agent."""
        agents, rounds = self._job.agents, self._job.rounds
        round_of = {(member, each.number): index for index, each in enumerate(rounds) for member in each.members}
        # By index of the round; an agent that never joined it stands for itself, below 0.
        reports: dict[int, list[tuple[int, TimelineEvent]]] = {}
        for name in EXPLAINS:
            for index, event in self._job.all(name):
                if event.cause != "closed" and event.state in ("", "error"):
                    reports.setdefault(round_of.get((index, event.round), -1 - index), []).append((index, event))
        found = [self._of_round(round_, each) for round_, each in reports.items()]
        for index, agent in enumerate(agents):
            if agent.end is None and (at := self.gone[index]) is not None and self._last.get(index, -1 - index) not in reports:
                found.append((index, Interruption(at, agent.last.round, NODE_LOST, SILENT)))
        placed = [mark if who is None else replace(mark, row=row_of[who], node=agents[who].node) for who, mark in found]
        return tuple(sorted(placed, key=lambda each: each.at))

    def _of_round(self, round_: int, reports: Sequence[tuple[int, TimelineEvent]]) -> tuple[int | None, Interruption]:
        """Return the agent that the end of a round concerns, if that is known. reports: the best first."""
        (index, event), agents = reports[0], self._job.agents
        members = self._job.rounds[round_].members if round_ >= 0 else (index,)
        at = min(self._tracks[who].stopped.get(each.round, each.at) for who, each in reports)
        reason = f"its agent received {event.signal}" if event.signal else event.reason or event.error or ""
        mark = Interruption(at, event.round, EXPLAINS[event.event] or event.kind or MEMBERSHIP, reason, after=self._after(round_))
        if event.event == "decision":
            code = "" if event.exit_code is None else f", exit code {event.exit_code}"
            mark = replace(mark, decision=event.decision + code, rank=event.culprit_rank, node=event.culprit_host)
            return next((each for each in members if agents[each].node == event.culprit_host), None), mark
        if event.event in ("hang", "round_over"):
            silent = [each for each in members if agents[each].end is None and self.gone[each] is not None]
            same = [each for each in silent if self._last.get(each) == round_]
            mark = replace(mark, kind=NODE_LOST if same else mark.kind)
        else:
            same = list(dict.fromkeys(who for who, each in reports if each.event == event.event))
            end = agents[index].end
            mark = replace(mark, decision="" if end is None else f"left with exit code {end.exit_code}")
        likewise = f"; likewise {counted(len(same) - 1, 'other')}" if len(same) > 1 else ""
        return (same[0] if same else None), replace(mark, reason=reason + likewise)

    def _after(self, round_: int) -> str:
        """Return what the round after this one resumed from, and whether agents were started for it: these ended before."""
        rounds = self._job.rounds
        following = rounds[round_ + 1] if 0 <= round_ < len(rounds) - 1 else None
        if following is None:
            return ""
        who = "" if set(following.members) & set(rounds[round_].members) else "a later start "
        for member in following.members:
            for each in self._job.agents[member].events:
                if each.event == "checkpoint_chosen" and each.round == following.number:
                    step = "a checkpoint" if each.step is None else f"step {each.step}"
                    return f"{who}resumed from {'nothing' if each.path is None else step}"
        return ""


def _places(agents: Sequence[Agent], gone: Sequence[float | None]) -> list[list[int]]:
    """Return the agents of each row: those of one node that did not run side by side, in order; rows by first rank."""
    rows: list[list[int]] = []
    for index, agent in enumerate(agents):
        for row in rows:
            at = gone[row[-1]]
            if agents[row[0]].node == agent.node and at is not None and at <= agent.begin:
                row.append(index)
                break
        else:
            rows.append([index])
    return sorted(rows, key=lambda row: (_first_rank(agents[row[0]]), agents[row[0]].begin, agents[row[0]].node))


def _first_rank(agent: Agent) -> float:
    return next((event.node_rank for event in agent.events if event.event == "round_started"), float("inf"))


def _joined(lives: Iterable[Iterable[Span]], length: float) -> tuple[Span, ...]:
    """Return the states of the agents of a row, one after the other."""
    found: list[Span] = []
    for spans in map(list, lives):
        found += [Span(found[-1].end, spans[0].begin, GONE)] if found else []
        found += spans
    return merged([*found, Span(found[-1].end, length, GONE)])


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans that have a length, with neighbours of one state as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].state == span.state and span.end > span.begin:
            found[-1] = replace(found[-1], end=span.end)
        elif span.end > span.begin:
            found.append(span)
    return tuple(found)


def whole_job(rows: Sequence[Row], length: float) -> tuple[Span, ...]:
    """Return when the job trained as a whole: some node trains, and no node does what keeps the others from it."""
    edges = sorted((at, step, span.state) for row in rows for span in row.spans for at, step in ((span.begin, 1), (span.end, -1)))
    counts: Counter[str] = Counter()
    found: list[Span] = []
    for (at, step, state), (until, *_) in itertools.pairwise([*edges, (length, 0, "")]):
        counts[state] += step
        busy = {each for each, count in counts.items() if count > 0 and each != GONE}
        trains = next((each for each in (TRAINING, RUNNING) if each in busy), BETWEEN)
        found.append(Span(at, until, GONE if not busy else BETWEEN if busy & STOPS_THE_JOB else trains))
    return merged(found)


def _shares(rows: Iterable[Row]) -> dict[str, float]:
    seconds = dict.fromkeys(STATES, 0.0)
    for span in itertools.chain.from_iterable(row.spans for row in rows):
        seconds[span.state] += span.end - span.begin
    total = sum(each for state, each in seconds.items() if state != GONE) or 1.0
    return {state: each / total for state, each in seconds.items() if each and state != GONE}


def _headline(job: Aligned, length: float) -> str:
    """Return how long it took, its restarts, and how it ended, or that it goes on."""
    verdicts = [event for _, event in job.all("decision")]
    charged = ""
    if verdicts:
        limit = f" of {verdicts[-1].max_restarts}" if verdicts[-1].max_restarts >= 0 else ""
        charged = f" ({verdicts[-1].restarts}{limit} charged)"
    last = max(job.agents, key=lambda agent: agent.last.at)
    code = f" with exit code {last.end.exit_code}" if last.end is not None and last.end.exit_code else ""
    end = "as of its last event" if last.end is None else f"ended: {last.end.state}{code}"
    restarts = counted(max(0, len(job.rounds) - 1), "restart")
    return f"J{named_job(last.last.run_id)[1:]}: {offset(length, length)}, {restarts}{charged}, {end}"


def _notes(job: Aligned) -> tuple[str, ...]:
    nodes = len({agent.node for agent in job.agents}) - len(job.alone)
    dropped = sum(event.count for _, event in job.all("events_dropped"))
    torn = sum(agent.events[0].event != "agent_started" for agent in job.agents)
    silent = any(job.all("first_step")) and not any([*job.all("checkpoint_saved"), *job.all("save_recorded")])
    notes = {
        "No save is known, so none is shown: agents hear of Checkpointer's, and record what is saved in checkpoint_dir.": silent,
        f"The clocks of {nodes} nodes are aligned by the starts of their rounds: the largest correction is "
        f"{job.correction:.3f} s, and at most {job.residual:.3f} s stay unexplained.": nodes > 1,
        f"These share no round with the others, so their own clocks count: {', '.join(job.alone)}.": job.alone,
        f"Events that were never written: {dropped}. So something may be missing.": dropped,
        f"The beginning of {counted(torn, 'agent')} is missing.": torn,
    }
    return tuple(note for note, is_so in notes.items() if is_so)


def offset(at: float, length: float) -> str:
    """Return a time since the beginning, as exact as a timeline of `length` seconds needs it: "18.6 s", "3:20", "1:03:20"."""
    if length < 60:
        return f"{at:.2f}".rstrip("0").rstrip(".") + " s"
    minutes, whole_s = divmod(round(at), 60)
    return f"{minutes}:{whole_s:02d}" if length < 3600 else f"{minutes // 60}:{minutes % 60:02d}:{whole_s:02d}"
