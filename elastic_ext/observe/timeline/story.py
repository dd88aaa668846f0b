"""What each node of a job did when, and what happened to the job. Pure: from events by one clock to spans and marks.

Invariant: the spans of a row follow each other and do not overlap; a mark stands for one thing that happened to the job, however
many agents tell of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastic_ext.observe.timeline.clocks import Aligned
from elastic_ext.observe.timeline.told import Told

TRAINING, HUNG, STOPPING, BACKOFF = "training", "hung", "stopping", "backoff"
JOINING, STARTING, LOADING = "rendezvous", "starting", "loading"
RUNNING, BETWEEN = "running", "between"  # all that a job's status tells of its past
# In the words of the legend.
STATES = {
    TRAINING: "training",
    HUNG: "hung",
    STOPPING: "stopping the workers",
    BACKOFF: "backoff before a restart",
    JOINING: "rendezvous: waiting for nodes",
    STARTING: "starting the workers",
    LOADING: "workers run, no step yet",
    RUNNING: "workers run",
    BETWEEN: "no workers: stopping, rendezvous, starting",
}
# What an agent does after an event; None: nothing, it has ended. Other events change nothing.
_AFTER: dict[str, str | None] = {
    "agent_started": JOINING,
    "round_started": STARTING,
    "workers_started": LOADING,
    "first_step": TRAINING,
    "hang": HUNG,
    "round_over": STOPPING,
    "failure": STOPPING,
    "workers_stopped": JOINING,
    "node_refused": None,
    "agent_ended": None,
}
SAME_S = 60.0  # two agents that tell of one round's end within this time tell of the same; a requeued job counts its rounds anew


@dataclass(frozen=True)
class Span:
    """A node is in this state, one of STATES, from `begin` to `end`; Unix seconds."""

    state: str
    begin: float
    end: float


@dataclass(frozen=True)
class Row:
    """What one node did. lost_at: the last event of each of its agents that went silent without an end, while others went on."""

    name: str
    spans: tuple[Span, ...]
    saves: tuple[float, ...] = ()
    lost_at: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mark:
    """Something that happened to the job, at Unix seconds. text: one line."""

    at: float
    node: str
    text: str


@dataclass(frozen=True)
class Story:
    """A job's life.

    Attributes:
        begin, end: Unix seconds of the first and of the last event.
        rows: by the rank that a node had first.
        trains: when the job trained, on at least one node.
        rounds: when each round began.
        marks: failures, hangs, preemptions and lost agents, in order.
        restarts: rounds after the first of each start of the job.
        notes: what a reader must know to trust the picture.
    """

    run_id: str
    begin: float
    end: float
    rows: tuple[Row, ...]
    trains: tuple[tuple[float, float], ...]
    rounds: tuple[float, ...]
    marks: tuple[Mark, ...]
    restarts: int
    notes: tuple[str, ...] = ()

    @property
    def trained_share(self) -> float:
        """Share of the job's time in which it trained, 0 to 1."""
        whole = self.end - self.begin
        return sum(end - begin for begin, end in self.trains) / whole if whole > 0 else 0.0


def tell(aligned: Aligned) -> Story:
    """Return the life of the job that these events are of. There must be at least one event."""
    events = aligned.events
    begin, end = events[0].wall, events[-1].wall
    rows = tuple(_row(name, agents, end) for name, agents in _by_row(events).items())
    rounds = _rounds(events)
    return Story(
        run_id=events[0].run_id,
        begin=begin,
        end=end,
        rows=rows,
        trains=_union((span.begin, span.end) for row in rows for span in row.spans if span.state == TRAINING),
        rounds=tuple(at for at, _ in rounds),
        marks=_marks(events, rows),
        restarts=sum(1 for _, number in rounds if number > 1),
        notes=_notes(events, aligned),
    )


def _by_row(events: Sequence[Told]) -> dict[str, list[list[Told]]]:
    """Return the events by row and agent: a row per node, and more where agents of a node ran side by side."""
    agents: dict[tuple[str, int], list[Told]] = defaultdict(list)
    for each in events:
        agents[each.node, each.pid].append(each)
    rows: dict[str, list[list[Told]]] = {}
    for (node, pid), told in sorted(agents.items(), key=lambda item: item[1][0].wall):
        name = node
        if name in rows and rows[name][-1][-1].wall > told[0].wall:
            name = f"{node} ({pid})"
        rows.setdefault(name, []).append(told)
    return dict(sorted(rows.items(), key=lambda item: (_first_rank(item[1]), item[0])))


def _first_rank(agents: Iterable[Sequence[Told]]) -> tuple[bool, int]:
    rank = next((each.whole("node_rank") for told in agents for each in told if each.name == "round_started"), -1)
    return rank < 0, rank


def _row(name: str, agents: Sequence[Sequence[Told]], job_end: float) -> Row:
    lives = [_life(told) for told in agents]
    ends = [told[-1].wall for told in agents]
    saves = tuple(each.wall for told in agents for each in told if each.name == "checkpoint_saved")
    lost_at = tuple(end for (_, ended), end in zip(lives, ends, strict=True) if not ended and end < job_end)
    return Row(name, tuple(span for spans, _ in lives for span in spans), saves, lost_at)


def _life(told: Sequence[Told]) -> tuple[tuple[Span, ...], bool]:
    """Return the spans of one agent, and whether it has said that it ends."""
    changes: list[tuple[float, str | None]] = []  # from when on, and the state
    waits_until = 0.0  # by the last verdict
    for each in told:
        while changes and changes[-1][0] > each.wall:  # a backoff that was cut short
            changes.pop()
        if each.name == "decision":
            waits_until = each.wall + each.seconds("delay")
        if each.name == "workers_stopped" and waits_until > each.wall:
            changes += [(each.wall, BACKOFF), (waits_until, JOINING)]
        elif each.name in _AFTER:
            changes.append((each.wall, _AFTER[each.name]))
    last = told[-1].wall
    changes = [change for change in changes if change[0] <= last]
    return _spans([*changes, (last, None)]), bool(changes) and changes[-1][1] is None


def _spans(changes: Sequence[tuple[float, str | None]]) -> tuple[Span, ...]:
    """Return the spans between changes of state, equal neighbours as one."""
    found: list[Span] = []
    for (begin, state), (end, _) in pairwise(changes):
        if state is None or end <= begin:
            continue
        if found and found[-1].state == state and found[-1].end == begin:
            found[-1] = replace(found[-1], end=end)
        else:
            found.append(Span(state, begin, end))
    return tuple(found)


def _union(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return tuple(found)


def _rounds(events: Sequence[Told]) -> list[tuple[float, int]]:
    """Return when each round began on its first node, and its number."""
    found: list[tuple[float, int]] = []
    for each in events:
        if each.name == "round_started" and not any(each.round == number and each.wall - at < SAME_S for at, number in found):
            found.append((each.wall, each.round))
    return found


def _marks(events: Sequence[Told], rows: Sequence[Row]) -> tuple[Mark, ...]:
    marks = [*_decisions(events), *_hangs(events)]
    for each in events:
        if each.name in ("preemption_noticed", "interrupted"):
            marks.append(Mark(each.wall, each.node, f"told to end by {each.text('signal')}"))
        elif each.name == "node_refused":
            marks.append(Mark(each.wall, each.node, f"not taken back: {each.text('reason')}"))
        elif each.name == "round_over" and each.text("cause") == "cut_off":
            marks.append(Mark(each.wall, each.node, f"cut off: {each.text('reason')}"))
    marks += [Mark(at, row.name, "last word of its agent: killed, or its host is gone") for row in rows for at in row.lost_at]
    return tuple(sorted(marks, key=lambda mark: (mark.at, mark.node)))


def _decisions(events: Sequence[Told]) -> list[Mark]:
    """Return the verdicts, each once, with the failure that caused it."""
    failures = [each for each in events if each.name == "failure"]
    found: list[tuple[Told, Told | None]] = []
    for each in events:
        if each.name == "decision" and not any(_same(each, other) for other, _ in found):
            found.append((each, next((failure for failure in failures if _caused(failure, each)), None)))
    return [_decision(*pair) for pair in found]


def _same(one: Told, other: Told) -> bool:
    return one.round == other.round and abs(one.wall - other.wall) < SAME_S


def _caused(failure: Told, decision: Told) -> bool:
    return failure.whole("rank") == decision.whole("culprit_rank", -2) and _same(failure, decision)


def _decision(told: Told, failure: Told | None) -> Mark:
    rank, host = told.whole("culprit_rank"), told.text("culprit_host")
    where = host or (failure.node if failure is not None else told.node)
    who = f"rank {rank}: " if rank >= 0 else ""
    exit_code = told.whole("exit_code")
    answer = f"{told.text('decision')}, exit code {exit_code}" if exit_code >= 0 else told.text("decision")
    at = failure.wall if failure is not None else told.wall
    return Mark(at, where, f"{who}{told.text('kind')} -> {answer}: {told.text('reason')}")


def _hangs(events: Sequence[Told]) -> list[Mark]:
    found: list[Told] = []
    for each in events:
        if each.name == "hang" and not any(_same(each, other) for other in found):
            found.append(each)
    return [Mark(each.wall, each.node, "the job hangs" + _culprits(each)) for each in found]


def _culprits(told: Told) -> str:
    ranks = told.fields.get("culprits")
    return f": the others wait for rank {', '.join(map(str, ranks[:8]))}" if isinstance(ranks, list) and ranks else ""


def _notes(events: Sequence[Told], aligned: Aligned) -> tuple[str, ...]:
    notes = []
    if aligned.spread >= 0.1:
        notes.append(f"clocks of the hosts put over each other by their rounds, to within {aligned.spread:.1f} s")
    if aligned.alone:
        notes.append(f"placed by its own clock, since it shares no round with the others: {', '.join(aligned.alone)}")
    if missing := sum(each.whole("count", 0) for each in events if each.name == "events_dropped"):
        notes.append(f"{missing} events are missing: they could not be written")
    if not any(each.name == "first_step" for each in events):
        notes.append("no step was told of, so no training is shown: steps of torch optimizers count")
    return tuple(notes)
