"""What a job's status tells of its past."""

from __future__ import annotations

from elastic_ext.observe.job_document import Document, Failure, Job
from elastic_ext.observe.node_report import RoundSpan
from elastic_ext.observe.timeline.outline import of_status
from elastic_ext.observe.timeline.story import BETWEEN, RUNNING, Mark, Span

FAILURE = Failure(1, "restart", "crash", "SIGSEGV", "r", "b", 3, None, 1, 3, "10:00")


def document(state: str, *rounds: RoundSpan, failures: tuple[Failure, ...] = ()) -> Document:
    job = Job("job", "ext_etcd", state, "", 2, 1, 1, 0, None, None)
    return Document(job, rounds=rounds, failures=failures, rounds_by="a")


def test_rounds_with_the_time_between_them_and_the_verdict_at_their_end():
    story = of_status(document("running", RoundSpan(1, 100, 60), RoundSpan(2, 50), failures=(FAILURE,)), now=1000)
    (row,) = story.rows
    assert row.spans == (Span(RUNNING, 900, 940), Span(BETWEEN, 940, 950), Span(RUNNING, 950, 1000))
    assert (story.begin, story.end, story.restarts, story.trains) == (900, 1000, 1, ((900, 940), (950, 1000)))
    assert story.marks == (Mark(940, "b", "rank 3: crash -> restart: SIGSEGV"),)


def test_a_job_that_recovers_ends_now_and_one_that_has_ended_ended_with_its_last_round():
    spans = RoundSpan(1, 100, 60)
    assert of_status(document("recovering", spans), now=1000).rows[0].spans[-1] == Span(BETWEEN, 940, 1000)
    assert of_status(document("failed", spans), now=1000).end == 940


def test_verdicts_on_rounds_that_nobody_saw_are_notes():
    story = of_status(document("running", RoundSpan(2, 50), failures=(FAILURE,)), now=1000)
    assert story.marks == ()
    assert story.notes[1] == "before that (10:00), round 1: rank 3: crash -> restart: SIGSEGV"


def test_a_job_without_rounds_is_empty():
    story = of_status(document("forming"), now=1000)
    assert (story.rows, story.trained_share) == ((), 0.0)
