"""What this node knows: of itself its state, its workers' progress and its rounds; of the job its goodput over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_ext.agent.goodput import AccountedMetrics
from elastic_ext.base.goodput import StateSeconds
from elastic_ext.observe import families
from elastic_ext.observe.job_status import Own
from elastic_ext.observe.metrics import AgentMetrics, WorkerProgress
from elastic_ext.observe.status_records import GoodputPoint, NodeReport, Pace, RoundHistory
from elastic_ext.rendezvous.contract import Rendezvous

POINT_S = 30.0  # between two points of goodput, at first
MAX_POINTS = 120  # then every other one is dropped, and the time doubles
STANDBYS = "elastic_ext_standbys"


@dataclass(frozen=True)
class Place:
    """This node in its round of so many nodes and workers. resumed_at: step that the round started from; None if unknown."""

    node_rank: int = -1
    base_rank: int = -1
    workers: int = 0
    resumed_at: int | None = None
    nodes: int = 0
    world: int = 0


def own_report(name: str, metrics: AgentMetrics, place: Place, round_: int, now: float) -> NodeReport:
    """Return what this node tells of itself, without its rounds."""
    rows = metrics.progress()
    samples = (sample for family in metrics.registry.restricted_registry([STANDBYS]).collect() for sample in family.samples)
    report = NodeReport(
        name=name,
        state=metrics.state.name,
        state_s=_age(now, metrics.state.since) or 0.0,
        node_rank=place.node_rank,
        base_rank=place.base_rank,
        workers=place.workers,
        round=round_,
        standbys=int(sum(each.value for each in samples)),
        at=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        pace=tuple(Pace(each.rank, round(each.skew, 3)) for each in rows if each.skew is not None),
    )
    return _with_progress(report, rows, place.resumed_at or 0, now) if rows else report


def _with_progress(report: NodeReport, rows: Sequence[WorkerProgress], resumed_at: int, now: float) -> NodeReport:
    slowest = min(rows, key=lambda each: each.steps)
    last_steps = [each.last_step_at for each in rows if each.last_step_at is not None]
    saved = max((each for each in rows if each.saved_at is not None), key=lambda each: each.saved_at or 0.0, default=None)
    return replace(
        report,
        step=(resumed_at if slowest.steps_before is None else slowest.steps_before) + slowest.steps,
        steps_per_s=round((slowest.steps - 1) / slowest.stepping_s, 3) if slowest.stepping_s > 0 else None,
        last_step_s=_age(now, min(last_steps)) if last_steps else None,
        saved_step=saved.saved_step if saved is not None else None,
        saved_s=_age(now, saved.saved_at) if saved is not None else None,
    )


def after(before: NodeReport, report: NodeReport, later_s: float) -> NodeReport:
    """Return a report with what it lacks from the one before: between two rounds the last step and checkpoint still count."""
    if report.step is None and before.step is not None:
        last_step_s = before.last_step_s + later_s if before.last_step_s is not None else None
        report = replace(report, step=before.step, last_step_s=last_step_s)
    if report.saved_step is None and before.saved_step is not None:
        report = replace(report, saved_step=before.saved_step, saved_s=(before.saved_s or 0.0) + later_s)
    return report


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else round(max(0.0, now - at), 3)


class Points:
    """Goodput over time, in at most MAX_POINTS points however long the job runs."""

    def __init__(self) -> None:
        self._points: list[tuple[float, tuple[StateSeconds, ...]]] = []
        self._every_s = POINT_S

    def __len__(self) -> int:
        return len(self._points)

    def add(self, goodput: tuple[StateSeconds, ...], now: float) -> None:
        """Keep a point if one is due."""
        if not goodput or (self._points and now - self._points[-1][0] < self._every_s):
            return
        self._points.append((now, goodput))
        if len(self._points) > MAX_POINTS:
            del self._points[1::2]
            self._every_s *= 2

    def ages(self, now: float) -> tuple[GoodputPoint, ...]:
        return tuple(GoodputPoint(_age(now, at) or 0.0, goodput) for at, goodput in tuple(self._points))


class OwnNode:
    """This node. The agent's loop tells it of states, places and ends of rounds, which costs the loop nothing."""

    def __init__(self, handler: Rendezvous, metrics: AccountedMetrics, on_state: Callable[[], None]) -> None:
        """on_state: called by the loop when its state has changed; it must return at once."""
        self.place = Place()
        self._handler, self._metrics = handler, metrics
        self._on_state = on_state
        self._history, self._points = RoundHistory(), Points()
        self._lock = threading.Lock()
        self._last: tuple[float, NodeReport] | None = None  # the last report with steps or a checkpoint, and when
        metrics.state.on_change = self._entered

    def _entered(self, state: str, at: float) -> None:
        with self._lock:
            self._history.entered(state, self._handler.round, at)
        self._on_state()

    def round_ended(self, why: str) -> None:
        """Note why the round is over."""
        with self._lock:
            self._history.explain(self._handler.round, why)

    def now(self, now: float) -> Own:
        """Return what it knows at `now`."""
        report = own_report(self._handler.host, self._metrics, self.place, self._handler.round, now)
        spent = self._metrics.goodput.job()
        with self._lock:
            # Not before the first round: until then nothing is known of what the job has spent before this agent.
            if self._points or self._metrics.state.name == families.RUNNING:
                self._points.add(spent.spent.seconds, now)
            if self._last is not None:
                report = after(self._last[1], report, max(0.0, now - self._last[0]))
            if report.step is not None or report.saved_step is not None:
                self._last = now, report
            report = replace(report, rounds=self._history.spans(now))
            return Own(self._handler.node_id, report, spent, self._points.ages(now), self.place.nodes, self.place.world)
