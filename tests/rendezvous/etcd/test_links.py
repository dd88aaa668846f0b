"""Links between agents: who is suspected, and who is declared dead. Real sockets, etcd, agents and workers."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.etcd import links
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.links import presence
from elastic_ext.rendezvous.etcd.links.links import Links, listening
from elastic_ext.rendezvous.etcd.links.suspects import Peer, Peers, judge
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.round_records import Node, encode
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.jobs import wait_gone
from tests.rendezvous.etcd.test_etcd_jobs import Nodes, reports

KEYS = JobKeys("job")
PEER = Peer("b", "127.0.0.1", 4000, signs=2, created=7, lease_id=1)
WAIT_S = 30.0


@pytest.mark.parametrize(
    ("found", "dead"),
    [(PEER, True), (replace(PEER, signs=3), False), (replace(PEER, created=8), False), (None, False)],
    ids=["silent", "sign", "registered-again", "left"],
)
def test_only_a_node_that_writes_nothing_is_dead(found, dead):
    assert judge(PEER, found).dead is dead


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 512])
def test_each_node_is_watched_by_others_and_far_apart(nodes):
    order = [f"n{rank}" for rank in range(nodes)]
    watched = {id_: rounds.neighbors(rank, order) for rank, id_ in enumerate(order)}
    for id_, near in watched.items():
        assert id_ not in near
        assert len(near) == min(nodes - 1, 1 if nodes < 4 else 2)
    times = [sum(id_ in near for near in watched.values()) for id_ in order]
    assert set(times) == {min(nodes - 1, 1 if nodes < 4 else 2)}


class Messages(logging.Handler):
    """What the links log, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._queue.put(record.getMessage())

    def until(self, text: str) -> str:
        while text not in (message := self._queue.get(timeout=WAIT_S)):
            pass
        return message


@pytest.fixture
def messages() -> Iterator[Messages]:
    logger = logging.getLogger(links.__name__)
    handler, before = Messages(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Agent:
    """The links of one agent, and its record in etcd under its own lease. signs: it shows that it lives."""

    def __init__(self, stack: ExitStack, endpoint: str, name: str, signs: bool = True) -> None:
        self.client = stack.enter_context(EtcdClient(endpoint))
        self.name, self.doubts = name, queue.Queue[int]()
        self.shows_signs = signs
        self._node = Node(0, 1, "", "127.0.0.1", 1)
        self._lease = self.client.lease_grant(60).lease_id
        self.links = Links("job", name, listening("127.0.0.1"), Peers(self.client, KEYS, RecordReader()), self._doubted)
        stack.callback(self.links.close)
        self.reached_at(self.links.port)

    def reached_at(self, port: int) -> None:
        self._node = replace(self._node, link_port=port)
        self._write()

    def _write(self) -> None:
        self.client.put(KEYS.node(self.name), encode(self._node), lease_id=self._lease)

    def _doubted(self, signs: int) -> None:
        if self.shows_signs:
            self._node = replace(self._node, signs=signs)
            self._write()
        self.doubts.put(signs)

    def in_job(self) -> bool:
        return self.client.get(KEYS.node(self.name)).kv is not None


def linked(stack: ExitStack, endpoint: str, messages: Messages, signs: bool = True) -> tuple[Agent, Agent, Proxy]:
    """Return two agents, and what is between them: `first` keeps a link to `second`."""
    first, second = Agent(stack, endpoint, "a"), Agent(stack, endpoint, "b", signs)
    between = stack.enter_context(Proxy(second.links.port))
    second.reached_at(between.port)
    first.links.follow(["b"])
    messages.until("linked to node b")
    return first, second, between


def test_a_reset_between_living_hosts_costs_nothing(server, stack, messages):
    """Both the connection and new ones are refused for a while: the node writes to etcd, and that is enough."""
    _, second, between = linked(stack, server.endpoint, messages)
    between.stop()
    messages.until("so it lives")
    assert second.in_job()
    assert second.doubts.qsize() == 1


def test_a_link_that_was_reset_comes_back(server, stack, messages):
    first, second, between = linked(stack, server.endpoint, messages)
    between.stop()
    between.start()
    messages.until("linked to node b")
    assert second.in_job()
    first.links.close()
    messages.until("node a has ended its link")


def test_an_old_sign_does_not_hide_a_death(server, stack, messages):
    """The node has shown that it lives when another of its links ended. This link must know of it."""
    _, second, between = linked(stack, server.endpoint, messages)
    other = stack.enter_context(Proxy(second.links.port))
    second.reached_at(other.port)
    third = Agent(stack, server.endpoint, "c")
    third.links.follow(["b"])
    messages.until("linked to node b")
    other.stop()
    messages.until("so it lives")
    second.shows_signs = False
    between.stop()
    messages.until("node b is dead")


def test_a_node_that_writes_nothing_is_taken_out_once(server, stack, messages):
    first, second, between = linked(stack, server.endpoint, messages, signs=False)
    lease = second.client.get(KEYS.node("b")).kv.lease_id
    between.stop()
    messages.until("node b is dead")
    with second.client.watch(KEYS.node("b")) as events:
        while second.in_job():
            assert events.get(WAIT_S) is not None
    assert second.client.lease_ttl(lease) == -1
    # It lived after all. It comes back, and from now on only its lease tells.
    third = Agent(stack, server.endpoint, "b")
    first.links.follow([])
    first.links.follow(["b"])
    first.links.follow(["c"])
    messages.until("no record of node c")
    assert third.links.presence.incoming == 0


def test_a_goodbye_is_no_suspicion(server, stack, messages):
    first, second, _ = linked(stack, server.endpoint, messages, signs=False)
    second.links.close()
    messages.until("node b left on purpose")
    assert second.in_job()
    assert first.doubts.empty()


def test_a_neighbor_of_an_earlier_round_is_no_suspicion(server, stack, messages):
    first, second, _ = linked(stack, server.endpoint, messages)
    first.links.follow([])
    messages.until("node a has ended its link")
    assert second.doubts.empty()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 100_000,
        b'{"schema": 1, "job": "other", "node": "a", "to": "b", "signs": 0}\n',
        b'{"schema": 1, "job": "job", "node": "a", "to": "somebody", "signs": 0}\n',
        b'{"schema": 2, "job": "job", "node": "a", "to": "b", "signs": 0}\n',
        b"[" * 1500 + b"\n",
    ],
    ids=["nothing", "http", "much", "other-job", "other-node", "other-version", "deep"],
)
def test_a_stranger_raises_no_doubt(server, stack, messages, line):
    agent = Agent(stack, server.endpoint, "b")
    with socket.create_connection(("127.0.0.1", agent.links.port)) as stranger:
        stranger.settimeout(WAIT_S)
        try:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
        except ConnectionError:
            pass  # closed before all was read
    messages.until("a connection from outside ended")
    assert agent.doubts.empty()


def test_idle_strangers_take_no_room_for_ever(server, stack, messages, monkeypatch):
    monkeypatch.setattr(presence, "HELLO_TIMEOUT_S", 0.2)
    agent = Agent(stack, server.endpoint, "b")
    idle = [
        stack.enter_context(socket.create_connection(("127.0.0.1", agent.links.port))) for _ in range(presence.MAX_INCOMING + 5)
    ]
    for each in idle:
        each.settimeout(WAIT_S)
        assert each.recv(100) == b""
    first = Agent(stack, server.endpoint, "a")
    first.links.follow(["b"])
    messages.until("linked to node b")


# Real agents.


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


def die_whole(pid: int) -> list[int]:
    """Kill an agent and all that it has started, its reaper too, so that none of them can act in between."""
    pids = descendants(pid)
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for each in pids:
            os.kill(each, sig)
    return pids


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_node_that_dies_whole_is_missed_long_before_its_lease_ends(server, nodes, role):
    """The lease of 300 s is longer than this test may take."""
    conf = "lease_ttl=300,last_call=30,stop_grace=2"
    first = nodes.start("a", server.endpoint, "2:3", conf=conf)
    others = [nodes.start(name, server.endpoint, "2:3", conf=conf) for name in "bc"]
    jobs = [first, *others]
    for job in jobs:
        job.wait_for(r'"world": 3')
    dying = first if role == "leader" else others[1]
    die_whole(dying.process.pid)
    left = [job for job in jobs if job is not dying]
    for job in left:
        job.wait_for(r'"world": 2')
    assert "is dead: its link has ended" in "".join(job.err for job in left)
    nodes.open_gate()
    assert [job.finish().returncode for job in left] == [0, 0]


def test_the_reaper_of_a_killed_agent_is_given_its_time(server, nodes):
    """It kills the workers before the others go on: as long as it lives, nobody declares the node dead."""
    conf = "lease_ttl=300,last_call=30,stop_grace=2"
    jobs = [nodes.start(name, server.endpoint, "1:2", conf=conf) for name in "ab"]
    for job in jobs:
        job.wait_for(r'"world": 2')
    (worker,) = [line["pid"] for line in reports(jobs[0]) if line["world"] == 2]
    (reaper,) = [pid for pid in descendants(jobs[0].process.pid) if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(reaper, signal.SIGSTOP)
    jobs[0].process.kill()
    assert wait_gone([worker], timeout_s=2) == [worker], "without its reaper nobody kills it"
    assert "is dead" not in jobs[1].err
    os.kill(reaper, signal.SIGCONT)
    jobs[1].wait_for(r'"world": 1, "attempt": [1-9]')
    assert wait_gone([worker], timeout_s=0) == []
    assert "is dead" not in jobs[1].err
    nodes.open_gate()
    assert jobs[1].finish().returncode == 0
