"""The state machine of the rounds, case by case; jobs at random are in test_simulated_jobs."""

import dataclasses

import pytest

from elastic_ext.base.records import RecordError
from elastic_ext.failures.joint_evidence import Reach
from elastic_ext.rendezvous import board, rounds, topics
from elastic_ext.rendezvous.round_records import (
    Agreed,
    Assignment,
    Drain,
    EndKind,
    Header,
    Node,
    NodeHost,
    RoundReport,
    State,
    decode,
    encode,
)
from elastic_ext.rendezvous.rounds import Amend, Conclude, End, Limits, Release, Seal, View, Wait, lost, next_action


def node(after=0, workers=2, **more):
    return Node(after=after, workers=workers, role=more.pop("role", "w"), address="h", port=1, **more)


def view(header, nodes, members=(), last_arrival=0.0, **more):
    joined = {id_: at for at, id_ in enumerate(nodes)}
    done = rounds.done(header.round, members, nodes)
    return View(header, nodes, joined, {id_: rank for rank, id_ in enumerate(members)}, done, last_arrival, **more)


LIMITS = Limits(2, 4, last_call_s=5)
RUNNING = Header(3, State.RUNNING)
BROKEN = Header(3, State.BROKEN)
JUDGED = Header(3, State.BROKEN, verdict="restart")
FAILED = node(report=RoundReport(3, "it failed"))
FOLLOWS = node(report=RoundReport(3, "it failed", follows=True))
NO_CAUSE = "all failures reported so far follow from another one; no report yet from node b"
ONE_FAILED = "workers of node a failed"
BOTH_FAILED = "workers of 2 nodes (including a) failed"
TWO = {"a": node(), "b": node()}
GROWS = {**TWO, "c": node(3)}
MORE = Wait("2 of at most 4 nodes have joined; more may come", 6)
A_LEFT = End(State.BROKEN, "node a left the round to wait for the next one")
C_MAY_FAIL = Wait("node c may have failed too", 7.5)
A_STOPS = Wait("waiting for node a to stop all workers")
BACK = "node b may come back after the outage"
OF_TWO = Header(3, State.RUNNING, nodes=2)
OUTAGE = {"returning_until": 10.0}
LOST_B = dataclasses.replace(BROKEN, lost="b")
REWRITTEN = "the assignments of 1 node in round 3 are being written again"
HEADER_LOST = Wait("the header of round 3 is lost; its nodes are writing it again", 10.0)


def test_lost_are_members_gone_released_or_cut_off():
    nodes = {"a": FOLLOWS, "b": node(after=3, cut=3), "c": node(after=3, cut=2), "d": node(after=3, cut=3)}
    assert lost(view(BROKEN, nodes, "abce")) == {"e": "was lost", "b": "was cut off from the job's store"}
    left = dataclasses.replace(BROKEN, drains=(Drain("a", "a", 1, released=True), Drain("c", "c", 1)))
    cut = "was cut off from the job's store"
    assert lost(view(left, nodes, "abce")) == {"e": "was lost", "a": "was asked to leave", "b": cut}
    back = dataclasses.replace(BROKEN, lost="a")  # the round has ended because it was gone
    assert lost(view(back, nodes, "abce")) == {"a": "was lost", "e": "was lost", "b": "was cut off from the job's store"}


@pytest.mark.parametrize(
    ("seen", "now", "action"),
    [
        (view(Header(), {"a": node()}), 99, Wait("1 of at least 2 nodes have joined")),
        (view(Header(), TWO, last_arrival=1), 2, MORE),
        (view(Header(), TWO, last_arrival=1), 6, Seal(("a", "b"), "2 nodes joined")),
        (view(Header(), {id_: node() for id_ in "abcd"}), 0, Seal(tuple("abcd"), "4 nodes joined")),
        (view(Header(), {id_: node() for id_ in "abcde"}), 0, Seal(tuple("abcd"), "5 nodes joined")),
        (view(RUNNING, TWO, "ab"), 0, Wait("running")),
        (view(RUNNING, {"a": node()}, "ab"), 0, End(State.BROKEN, "lost node b", lost="b")),
        (view(RUNNING, {"a": node(3), "b": node()}, "ab"), 0, A_LEFT),
        (view(RUNNING, {"a": node(done=3), "b": node(done=3)}, "ab"), 0, End(State.DONE, "all workers have finished")),
        (view(RUNNING, {"a": node(done=3), "b": node()}, "ab"), 0, Wait("running")),
        (view(RUNNING, GROWS, "ab"), 0, End(State.BROKEN, "growing by node c")),
        (view(RUNNING, GROWS, "ab", may_grow=False), 0, Wait("node c will join at the next checkpoint", 5)),
        (view(RUNNING, {"a": node(done=3), "b": node(), "c": node(3)}, "ab"), 0, Wait("running")),
        (view(RUNNING, {id_: node() for id_ in "abcde"}, "abcd"), 0, Wait("running")),
        # No fixed last call: all that live are back and there are enough.
        (view(BROKEN, {"b": node(3), "a": node(3)}, "abc"), 0, Seal(("a", "b"), "2 nodes joined")),
        (view(BROKEN, {"a": node(3), "b": node(2)}, "abc"), 0, Wait("waiting for node b to stop all workers")),
        (view(BROKEN, {"a": node(3)}, "abc"), 0, Wait("1 of at least 2 nodes have joined")),
        # Old ranks first, whoever comes first now; then spares.
        (view(BROKEN, {"d": node(), "b": node(3), "a": node(3)}, "abc"), 0, Seal(("a", "b", "d"), "3 nodes joined")),
        # Failures: one verdict on the round before the next one, once all have told, or some time after the first.
        (view(RUNNING, {"a": FAILED, "b": node()}, "ab"), 0, End(State.BROKEN, "workers of node a failed", EndKind.FAILED)),
        (view(BROKEN, {"a": FAILED, "b": node()}, "ab", reported_at=7), 7, Wait("node b may have failed too", 7.5)),
        (view(BROKEN, {"a": FAILED, "b": node()}, "ab", reported_at=7), 7.5, Conclude(("a",), "workers of node a failed")),
        # Without a cause so far, all that live are waited for: the next round waits for them too.
        (view(BROKEN, {"a": FOLLOWS, "b": node(), "c": node(3)}, "abc", reported_at=7), 99, Wait(NO_CAUSE)),
        (view(BROKEN, {"a": FOLLOWS, "b": node(3), "c": node(3)}, "abcd", reported_at=7), 7, Conclude(("a",), ONE_FAILED)),
        (view(BROKEN, {"a": FOLLOWS, "b": FAILED, "c": node()}, "abc", reported_at=7), 7, C_MAY_FAIL),
        (view(BROKEN, {"a": FAILED, "b": node(3)}, "ab", reported_at=7), 7, Conclude(("a",), "workers of node a failed")),
        (view(BROKEN, {"a": FAILED, "b": FAILED}, "ab", reported_at=7), 7, Conclude(("a", "b"), BOTH_FAILED)),
        (view(BROKEN, {"a": FAILED}, "ab", reported_at=7), 7, Conclude(("a",), "workers of node a failed")),  # b is lost
        (view(JUDGED, {"a": FAILED, "b": node(3)}, "ab", reported_at=7), 7, A_STOPS),
        (view(JUDGED, {"a": node(3), "b": node(3)}, "ab"), 7, Seal(("a", "b"), "2 nodes joined")),
        (view(BROKEN, {"a": node(3, report=RoundReport(2, "old")), "b": node(3)}, "ab"), 7, Seal(("a", "b"), "2 nodes joined")),
        (view(Header(3, State.CLOSED, reason="x"), {"a": node(), "b": node()}, "ab"), 99, Wait("the job is over: x")),
        # After an outage.
        (view(OF_TWO, {"a": node()}, "ab", **OUTAGE), 9, Wait(BACK, 10.0)),
        (view(OF_TWO, {"a": node()}, "ab", **OUTAGE), 10, End(State.BROKEN, "lost node b", lost="b")),
        (view(OF_TWO, {"a": node(done=3)}, "ab", **OUTAGE), 9, Wait(BACK, 10.0)),
        # What has ended the round need not wait; the next one does.
        (view(OF_TWO, {"a": FAILED}, "ab", **OUTAGE), 9, End(State.BROKEN, ONE_FAILED, EndKind.FAILED)),
        (view(OF_TWO, {"a": node(3)}, "ab", **OUTAGE), 9, A_LEFT),
        (view(BROKEN, {"a": node(3), "c": node()}, "ab", **OUTAGE), 9, Wait(BACK, 10.0)),
        (view(BROKEN, {"a": node(3), "c": node()}, "ab", **OUTAGE), 10, Seal(("a", "c"), "2 nodes joined")),
        # The round has ended because it was gone: nobody waits for it once more.
        (view(LOST_B, {"a": node(3), "c": node()}, "ab", **OUTAGE), 9, Seal(("a", "c"), "2 nodes joined")),
        (view(LOST_B, {"a": node(3), "d": node()}, "abc", **OUTAGE), 9, Wait("node c may come back after the outage", 10.0)),
        # A leader that does not know all parts must not take those that it knows for all: it would hold the job for done.
        (view(OF_TWO, {"a": node(done=3), "b": node()}, "a", **OUTAGE), 3, Wait(REWRITTEN, 4.0)),
        (view(OF_TWO, {"a": node(done=3), "b": node()}, "a", **OUTAGE), 9.5, Wait(REWRITTEN, 10.0)),
        (view(OF_TWO, {"a": node(done=3), "b": node()}, "a"), 0, End(State.BROKEN, "the assignments of 1 node are lost")),
        # One that has never seen the header, but nodes that were in that round.
        (view(Header(), {"a": node(round=3), "b": node()}, **OUTAGE), 9, HEADER_LOST),
    ],
)
def test_next_action(seen, now, action):
    assert next_action(seen, LIMITS, now) == action


FEW = "1 of at least 2 nodes have joined"


@pytest.mark.parametrize(
    ("seen", "now", "action"),
    [
        (view(BROKEN, {"a": node(3)}, "ab", few_since=7), 21, Wait(FEW, 22)),
        (view(BROKEN, {"a": node(3)}, "ab", few_since=7), 22, Conclude((), f"{FEW}, and no lost one has come back in 15 s")),
        (view(JUDGED, {"a": node(3)}, "ab", few_since=7), 22, Conclude((), f"{FEW}, and no lost one has come back in 15 s")),
        (view(BROKEN, {"a": node(3), "c": node()}, "ab", few_since=7), 22, Seal(("a", "c"), "2 nodes joined")),  # a spare
        (view(BROKEN, {"a": node(2)}, "ab", few_since=7), 22, A_STOPS),
        (view(BROKEN, {"a": node(3)}, "ab", few_since=7, returning_until=30), 22, Wait(BACK, 30)),
        (view(BROKEN, {"c": node()}, "ab", few_since=7), 99, Wait(FEW)),  # of another launch, which begins
        (view(Header(), {"a": node()}, few_since=7), 99, Wait(FEW)),
    ],
)
def test_too_few_await_lost_ones_for_a_time(seen, now, action):
    assert next_action(seen, dataclasses.replace(LIMITS, rejoin_s=15), now) == action
    if isinstance(action, Conclude):
        assert next_action(seen, LIMITS, now) == Wait(FEW)


HELD_UP = board.Ruling("it may be old", until=9.0)
DIFFERS = board.Ruling("they differ", EndKind.DIFFERS)


@pytest.mark.parametrize(
    ("rulings", "action"),
    [
        ((DIFFERS,), End(State.BROKEN, "they differ", EndKind.DIFFERS)),
        ((board.Ruling("a warning"),), Wait("running")),
        ((board.Ruling("a warning"), HELD_UP, DIFFERS), Wait("it may be old", 9.0)),
    ],
)
def test_the_boards_first_ruling_counts(rulings, action):
    """Also if all nodes but one are done: what differs counts."""
    nodes = {"a": node(), "b": node(done=3)}
    assert next_action(view(RUNNING, nodes, "ab", rulings=rulings), LIMITS, 0) == action


SAVE = topics.SAVE.for_all(topics.SaveOrder(1))
ORDERED = dataclasses.replace(RUNNING, agreed=Agreed(1, (SAVE,)))
ASKED = board.Ruling("save 1 was asked for", agreed=SAVE)


@pytest.mark.parametrize(
    ("header", "rulings", "more", "action"),
    [
        (RUNNING, (ASKED,), {}, Amend(ORDERED, "save 1 was asked for")),
        (RUNNING, (HELD_UP, ASKED), {"returning_until": 9.0}, Amend(ORDERED, "save 1 was asked for")),
        (ORDERED, (ASKED,), {}, Wait("running")),
        (RUNNING, (ASKED, DIFFERS), {}, End(State.BROKEN, "they differ", EndKind.DIFFERS)),
    ],
)
def test_what_rules_find_for_all_reaches_all(header, rulings, more, action):
    """Also while the leader waits for something else, once, and not with the end of the round."""
    assert next_action(view(header, {"a": node(), "b": node()}, "ab", rulings=rulings, **more), LIMITS, 0) == action


def test_rules_hear_of_those_that_are_there():
    seen = view(RUNNING, {"b": node(done=3), "a": node(done=2)}, "abc", finished_at=7.0)
    assert rounds.members(seen) == board.RoundMembers(("a", "b"), frozenset("b"), 7.0)


@pytest.mark.parametrize(
    ("silent", "first"), [({}, "abc"), ({"c": "a"}, "bac"), ({"c": "a", "a": "cb"}, "abc"), ({"b": "x"}, "abc")]
)
def test_an_unreachable_node_does_not_serve_the_store(silent, first):
    nodes = {id_: dataclasses.replace(node(3), address=id_, silent=tuple(silent.get(id_, ""))) for id_ in "abc"}
    assert rounds.order(view(BROKEN, nodes, "abc"), list("cab"), 3) == tuple(first)


@pytest.mark.parametrize(("moves", "ranks"), [("a", "bac"), ("b", "acb"), ("c", "acb"), ("x", "abc"), ("", "abc")])
def test_a_node_moves_to_show_what_failures_follow(moves, ranks):
    waits = {id_: node(3) for id_ in "abc"}
    action = next_action(view(JUDGED, waits, "abc", moves=moves), LIMITS, 0)
    assert action.order == tuple(ranks)
    assert (f"the ranks of node {moves} move" in action.reason) == (ranks != "abc")
    shorter = Limits(1, 1, last_call_s=0)
    assert next_action(view(JUDGED, waits, "abc", moves="a"), shorter, 0) == Seal(("a",), "3 nodes joined")


def test_a_round_begins_after_those_leaving_are_gone():
    """Nothing may have failed there: it waits for the next round until it sees the verdict."""
    waits = {"a": node(3), "b": node(3), "c": node(3)}
    assert next_action(view(JUDGED, waits, "abc", leaves="b"), LIMITS, 0) == Wait("waiting for node b to leave")
    del waits["b"]
    assert next_action(view(JUDGED, waits, "abc", leaves="b"), LIMITS, 0) == Seal(("a", "c"), "2 nodes joined")


def test_a_node_has_addresses_until_its_workers_finish():
    nodes = {"a": node(3), "b": dataclasses.replace(node(3), done=3)}
    assert rounds.addressed(view(JUDGED, nodes, "abc")) == {"a": Reach(("h",))}


ASKED = dataclasses.replace(RUNNING, drains=(Drain("a", "a", 1, "fan"),), drains_made=1)
FREED = dataclasses.replace(ASKED, drains=(Drain("a", "a", 1, "fan", released=True),), drains_made=2)
IS_OVER = {"state": State.BROKEN}
THREE = {**TWO, "c": node()}
READY = board.posted(board.Posts(), 3, topics.READY, topics.ReadyToLeave(1))
ABC = {"a": node(3), "b": node(3), "c": node(3)}
KEPT = dataclasses.replace(ASKED, drains=(Drain("a", "a", 1, "fan", held=True),), drains_made=2)
KEEP = Amend(KEPT, "node a cannot be spared now, and will have to save again before leaving")
ASK_AGAIN = Amend(
    dataclasses.replace(ASKED, drains=(Drain("a", "a", 3, "fan"),), drains_made=3),
    "a node that was to leave can be spared now: it saves again first",
)
LEAVE = Release(("a",), "node a may leave: fan")


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        (view(ASKED, THREE, "abc"), Wait("running")),
        (view(ASKED, {**THREE, "a": node(board=READY)}, "abc"), LEAVE),
        (view(ASKED, {**THREE, "a": node(board=READY, done=3)}, "abc"), Wait("running")),  # the job is about to end
        (view(ASKED, {"a": node(board=READY), "b": node()}, "ab"), KEEP),  # the others would be too few
        (view(KEPT, {"a": node(board=READY), "b": node()}, "ab"), Wait("running")),
        (view(KEPT, {**THREE, "a": node(board=READY)}, "ab"), ASK_AGAIN),
        (view(ASKED, {"b": node(), "c": node(), "a": node()}, "bc"), LEAVE),  # a spare: at once, and it does not join first
        (view(ASKED, {"b": node(), "c": node()}, "bc"), LEAVE),  # it is gone: the host is refused all the same
        (view(FREED, THREE, "abc"), End(State.BROKEN, "node a drained: fan")),
        (view(FREED, {"b": node(), "c": node(), "a": node()}, "bc"), Wait("running")),
        # Between two rounds nothing can be lost.
        (view(dataclasses.replace(ASKED, **IS_OVER), ABC, "abc"), LEAVE),
        (view(dataclasses.replace(ASKED, **IS_OVER), {**ABC, "b": node()}, "abc"), LEAVE),
        (view(dataclasses.replace(ASKED, **IS_OVER), {"a": node(3), "b": node(3)}, "ab"), Seal(("a", "b"), "2 nodes joined")),
        (view(dataclasses.replace(FREED, **IS_OVER), ABC, "abc"), Seal(("b", "c"), "2 nodes joined")),
        (view(dataclasses.replace(FREED, **IS_OVER), {**ABC, "a": node()}, "abc"), A_STOPS),
    ],
)
def test_next_action_for_nodes_that_are_to_leave(seen, action):
    assert next_action(seen, LIMITS, 0) == action


def test_a_drain_lasts_until_the_node_is_gone():
    over = dataclasses.replace(ASKED, state=State.BROKEN)
    header, _ = rounds.seal(view(over, {"a": node(3), "b": node(3)}, "ab"), Seal(("a", "b"), ""), LIMITS)
    assert (header.drains, header.drains_made) == (ASKED.drains, 1)
    header, _ = rounds.seal(view(over, {"b": node(3), "c": node(3)}, "b"), Seal(("b", "c"), ""), LIMITS)
    assert header.drains == ()
    assert decode(Header, encode(FREED), "k") == FREED


@pytest.mark.parametrize("waits", [node(after=7), node(round=7)])
def test_a_used_round_number_is_not_reused(waits):
    seen = view(Header(1, State.BROKEN), {"a": node(1), "b": waits}, "a")
    header, parts = rounds.seal(seen, Seal(("a", "b"), ""), LIMITS)
    assert header.round == 8
    assert {part.round for part in parts.values()} == {8}


JOB = Header(3, State.RUNNING, seal="s", job="j")


@pytest.mark.parametrize(
    ("found", "known", "brought_back"),
    [
        (None, JOB, True),
        (None, dataclasses.replace(JOB, state=State.BROKEN), True),
        (None, Header(), False),
        # The next job of this run id may have begun.
        (None, dataclasses.replace(JOB, state=State.DONE), False),
        (None, dataclasses.replace(JOB, state=State.CLOSED), False),
        (JOB, JOB, False),
        # A round that is over stays over, whoever brings back what.
        (JOB, dataclasses.replace(JOB, state=State.BROKEN), True),
        (JOB, dataclasses.replace(JOB, state=State.CLOSED), True),
        (dataclasses.replace(JOB, state=State.BROKEN), dataclasses.replace(JOB, state=State.BROKEN, verdict="v"), True),
        (JOB, dataclasses.replace(JOB, agreed=Agreed(1)), True),
        (JOB, dataclasses.replace(JOB, drains_made=1), True),
        (dataclasses.replace(JOB, drains_made=1), JOB, False),
        (JOB, dataclasses.replace(JOB, round=4, seal="t"), True),
        (dataclasses.replace(JOB, state=State.BROKEN), JOB, False),
        (dataclasses.replace(JOB, round=4, seal="t"), JOB, False),
        # Two rounds of one number, and another job: what is in the store counts.
        (dataclasses.replace(JOB, seal="t"), dataclasses.replace(JOB, state=State.BROKEN), False),
        (dataclasses.replace(JOB, round=1, job="k"), JOB, False),
    ],
)
def test_which_header_comes_back(found, known, brought_back):
    assert rounds.needs_restoring(found, known) is brought_back


def test_topology_orders_strangers():
    seen = view(Header(), {id_: node(host=NodeHost(rack)) for id_, rack in zip("abcd", ("r2", "r1", "r2", "r1"), strict=True)})
    assert next_action(seen, LIMITS, 0).order == ("b", "d", "a", "c")


def test_seal_numbers_mixed_workers_and_roles():
    seen = view(Header(1, State.BROKEN), {"a": node(1, 2, role="t"), "b": node(1, 1, role="r"), "c": node(1, 3, role="t")}, "abc")
    header, parts = rounds.seal(seen, next_action(seen, LIMITS, 0), LIMITS)
    sealed = header.round, header.state, header.nodes, header.world, header.address, header.port
    assert sealed == (2, State.RUNNING, 3, 6, "h", 1)
    assert parts == {
        "a": Assignment(2, 0, 0, 0, 5, neighbors=("b", "c")),
        "b": Assignment(2, 1, 2, 0, 1, neighbors=("c", "a")),
        "c": Assignment(2, 2, 3, 2, 5, neighbors=("a", "b")),
    }


ENDED = Header(4, State.BROKEN, 2, 3, "h", 9, "why", end=EndKind.STALLED)


@pytest.mark.parametrize("record", [node(), Header(4, State.BROKEN, 2, 3, "h", 9, "why"), ENDED, Assignment(1, 2, 3, 4, 5)])
def test_records(record):
    assert decode(type(record), encode(record), "k") == record


def test_a_header_without_an_end_field_is_valid():
    """As version 0.1 wrote them."""
    assert decode(Header, b'{"schema":3,"round":4,"state":"broken"}', "k") == Header(4, State.BROKEN)


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"[]", b"null", b"{}", b'{"schema":2}', b'{"schema":3}', b'{"schema":3,"round":1,"state":"odd"}', b"\xff"],
)
def test_an_invalid_record_is_refused_in_one_line(value):
    with pytest.raises(RecordError, match="the/key") as error:
        decode(Header, value, "the/key")
    assert "\n" not in str(error.value)
