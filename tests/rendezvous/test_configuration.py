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
    configuration,
    decode,
    encode,
    with_job,
)
from elastic_ext.rendezvous.handler import alone_at_store
from elastic_ext.rendezvous.keys import ROOT
from elastic_ext.rendezvous.round_records import Header, State
from elastic_ext.rendezvous.rounds import Amend, Limits, Seal, Wait, next_action
from tests.embedded_server import EmbeddedServer
from tests.jobs import SCRIPTS
from tests.rendezvous.test_etcd_jobs import CONF, Nodes, Store, assert_one_line, seen, wait_for_nodes
from tests.rendezvous.test_rounds import TWO, view
from tests.rendezvous.test_simulated_jobs import Few
from tests.simulation import KEYS, Node

PROGRAM = WorkerProgram("/jobs/train.py", "default", 3, {"torch": "2.13.0"})


def of(host: str, program: WorkerProgram = PROGRAM, **settings: object) -> Configuration:
    made = configuration(Settings(**settings), host, program)  # type: ignore[arg-type]
    assert decode(encode(made), "its record") == made
    return made


def runs(script: str, role: str = "default") -> WorkerProgram:
    return dataclasses.replace(PROGRAM, script=script, role=role)


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([of("a", checkpoint_dir="/c"), of("b", checkpoint_dir="/c")], ""),
        ([of("a", checkpoint_dir="/c"), of("b")], "checkpoint_dir is /c on a, and not set on b"),
        ([of("a"), of("b", checkpoint_dir="/c")], "checkpoint_dir is /c on b, and not set on a"),
        ([of("a"), of("b", hang=False), of("c")], "hang is on on a, on c, and off on b"),
        ([of("a", local_dir="/ssd/1"), of("b", local_dir="/ssd/2")], ""),
        ([of("a", local_dir="/ssd/1"), of("b")], "local_dir is set on a, and not set on b"),
        ([of("a"), of("b", runs("eval.py"))], "script is train.py on a, and eval.py on b"),
        ([of("a"), of("b", runs("eval.py", "evaluator"))], ""),
        ([of("a", checkpoint_dir="s3://key:secret@b/c"), of("b")], "checkpoint_dir is s3://***@b/c on a, and not set on b"),
        ([of(str(each)) for each in range(5)] + [of("x", verify="off")],
         "verify is sampled on 0, on 1, on 2 and 2 more, and off on x"),
        ([of("a"), Configuration("of another version")], ""),
        ([of("a", checkpoint_dir="/c" * 300), of("b", checkpoint_dir="/c" * 299 + "/d")],
         f"checkpoint_dir is {'/c' * 300} on a, and {'/c' * 299}/d on b"),
        ([of("a"), Configuration("b", (ConfiguredValue("script", "a\x1b[2J\nb"),))],
         r"script is train.py on a, and a\x1b[2J\nb on b"),
    ],
)  # fmt: skip
def test_what_decides_for_the_job_is_alike(found: Sequence[Configuration], wrong: str) -> None:
    assert among(found).wrong == wrong


def test_other_differences_are_only_logged() -> None:
    other = dataclasses.replace(PROGRAM, script="/home/x/train.py", max_restarts=5, versions={"torch": "2.12.1"})
    differs = among([of("a"), of("b", other)])
    assert differs.wrong == ""
    path = "path of the script is /jobs/train.py on a, and /home/x/train.py on b"
    assert differs.noted == f"{path}; max_restarts is 3 on a, and 5 on b; torch is 2.13.0 on a, and 2.12.1 on b"


def test_a_later_node_compares_itself_with_the_job() -> None:
    differs = with_job(of("a", checkpoint_dir="/c"), of("b"))
    assert differs.wrong == "checkpoint_dir is /c in the job, and not set on this node"


def test_no_first_round_while_nodes_differ() -> None:
    limits, text = Limits(2, 2, 0.0), "hang is on on a, and off on b"
    held = next_action(view(Header(), TWO, differs=text), limits, 1)
    assert held == Amend(Header(differs=text), text)
    assert next_action(view(Header(differs=text), TWO, differs=text), limits, 1) == Wait(text)
    few = next_action(view(Header(differs=text), {"a": TWO["a"]}), limits, 1)
    assert few == Amend(Header(), "the nodes do not differ any more in what must be alike"), "the other one has left"
    assert isinstance(next_action(view(Header(), TWO), limits, 1), Seal)


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
        assert "script is train.py in the job, and other.py on this node" in str(node.failure)


def test_a_round_is_held_until_the_other_leaves() -> None:
    few = Configured("az", joined=False)
    held = few.until_stored(lambda header: header.differs)
    assert (held.round, held.differs) == (0, "script is train.py on a, and other.py on z")
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
    other = nodes.start("b", place.endpoint, 2, conf=f"{CONF},join_timeout=12")
    assert_one_line(other.finish(), 75, "other nodes wait there under --rdzv-id=job: give all nodes the same id")


@pytest.mark.seam
def test_differing_nodes_leave_or_are_mended(store: Store, nodes: Nodes, tmp_path: Path) -> None:
    """Both say at once what differs and where. Once the wrong one was started again with the same, the job begins."""
    saves = f"checkpoint_dir={tmp_path}/saves"
    nodes.start("a", store.endpoint, 2, conf=f"{CONF},{saves}")
    nodes.start("b", store.endpoint, 2, conf=f"{CONF},join_timeout=12", ELASTIC_EXT_NODE_NAME="wrong")
    nodes.wait_for(r"no round is formed: checkpoint_dir is \S+saves on \S+, and not set on wrong; .* leaves with 78 in")
    done = nodes.jobs.pop("b").finish()
    assert_one_line(done, 78, "no round was formed: checkpoint_dir is ")
    nodes.start("c", store.endpoint, 2, conf=f"{CONF},{saves}")
    nodes.wait_for(seen(2, 0))
    nodes.finish()


@pytest.mark.seam
def test_a_stranger_leaves_a_running_job(store: Store, nodes: Nodes) -> None:
    nodes.start("a", store.endpoint, "1:2")
    nodes.wait_for(seen(1, 0))
    stranger = nodes.start("b", store.endpoint, "1:2", script=str(SCRIPTS / "gloo_job.py"))
    said = "script is elastic_job.py in the job, and gloo_job.py on this node"
    assert_one_line(stranger.finish(), 78, said)
    nodes.finish("a")
    assert nodes.attempts() == {0}, "the job was not held up"
