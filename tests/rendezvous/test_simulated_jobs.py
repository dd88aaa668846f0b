"""Jobs in virtual time (tests/simulation.py): one test for each thing that goes wrong, then all of them at random.

ELASTIC_EXT_TEST_JOBS says how many random jobs there are, ELASTIC_EXT_TEST_SEED with which seed they begin.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ext.agent.leaving import ask_for_save, save_wanted
from elastic_ext.agent.verdicts import Verdicts, for_others
from elastic_ext.base.diagnosis import Response
from elastic_ext.base.errors import StorageAway
from elastic_ext.base.settings import Settings
from elastic_ext.cli import requests
from elastic_ext.cli.requests import DrainOutcome, Ending, with_save
from elastic_ext.etcd import Delete, Put, Unavailable
from elastic_ext.failures.ledger import (
    JobStopped,
    JobVerdict,
    Ledger,
    decode_ledger,
    decode_verdict,
    encode_ledger,
    encode_verdict,
)
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.rendezvous import board, drains, leader, topics
from elastic_ext.rendezvous.contract import JobDone, NodeIdentity
from elastic_ext.rendezvous.drains import DrainRequest
from elastic_ext.rendezvous.header_record import closed
from elastic_ext.rendezvous.job_records import LateJoins
from elastic_ext.rendezvous.judging import AgentPolicy, Judgement, RoundReports
from elastic_ext.rendezvous.round_records import Assignment, EndKind, Header, NodeHost, State, decode, encode
from elastic_ext.rendezvous.round_records import Node as Record
from elastic_ext.rendezvous.rounds import JOIN_WINDOW_S, Limits
from elastic_ext.rendezvous.tasks import HostRefused
from tests.participants import place_of
from tests.rendezvous.random_jobs import REPORT, STEP, Agent, Job, Restarts, Stage
from tests.simulation import KEYS, Client, Node, Operator, World, stored

TTL_S = 10
JOBS = int(os.environ.get("ELASTIC_EXT_TEST_JOBS", 200))
SEED = int(os.environ.get("ELASTIC_EXT_TEST_SEED", 0))
PARTS = 4
GARBLED = ["", "{}", '{"schema": 3}', '{"schema": 4}']


def no_answer() -> None:
    raise Unavailable("no endpoint answers")


SAVED = topics.SaveDone(1, 5)
ONLY_SAVED = board.posted(board.Posts(), 1, topics.SAVED, SAVED)


def has_saved(node: Record) -> bool:
    return topics.SAVED.of(node.board, node.board.round) == SAVED


class Few:
    """Nodes of one job, which came in the order of their names, so that the first leads.

    joined: they are in round 1. Else limits that wait for one more leave time to prepare something.
    """

    def __init__(
        self,
        names: str = "abc",
        limits: Limits | None = None,
        joined: bool = True,
        policy: AgentPolicy | None = None,
        seed: int = SEED,
    ) -> None:
        self.world = World(seed)
        self.client = Client(self.world)
        self.limits = limits or Limits(len(names), len(names), 0.0)
        self.policy = policy or Restarts()
        self.nodes = {name: self.add(name) for name in names}
        if joined:
            self.until_round(1)

    def add(self, name: str, **more: Any) -> Node:
        """Let a node enter. more: of its NodeConfig."""
        node = Node(self.world, name, self.limits, TTL_S, self.policy, **more)
        node.ready(0)
        self.world.until(lambda: node.participant.registration.created)
        return node

    def until_round(self, number: int, names: Iterable[str] = "") -> None:
        """Run until these nodes are in that round, or all are."""
        self.world.until(lambda: all(self.nodes[name].round == number for name in names or self.nodes))

    def next_round(self, number: int, names: Iterable[str] = "") -> None:
        """Let these nodes, or all, stop their workers and go on to that round."""
        for name in names or self.nodes:
            self.nodes[name].ready(number - 1)
        self.until_round(number, names)

    def until_stored(self, holds: Callable[[Header], object]) -> Header:
        """Run until the store holds a header of which this is true."""
        return self.world.until(lambda: header if (header := stored(self.world)) is not None and holds(header) else None)

    def until_broken(self, number: int = 1) -> Header:
        return self.until_stored(lambda header: (header.round, header.state) == (number, State.BROKEN))

    def break_round(self, name: str) -> Header:
        """Let this node end round 1."""
        self.nodes[name].participant.end_round(1, State.BROKEN, f"{name} ends it")
        return self.until_broken()

    def says(self, name: str) -> Record | None:
        """Return what a node has written of itself."""
        kv = self.client.get(KEYS.node(name)).kv
        return decode(Record, kv.value, name) if kv is not None else None

    def until_says(self, name: str, holds: Callable[[Record], object]) -> Record:
        return self.world.until(lambda: says if (says := self.says(name)) is not None and holds(says) else None)

    def leader(self) -> str:
        """Return the node that leads. For a moment after an outage, one that led before takes itself for the leader as well."""

        def leading() -> list[str]:
            nodes = [node for node in self.nodes.values() if node.lives and node.participant.election.leader is not None]
            return [node.name for node in nodes]

        self.world.until(lambda: len(leading()) == 1, TTL_S)
        return leading()[0]

    def ledger(self) -> Ledger:
        kv = self.client.get(KEYS.ledger).kv
        return decode_ledger(kv.value.decode()) if kv is not None else Ledger()

    def written(self) -> list[Header]:
        """Return all headers that were written."""
        events = [event for event in self.world.history if event.kv.key == KEYS.header.encode() and event.kind == "put"]
        return [decode(Header, event.kv.value, "round") for event in events]

    def headers(self) -> list[tuple[int, State]]:
        return [(header.round, header.state) for header in self.written()]


# What a node says of itself.


def test_a_write_that_fails_is_tried_again():
    """It has a part in a round that was over before it could take it: the others wait for it to say that it has not."""
    few = Few("a", Limits(2, 2, 0.0), joined=False)
    few.nodes["a"].client.before("/nodes/a", no_answer)
    few.client.put(KEYS.assignment("a"), encode(Assignment(1, 0, 0, 0, 1, "s")))
    few.client.put(KEYS.header, encode(Header(1, State.BROKEN, 1, 1, "h", 9, "over", "s", job="s")))
    few.until_says("a", lambda node: node.after == 1)


def test_what_was_said_last_stays_said():
    few = Few("a")
    node = few.nodes["a"]
    node.client.before("/nodes/a", no_answer)
    node.part.post(topics.STALLED, topics.Stalled())
    few.world.run(0.1)
    node.part.post(topics.STALLED, None)
    few.world.run(1.0)
    node.part.post(topics.SAVED, SAVED)
    assert few.until_says("a", has_saved).board == ONLY_SAVED


def test_what_is_said_again_is_not_written():
    """Agents repeat their claims at each check."""
    few = Few("a")
    node = few.nodes["a"]
    node.part.post(topics.STALLED, topics.Stalled())
    few.until_says("a", lambda said: topics.STALLED.of(said.board, 1) is not None)
    before = few.client.get(KEYS.node("a")).kv
    for _ in range(5):
        node.part.post(topics.STALLED, topics.Stalled())
    node.part.post(topics.SAVED, SAVED)
    few.until_says("a", has_saved)
    assert few.client.get(KEYS.node("a")).kv.version == before.version + 1


def test_a_claim_is_sent_once(monkeypatch):
    """In one small message: a path may lose large ones."""
    few, sent = Few("a"), list[Put]()
    node = few.nodes["a"]
    txn = node.client.txn

    def count(compares, on_success=(), on_failure=(), **more):
        sent.extend(op for op in (*on_success, *on_failure) if isinstance(op, Put))
        return txn(compares, on_success, on_failure, **more)

    monkeypatch.setattr(node.client, "txn", count)
    node.part.post(topics.SAVED, SAVED)
    few.until_says("a", has_saved)
    assert [put.key for put in sent] == [KEYS.node("a")]


def test_what_is_done_counts_for_its_round():
    few = Few("a")
    node = few.nodes["a"]
    node.client.before("/nodes/a", no_answer)
    node.part.done()
    few.world.run(0.1)
    node.participant.end_round(1, State.BROKEN, "over")
    node.join(1)
    few.world.run(1.0)
    node.part.post(topics.SAVED, SAVED)
    assert few.until_says("a", has_saved).done < 2
    assert node.participant.header.state is State.RUNNING


def test_a_finished_node_says_so_while_waiting():
    """Others miss its workers then, and it is not to blame."""
    few = Few("ab")
    few.nodes["a"].part.done()
    few.until_says("a", lambda said: said.done == 1)
    few.break_round("b")
    few.nodes["a"].ready(1)
    assert few.until_says("a", lambda said: said.after == 1).done == 1


# Elections.


@pytest.mark.parametrize(
    ("name", "go", "leads"),
    [("a", lambda node: node.cut(3 * TTL_S), "b"), ("b", lambda node: node.freeze(2 * TTL_S), "a")],
    ids=["the-leader-is-cut-off", "another-stands-still"],
)
def test_a_node_away_too_long_returns_last(name, go, leads):
    few = Few("abc", Limits(2, 3, 5.0))
    go(few.nodes[name])
    assert few.until_broken().lost == name
    few.next_round(2, "abc".replace(name, ""))
    assert stored(few.world).nodes == 2
    few.until_broken(2)  # it is back, and waits
    few.next_round(3)
    assert few.leader() == leads
    assert [number for number, state in few.headers() if state is State.RUNNING] == [1, 2, 3]


def test_a_predecessor_that_registers_again_comes_last():
    few = Few("abc", Limits(1, 3, 5.0))
    few.world.run(5.0)
    few.client.delete(KEYS.node("b"))
    few.world.run(5.0)
    few.next_round(2)
    few.nodes["a"].kill()
    few.until_broken(2)
    assert few.leader() == "c"


@pytest.mark.parametrize("content", [None, "{}"], ids=["deleted", "overwritten"])
def test_a_dead_nodes_record_goes_before_the_next(content):
    """Its lease is not over: `last` still names it to the new node, and nothing more happens to its record."""
    few = Few("a", Limits(1, 1, 0.0))
    few.nodes["a"].kill()
    few.client.delete(KEYS.node("a")) if content is None else few.client.put(KEYS.node("a"), content)
    few.nodes["b"] = few.add("b")
    few.world.run(3 * TTL_S)
    assert few.leader() == "b"


def test_a_node_with_the_older_key_leads():
    """Somebody had written it before, so that the node comes first, though the other one leads already."""
    few = Few("", Limits(2, 2, 0.0), joined=False)
    few.client.put(KEYS.node("b"), "{}")
    few.nodes = {name: few.add(name) for name in "ab"}
    few.until_round(1)
    few.world.run(5.0)
    assert few.leader() == "b"


def test_the_store_returns_after_a_missed_key():
    """The key is back as it was, so the node does not write it again, and nothing else has it look again."""
    few = Few("ab", Limits(1, 2, 5.0))
    few.world.run(5.0)
    store = few.world.store
    few.nodes["b"].client.after("get the last of", lambda: few.world.set_up_store(store=store))
    few.world.set_up_store()
    few.world.until(lambda: few.world.store is store)
    few.world.run(TTL_S)
    few.nodes["a"].kill()
    few.world.run(3 * TTL_S)
    assert few.leader() == "b"


def test_a_node_registered_again_does_not_lead_yet():
    """Others may have registered before. All stood still, say: then each of them has led for a moment."""
    few = Few("a")
    node = few.nodes["a"]
    written: list[bool] = []

    def register_again() -> None:
        leader = node.participant.election.leader
        few.client.delete(KEYS.node("a"))
        node.participant.repair.write_own_key()
        written.append(leader.write_header(dataclasses.replace(node.participant.header, state=State.CLOSED)))

    node.lane.run(register_again)
    few.world.until(lambda: written)
    assert written == [False]
    node.participant.end_round(1, State.BROKEN, "it leads again")
    node.join(1)


@pytest.mark.parametrize(
    ("before", "vain"), [("/assign/", 0), (f"transaction on {KEYS.header}", 1)], ids=["assignments", "header"]
)
def test_a_leader_wakes_before_the_next_round(before, vain):
    """It stood still for longer than its lease. What it writes counts for no round, and what was written meanwhile stays.

    vain: seals of assignments that belong to no round.
    """
    few = Few("abc", Limits(2, 4, 5.0), joined=False)
    few.nodes["a"].client.before(before, lambda: few.nodes["a"].freeze(2 * TTL_S))
    few.until_round(1, "bc")
    assert stored(few.world).nodes == 2
    few.until_broken()  # a is there again, and waits
    assert few.nodes["a"].round == 0
    few.next_round(2)
    assert few.leader() == "b"
    assert few.headers()[0] == (1, State.RUNNING)
    written = [event.kv for event in few.world.history if event.kv.key.startswith(KEYS.assignments.encode())]
    seals = {decode(Assignment, kv.value, "assign").seal for kv in written if kv.value}
    sealed = {header.seal for header in few.written() if header.state is State.RUNNING}
    assert (len(seals - sealed), sealed - seals) == (vain, set())


@pytest.mark.parametrize("names", ["abc", "abcd"], ids=["members", "a-new-one-too"])
def test_a_leader_is_lost_between_assignments_and_header(names):
    """The next one waits for its lease, and not also for assignments that were replaced. Ranks stay."""
    few = Few("abc", Limits(2, 4, 5.0))
    for name in names[3:]:
        few.nodes[name] = few.add(name)
    few.break_round("b")
    lost: list[float] = []

    def lose() -> None:
        lost.append(few.world.now)
        few.nodes["a"].kill()

    few.nodes["a"].client.before("/job/round", lose)
    for name in "abc":
        few.nodes[name].ready(1)
    few.until_round(2, names[1:])
    assert few.world.now < lost[0] + TTL_S + 5.0
    assert stored(few.world).nodes == len(names) - 1
    seats = [decode(Assignment, few.client.get(KEYS.assignment(name)).kv.value, name).rank for name in names[1:]]
    assert seats == list(range(len(names) - 1))
    assert few.client.get(KEYS.assignment("a")).kv is None


def test_ranks_move_once_although_a_leader_dies():
    """In the assignments that it has written they have moved."""
    few = Few("abcd", Limits(2, 4, 5.0), policy=Decides("c", moves_ranks=True))
    fail(few, "c")
    few.until_stored(lambda header: header.verdict)
    few.nodes["a"].client.before("/job/round", few.nodes["a"].kill)
    few.nodes["a"].ready(1)
    few.next_round(2, "bcd")
    seats = [decode(Assignment, few.client.get(KEYS.assignment(name)).kv.value, name).rank for name in "bdc"]
    assert seats == [0, 1, 2]


# Verdicts.


def fail(few: Few, name: str, number: int = 1) -> None:
    """Let the workers of this node fail."""
    few.nodes[name].participant.end_round(number, State.BROKEN, f"{name} failed")
    few.nodes[name].part.report(REPORT)


class Decides(Restarts):
    """Its verdicts name this node. decision: what its decisions have in place of those of Restarts."""

    def __init__(self, node: str, **decision: Any) -> None:
        super().__init__()
        self._node, self._decision = node, decision

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        judged = super().judge(reports, ledger)
        verdict = decode_verdict(judged.verdict)
        verdict = dataclasses.replace(verdict, node=self._node, decision=dataclasses.replace(verdict.decision, **self._decision))
        return dataclasses.replace(judged, verdict=encode_verdict(verdict))


MEANWHILE: dict[str, tuple[Callable[[Few], object], int, bool]] = {  # what happens, what is charged, whether it is judged again
    "it stands still": (lambda few: few.nodes["a"].freeze(2 * TTL_S), 1, True),
    "its answer is lost": (lambda few: setattr(few.nodes["a"].client, "lose_answers", 1), 1, False),
    "the ledger changes": (lambda few: few.client.put(KEYS.ledger, encode_ledger(Ledger(charged=5))), 6, True),
    "it leads no more": (lambda few: few.client.delete(KEYS.node("a")), 1, True),
    "it is lost": (lambda few: few.nodes["a"].kill(), 1, True),
}


@pytest.mark.parametrize(("happens", "charged", "again"), MEANWHILE.values(), ids=MEANWHILE)
def test_a_failure_is_charged_once_despite_lost_leaders(happens, charged, again):
    """When it has read the ledger and judged, just before it writes the verdict."""
    few = Few("abc", Limits(2, 3, 5.0))
    client = few.nodes["a"].client
    client.before("get /elastic_ext/job/ledger", lambda: client.before("/job/round", lambda: happens(few)))
    fail(few, "c")
    verdict = few.until_stored(lambda header: header.verdict).verdict
    few.world.run(3 * TTL_S)
    assert few.until_stored(lambda header: True).verdict == verdict
    assert (few.ledger().charged, len(few.ledger().verdicts), len(few.policy.judged) > 1) == (charged, 1, again)
    few.next_round(2, [name for name, node in few.nodes.items() if node.lives])


def test_a_node_late_for_its_round_leaves():
    """The others miss it, and wait until it is gone."""
    leaves = Decides("c", response=Response.REPLACE_NODE, action=Action.STOP, exit_code=69)
    few = Few("abc", Limits(2, 3, 5.0), policy=leaves)
    few.break_round("b")
    few.nodes["c"].ready(1)
    few.until_says("c", lambda node: node.after == 1)
    few.nodes["c"].cut(5.0)
    few.next_round(2, "ab")
    fail(few, "b", 2)
    few.until_stored(lambda header: header.verdict)
    few.until_says("c", lambda node: node.after == 2)
    for name in "ab":
        few.nodes[name].ready(2)
    few.world.run(2 * TTL_S)
    assert few.until_stored(lambda header: True).state is State.BROKEN
    with pytest.raises(JobStopped):
        place_of(few.nodes["c"].participant).await_round(1, lambda verdict: None)
    few.nodes["c"].leave()
    few.until_round(3, "ab")


def test_launches_of_one_round_are_charged_each():
    """A scheduler starts the job again after each failure, and each launch begins with round 1."""
    few = Few("a")
    for launch in range(3):
        fail(few, "a")
        few.until_stored(lambda header: header.verdict)
        assert few.policy.judged[-1].charges == launch
        few.nodes["a"].participant.change_header(1, lambda header: closed(header, "a", None), in_any_round=True)
        few.until_stored(lambda header: header.state is State.CLOSED)
        few.nodes["a"].leave()
        few.world.run(1.0)
        few.nodes["a"] = few.add("a")
        few.until_round(1)
    assert few.client.get_prefix(KEYS.charges).count == 3


def test_the_budget_outlives_records_and_jobs_a_ledger():
    few = Few("abc")
    records = (KEYS.header, KEYS.job, KEYS.last_node, KEYS.assignments)
    for number, lost, charged in ((1, records, 1), (2, [KEYS.ledger], 2), (3, [], 1)):
        fail(few, "b", number)
        few.until_stored(lambda header, number=number: header.round == number and header.verdict)
        assert few.ledger().charged == charged
        few.next_round(number + 1)
        few.client.txn([], [Delete(key, prefix=True) for key in lost])
        few.world.until(lambda: is_whole(few))


# Too few are left.


class FewLeft(Few):
    """Two nodes, both needed; lost ones are waited for 15 s. The agent of the leader judges."""

    def __init__(self) -> None:
        super().__init__("ab", Limits(2, 2, 0.0, rejoin_s=15.0), policy=AgentPolicy(Settings(), lambda: None))

    def lose(self, name: str) -> str:
        """Return the name of the other node, which waits for the next round by now."""
        self.nodes[name].kill()
        self.until_broken()
        (left,) = {*self.nodes} - {name}
        self.nodes[left].ready(1)
        self.until_says(left, lambda node: node.after == 1)
        return left


@pytest.mark.parametrize("lost", ["b", "a"], ids=["another", "the-leader"])
def test_a_job_of_too_few_is_requeued(lost):
    few = FewLeft()
    few.lose(lost)
    began = few.world.now
    header = few.until_stored(lambda header: header.state is State.CLOSED)
    assert 13.0 < few.world.now - began < 17.0
    decision = decode_verdict(header.verdict).decision
    assert (decision.response, decision.exit_code) == (Response.REQUEUE, 75)
    assert decision.reason.startswith(f"node {lost} was lost; 1 of at least 2 nodes are left")


# Records that are lost, or written over.


@pytest.mark.parametrize("blank", ["", " "])
def test_a_job_begins_over_a_record_without_lease(blank):
    few = Few("", Limits(1, 1, 0.0), joined=False)
    few.client.put(KEYS.job, '{"schema": 2, "min_nodes": 1, "max_nodes": 1' + blank + "}")
    few.nodes["a"] = few.add("a")
    few.until_round(1)
    assert few.client.get(KEYS.job).kv.lease_id == few.client.get(KEYS.header).kv.lease_id != 0


def test_a_round_ends_while_its_header_is_gone():
    few = Few("a")
    few.client.delete(KEYS.header)
    few.nodes["a"].participant.end_round(1, State.BROKEN, "its end")
    assert few.until_broken().reason == "its end"


def test_a_round_that_is_over_stays_over():
    """A node that had missed the news has written again what it knew."""
    few = Few("a")
    node = few.nodes["a"].participant
    first = node.header
    node.end_round(1, State.BROKEN, "over")
    few.until_broken()
    few.next_round(2)
    second = node.header
    few.client.put(KEYS.header, encode(first))
    assert few.until_stored(lambda header: header != first) == second
    assert node.header == second


def test_a_late_request_revives_no_round():
    """The round ends just before the request is written."""
    few = Few("ab")
    node = few.nodes["b"]
    over = dataclasses.replace(node.participant.header, state=State.BROKEN)
    few.nodes["a"].client.before("/job/round", lambda: few.client.put(KEYS.header, encode(over)))
    ask_for_save(node.part)
    few.world.run(TTL_S)
    assert stored(few.world) == over
    assert few.headers() == [(1, State.RUNNING), (1, State.BROKEN)]


def test_a_save_is_asked_of_all_nodes():
    """Once for all that ask at the same time, by post or by command; again for who asks once it is known."""
    few = Few("abc")
    for name in "bc":
        ask_for_save(few.nodes[name].part)
    few.client.put(KEYS.header, encode(with_save(few.nodes["a"].participant.header)))
    few.world.run(1)
    assert [save_wanted(few.nodes[name].part) for name in "abc"] == [1, 1, 1]
    ask_for_save(few.nodes["b"].part)
    few.world.run(1)
    assert [save_wanted(few.nodes[name].part) for name in "abc"] == [2, 2, 2]
    assert stored(few.world).agreed.made == 2
    few.break_round("c")
    few.next_round(2)
    assert [save_wanted(few.nodes[name].part) for name in "abc"] == [0, 0, 0], "what was asked in a round that is over"


def test_an_assignment_is_restored_although_the_header_changes():
    few = Few("ab")
    node = few.nodes["b"]
    save = with_save(node.participant.header)
    node.client.before("/assign/b", lambda: few.client.put(KEYS.header, encode(save)))
    few.client.delete(KEYS.assignment("b"))
    few.world.until(lambda: is_whole(few))
    assert stored(few.world) == save


def test_the_jobs_name_stays_and_others_differ():
    """Who may commit checkpoints is found by it (checkpoints/directory/generations.py)."""
    few = Few("a")
    node = few.nodes["a"]
    name = node.participant.header.job
    few.client.delete_prefix(KEYS.prefix)
    few.until_stored(lambda header: header.round == 1)
    node.participant.end_round(1, State.BROKEN, "over")
    node.join(1)
    assert node.participant.header.job == name != ""
    node.leave()
    few.world.run(1.0)
    few.client.delete_prefix(KEYS.prefix)
    few.nodes = {"b": few.add("b")}
    few.until_round(1)
    assert few.nodes["b"].participant.header.job not in ("", name)


OTHERS = '{"schema": 2, "min_nodes": 7, "max_nodes": 9}'
THEIRS = Header(3, State.RUNNING, 7, 7, "h", 9, "others", "s", job="another")


def test_another_job_has_taken_the_run_id():
    """It has begun its first round: before, its settings are no more than those of a node that came as records were lost."""
    few = Few("a")
    few.client.txn([], [Put(KEYS.job, OTHERS), Put(KEYS.header, encode(THEIRS))])
    few.world.until(lambda: few.nodes["a"].failure)
    assert "another job with other settings has taken this --rdzv-id" in str(few.nodes["a"].failure)


def is_whole(few: Few) -> bool:
    """All records are there, each node in the round has its own, and nobody has left it."""
    there = {kv.key.decode() for kv in few.client.get_prefix(KEYS.prefix).kvs}
    own = {key for name in few.nodes for key in (KEYS.node(name), KEYS.assignment(name))}
    return own | {KEYS.job, KEYS.header} <= there


def all_comes_back(few: Few, spoil: Callable[[], object], there: Callable[[], object] | None = None) -> None:
    """Do this; then all records are there again, and the round goes on."""
    before = stored(few.world)
    spoil()
    few.world.until(there or (lambda: is_whole(few)))
    few.world.run(2 * TTL_S)
    assert stored(few.world) == before


@pytest.mark.parametrize("key", [KEYS.header, KEYS.job, KEYS.assignment("a"), KEYS.assignment("c"), ""])
def test_a_deleted_record_comes_back(key):
    few = Few("abc")
    all_comes_back(few, lambda: few.client.delete_prefix(key or KEYS.prefix))


@pytest.mark.parametrize("content", GARBLED)
@pytest.mark.parametrize("key", [KEYS.header, KEYS.job, KEYS.assignment("c")])
def test_what_others_write_over_ends_no_round(key, content):
    few = Few("abc")
    few.client.put(key, content)
    few.world.run(2 * TTL_S)
    assert {(each.part.over(), each.participant.header.round) for each in few.nodes.values()} == {(None, 1)}
    few.nodes["b"].participant.end_round(1, State.BROKEN, "over")
    few.world.until(lambda: all(each.part.over() is not None for each in few.nodes.values()))
    few.next_round(2)


@pytest.mark.parametrize("content", GARBLED)
@pytest.mark.parametrize("name", ["a", "b"], ids=["the-leader", "another"])
def test_a_node_written_over_costs_a_restart(name, content):
    few = Few("abc")
    few.client.put(KEYS.node(name), content)
    few.world.run(2 * TTL_S)
    if stored(few.world).state is State.BROKEN:
        assert few.until_broken().lost == name
        few.next_round(2)
    assert is_whole(few)
    few.leader()


@pytest.mark.parametrize("name", ["a", "b"], ids=["the-leader", "another"])
def test_a_node_whose_key_is_deleted_returns(name):
    """To the leader this looks like the node's death. Its own key it may write again before the next node has looked."""
    few = Few("abc")
    few.client.delete(KEYS.node(name))
    few.world.run(2 * TTL_S)
    if name == "b" or stored(few.world).state is State.BROKEN:
        assert few.until_broken().lost == name
        few.next_round(2)
    assert is_whole(few)
    few.leader()


def test_the_answer_to_a_rewrite_is_lost():
    """The node leads, and compares with the key as the store has it now: else it could never end the round for another node."""
    few = Few("a", Limits(1, 2, 0.0))
    few.nodes["a"].client.before("/nodes/a", lambda: setattr(few.nodes["a"].client, "lose_answers", 1))
    few.client.delete(KEYS.node("a"))
    few.world.run(TTL_S)
    few.nodes["b"] = few.add("b")
    few.until_broken()


def test_a_node_that_was_in_later_rounds():
    """Nothing else knows of them any more."""
    few = Few("", Limits(1, 1, 0.0), joined=False)
    Node(few.world, "a", few.limits, TTL_S).join(5)
    assert few.headers() == [(6, State.RUNNING)]


def test_the_jobs_records_last_as_long_as_it():
    few = Few("ab")
    few.world.run(20 * TTL_S)
    assert [event.kv.key for event in few.world.history if event.kind == "delete"] == []


# The store.


@pytest.mark.parametrize("seconds", [2 * TTL_S, 4 * TTL_S], ids=["leases-of-nodes", "leases-of-all"])
def test_all_are_cut_off_and_nothing_ends(seconds):
    few = Few("abc")

    def cut_all() -> None:
        for node in few.nodes.values():
            node.cut(seconds)
        few.world.run(seconds - 1)
        assert few.client.get_prefix(KEYS.nodes).kvs == ()

    all_comes_back(few, cut_all)


@pytest.mark.parametrize("revision", [1, 1000], ids=["older", "newer"])
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_in_a_reset_store_one_node_leads(seed, revision, caplog):
    """Not each by its key of the store before, and not once more when a task is tried again that another has done."""
    caplog.set_level(logging.INFO, logger=leader.__name__)
    few = Few("abc", seed=seed)
    caplog.clear()
    all_comes_back(few, lambda: few.world.set_up_store(revision))
    led = [record.getMessage() for record in caplog.records if "leads the rendezvous" in record.getMessage()]
    assert led == [f"node {few.leader()} leads the rendezvous"]
    few.break_round("b")
    few.next_round(2)


def test_a_new_store_that_others_have_used():
    """Its revision is higher than all that the node has seen; that of the header, written by another node, is not."""
    few = Few("a")
    node = few.nodes["a"]
    node.process.frozen = True
    few.world.set_up_store()
    few.client.put(KEYS.header, encode(node.participant.header))
    for _ in range(node.participant.header_record.revision + 20):
        few.client.put("/others", "")
    node.process.thaw()
    node.participant.end_round(1, State.BROKEN, "over")
    assert few.until_broken().reason == "over"
    node.join(1)


# A node closes the job.


@pytest.mark.parametrize("error", [OSError("no such directory"), SystemExit(78), StorageAway("no answer")], ids=repr)
def test_all_leave_with_the_closing_nodes_code(error):
    few = Few("ab", Limits(2, 2, 0.0))
    few.nodes["c"] = few.add("c")  # a spare
    verdicts = Verdicts(Settings(), SimpleNamespace(part=SimpleNamespace(round=1), node=NodeIdentity("a", "a", "")))
    away = isinstance(error, StorageAway)
    verdict = for_others(verdicts.of_checkpoints(error) if away else verdicts.of_agent(error), "design")
    few.nodes["a"].participant.change_header(1, lambda header: closed(header, "a", verdict), in_any_round=True)
    few.world.until(lambda: all(node.participant.header.state is State.CLOSED for node in few.nodes.values()))
    assert few.nodes["b"].part.over().kind is EndKind.CLOSED
    for name, round_ in (("b", 1), ("c", 0)):
        with pytest.raises(JobStopped) as stopped:
            place_of(few.nodes[name].participant).await_round(round_, lambda verdict: None)
        code = 75 if away else 78 if isinstance(error, SystemExit) else 1
        assert (stopped.value.verdict.decision.exit_code, stopped.value.verdict.host) == (code, "a")
        assert stopped.value.verdict.keeps_ledger == away


@pytest.mark.parametrize(("failed", "kind"), [(False, EndKind.BROKEN), (True, EndKind.FAILED)])
def test_a_node_that_leaves_has_no_failed_workers(failed, kind):
    """Else a node whose link went down would report a failure, and there was none."""
    few = Few("ab")
    few.nodes["a"].part.break_off("a leaves", failed)
    few.until_broken()
    few.world.until(lambda: few.nodes["b"].part.over() is not None)
    assert few.nodes["b"].part.over().kind is kind


def test_a_job_that_is_done_cannot_be_closed():
    few = Few("ab")
    for node in few.nodes.values():
        node.part.done()
    few.until_stored(lambda header: header.state is State.DONE)
    few.nodes["a"].participant.change_header(1, lambda header: closed(header, "a", None), in_any_round=True)
    few.world.run(1.0)
    assert few.headers()[-1] == (1, State.DONE)


@pytest.mark.parametrize(
    ("ends", "kept"),
    [("done", 0), (Decision(Action.STOP, "code", "a bug", 65, response=Response.STOP), 0),
     (Decision(Action.STOP, "preemption", "again", 75, response=Response.REQUEUE), 2), ("killed", 2)],
    ids=["done", "code-bug", "requeue", "killed"],
)  # fmt: skip
def test_another_job_has_a_budget_of_its_own(ends, kept):
    """Whenever it begins under the same run id: the header of the one before has expired, its ledger has not."""
    few = Few("a", Limits(1, 1, 0.0))
    few.client.txn([], [Put(KEYS.ledger, encode_ledger(Ledger(charged=2)))])
    if ends == "done":
        few.nodes["a"].part.done()
        few.until_stored(lambda header: header.state is State.DONE)
    elif ends != "killed":
        few.client.txn([], [Put(KEYS.ledger, encode_ledger(Ledger(charged=2, verdicts=(JobVerdict(ends, 1, "a", "a"),))))])
    few.nodes.pop("a").kill()
    few.world.run(10 * TTL_S)
    assert stored(few.world) is None
    few.nodes["b"] = few.add("b")
    few.until_round(1)
    assert few.ledger() == Ledger(charged=2, verdicts=few.ledger().verdicts) if kept else few.ledger() == Ledger()


# Nodes that come late.


@pytest.mark.parametrize(
    ("own_store", "comes", "round_"), [(True, 0, 0), (True, 1, 0), (True, 2, 0), (False, 0, 0), (False, 1, 0), (False, 2, 1)]
)
def test_a_spare_reruns_no_finished_job(own_store, comes, round_):
    """comes: while it runs, while its node is about to leave, or after that: in a store of others, that begins the next job."""
    few = Few("a", Limits(1, 1, 0.0), joined=False)
    few.until_round(1, "a")
    spare = few.add("b", own_store=own_store) if comes == 0 else None
    few.nodes["a"].part.done()
    few.until_stored(lambda header: header.state is State.DONE)
    if comes == 2:
        few.nodes["a"].leave()
        few.world.run(1.0)
    spare = spare or few.add("b", own_store=own_store)
    few.nodes["a"].leave()
    few.world.run(2 * TTL_S)
    assert spare.round == round_
    if not round_:
        with pytest.raises(JobDone):
            place_of(spare.participant).await_round(0, lambda verdict: None)


def test_spares_write_nothing_when_a_round_ends():
    """With hundreds of them that would be as many writes just when the next round is to form."""
    few = Few("ab", Limits(2, 2, 0.0))
    for name in "cdef":
        few.add(name)
    for number in (1, 2, 3):
        fail(few, "b", number)
        few.until_stored(lambda header: header.verdict)
        few.next_round(number + 1)
    few.world.run(TTL_S)
    assert {few.client.get(KEYS.node(name)).kv.version for name in "cdef"} == {1}


AT_ONCE = SimpleNamespace(post=lambda task: task(), run=lambda task: task())  # runs each task at once


def test_a_node_counts_unless_it_was_there():
    client = Client(World())

    def count() -> list[bytes]:
        return [kv.key.rpartition(b"/")[2] for kv in client.get_prefix(KEYS.joins("n1")).kvs]

    from_the_start = LateJoins(client, KEYS, "n1", 60, 1)
    for round_ in (1, 2, 3):
        from_the_start.entered(round_, AT_ONCE)
    assert count() == []
    from_the_start.entered(5, AT_ONCE)
    assert count() == [b"5"]
    LateJoins(client, KEYS, "n2", 60, 1).entered(5, AT_ONCE)
    from_the_start.entered(6, AT_ONCE)
    assert count() == [b"5"]
    assert client.get(KEYS.refusal("n1")).kv is None
    LateJoins(client, KEYS, "n1", 60, 1).entered(7, AT_ONCE)
    assert client.get(KEYS.refusal("n1")).kv is not None
    with pytest.raises(HostRefused, match="joined the running job 3 times within 60 minutes"):
        LateJoins(client, KEYS, "n1", 60, 1).entered(9, AT_ONCE)
    (lease,) = {kv.lease_id for kv in client.get_prefix(KEYS.join("n1", 5)).kvs}
    assert JOIN_WINDOW_S - 60 < client.lease_left_s(lease) <= JOIN_WINDOW_S


def test_a_name_of_two_machines_is_not_refused():
    """At first one machine has it, then two; the limit is reached each time."""
    client, refused = Client(World()), []
    lease_id = client.lease_grant(600).lease_id
    for number in range(2):
        node = Record(1, 1, "", f"10.0.0.{number}", 1, host=NodeHost(machine=f"boot{number}"))
        client.txn([], [Put(KEYS.node(f"gpu-{number}-abcdef"), encode(node), lease_id=lease_id)])
        LateJoins(client, KEYS, "gpu", 60, 0).entered(7, AT_ONCE)
        refused.append(client.get(KEYS.refusal("gpu")).kv is not None)
        client.txn([], [Delete(KEYS.refusal("gpu"))])
    assert refused == [True, False]


# Drains.


class Drained:
    """Agents in round 1, the first of which leads; b is to leave."""

    def __init__(self, names: str = "abcd", limits: Limits | None = None, saves: bool = True) -> None:
        self.world = World(SEED)
        self.agents: list[Agent] = []
        self.limits = limits or Limits(2, 4, 60.0)
        for name in names:
            agent = self.add(name)
            agent.saves = saves
            self.world.until(lambda: self.agents[-1].participant.registration.created)
        self.world.until(lambda: all(each.stage is Stage.RUNNING for each in self.agents))

    def add(self, name: str) -> Agent:
        return Agent(self.world, f"{name}-1-abcdef", self.limits, self.agents)

    def drain(self, meanwhile: Callable[[], object]) -> DrainOutcome:
        """Ask for it, do something, and wait for the end."""
        request = DrainRequest(self.agents[1].name, "fan", 600)
        return requests.drain(Operator(self.world), "job", request, 60.0, lambda line: meanwhile())


def test_a_drained_node_leaves_after_its_checkpoint():
    job = Drained()
    outcome = job.drain(lambda: None)
    reason = f"b has left: saved step {STEP}, round 2 runs with 3 nodes"
    assert (outcome.ending, outcome.reason) == (Ending.DRAINED, reason)
    assert Client(job.world).get(KEYS.refusal("b")).kv.value == b"drained: fan"


def test_the_leader_is_lost_before_the_checkpoint():
    """The round is over then, so nothing has to be saved."""
    job = Drained(saves=False)
    outcome = job.drain(lambda: job.world.after(1.0, lambda: job.agents[0].agent.run(job.agents[0].go)))
    assert (outcome.ending, outcome.reason) == (Ending.DRAINED, "b has left: round 2 runs with 2 nodes")
    job.world.until(lambda: stored(job.world).drains == ())


def test_a_drain_outlives_an_outage():
    job = Drained()
    outcome = job.drain(lambda: [each.cut(15.0) for each in job.agents])
    assert outcome.ending is Ending.DRAINED
    assert stored(job.world).nodes == 3


def test_a_host_to_leave_gets_no_node():
    """Not even before the checkpoint that the node waits for."""
    job = Drained(saves=False)
    leaving = job.agents[1]

    def meanwhile() -> None:
        late = Agent(job.world, "b-2-abcdef", job.limits, job.agents)
        job.world.until(lambda: late.failure is not None)
        assert isinstance(late.failure, HostRefused)
        job.world.until(lambda: drains.of_node(leaving.participant.header, leaving.name))
        leaving.part.post(topics.READY, topics.ReadyToLeave(drains.of_node(leaving.participant.header, leaving.name).number, 40))

    outcome = job.drain(meanwhile)
    assert (outcome.ending, outcome.reason) == (Ending.DRAINED, "b has left: saved step 40, round 2 runs with 3 nodes")


def test_a_node_that_cannot_be_spared_saves_again():
    """The spare is lost before the checkpoint. With another one the node saves again first."""
    job = Drained("ab", Limits(2, 2, 0.0), saves=False)
    spare, leaving = job.add("c"), job.agents[1]
    job.world.until(lambda: spare.participant.registration.created)

    def drain() -> drains.Drain | None:
        return drains.of_node(leaving.participant.header, leaving.name)

    def meanwhile() -> None:
        job.world.until(drain)
        spare.agent.run(spare.go)
        job.world.run(1.0)
        leaving.part.post(topics.READY, topics.ReadyToLeave(number := drain().number, 40))
        job.world.until(lambda: drain().held)
        job.add("d")
        job.world.until(lambda: drain().number > number)
        leaving.part.post(topics.READY, topics.ReadyToLeave(drain().number, 90))

    outcome = job.drain(meanwhile)
    assert (outcome.ending, outcome.reason) == (Ending.DRAINED, "b has left: saved step 90, round 2 runs with 2 nodes")


@pytest.mark.parametrize("seconds", [0.0, 4 * TTL_S], ids=["deleted", "outage"])
def test_an_assignment_lost_before_its_node_reads_it(seconds):
    """The others have their assignments and write them again; nobody has that of this node."""
    few = Few("abc", Limits(2, 4, 5.0), joined=False)
    few.nodes["a"].client.after("/assign/", lambda: lose_assignment(few, seconds))
    few.until_round(1, "ab")
    few.world.run(2 * seconds)
    assert few.nodes["c"].round == 0
    few.break_round("a")  # its workers wait for those of c
    for name in "ab":
        few.nodes[name].ready(1)
    few.until_round(2)


def lose_assignment(few: Few, seconds: float) -> None:
    """Delete that of node c; or cut off c before it has it, and the others once they have theirs, until the leases end."""
    node = few.nodes["c"]
    if not seconds:
        node.process.frozen = True
        few.nodes["a"].client.after("/job/round", lambda: (few.client.delete(KEYS.assignment("c")), node.process.thaw()))
        return
    node.cut(seconds)
    for name in "ab":
        few.world.after(0.5, lambda other=few.nodes[name]: other.cut(seconds))


def test_history_compacted_between_assignment_and_its_event():
    few = Few("ab", Limits(2, 3, 5.0), joined=False)
    client = few.nodes["a"].client  # of the node that writes the header next
    client.after("/assign/", lambda: (client.watches.broke(), few.world.compact()))
    few.until_round(1)


@pytest.mark.parametrize(
    ("before", "happens"),
    [
        ("/nodes/a", lambda few: few.world.set_up_store(1000)),  # watches begin again
        (
            f"get {KEYS.nodes}*",
            lambda few: few.client.put(KEYS.node("a"), "{}"),
        ),  # nothing tells it: it waits for its first round
    ],
    ids=["watches-begin-again", "its-record-is-overwritten"],
)
def test_a_node_enters_although_much_changes_meanwhile(before, happens):
    few = Few("", Limits(1, 1, 0.0), joined=False)
    node = Node(few.world, "a", few.limits, TTL_S)
    node.client.before(before, lambda: happens(few))
    node.join(0)


def test_a_dead_leaders_key_is_overwritten():
    """Without a lease, so that it is never deleted, and nobody but the leader puts it back."""
    few = Few("abc", Limits(2, 3, 5.0))
    few.world.run(5.0)
    few.nodes["a"].kill()
    few.client.put(KEYS.node("a"), "{}")
    few.world.run(5 * TTL_S)
    assert few.leader() == "b"


def test_a_new_header_at_the_old_revision():
    few = Few("ab", Limits(2, 2, 0.0))
    node = few.nodes["a"]
    node.process.frozen = True
    revision, over = node.participant.header_record.revision, dataclasses.replace(node.participant.header, state=State.BROKEN)
    few.world.set_up_store(revision - 1)
    few.client.put(KEYS.header, encode(over))
    node.process.thaw()
    few.world.until(lambda: node.participant.header.state is State.BROKEN)


def test_a_round_ends_while_its_node_enters():
    """Its record is written, and the answers are lost: it is in a round before it knows that it has registered."""
    few = Few("a", Limits(1, 2, 5.0), joined=False)
    node = Node(few.world, "b", few.limits, TTL_S)
    seen: list[State] = []
    node.on_change = lambda: seen.append(node.participant.header.state)  # type: ignore[method-assign]
    node.client.before("/nodes/b", lambda: setattr(node.client, "lose_answers", 1))
    node.ready(0)
    few.until_round(1)
    few.world.until(lambda: node.round == 1)
    over = dataclasses.replace(node.participant.header, state=State.BROKEN)
    node.client.before(f"read of {KEYS.job}", lambda: few.client.put(KEYS.header, encode(over)))
    few.world.run(TTL_S)
    assert node.participant.header.state is State.BROKEN
    assert seen[-1] is State.BROKEN


# At random.


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults_break_no_invariant(part, caplog):
    """In the end all nodes that live are in one round."""
    caplog.set_level(logging.CRITICAL, logger="elastic_ext")
    for seed in range(SEED + part, SEED + JOBS, PARTS):
        job = Job(seed)
        try:
            job.run()
        except AssertionError as error:
            raise AssertionError(f"ELASTIC_EXT_TEST_SEED={seed} ELASTIC_EXT_TEST_JOBS=1\n" + "\n".join(job.log)) from error
