"""What an agent shows of its own node, and the thread behind the job's status."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

from elastic_ext.agent.observation import (
    CHANGES_PER_S,
    MAX_POINTS,
    POINT_S,
    SETTLE_S,
    JobView,
    NodePlace,
    OwnNode,
    Points,
    after,
    own_report,
    settle_s,
)
from elastic_ext.base.goodput import StateSeconds
from elastic_ext.rendezvous.contract import NodeIdentity
from elastic_ext.status import job_status
from elastic_ext.status.job_status import MAX_ROUNDS, NodeReport, RoundHistory, RoundSpan
from elastic_ext.telemetry import families
from elastic_ext.telemetry.agent_metrics import AgentMetrics, WorkerProgress
from elastic_ext.workers.progress import Progress
from tests.until import LIMIT_S

S = 10**9  # nanoseconds
PLACE = NodePlace(1, 4, 2, 100)


def told(rows: list[WorkerProgress], now: float = 60.0) -> NodeReport:
    metrics = AgentMetrics(version="1", torch="2", run_id="job", progress=lambda: rows)
    return own_report("n1", metrics, PLACE, 3, now)


def test_the_slowest_worker_counts_and_the_newest_checkpoint():
    rows = [
        WorkerProgress(0, 4, Progress(7, 50, 10 * S, 59 * S, True, saved_step=40, saved_ns=30 * S)),
        WorkerProgress(1, 5, Progress(8, 21, 18 * S, 58 * S, True, saved_step=60, saved_ns=50 * S)),
    ]
    report = told(rows)
    assert (report.step, report.steps_per_s, report.last_step_s) == (121, 0.5, 2.0)
    assert (report.saved_step, report.saved_s) == (60, 10.0)
    assert job_status.decode_report(job_status.encode_report(report), "it") == report


def test_what_a_script_reports_comes_before_its_input():
    """It has loaded something else, or nothing was given to it."""
    assert told([WorkerProgress(0, 4, Progress(7, 50, 0, 0, True, steps_before=900))]).step == 950


def test_without_workers_nothing_is_made_up():
    report = told([])
    assert (report.step, report.steps_per_s, report.last_step_s, report.saved_step) == (None, None, None, None)
    first = told([WorkerProgress(0, 4, Progress(7, 0, 0, 0, True))])
    assert (first.step, first.steps_per_s, first.last_step_s) == (100, None, None)


def test_between_rounds_last_step_and_checkpoint_age():
    before = NodeReport("n1", "running", step=70, total_steps=90, last_step_s=1.0, saved_step=60, saved_s=4.0)
    later = after(before, NodeReport("n1", "rendezvous"), 10.0)
    assert (later.step, later.last_step_s, later.saved_step, later.saved_s) == (70, 11.0, 60, 14.0)
    again = after(later, NodeReport("n1", "running", step=61), 1.0)  # the next round has no checkpoint yet, but steps
    assert (again.step, again.last_step_s, again.saved_step, again.saved_s) == (61, None, 60, 15.0)
    assert (later.total_steps, again.total_steps) == (90, 90)


def test_points_stay_few_and_cover_the_whole_job():
    points = Points()
    for number in range(1000):
        points.add((StateSeconds("productive", float(number)),), number * POINT_S)
    found = points.ages(1000 * POINT_S)
    assert MAX_POINTS / 2 <= len(found) <= MAX_POINTS
    assert found[0].age_s == 1000 * POINT_S
    gaps = {a.age_s - b.age_s for a, b in pairwise(found)}
    assert max(gaps) <= 2 * min(gaps)


def test_rounds_end_as_workers_stop_with_a_reason():
    history = RoundHistory()
    for state, round_, now in (("rendezvous", 1, 0.0), ("running", 1, 2.0), ("stop", 1, 5.0), ("running", 2, 8.0)):
        history.entered(state, round_, now)
    history.explain(1, "a crash")
    history.explain(1, "what others made of it later")
    assert history.spans(10.0) == (RoundSpan(1, 8.0, 5.0, "a crash"), RoundSpan(2, 2.0))
    for round_ in range(3, 200):
        history.entered(families.RUNNING, round_, 10.0 + round_)
    assert len(history.spans(300.0)) == MAX_ROUNDS
    assert replace(history.spans(300.0)[-1], began_s=0.0) == RoundSpan(199, 0.0)


class Broken:
    """A rendezvous with a bug in its status."""

    node, part = NodeIdentity("a", "n0", ""), SimpleNamespace(round=1)

    def get_run_id(self) -> str:
        return "job"

    def get_backend(self) -> str:
        return "ext_etcd"

    def show(self, report: str, last: bool) -> None:
        pass

    def status(self) -> None:
        raise ValueError("a bug")


def test_the_page_shows_a_thread_that_failed():
    metrics = AgentMetrics(version="1", torch="2", run_id="job", progress=list)
    view = JobView(Broken(), OwnNode(Broken(), metrics))
    try:
        view.document()
        view._thread.join(LIMIT_S)
        view._answer = None
        assert "has failed" in json.loads(view.document())["fault"]
    finally:
        view.close(0.0)


def test_nodes_changing_state_at_once_report_in_turn():
    ids = [f"node{number}-77-ab" for number in range(512)]
    spread = [settle_s(id_, 512) for id_ in ids]
    assert spread == [settle_s(id_, 512) for id_ in ids]
    assert SETTLE_S <= min(spread) < max(spread) <= SETTLE_S + 5.12
    assert max(Counter(map(int, spread)).values()) < 1.5 * CHANGES_PER_S
    assert settle_s("a", 2) < SETTLE_S + 0.02
