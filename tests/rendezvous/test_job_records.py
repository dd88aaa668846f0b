"""A job's records: nodes that begin the next job under the run id of one that has ended, at the same time; members; keys."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.etcd import Delete, Put
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.configuration import Configuration, ConfiguredValue
from elastic_ext.rendezvous.configuration import encode as encode_configuration
from elastic_ext.rendezvous.job_records import JobRecords, JobSnapshot, SharedSettings
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.leader import Members
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, RecordReader, State, encode
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import LostRace, NodeConfig, NodeContext, TaskRunner
from tests.simulation import Client, Lane, Process, World

KEYS = JobKeys("job")


class SlowClient(Client):
    """A client whose process gets no time after its n-th transaction; the others do something meanwhile."""

    def __init__(self, world: World, after: int, meanwhile: Callable[[], object]) -> None:
        super().__init__(world)
        self._left = after
        self._meanwhile = meanwhile

    def txn(self, *args, **kwargs):
        answer = super().txn(*args, **kwargs)
        self._left -= 1
        if self._left == 0:
            self._meanwhile()
        return answer


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def tasks(world: World) -> TaskRunner:
    """For the nodes' contexts; nothing here is posted to it."""
    lane = Lane(world, Process())
    return TaskRunner(lane, "n", in_job=lambda: False, on_lease_lost=print, on_timer=print, on_failure=print)


class Start:
    """What a node does first, for a job of so many nodes."""

    def __init__(self, tasks: TaskRunner) -> None:
        self._tasks = tasks

    def __call__(self, client: Client, node_id: str, nodes: int) -> JobSnapshot:
        return self.records(client, node_id, nodes).read_or_create()

    def records(self, client: Client, node_id: str, nodes: int, loopback: str = "") -> JobRecords:
        config = NodeConfig("job", node_id, Limits(nodes, nodes, 0.5), 2, loopback=loopback)
        return JobRecords(NodeContext(client, config, KEYS, RecordReader(), self._tasks))


@pytest.fixture
def start(tasks: TaskRunner) -> Start:
    return Start(tasks)


def register(client: Client) -> None:
    client.txn([], [Put(KEYS.node("a"), encode(Node(0, 1, "trainer", "a", 1)), lease_id=client.lease_grant(10).lease_id)])


def end_a_job(client: Client, start: Start, nodes: int) -> None:
    found = start(client, "old", nodes)
    over = Header(1, State.DONE, nodes, nodes, seal="s", job="j")
    client.txn([], [Put(KEYS.header, encode(over), lease_id=found.lease_id)])


@pytest.mark.parametrize("registers", [False, True], ids=["job-only", "and-its-node"])
@pytest.mark.parametrize("after", [1, 2], ids=["after-reading", "after-judging"])
@pytest.mark.parametrize("nodes_before", [1, 2], ids=["other-settings", "same-settings"])
def test_the_slower_node_enters_the_fasters_job(world, start, nodes_before, after, registers):
    """What it has read is of the old job: it neither is refused for that, nor takes it for its own, nor deletes the new one."""
    fast = Client(world)
    end_a_job(fast, start, nodes_before)
    begun = []

    def begin() -> None:
        begun.append(start(fast, "a", 2))
        if registers:
            register(fast)

    found = start(SlowClient(world, after, begin), "b", 2)
    assert (found.lease_id, found.header) == (begun[0].lease_id, Header())
    assert fast.get(KEYS.job).kv.lease_id == begun[0].lease_id
    assert len(begun) == 1


def test_another_script_is_another_job(world, start):
    """Also of one that is done: its node does not end with 0 as if its script had run."""
    client = Client(world)
    records = start.records(client, "b", 1)
    job, mine = (encode_configuration(Configuration(name, (ConfiguredValue("script", f"{name}.py"),))) for name in ("a", "b"))
    records.compare(mine)  # of an older version, or lost: nothing is known
    client.txn([], [Put(KEYS.configuration, job, lease_id=client.lease_grant(10).lease_id)])
    records.compare("")
    records.compare(job)
    with pytest.raises(
        UsageError, match=r"script=a\.py in the job, but script=b\.py on this node; give all nodes of a job the same"
    ):
        records.compare(mine)


def test_a_job_that_has_nodes_is_not_deleted(world, start):
    client = Client(world)
    end_a_job(client, start, 2)
    register(client)
    assert start(client, "b", 2).header.ended
    assert start(client, "b", 3).header.ended


def _nnodes(records: JobRecords) -> tuple[int, int]:
    limits = records.limits(Header())
    return limits.min_nodes, limits.max_nodes


def test_another_nnodes_gives_way_to_the_jobs(world, start):
    """Once its nodes are certainly not those of a launch before. Where none is left, ours holds."""
    client = Client(world)
    start(client, "a", 2)
    register(client)
    records = start.records(client, "b", 3)
    with pytest.raises(LostRace):
        records.read_or_create()
    world.run(5)
    records.read_or_create()
    assert _nnodes(records) == (2, 2)
    client.txn([], [Delete(KEYS.node("a"))])
    records.read_or_create()
    assert _nnodes(records) == (3, 3)


@pytest.mark.parametrize(("theirs", "mine"), [(1, 2), (2, 1)])
def test_a_forgotten_nnodes_is_refused(world, start, theirs, mine):
    """Without it torchrun takes 1, and such a node has the loopback for its address."""
    client = Client(world)
    start(client, "a", theirs)
    register(client)
    records = start.records(client, "b", mine)
    with pytest.raises(LostRace):
        records.read_or_create()
    world.run(5)
    with pytest.raises(
        UsageError, match=f"runs with --nnodes={theirs}:{theirs}, this node was started with --nnodes={mine}:{mine}"
    ):
        records.read_or_create()


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [("", "", True), ("m/1", "m/1", True), ("m/1", "m/2", False), ("m/1", "", True), ("", "m/1", True)],
)
def test_nodes_do_not_meet_at_different_loopbacks(first, second, fits):
    theirs, mine = SharedSettings(2, 2, first), SharedSettings(2, 2, second)
    assert mine.is_elsewhere(theirs) is not fits
    assert mine.same_nodes(theirs)


def test_a_restarted_container_takes_over_its_job(world, start):
    """It has another loopback then. While nodes live where the old one was, this is another host."""
    client = Client(world)
    first = start.records(client, "a", 2, "m/1").read_or_create()
    register(client)
    again = start.records(client, "b", 2, "m/2")
    with pytest.raises(LostRace):
        again.read_or_create()
    client.txn([], [Delete(KEYS.node("a"))])
    assert again.read_or_create().lease_id == first.lease_id
    register(client)
    late = start.records(client, "c", 2, "m/1")
    with pytest.raises(LostRace):
        late.read_or_create()
    world.run(5)
    with pytest.raises(UsageError, match="set --rdzv-conf=address=INTERFACE"):
        late.read_or_create()


# The members of a round, as a leader learns them from assignments of which some are lost.


ORDER = ("a", "b", "c", "d")


@pytest.mark.parametrize("lost", ["", "a", "d", "bd"])
def test_a_lost_member_is_known_by_its_neighbors(lost: str) -> None:
    """A node and the store are lost together: nobody writes its assignment again, and the others still know that it was there."""
    header = Header(3, State.RUNNING, nodes=len(ORDER), world=4, seal="s")
    waited: list[bool] = []
    client = Client(World())
    lease = client.lease_grant(60).lease_id
    for rank, id_ in enumerate(ORDER):
        if id_ not in lost:
            assignment = Assignment(3, rank, rank, rank, 4, seal="s", neighbors=rounds.neighbors(rank, ORDER))
            client.txn([], [Put(KEYS.assignment(id_), encode(assignment), lease_id=lease)])
    context = SimpleNamespace(client=client, keys=KEYS, reader=RecordReader())
    outage = SimpleNamespace(expect_members=lambda: waited.append(True))
    members = Members(context, SimpleNamespace(value=header), outage)  # type: ignore[arg-type]
    members.load()
    assert members.ranks == {id_: rank for rank, id_ in enumerate(ORDER)}
    assert waited == [True] * bool(lost), "those that live write their own again"


# Versions of this package that share an etcd must agree on the keys.


def test_the_keys_of_a_job():
    keys = JobKeys("j")
    assert [keys.job, keys.header, keys.last_node, keys.ledger] == [
        f"/elastic_ext/j/{name}" for name in ("job", "round", "last", "ledger")
    ]
    assert keys.node("a") == "/elastic_ext/j/nodes/a"
    assert keys.assignment("a") == "/elastic_ext/j/assign/a"
    assert keys.offer("s", 3) == "/elastic_ext/j/offers/s/3"
    assert keys.charge(4) == "/elastic_ext/j/charges/4"
    assert keys.refusal("h") == "/elastic_ext/j/refused/h"
