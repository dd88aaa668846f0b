"""Nodes that differ never come to be in one round: after a kill, with lost records, under another role, with another --nnodes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from elastic_ext.etcd import Delete
from elastic_ext.rendezvous.configuration import Configuration, among, encode
from elastic_ext.rendezvous.round_records import State
from elastic_ext.rendezvous.rounds import Limits
from tests.rendezvous.test_configuration import PROGRAM, Configured, of, runs
from tests.simulation import KEYS, Node, stored

MOST_TEXT = 10_000  # of a header: each node watches it
LONG_S = 60.0


class Launches(Configured):
    """Agents that go on to the next round; those that are called z run with another script."""

    def spawn(self, name: str, limits: Limits | None = None, mine: Configuration | None = None) -> None:
        """Start a node, and wait for nothing."""
        self.nodes[name] = self._started(name, limits, mine)

    def _started(self, name: str, limits: Limits | None = None, mine: Configuration | None = None) -> Node:
        node = Node(self.world, name, limits or self.limits, policy=self.policy)
        mine = mine or of(name, runs("other.py") if name[0] == "z" else PROGRAM)
        node.participant.registration.configuration = encode(mine)
        node.ready(0)
        return node

    def add(self, name: str, **more: object) -> Node:
        node = self._started(name)
        self.world.until(lambda: node.participant.registration.created or node.failure)
        return node

    def end(self, names: Iterable[str], go: str = "kill") -> None:
        for name in names:
            getattr(self.nodes.pop(name), go)()

    def together(self) -> set[str]:
        """Return the nodes of the running round."""
        header = stored(self.world)
        found = {name: node.participant.joined for name, node in self.nodes.items() if node.lives}
        return {name for name, joined in found.items() if joined is not None and header is not None and joined[1].of(header)}

    def settle(self, seconds: float) -> None:
        """Let the agents stop their workers and go on, and see that no node is in a round with one of another script."""
        until = self.world.now + seconds
        while self.world.now < until:
            self.world.run(0.25)
            for node in self.nodes.values():
                header, joined = node.participant.header, node.participant.joined
                over = joined is not None and not (header.state is State.RUNNING and joined[1].of(header))
                if node.lives and node.failure is None and joined is not None and over and not header.ended:
                    node.ready(max(joined[0].round, header.round if header.job == joined[0].job else 0))
            names = self.together()
            assert len({name[0] == "z" for name in names}) < 2, f"one round of two scripts: {sorted(names)}"

    def lose_records(self) -> None:
        self.world.set_up_store()

    def finish(self) -> None:
        for name in self.together():
            self.nodes[name].part.done()
        self.until_stored(lambda header: header.state is State.DONE)


TWO = Limits(2, 2, 0.0)


# A job that has ended, and is started again with a setting that was mended.


@pytest.mark.parametrize("go", ["leave", "kill"])
def test_an_ended_job_starts_with_mended_settings(go: str) -> None:
    """Ctrl-C on all nodes, or SIGKILL, one setting is changed, the same command again: each of the new nodes leaves with 78."""
    few = Launches("ab", TWO)
    if go == "leave":
        few.break_round("a")
    few.end("ab", go)
    for name in ("z1", "z2"):
        few.spawn(name)
    few.settle(60.0)
    assert few.together() == {"z1", "z2"}


def test_the_next_script_awaits_the_last_node() -> None:
    """`torchrun one.py; torchrun two.py` on each node, under one id: a node is through before the other one has left."""
    few = Launches("ab", TWO)
    few.finish()
    few.end("a", "leave")
    few.spawn("z1")
    few.world.run(2.0)
    few.end("b", "leave")
    few.spawn("z2")
    few.settle(60.0)
    assert few.together() == {"z1", "z2"}


# The record of what the job runs with is lost.


def test_a_stranger_in_an_empty_store_joins_none() -> None:
    """The pod that hosts the store is replaced by one with another script, say. It leads, and takes its own for the job's."""
    few = Launches("ab", Limits(2, 3, 0.0))
    for name in "ab":
        few.nodes[name].cut(2.0)
    few.lose_records()
    few.spawn("z")
    few.settle(60.0)
    assert few.nodes["z"].failure is not None
    assert few.together() == {"a", "b"}


def test_a_stranger_that_leads_joins_none() -> None:
    """It has come while the record was lost, so that it outlives those that led before it."""
    few = Launches("ab", Limits(1, 4, 3.0))
    few.lose_records()
    few.settle(30.0)
    few.spawn("z")
    few.settle(5.0)
    few.spawn("c")
    few.settle(20.0)
    few.end("ab")
    few.settle(60.0)
    assert few.together() == {"c"}


def test_a_stranger_hears_despite_a_lost_record() -> None:
    """It waits for as long as the job trains, without a line."""
    few = Launches("ab", Limits(2, 3, 0.0))
    few.lose_records()
    few.settle(30.0)
    few.spawn("z")
    few.settle(30.0)
    assert few.nodes["z"].failure is not None


@pytest.mark.parametrize("ends", [False, True])
def test_a_stranger_hears_despite_a_deleted_record(ends: bool) -> None:
    """Only what the job runs with was deleted, by hand. Of a round that ends meanwhile the stranger is not part either."""
    few = Launches("ab", Limits(2, 3, 0.0))
    few.client.txn([], [Delete(KEYS.configuration)])
    few.spawn("z")
    if ends:
        few.break_round("a")
    few.settle(30.0)
    assert few.nodes["z"].failure is not None
    assert few.together() == {"a", "b"}


@pytest.mark.parametrize("seed", range(3))
def test_a_stranger_hears_between_rounds_too(seed: int) -> None:
    """The pod that hosts the store is replaced by one with another script: both are in one round, or wait in silence."""
    few = Launches("ab", TWO, seed=seed)
    few.end("a")
    few.nodes["b"].cut(2.0)
    few.lose_records()
    few.spawn("z")
    few.settle(60.0)
    assert few.nodes["z"].failure is not None


def test_no_zero_after_a_lost_record() -> None:
    """It comes to a job of another script that is done: its agent ends with 0."""
    few = Launches("ab", TWO)
    few.lose_records()
    few.settle(30.0)
    few.finish()
    node = few.add("z")
    few.world.run(2.0)
    assert node.failure is not None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_zero_before_a_node_has_compared(seed: int) -> None:
    """It came as the first round was sealed, and was cut off until the job was done: 0, though its script never ran."""
    few, early = Launches("a", TWO, joined=False, seed=seed), list[Node]()
    few.world.until(lambda: few.nodes["a"].participant.election.leader is not None)
    few.world.run(1.0)
    few.nodes["a"].client.before(KEYS.configurations, lambda: early.append(few.add("z")))
    few.spawn("b")
    few.world.until(lambda: early)
    early[0].cut(8.0)
    few.settle(3.0)
    few.finish()
    few.world.until(lambda: early[0].participant.header.state is State.DONE or early[0].failure)
    assert early[0].failure is not None


def test_members_hear_that_a_stranger_took_over() -> None:
    """They were cut off from a store that was lost, and it has begun a job of its own: both wait without a line."""
    few = Launches("ab", Limits(1, 3, 3.0))
    for name in "ab":
        few.nodes[name].cut(9.0)
    few.lose_records()
    few.spawn("z")
    few.settle(90.0)
    assert {name for name in "ab" if few.nodes[name].failure is None} == set()


def test_a_node_back_in_another_job_hears() -> None:
    """It was cut off while its job ended, and another script took the id."""
    few = Launches("ab", Limits(1, 2, 0.5))
    few.nodes["b"].cut(70.0)
    few.settle(15.0)
    few.finish()
    few.end("a", "leave")
    few.world.run(15.0)
    few.spawn("z")
    few.settle(80.0)
    assert few.nodes["b"].failure is not None


def test_a_leader_forgets_what_lost_nodes_ran_with() -> None:
    """In a long job with many replaced nodes it would keep them all."""
    few = Launches("ab", Limits(2, 3, 0.0))
    few.spawn("c")
    few.settle(15.0)
    few.end("c")
    few.settle(30.0)
    leads = few.nodes[few.leader()].participant.election.leader
    assert leads is not None
    assert leads._records.configurations._read.keys() == {"a", "b"}


# Roles.


@pytest.mark.parametrize("at_once", [False, True])
def test_one_script_for_each_role_later_too(at_once: bool) -> None:
    """The leader is of another role, and compares with itself only; so does the job's record."""
    few = Launches("a", Limits(1, 4, 0.0))
    few.spawn("e", mine=of("e", runs("eval.py", "evaluator")))
    if not at_once:
        few.settle(5.0)
    few.spawn("x", mine=of("x", runs("other.py", "evaluator")))
    few.settle(20.0)
    assert few.together() in ({"a", "e"}, {"a", "x"})


# Another --nnodes.


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_forgotten_nnodes_takes_no_job(seed: int) -> None:
    """Four nodes start at once, one of them without --nnodes. Where that is the first, it trains alone, and the others end with 0
    once it is done. They ask for four nodes, so that no job of one is theirs."""
    few = Launches("", Limits(4, 4, 0.0), joined=False, seed=seed)
    for name in "abc":
        few.spawn(name)
    few.spawn("d", Limits(1, 1, 0.0))
    few.settle(60.0)
    assert few.together() in ({"a", "b", "c", "d"}, set()) or all(few.nodes[name].failure is not None for name in "abc")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("joined", "least"), [(True, 2), (False, 3)])
def test_no_nnodes_stops_a_job_without_records(joined: bool, least: int, seed: int) -> None:
    """A node with another one is the first to write the job's record again. Since a round was sealed the job's own holds."""
    few = Launches("ab", Limits(least, 3, 0.0), joined, seed=seed)
    for name in "ab":
        few.nodes[name].cut(2.0)
    few.lose_records()
    few.spawn("c", Limits(least, 4, 0.0))
    few.settle(60.0)
    assert [node.failure for node in few.nodes.values()] == [None] * 3
    assert few.together() == {"a", "b", "c"}
    few.spawn("d", Limits(least, 4, 0.0))
    few.settle(60.0)
    assert len(few.together()) == (3 if joined else 4)


def test_a_lost_jobs_record_gives_no_other_nnodes() -> None:
    """Only that is lost, and a new node is the first to miss it; later it leads."""
    few = Launches("ab", Limits(2, 3, 0.0))
    few.nodes["a"].cut(2.0)
    few.client.txn([], [Delete(KEYS.job)])
    few.spawn("c", Limits(1, 4, 0.0))
    few.settle(60.0)
    few.end("ab")
    few.settle(60.0)
    assert few.nodes["c"].failure is None
    assert few.together() == set(), "one node is not enough for the job"


# What is said.


def test_what_differs_fits_into_a_header() -> None:
    """Each node has a directory of its own: one line names them all, and each node watches it."""
    found = [of(f"node{number}", checkpoint_dir=f"/scratch/node{number}/saves") for number in range(1000)]
    assert len(among(found).wrong) < MOST_TEXT
