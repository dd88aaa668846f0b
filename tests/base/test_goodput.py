"""What agents share of their goodput, and the line that says where the time went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.base import goodput
from elastic_ext.base.goodput import IDLE, LOST, PRODUCTIVE, STARTUP, CheckpointPosition, HostRecord, Spent, seconds_of
from elastic_ext.base.records import RecordError

amounts = st.floats(0, 1e9)
some = st.builds(
    Spent,
    st.dictionaries(st.sampled_from(list(goodput.STATES)), amounts).map(seconds_of),
    *[st.integers(0, 10**6)] * 4,
    st.lists(st.builds(CheckpointPosition, amounts, amounts)).map(goodput.newest_positions),
)


@given(some, some)
def test_sums_and_differences(one, more):
    both = one.plus(more)
    assert both.total_s == pytest.approx(one.total_s + more.total_s)
    rest = both.since(one)
    assert rest.by_state == pytest.approx(more.by_state, abs=1e-5)
    assert (rest.interruptions, rest.saves, rest.starts) == (more.interruptions, more.saves, more.starts)
    assert both.reached == max(one.reached, more.reached)


def test_a_sum_knows_the_newest_checkpoints_of_both():
    places = [CheckpointPosition(step, 100.0 * step) for step in range(6)]
    both = Spent(positions=(*places[:3], CheckpointPosition(5, 1.0))).plus(Spent(positions=tuple(places[3:])))
    assert both.positions == tuple(places[2:])  # the fifth was saved again


@given(some, amounts)
def test_a_record_is_read_as_it_was_written(spent, at):
    record = HostRecord(spent, at)
    assert goodput.decode(goodput.encode(record), "key") == record


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1}', '{"schema": 2, "at": 1}', '{"schema": 1, "at": -1}', "[" * 9999])
def test_other_texts_are_refused(text):
    with pytest.raises(RecordError, match="key"):
        goodput.decode(text, "key")


def test_the_time_between_two_agents_is_idle():
    more = Spent(seconds_of({PRODUCTIVE: 5}))
    first = HostRecord().with_more(more, now=1000, first=True)
    assert first.spent.by_state[IDLE] == 0  # nobody was before
    second = first.with_more(more, now=1060, first=False)
    assert second.spent == Spent(seconds_of({PRODUCTIVE: 10}))
    third = second.with_more(more, now=1100, first=True)
    assert third.spent.by_state == {**dict.fromkeys(goodput.STATES, 0), PRODUCTIVE: 15, IDLE: 35}  # 5 of the 40 are its own
    assert third.with_more(more, now=900, first=True).spent.by_state[IDLE] == 35  # the clock was set back


def test_one_line_says_where_the_time_went():
    spent = Spent(seconds_of({PRODUCTIVE: 931, LOST: 22, STARTUP: 46.9, IDLE: 0.1}))
    assert goodput.summary(spent) == "goodput 93.1%: startup 4.7%, lost work 2.2%"
    assert goodput.summary(Spent(seconds_of({PRODUCTIVE: 3}))) == "goodput 100.0%"
    assert "unknown" in goodput.summary(Spent())
