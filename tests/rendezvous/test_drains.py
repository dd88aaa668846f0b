"""Who may drain which node, how a drain ends, and whether a spare replaces a host: decisions over plain values."""

import dataclasses

import pytest

from elastic_ext.agent.leaving import SaveResult
from elastic_ext.cli import requests
from elastic_ext.cli.requests import DrainAsked, Ending, drain_outcome
from elastic_ext.etcd.values import KeyValue
from elastic_ext.features.drains.watch import DrainFacts, DrainPlan, Step, plan_drain
from elastic_ext.rendezvous import board, drains, topics
from elastic_ext.rendezvous.drains import Answer, DrainRequest, admit
from elastic_ext.rendezvous.round_records import Drain, Header, Node, NodeHost, State
from elastic_ext.rendezvous.running_job import JobRecordsNow

NODES = ("n1-10-aaaaaa", "n1-11-bbbbbb", "n2-10-cccccc", "rack-3-n3-10-dddddd")
THERE = dict.fromkeys(NODES, Node(2, 1, "w", "h", 1))
HEADER = Header(3, State.RUNNING, 3)


def drained(*ids: str, **more: object) -> Header:
    found = tuple(Drain(id_, drains.host_of(id_), 1, "fan", **more) for id_ in ids)
    return dataclasses.replace(HEADER, drains=found, drains_made=1)


@pytest.mark.parametrize(
    ("name", "header", "refused", "min_nodes", "answer", "said"),
    [
        ("n2", HEADER, {}, 3, Answer.ADMITTED, "others: 3 nodes, and the job takes at least 3"),
        ("n2-10-cccccc", HEADER, {}, 3, Answer.ADMITTED, "others: 3 nodes"),
        ("n2", HEADER, {}, 4, Answer.TOO_FEW, "3 nodes would remain, and the job takes at least 4; nothing was changed"),
        ("n1", HEADER, {}, 3, Answer.TOO_FEW, "2 nodes would remain"),  # both of its agents leave
        ("n1-10-aaaaaa", HEADER, {}, 2, Answer.ADMITTED, "others: 2 nodes"),
        ("rack-3-n3", HEADER, {}, 1, Answer.ADMITTED, "others: 3 nodes"),
        ("n2", HEADER, {"n1": "bad"}, 2, Answer.TOO_FEW, "1 node would remain"),  # one that is refused does not count
        ("n2", drained("rack-3-n3-10-dddddd"), {}, 3, Answer.TOO_FEW, "2 nodes would remain"),
        ("n2", drained("n2-10-cccccc"), {}, 9, Answer.ASKED, "n2 was asked to leave before"),
        ("n4", drained("n4-10-aaaaaa"), {}, 9, Answer.ASKED, "n4 was asked to leave before"),  # it has just died
        ("n4", HEADER, {"n4": "drained: fan"}, 1, Answer.LEFT, "n4 has left the job before: drained: fan"),
        ("rack-4-n3", HEADER, {"rack": "drained: fan"}, 1, Answer.UNKNOWN, "no node rack-4-n3"),
        ("n4-7-aaaaaa", HEADER, {"n4": "drained: fan"}, 1, Answer.LEFT, "n4 has left"),
        ("n3", HEADER, {}, 1, Answer.UNKNOWN, "no node n3 in the job; its nodes: n1, n2, rack-3-n3"),
    ],
)
def test_who_may_be_drained(name, header, refused, min_nodes, answer, said):
    found = admit(DrainRequest(name, "fan", 60), header, THERE, refused, min_nodes)
    assert found.answer is answer
    assert said in found.reason
    assert (found.header == header) is (answer is not Answer.ADMITTED)


@pytest.mark.parametrize("name", ["n1", "n1-10-aaaaaa"])
def test_one_of_two_machines_of_one_name(name):
    """Both would leave, and neither could come back. Two agents of one machine are no such case; nor is one that does not say."""
    nodes = {
        id_: Node(2, 1, "w", f"10.0.0.{number}", 1, host=NodeHost(machine=f"boot{number}")) for number, id_ in enumerate(NODES)
    }
    found = admit(DrainRequest(name, "fan", 60), HEADER, nodes, {}, 1)
    assert (found.answer, found.header, found.nodes) == (Answer.AMBIGUOUS, HEADER, ())
    assert "several machines of the job are called n1 (10.0.0.0, 10.0.0.1)" in found.reason
    assert admit(DrainRequest("n2", "fan", 60), HEADER, nodes, {}, 1).answer is Answer.ADMITTED
    for machine in ("boot0", ""):
        nodes[NODES[1]] = dataclasses.replace(nodes[NODES[1]], host=NodeHost(machine=machine))
        assert admit(DrainRequest(name, "fan", 60), HEADER, nodes, {}, 1).answer is Answer.ADMITTED


def test_what_is_written():
    found = admit(DrainRequest("n1", "", 60), HEADER, THERE, {}, 1).header
    assert [(each.node, each.host, each.number, each.reason) for each in found.drains] == [
        ("n1-10-aaaaaa", "n1", 1, drains.NO_REASON),
        ("n1-11-bbbbbb", "n1", 1, drains.NO_REASON),
    ]
    assert found.drains_made == 1
    hastened = admit(DrainRequest("n1", "again", 60, now=True), found, THERE, {}, 1).header
    assert [(each.number, each.reason, each.now) for each in hastened.drains] == [(1, drains.NO_REASON, True)] * 2
    assert drains.withdrawn(hastened, "n1") == dataclasses.replace(HEADER, drains_made=3)
    released = drains.release(hastened, ["n1-10-aaaaaa", "n1-11-bbbbbb"], {})
    assert drains.withdrawn(released, "n1") is released  # it has begun


def node(drained=0, step=-1):
    ready = topics.ReadyToLeave(drained, step) if drained else None
    return Node(2, 1, "w", "h", 1, board=board.posted(board.Posts(), HEADER.round, topics.READY, ready))


def test_as_many_are_released_as_can_be_spared():
    header = drained("n1-10-aaaaaa", "n1-11-bbbbbb", "n2-10-cccccc")
    nodes = dict.fromkeys(NODES, node(1, 40))
    assert drains.may_go(header, nodes, NODES, 1) == ("n1-10-aaaaaa", "n1-11-bbbbbb", "n2-10-cccccc")
    assert drains.may_go(header, nodes, NODES, 2) == ("n1-10-aaaaaa", "n1-11-bbbbbb")
    after = drains.release(header, ["n1-10-aaaaaa"], nodes)
    assert [(each.released, each.step) for each in after.drains] == [(True, 40), (False, -1), (False, -1)]
    assert drains.may_go(after, nodes, NODES, 2) == ("n1-11-bbbbbb",)
    # A checkpoint of an earlier drain, since withdrawn, does not count.
    assert drains.may_go(header, dict.fromkeys(NODES, node(7, 40)), NODES, 1) == ()
    assert drains.may_go(drained("n2-10-cccccc", now=True), dict.fromkeys(NODES, node()), NODES, 1) == ("n2-10-cccccc",)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (DrainFacts(), Step.WAIT),
        (DrainFacts(asks=True), Step.ASK),
        (DrainFacts(asks=True, reported=True), Step.ASK),  # that one may be older than the steps since
        (DrainFacts(asks=True, asked=True), Step.WAIT),
        (DrainFacts(asks=True, asked=True, reported=True), Step.WAIT),
        (DrainFacts(asks=True, asked=True, published=True), Step.GO),  # rank 0 alone reports it, on another node
        (DrainFacts(asks=True, asked=True, result=SaveResult.SAVED), Step.GO),
        (DrainFacts(asks=True, asked=True, result=SaveResult.FAILED), Step.WAIT),
        (DrainFacts(asks=True, asked=True, result=SaveResult.FAILED, reported=True), Step.GO),
        (DrainFacts(reported=True), Step.GO),
        (DrainFacts(published=True), Step.GO),
        # What is on its own disk goes with the node.
        (DrainFacts(local=True, reported=True), Step.WAIT),
        (DrainFacts(local=True, asks=True, asked=True, result=SaveResult.SAVED), Step.WAIT),
        (DrainFacts(local=True, asks=True, asked=True, result=SaveResult.SAVED, published=True), Step.GO),
    ],
)
def test_when_the_node_can_go(seen, expected):
    found = plan_drain(seen)
    assert isinstance(found, DrainPlan)
    assert found.step is expected


RAN = DrainAsked("n2", ("n2-10-cccccc",), 3, ran=True)
SPARE = dataclasses.replace(RAN, ran=False)
OTHERS = frozenset(NODES) - {"n2-10-cccccc"}
DRAIN = Drain("n2-10-cccccc", "n2", 1)
PENDING = dataclasses.replace(HEADER, drains=(DRAIN,))
NEXT = Header(4, State.RUNNING, 3)
DONE = (dataclasses.replace(DRAIN, released=True, step=40),)


@pytest.mark.parametrize(
    ("asked", "header", "nodes", "done", "ending", "said"),
    [
        (RAN, PENDING, frozenset(NODES), (), None, ""),
        (RAN, dataclasses.replace(PENDING, drains=DONE), frozenset(NODES), DONE, None, ""),
        (RAN, HEADER, frozenset(NODES), (), Ending.LATE, "the drain was withdrawn"),
        (RAN, dataclasses.replace(HEADER, state=State.BROKEN), OTHERS, DONE, None, ""),
        (RAN, HEADER, OTHERS, DONE, None, ""),  # the leader has not ended the round yet
        (RAN, NEXT, OTHERS, DONE, Ending.DRAINED, "n2 has left: saved step 40, round 4 runs with 3 nodes"),
        (RAN, NEXT, OTHERS, (), Ending.DRAINED, "n2 has left: round 4 runs with 3 nodes"),  # it was lost before
        (SPARE, HEADER, OTHERS, DONE, Ending.DRAINED, "round 3 runs with 3 nodes"),
        (RAN, Header(3, State.DONE, reason="finished"), OTHERS, (), Ending.DRAINED, "n2 is free; the job has ended"),
        (RAN, Header(3, State.CLOSED, reason="a bug"), OTHERS, (), Ending.NO_JOB, "the job has ended: a bug"),
        (RAN, None, OTHERS, (), None, ""),  # its nodes write a lost header again
        (RAN, None, frozenset(), (), Ending.NO_JOB, "the job is gone"),
    ],
)
def test_how_a_drain_has_ended(asked, header, nodes, done, ending, said):
    found = drain_outcome(asked, requests.Seen(header, nodes, done))
    assert (found.ending if found is not None else None) is ending
    assert said in (found.reason if found is not None else "")


def test_an_indispensable_node_saves_again_before_leaving():
    """Its spare is lost before the checkpoint, and another one comes much later: steps since would be repeated."""
    header, ready = drained(NODES[0]), {id_: node(1, 40) for id_ in NODES[:3]}
    assert drains.may_go(header, ready, NODES[:3], 3) == ()
    kept = drains.held(header, ready, NODES[:3], 3)
    assert ([each.held for each in kept.drains], kept.drains_made) == ([True], 2)
    assert drains.held(kept, ready, NODES[:3], 3) is kept
    spared = {**ready, NODES[3]: node()}
    assert drains.may_go(kept, spared, NODES[:3], 3) == ()
    again = drains.held(kept, spared, NODES[:3], 3)
    assert [(each.held, each.number) for each in again.drains] == [(False, 3)]
    assert drains.may_go(again, spared, NODES[:3], 3) == ()  # its checkpoint is of the drain before
    assert drains.may_go(again, {**spared, NODES[0]: node(3, 90)}, NODES[:3], 3) == (NODES[0],)
    assert drains.may_go(kept, spared, (), 3) == (NODES[0],)  # between two rounds nothing is lost


def test_a_node_that_can_go_is_not_held():
    header = drained(NODES[0], NODES[1])
    assert drains.held(header, dict.fromkeys(NODES, node()), NODES, 4) is header
    nodes = dict.fromkeys(NODES, node(1, 40))
    after = drains.held(drained(NODES[0], NODES[1], held=True), nodes, NODES, 3)
    assert [each.held for each in after.drains] == [False, True]  # one can be spared, not both
    assert drains.held(after, nodes, NODES, 3) is after, "the second would save for nothing: its place was promised to the first"


def test_machines_of_one_name_differ_by_boot():
    def node(machine: str, address: str = "10.0.0.1") -> Node:
        return Node(0, 1, "trainer", address, 1, host=NodeHost(machine=machine))

    nodes = {"a-1-aaaaaa": node("x"), "a-2-bbbbbb": node("x"), "b-1-cccccc": node("y")}
    assert drains.ambiguous_hosts(nodes) == frozenset()
    assert drains.ambiguous_hosts({**nodes, "b-1-dddddd": node("z", "10.0.0.2")}) == {"b"}
    assert drains.ambiguous_hosts({**nodes, "b-1-dddddd": node("z")}) == frozenset(), "booted again"
    assert drains.ambiguous_hosts({**nodes, "b-1-dddddd": node("", "10.0.0.2")}) == frozenset(), "unknown"


# Whether a spare replaces a host.

MEMBERS = ("n1-10-aaaaaa", "n2-10-bbbbbb", "n3-10-cccccc")
SPARES = ("n4-10-dddddd", "n5-10-eeeeee")
BECAUSE = "stragglers=replace: rank 3 on "


def keeps(spares: int, leaving: tuple[str, ...] = (), refused: dict[str, str] | None = None) -> str:
    """What there is to say against replacing n2."""
    nodes = dict.fromkeys((*MEMBERS, *SPARES[:spares]), Node(2, 1, "w", "h", 1))
    seen = KeyValue(b"header", b"", 1, 1, 1, 0)
    return JobRecordsNow(drained(*leaving), seen, nodes, refused or {}, 1, frozenset(MEMBERS)).keeps("n2", BECAUSE)


@pytest.mark.parametrize(
    ("spares", "leaving", "expected"),
    [
        (0, (), "no spare waits; nothing was changed"),
        (1, (), ""),
        (1, ("n1-10-aaaaaa",), "no spare waits but for 1 node that is to leave before; nothing was changed"),
        (2, ("n1-10-aaaaaa",), ""),
        (1, ("n2-10-bbbbbb",), ""),  # itself, which was asked before
        (1, ("n9-10-ffffff",), ""),  # it has gone
        (1, ("n4-10-dddddd",), "no spare waits; nothing was changed"),
    ],
)
def test_each_leaving_node_needs_its_own_spare(spares, leaving, expected):
    assert keeps(spares, leaving) == expected


@pytest.mark.parametrize(
    ("why", "kept"),
    [
        (f"drained: {BECAUSE}n7 is late by 9 ms of a step of 60 ms: 15%", True),
        ("drained: stragglers=replace: rank 4 on n7 is late by 9 ms of a step of 60 ms: 15%", False),
        ("drained: fan", False),
    ],
)
def test_a_wandering_late_rank_costs_one_host(why, kept):
    """Rank 0 that writes the log, say: the job would restart every few minutes, until no host is left."""
    assert keeps(1, refused={"n7": why}) == ("n7 has left for the same before; nothing was changed" if kept else "")
    assert keeps(1, refused={"n2": why}) == ""
