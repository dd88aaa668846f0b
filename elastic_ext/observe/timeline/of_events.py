"""The course of a job from the events of its agents. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic_ext.observe.timeline import clocks
from elastic_ext.observe.timeline.clocks import JOINED, Agent, Aligned, Clocks
from elastic_ext.observe.timeline.course import (
    GONE,
    RUNNING,
    TRAINING,
    Course,
    Mark,
    Row,
    Saved,
    Span,
    Start,
    job_spans,
    merged,
    shares,
)
from elastic_ext.observe.timeline.lines import Line, once
from elastic_ext.observe.timeline.marks import Ends, Found
from elastic_ext.observe.timeline.walk import Walk, walk

SHORTEST_S = 0.001  # of a picture: one event has no length
NO_RANK = 2**31


def course(lines: Sequence[Line]) -> Course:
    """Return the course of one job. lines: at least one, all of one run id, in any order."""
    lines = once(lines)
    aligned = clocks.aligned(clocks.agents_of(lines))
    agents = aligned.agents
    steps_told = any(line.name == "first_step" for line in lines)
    walks = [walk(agent, steps_told) for agent in agents]
    began = min(agent.times[0] for agent in agents)
    length = max(max(agent.times[-1] for agent in agents) - began, SHORTEST_S)
    ends = Ends(aligned, walks)
    places = _places(agents, ends)
    rows = _rows(agents, walks, ends, places, (began, length))
    row_of = {index: number for number, members in enumerate(places) for index in members}
    job = job_spans(rows, length)
    return Course(
        run_id=lines[0].run_id,
        began_unix=began,
        length=length,
        end=_end(agents, walks),
        restarts=_restarts(agents, aligned),
        rows=rows,
        nodes=len(rows),
        spent=shares(rows),
        job=job,
        trained=sum(each.end - each.begin for each in job if each.state in (TRAINING, RUNNING)) / length,
        trained_is="Trained {} of the time, steps done twice included"
        if steps_told
        else "Workers ran {} of the time; steps are not told",
        rounds=tuple(Start(each.at - began, each.number) for each in sorted(aligned.rounds, key=lambda each: each.at)),
        marks=tuple(_mark(each, row_of, began) for each in ends.marks()),
        saved=_saved(agents, aligned, began),
        notes=_notes(agents, walks, aligned.clocks),
    )


def _places(agents: Sequence[Agent], ends: Ends) -> list[list[int]]:
    """Return the agents of each row: those of one node that did not run side by side, in order; rows by first rank."""
    rows: list[list[int]] = []
    of_node: dict[str, list[list[int]]] = {}
    for index, agent in enumerate(agents):  # in the order of time
        mine = of_node.setdefault(agent.node, [])
        free = next((row for row in mine if (gone_at := ends.gone_at(row[-1])) is not None and gone_at <= agent.times[0]), None)
        if free is None:
            rows.append([])
            free = rows[-1]
            mine.append(free)
        free.append(index)
    return sorted(rows, key=lambda row: (_first_rank(agents, row), agents[row[0]].times[0], agents[row[0]].node))


def _first_rank(agents: Sequence[Agent], row: Sequence[int]) -> int:
    joined = (line for index in row for line in agents[index].lines if line.name == JOINED)
    rank = next((line.whole("node_rank") for line in joined), None)
    return NO_RANK if rank is None else rank


def _rows(
    agents: Sequence[Agent], walks: Sequence[Walk], ends: Ends, places: Sequence[Sequence[int]], of: tuple[float, float]
) -> tuple[Row, ...]:
    """of: when the picture begins, Unix seconds, and its length."""
    began, length = of
    names = [agents[row[0]].node for row in places]
    found = []
    for row, name in zip(places, names, strict=True):
        spans: list[Span] = []
        for index in row:
            gone_at = ends.gone_at(index)
            until = began + length if gone_at is None else gone_at
            for span in walks[index].spans(until, began):
                begin = max(span.begin, spans[-1].end if spans else 0.0)
                if spans and begin > spans[-1].end:
                    spans.append(Span(spans[-1].end, begin, GONE))
                spans.append(replace(span, begin=begin, end=max(begin, span.end)))
        if spans and spans[-1].end < length:
            spans.append(Span(spans[-1].end, length, GONE))
        pid = f" (pid {agents[row[0]].pid})" if names.count(name) > 1 else ""
        found.append(Row(f"{name}{pid}", merged(spans)))
    return tuple(found)


def _mark(found: Found, row_of: Mapping[int, int], began: float) -> Mark:
    return Mark(
        at=found.at - began,
        row=row_of[found.agent] if found.agent is not None else None,
        node=found.node,
        rank=found.rank,
        round=found.round,
        kind=found.kind,
        decision=found.decision,
        reason=found.reason,
        after=found.after,
    )


def _saved(agents: Sequence[Agent], aligned: Aligned, began: float) -> tuple[Saved, ...]:
    """Return the checkpoints, each as the first agent of a round saw it."""
    found: dict[tuple[int | None, int], Saved] = {}
    for index, agent in enumerate(agents):
        for line, at in zip(agent.lines, agent.times, strict=True):
            step = line.whole("step")
            if line.name != "checkpoint_saved" or step is None:
                continue
            key = (aligned.of.get((index, line.round)), step)
            if key not in found or at - began < found[key].at:
                found[key] = Saved(at - began, step, line.number("seconds"))
    return tuple(sorted(found.values(), key=lambda each: each.at))


def _end(agents: Sequence[Agent], walks: Sequence[Walk]) -> str:
    newest: dict[str, int] = {agent.node: index for index, agent in enumerate(agents)}
    last = [agents[index].lines[-1] for index in newest.values() if walks[index].ended]
    if not last or max(agent.times[-1] for agent in agents) > max(
        (agents[index].times[-1] for index in newest.values() if walks[index].ended), default=0.0
    ):
        return "as of its last event"
    states = {line.text("state") for line in last}
    if states == {"succeeded"}:
        return "ended: succeeded"
    codes = sorted({code for line in last if (code := line.whole("exit_code"))})
    if "succeeded" in states:
        return "ended: succeeded"
    return "ended" + (f" with exit code {', '.join(map(str, codes))}" if codes else "")


def _restarts(agents: Sequence[Agent], aligned: Aligned) -> str:
    ran = {
        aligned.of.get((index, line.round))
        for index, agent in enumerate(agents)
        for line in agent.lines
        if line.name == "workers_started"
    }
    count = max(0, len(ran) - 1)
    verdicts = sorted(
        ((at, line) for agent in agents for line, at in zip(agent.lines, agent.times, strict=True) if line.name == "decision"),
        key=lambda each: each[0],
    )
    charged, limit = (verdicts[-1][1].whole(name) for name in ("restarts", "max_restarts")) if verdicts else (None, None)
    of = f" of {limit}" if limit is not None and limit >= 0 else ""
    return f"{count} restart{'' if count == 1 else 's'}" + (f" ({charged}{of} charged)" if charged is not None else "")


def _notes(agents: Sequence[Agent], walks: Sequence[Walk], of: Clocks) -> tuple[str, ...]:
    found = []
    if of.nodes:
        found.append(
            f"The clocks of {of.nodes} nodes are aligned by the starts of their rounds: the largest correction is "
            f"{of.largest:.3f} s, and at most {of.residual:.3f} s stay unexplained."
        )
    if of.alone:
        shown = ", ".join(of.alone[:5]) + (f" and {len(of.alone) - 5} more" if len(of.alone) > 5 else "")
        found.append(f"These share no round with the others, so their own clocks count: {shown}.")
    dropped = sum(line.whole("count") or 0 for agent in agents for line in agent.lines if line.name == "events_dropped")
    if dropped:
        found.append(f"{dropped} events were never written, so something may be missing.")
    torn = sum(agent.lines[0].name != clocks.BORN for agent in agents)
    if torn:
        found.append(f"The beginning of {torn} agents is missing.")
    return tuple(found)
