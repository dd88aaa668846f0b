"""A drain on a real etcd, among nodes without workers: what happens in between neither loses it nor does it twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from elastic_ext.cli import requests
from elastic_ext.cli.requests import DrainOutcome, Ending
from elastic_ext.rendezvous import drains
from elastic_ext.rendezvous.drains import DrainRequest
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.participant import Participant
from elastic_ext.rendezvous.round_records import Header, Node, State
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import Dispatcher, HostRefused, NodeConfig
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


def ask(pool: ThreadPoolExecutor, client: EtcdClient, member: Member) -> Future[DrainOutcome]:
    """Have a node drained, and return once it knows."""
    told, request = threading.Event(), DrainRequest(member.id, "fan", 600)
    asking = pool.submit(lambda: requests.drain(client, "job", request, NEWS_S, lambda line: told.set()))
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

    def drain(self, host: str) -> Future[DrainOutcome]:
        return ask(self.pool, self.client, self.members["abcd".index(host)])


@pytest.fixture
def four(server: EtcdServer) -> Iterator[Four]:
    with ExitStack() as stack:
        yield Four(stack, server)


@pytest.mark.seam
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
