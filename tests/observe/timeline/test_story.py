"""From events to what each node did and what happened to the job; from several clocks to one."""

from __future__ import annotations

import itertools

import pytest

from elastic_ext.observe.timeline import clocks, story
from elastic_ext.observe.timeline.clocks import Aligned
from elastic_ext.observe.timeline.story import BACKOFF, HUNG, JOINING, LOADING, STARTING, STOPPING, TRAINING, Mark, Span
from elastic_ext.observe.timeline.told import Told


def told(at: float, name: str, node: str = "a", pid: int = 1, round: int = 1, wall: float | None = None, **fields) -> Told:
    return Told(name, node, pid, "job", round, at if wall is None else wall, at, fields)


def tell(*events: Told) -> story.Story:
    return story.tell(Aligned(tuple(sorted(events, key=lambda each: each.wall)), {}, 0.0, ()))


def life(*names: str, node: str = "a", begin: float = 0.0, **more) -> list[Told]:
    """One event each second."""
    return [told(begin + second, name, node, **more) for second, name in enumerate(names)]


UP = ("agent_started", "round_started", "workers_started", "first_step")


def test_the_spans_of_a_node_follow_each_other_from_its_first_event_to_its_last():
    (row,) = tell(*life(*UP, "failure", "workers_stopped", "round_started", "workers_started", "hang", "agent_ended")).rows
    states = [JOINING, STARTING, LOADING, TRAINING, STOPPING, JOINING, STARTING, LOADING, HUNG]
    assert row.spans == tuple(Span(state, at, at + 1) for at, state in enumerate(states))
    assert row.lost_at == ()


def test_events_that_change_nothing_part_no_span():
    (row,) = tell(*life(*UP, "checkpoint_saved", "checkpoint_copied", "of a newer version", "agent_ended")).rows
    assert row.spans[-1] == Span(TRAINING, 3, 7)
    assert row.saves == (4,)


@pytest.mark.parametrize(
    ("delay", "spans"),
    [(0, [(JOINING, 5, 9)]), (3, [(BACKOFF, 5, 7), (JOINING, 7, 9)]), (60, [(BACKOFF, 5, 9)])],
)
def test_a_backoff_ends_with_its_delay_or_with_the_next_round(delay, spans):
    events = [*life(*UP), told(4, "decision", delay=delay), told(5, "workers_stopped"), told(9, "round_started", round=2)]
    (row,) = tell(*events, told(10, "agent_ended")).rows
    assert [(each.state, each.begin, each.end) for each in row.spans if 5 <= each.begin < 9] == spans


def test_an_agent_that_never_says_that_it_ends_is_lost_unless_it_is_the_last_to_speak():
    of_b = life(*UP, node="b", pid=2)
    first, second = tell(*life(*UP), *of_b, told(60, "agent_ended", "b", 2)).rows
    assert (first.lost_at, second.lost_at) == ((3,), ())
    assert tell(*life(*UP)).rows[0].lost_at == ()


def test_a_node_is_one_row_over_restarts_and_two_where_its_agents_ran_side_by_side():
    after = life(*UP, "agent_ended", begin=10, pid=2)
    assert [row.name for row in tell(*life(*UP, "agent_ended"), *after).rows] == ["a"]
    beside = life(*UP, "agent_ended", begin=2, pid=2)
    assert [row.name for row in tell(*life(*UP, "agent_ended"), *beside).rows] == ["a", "a (2)"]


def test_an_agent_that_was_killed_leaves_a_gap_before_the_next_one_of_its_node():
    (row,) = tell(*life(*UP), *life(*UP, "agent_ended", begin=10, pid=2)).rows
    assert row.lost_at == (3,)
    assert [(each.begin, each.end) for each in row.spans] == [(0, 1), (1, 2), (2, 3), (10, 11), (11, 12), (12, 13), (13, 14)]


def test_rows_are_in_the_order_of_ranks_and_spares_come_last():
    events = [told(0, "agent_started", node, pid) for pid, node in enumerate("abc")]
    events += [told(1, "round_started", "b", 1, node_rank=0), told(1, "round_started", "c", 2, node_rank=1)]
    assert [row.name for row in tell(*events).rows] == ["b", "c", "a"]


def test_the_job_trains_while_any_node_does():
    of_b = life(*UP, "workers_stopped", "agent_ended", node="b", pid=2, begin=1)
    found = tell(*life(*UP, "workers_stopped", "agent_ended"), *of_b)
    assert found.trains == ((3, 5),)
    assert found.trained_share == pytest.approx(2 / 6)


def test_what_all_agents_tell_of_is_one_mark_with_the_failure_that_caused_it():
    verdict = {"culprit_rank": 3, "culprit_host": "b", "decision": "restart", "kind": "crash", "reason": "SIGSEGV"}
    events = [told(5.2, "decision", "a", 1, **verdict), told(5.3, "decision", "b", 2, **verdict)]
    events += [told(5, "failure", "b", 2, rank=3), told(4.9, "failure", "a", 1, rank=0)]
    events += [told(90, "decision", "a", 1, 2, **verdict), told(5000, "decision", "a", 9, 1, **verdict)]
    marks = tell(*events).marks
    assert marks[:1] == (Mark(5, "b", "rank 3: crash -> restart: SIGSEGV"),)
    assert [mark.at for mark in marks if "crash" in mark.text] == [5, 90, 5000]


def test_a_round_counts_once_and_restarts_are_those_after_the_first_of_each_start():
    events = [told(at, "round_started", node, round=number) for at, node, number in [(0, "a", 1), (1, "b", 1), (50, "a", 2)]]
    events += [told(4000, "round_started", "a", 2, 1), told(4100, "round_started", "a", 2, 2), told(4101, "agent_ended", "a", 2)]
    found = tell(*events)
    assert (found.rounds, found.restarts) == ((0, 50, 4000, 4100), 2)


def test_hangs_signals_and_lost_events_are_told():
    events = [*life(*UP), told(5, "hang", culprits=[2, 3]), told(5.5, "hang", "b", 2, culprits=[])]
    events += [
        told(6, "preemption_noticed", signal="SIGTERM"),
        told(7, "events_dropped", count=4),
        told(8, "agent_ended", "b", 2),
    ]
    found = tell(*events)
    assert [mark.text for mark in found.marks[:2]] == ["the job hangs: the others wait for rank 2, 3", "told to end by SIGTERM"]
    assert any("4 events are missing" in note for note in found.notes)


# Clocks.


def rounds(node: str, pid: int, ahead: float, *times: float) -> list[Told]:
    """Rounds that begin at these times, told by a host whose clock is ahead by so much."""
    return [told(1000 * pid + at, "round_started", node, pid, number, wall=at + ahead) for number, at in enumerate(times, 1)]


def test_hosts_whose_clocks_differ_are_put_over_each_other_by_their_rounds():
    aligned = clocks.align([*rounds("a", 1, 0, 10, 100, 300), *rounds("b", 2, 40, 10.2, 100, 300)])
    assert [each.node for each in aligned.events] == ["a", "b", "a", "b", "a", "b"] or aligned.spread < 0.25
    assert aligned.corrections == {"a": 0, "b": pytest.approx(-40)}
    assert aligned.spread == pytest.approx(0.2)


def test_a_clock_that_is_set_moves_nothing():
    events = rounds("a", 1, 0, 10, 100, 300)
    events[1] = told(1100, "round_started", "a", 1, 2, wall=99999)
    assert [each.wall for each in clocks.align(events).events] == [10, 100, 300]


def test_rounds_of_another_start_of_the_job_are_not_taken_for_the_same():
    aligned = clocks.align([*rounds("a", 1, 0, 10), *rounds("b", 2, 1, 10), *rounds("b", 3, 1, 4000), *rounds("a", 4, 0, 4000)])
    assert aligned.corrections == {"a": 0, "b": -1}


def test_a_host_that_shares_no_round_is_named():
    aligned = clocks.align([*rounds("a", 1, 0, 10, 20), told(5, "agent_started", "b", 2, wall=12)])
    assert aligned.alone == ("b",)


def test_the_order_of_the_files_does_not_matter():
    events = [*rounds("a", 1, 0, 10, 20), *rounds("b", 2, 7, 10, 20), *rounds("c", 3, -7, 10, 20)]
    found = {tuple(clocks.align(list(order)).corrections.items()) for order in itertools.permutations(events, 6)}
    assert found == {(("a", 0.0), ("b", -7.0), ("c", 7.0))}
