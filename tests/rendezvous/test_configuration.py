"""One job, one configuration: nodes that run with different scripts or settings never come to be in one round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import Delete
from elastic_ext.rendezvous.configuration import (
    Configuration,
    ConfiguredValue,
    WorkerProgram,
    among,
    decode,
    encode,
    of_node,
    with_job,
)
from elastic_ext.rendezvous.handler import alone_at_store
from elastic_ext.rendezvous.keys import ROOT
from elastic_ext.rendezvous.round_records import Header, State
from elastic_ext.rendezvous.rounds import Amend, Limits, Seal, Wait, before_first
from tests.embedded_server import EmbeddedServer
from tests.jobs import SCRIPTS
from tests.rendezvous.test_etcd_jobs import CONF, Nodes, Store, assert_one_line, seen, wait_for_nodes
from tests.rendezvous.test_simulated_jobs import Few
from tests.simulation import KEYS, Node

LEAVES_SOON = "lease_ttl=5,last_call_timeout=0.5,join_timeout=5"
PROGRAM = WorkerProgram("/jobs/train.py", "default", 1, 3, {"torch": "2.13.0"})


def of(host: str, program: WorkerProgram = PROGRAM, **settings: object) -> Configuration:
    made = of_node(Settings(**settings), host, program)  # type: ignore[arg-type]
    assert decode(encode(made), "its record") == made
    return made


def runs(script: str, role: str = "default") -> WorkerProgram:
    return dataclasses.replace(PROGRAM, script=script, role=role)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([of("a", checkpoint_dir="/c"), of("b", checkpoint_dir="/c")], ""),
        ([of("a", checkpoint_dir="/c"), of("b")], "checkpoint_dir=/c on a, but not set on b"),
        ([of("a"), of("b", checkpoint_dir="/c")], "checkpoint_dir=/c on b, but not set on a"),
        ([of("a"), of("b", verify="off"), of("c")], "verify=sampled on a, c, but verify=off on b"),
        ([of("a", resume_from="/c/d"), of("b", resume_from="/c/d/"), of("c", resume_from="/c/.//d")], ""),
        ([of("a", checkpoint_dir="s3://b/c"), of("b", checkpoint_dir="s3://b/c/")], ""),
        ([of("a", checkpoint_dir="s3://b/c"), of("b", checkpoint_dir="s3://b//c")],
         "checkpoint_dir=s3://b/c on a, but checkpoint_dir=s3://b//c on b"),
        ([of("a", resume_from="/c/"), of("b", resume_from="/c"), of("x", resume_from="/d/../c/")],
         "resume_from=/c/ on a, b, but resume_from=/d/../c/ on x"),
        ([of("a", local_dir="/ssd/1"), of("b", local_dir="/ssd/2")], ""),
        ([of("a", local_dir="/ssd/1"), of("b")], "local_dir=set on a, but not set on b"),
        ([of("a"), of("b", runs("eval.py"))], "script=train.py on a, but script=eval.py on b"),
        ([of("a"), of("b", runs("eval.py", "evaluator"))], ""),
        ([of("a", checkpoint_dir="s3://key:secret@b/c"), of("b")], "checkpoint_dir=s3://***@b/c on a, but not set on b"),
        ([of(str(each)) for each in range(5)] + [of("x", verify="off")],
         "verify=sampled on 0, 1, 2 and 2 more, but verify=off on x"),
        ([of("a"), Configuration("of another version")], ""),
        ([of("a", checkpoint_dir="/c" * 300), of("b", checkpoint_dir="/c" * 299 + "/d")],
         f"checkpoint_dir={'/c' * 300} on a, but checkpoint_dir={'/c' * 299}/d on b"),
        ([of("a"), Configuration("b", (ConfiguredValue("script", "a\x1b[2J\nb"),))],
         r"script=train.py on a, but script=a\x1b[2J\nb on b"),
    ],
)  # fmt: skip
def test_what_decides_for_the_job_is_alike(found: Sequence[Configuration], wrong: str) -> None:
    assert among(found).wrong == wrong


def test_other_differences_are_only_logged() -> None:
    other = dataclasses.replace(PROGRAM, script="/home/x/train.py", max_restarts=5, versions={"torch": "2.12.1"})
    differs = among([of("a"), of("b", other)])
    assert differs.wrong == ""
    path = "path of script=/jobs/train.py on a, but path of script=/home/x/train.py on b"
    assert differs.noted == f"{path}; max_restarts=3 on a, but max_restarts=5 on b; torch=2.13.0 on a, but torch=2.12.1 on b"


@pytest.mark.parametrize(
    ("first", "second", "noted"),
    [
        ("--lr=1 --x", "--lr=1 --x", ""),
        ("--lr=1", "--lr=2", "arguments (--lr) differ on b"),
        ("--lr 1 a", "--lr 2 b", "arguments (--lr, 3) differ on b"),
        ("--x --y", "--y --x", "arguments (their order) differ on b"),
        ("-pHUSH", "-pOTHER", "arguments (-p) differ on b"),
        ("HUSH=", "", "arguments (1) differ on b"),
        ("--token=HUSH " + "x " * 20, "--token=OTHER " + "y", "arguments (--token, 2, 3 and 14 more) differ on b"),
    ],
)
def test_other_arguments_are_named_without_values(first: str, second: str, noted: str) -> None:
    """One may be a secret. Others are no mistake: a rank of the node, say."""
    a, b = (
        of(name, dataclasses.replace(PROGRAM, arguments=tuple(given.split()))) for name, given in (("a", first), ("b", second))
    )
    differs = among([a, b])
    assert (differs.wrong, differs.noted) == ("", noted)
    assert "HUSH" not in encode(a)


def test_a_later_node_compares_itself_with_the_job() -> None:
    differs = with_job(of("a", checkpoint_dir="/c"), of("b"))
    assert differs.wrong == "checkpoint_dir=/c in the job, but not set on this node"


def test_no_first_round_while_nodes_differ() -> None:
    ready, text = Seal(("a", "b"), "2 nodes joined"), "verify=sampled on a, but verify=off on b"
    assert before_first(Header(), ready, lambda order: text * (len(order) == 2)) == Amend(Header(differs=text), text)
    assert before_first(Header(differs=text), ready, lambda _: text) == Wait(text)
    assert before_first(Header(), ready, lambda _: "") == ready


def test_a_hold_ends_when_the_other_leaves() -> None:
    """Nothing is asked of the nodes while too few are there."""
    asked, few = list[object](), Wait("1 of at least 2 nodes have joined")
    action = before_first(Header(differs="hang"), few, lambda order: str(asked.append(order)))
    assert action == Amend(Header(), "the nodes do not differ any more in what must be alike")
    assert (before_first(Header(), few, lambda order: str(asked.append(order))), asked) == (few, [])


class Configured(Few):
    """Nodes in virtual time; those that are called z run with another script."""

    def add(self, name: str, **more: object) -> Node:
        node = Node(self.world, name, self.limits, policy=self.policy, **more)
        mine = of(name, runs("other.py") if name[0] == "z" else PROGRAM)
        node.participant.registration.configuration = encode(mine)
        node.ready(0)
        self.world.until(lambda: node.participant.registration.created or node.failure)
        return node

    def until_refused(self, node: Node) -> None:
        self.world.until(lambda: node.failure is not None)
        assert isinstance(node.failure, UsageError)
        assert "script=train.py in the job, but script=other.py on this node" in str(node.failure)


def test_a_round_is_held_until_the_other_leaves() -> None:
    few = Configured("az", joined=False)
    held = few.until_stored(lambda header: header.differs)
    assert (held.round, held.differs) == (0, "script=train.py on a, but script=other.py on z")
    few.nodes.pop("z").leave()
    few.until_stored(lambda header: not header.differs)
    few.nodes["b"] = few.add("b")
    few.until_round(1)
    assert few.headers()[-1] == (1, State.RUNNING)


def test_a_stranger_never_comes_into_a_round() -> None:
    """Whether it comes later, or as the first round is sealed: then it is a node of the job already, but in no round."""
    few, early = Configured("a", Limits(2, 3, 0.0), joined=False), list[Node]()
    few.world.until(lambda: few.nodes["a"].participant.election.leader is not None)
    few.world.run(1.0)
    # As the leader reads what the nodes run with that it knows.
    few.nodes["a"].client.before(KEYS.configurations, lambda: early.append(few.add("z1")))
    few.nodes["b"] = few.add("b")
    few.until_round(1, "ab")
    few.until_refused(few.add("z2"))
    few.until_refused(early[0])
    assert few.headers() == [(1, State.RUNNING)], "no round has ended for it"
    assert {name for name in few.nodes if few.nodes[name].round == 1} == {"a", "b"}


def test_each_leader_writes_what_the_job_runs_with() -> None:
    few = Configured("abc", Limits(2, 3, 9.0))
    few.client.txn([], [Delete(KEYS.configuration)])
    few.nodes.pop("a").kill()
    few.until_broken()
    few.next_round(2)
    few.until_refused(few.add("z"))


def test_the_jobs_nnodes_hold_whoever_leads() -> None:
    few = Configured("ab", Limits(2, 2, 0.0))
    few.limits = Limits(1, 3, 0.0)
    few.nodes["c"] = few.add("c")
    for name in "ab":
        few.nodes.pop(name).kill()
        few.world.run(60.0)
    assert few.nodes["c"].participant.election.leader is not None
    assert few.nodes["c"].round == 0, "one node is not enough for the job"
    few.nodes["d"] = few.add("d")
    few.world.until(lambda: few.nodes["d"].round)


def test_a_launch_with_another_nnodes_outwaits_the_dead() -> None:
    few = Configured("ab", Limits(2, 2, 0.0))
    for name in "ab":
        few.nodes.pop(name).kill()
    few.limits = Limits(1, 1, 0.0)
    few.nodes["c"] = few.add("c")
    few.world.until(lambda: few.nodes["c"].round)


@pytest.mark.parametrize(
    ("keys", "hosted_here", "said"),
    [
        (["job/job", "job/nodes/a"], True, "this node hosts the store at a:1, and no other node came to it"),
        (["job/job", "job/nodes/a"], False, ""),
        (["job/job", "job/nodes/a", "job/nodes/b"], True, ""),
        (["job/nodes/a", "none/nodes/b", "none/nodes/c", "z/job"], False, "other nodes wait there under --rdzv-id=none: give"),
    ],
)
def test_the_store_explains_too_few_nodes(keys: Sequence[str], hosted_here: bool, said: str) -> None:
    found = alone_at_store([ROOT + key for key in keys], "job", hosted_here, "a:1")
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.seam
def test_nodes_with_two_ids_hear_of_it(nodes: Nodes) -> None:
    place = EmbeddedServer()  # where it will be: an agent starts it
    nodes.options = place.options
    nodes.start("a", place.endpoint, 2, conf=f"{CONF},join_timeout=300").wait_for("metrics: serving")
    wait_for_nodes(place, 1)
    nodes.run_id = "other"
    other = nodes.start("b", place.endpoint, 2, conf=LEAVES_SOON)
    assert_one_line(other.finish(), 75, "other nodes wait there under --rdzv-id=job: give all nodes the same id")


@pytest.mark.seam
@pytest.mark.full("etcd")
def test_differing_nodes_leave_or_are_mended(store: Store, nodes: Nodes, tmp_path: Path) -> None:
    """Both say at once what differs and where. Once the wrong one was started again with the same, the job begins."""
    saves = f"checkpoint_dir={tmp_path}/saves"
    nodes.start("a", store.endpoint, 2, conf=f"{CONF},{saves}")
    wait_for_nodes(store, 1)
    nodes.start("b", store.endpoint, 2, conf=LEAVES_SOON, ELASTIC_EXT_NODE_NAME="wrong")
    nodes.wait_for(r"no round is formed: checkpoint_dir=\S+saves on \S+, but not set on wrong; .* leaves with 78 in")
    done = nodes.jobs.pop("b").finish()
    assert_one_line(done, 78, "no round was formed: checkpoint_dir=")
    nodes.start("c", store.endpoint, 2, conf=f"{CONF},{saves}")
    nodes.wait_for(seen(2, 0))
    nodes.finish()


@pytest.mark.seam
@pytest.mark.full("embedded")
def test_a_stranger_leaves_a_running_job(store: Store, nodes: Nodes) -> None:
    nodes.start("a", store.endpoint, "1:2")
    nodes.wait_for(seen(1, 0))
    stranger = nodes.start("b", store.endpoint, "1:2", script=str(SCRIPTS / "gloo_job.py"))
    said = "script=elastic_job.py in the job, but script=gloo_job.py on this node"
    assert_one_line(stranger.finish(), 78, said)
    nodes.finish("a")
    assert nodes.attempts() == {0}, "the job was not held up"
