"""A drain on a real etcd, among nodes without workers: what happens in between neither loses it nor does it twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from elastic_ext.rendezvous import drains
from elastic_ext.rendezvous.drains import Request
from elastic_ext.rendezvous.etcd import drain_request
from elastic_ext.rendezvous.etcd.context import NodeConfig
from elastic_ext.rendezvous.etcd.drain_request import Ending, Outcome
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.etcd.tasks import Dispatcher, HostRefused
from elastic_ext.rendezvous.round_records import Header, Node, State
from elastic_ext.rendezvous.rounds import Limits
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.participants import part_of

KEYS = JobKeys("job")
NEWS_S = 60.0
TWO_TO_FOUR = Limits(2, 4, 60.0)


class Member:
    """A node of a job that takes two to four of them, or as many as the test says."""

    def __init__(self, stack: ExitStack, server: EtcdServer, host: str, pid: int = 1, limits: Limits = TWO_TO_FOUR) -> None:
        self.changed = threading.Condition()
        self.dispatcher = Dispatcher()
        stack.callback(self.dispatcher.close, 5)
        client = stack.enter_context(EtcdClient(server.endpoint))
        self.id = f"{host}-{pid}-abcdef"
        config = NodeConfig("job", self.id, limits, 20, host)
        self.node = Participant(client, self.dispatcher, config, self._notify)
        self.join(0)

    def join(self, after: int) -> None:
        self.node.ready(Node(after=after, workers=1, role="", address="127.0.0.1", port=1))

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def until(self, holds: Callable[[Header], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self.node.header), NEWS_S), self.node.header

    def until_released(self) -> None:
        self.until(lambda header: self.id in drains.released(header))


def await_nodes(client: EtcdClient, count: int) -> None:
    """Wait until exactly so many are registered."""
    with client.watch_with_snapshot(KEYS.nodes) as news:
        while len(client.get_prefix(KEYS.nodes).kvs) != count:
            assert news.get(NEWS_S) is not None


def ask(pool: ThreadPoolExecutor, client: EtcdClient, member: Member) -> Future[Outcome]:
    """Have a node drained, and return once it knows."""
    told, request = threading.Event(), Request(member.id, "fan", 600)
    asking = pool.submit(lambda: drain_request.drain(client, "job", request, NEWS_S, lambda line: told.set()))
    assert told.wait(NEWS_S)
    member.until(lambda header: drains.of_node(header, member.id) is not None)
    return asking


class Four:
    """Four nodes in round 1; the first one leads."""

    def __init__(self, stack: ExitStack, server: EtcdServer) -> None:
        self.members = []
        for host in "abcd":
            self.members.append(Member(stack, server, host))
            if host == "a":
                with EtcdClient(server.endpoint) as client:
                    await_nodes(client, 1)
        for each in self.members:
            each.until(lambda header: header.round == 1)
        self.client = stack.enter_context(EtcdClient(server.endpoint))
        self.pool = stack.enter_context(ThreadPoolExecutor(1))

    def drain(self, host: str) -> Future[Outcome]:
        return ask(self.pool, self.client, self.members["abcd".index(host)])


@pytest.fixture
def four(server: EtcdServer) -> Iterator[Four]:
    with ExitStack() as stack:
        yield Four(stack, server)


@pytest.mark.seam
def test_the_leader_is_lost_before_the_checkpoint(four):
    a, b, c, d = four.members
    asking = four.drain("c")
    a.node.leave(5)
    for each in (b, d):
        each.until(lambda header: header.state is State.BROKEN)
        each.join(1)
    c.until_released()  # the round was over, so nothing had to be saved
    c.node.leave(5)
    outcome = asking.result(NEWS_S)
    assert (outcome.ending, outcome.reason) == (Ending.DRAINED, "c has left: round 2 runs with 2 nodes")
    assert four.client.get(KEYS.refusal("c")).kv.value == b"drained: fan"
    b.until(lambda header: header.drains == ())


@pytest.mark.full
def test_etcd_is_started_again_before_the_checkpoint_and_after_it(four, server):
    """A node that starts on that host meanwhile does not join."""
    a, b, c, d = four.members
    asking = four.drain("b")
    with ExitStack() as stack:
        late = Member(stack, server, "b", 2)
        late.until(lambda header: late.node.failure is not None)
        assert isinstance(late.node.failure, HostRefused)
    server.kill()
    server.restart()
    part_of(b.node).report_ready_to_leave(1, 40)
    b.until_released()
    server.kill()
    server.restart()
    for each in (a, c, d):
        each.until(lambda header: header.state is State.BROKEN)
        each.join(1)
    b.node.leave(5)
    outcome = asking.result(NEWS_S)
    assert (outcome.ending, outcome.reason) == (Ending.DRAINED, "b has left: saved step 40, round 2 runs with 3 nodes")


@pytest.mark.seam
def test_a_node_that_cannot_be_spared_is_asked_to_save_again_once_it_can(server):
    """Of two nodes and a spare, the spare is lost before the checkpoint. With another one the node saves again first."""
    with ExitStack() as stack:
        limits = Limits(2, 2, 0.0)
        a, b = (Member(stack, server, host, limits=limits) for host in "ab")
        for each in (a, b):
            each.until(lambda header: header.round == 1)
        spare = Member(stack, server, "c", limits=limits)
        client = stack.enter_context(EtcdClient(server.endpoint))
        await_nodes(client, 3)
        asking = ask(stack.enter_context(ThreadPoolExecutor(1)), client, b)
        number = drains.of_node(b.node.header, b.id).number
        spare.node.leave(5)
        await_nodes(client, 2)
        part_of(b.node).report_ready_to_leave(number, 40)
        b.until(lambda header: drains.of_node(header, b.id).held)
        spare = Member(stack, server, "d", limits=limits)
        b.until(lambda header: drains.of_node(header, b.id).number > number)
        part_of(b.node).report_ready_to_leave(drains.of_node(b.node.header, b.id).number, 90)
        b.until_released()
        a.until(lambda header: header.state is State.BROKEN)
        a.join(1)
        b.node.leave(5)
        outcome = asking.result(NEWS_S)
        assert (outcome.ending, outcome.reason) == (Ending.DRAINED, "b has left: saved step 90, round 2 runs with 2 nodes")
