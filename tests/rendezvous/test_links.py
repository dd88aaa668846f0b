"""Links between agents: who is suspected, and who is declared dead. Real sockets, etcd, agents and workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elastic_ext.base import records
from elastic_ext.etcd import FROM_NOW, Unavailable, Watch
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous import handshake, links, presence, rounds
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.links import DEAD, LinkEnd, Links, Peer, Peers
from elastic_ext.rendezvous.presence import Standing, in_thread
from elastic_ext.rendezvous.round_records import Assignment, LinkPort, Node, RecordReader, encode
from elastic_ext.rendezvous.round_store import listen_at
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, descendants, stop_grace, wait_gone
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import Nodes, reports
from tests.until import until

KEYS = JobKeys("job")
WAIT_S = 60.0
CONFIRM_S = 0.3125  # the pause of watchers in which a node may answer; like no other pause


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 512])
def test_each_node_is_watched_by_two_others(nodes):
    order = [f"n{rank}" for rank in range(nodes)]
    watched = {id_: rounds.neighbors(rank, order) for rank, id_ in enumerate(order)}
    expected = min(nodes - 1, 2)
    assert all(id_ not in near and len(near) == expected for id_, near in watched.items())
    assert {sum(id_ in near for near in watched.values()) for id_ in order} == {expected}


class Messages(logging.Handler):
    """What the links log, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._queue.put(record.getMessage())

    def until(self, text: str, refused: str | None = None) -> str:
        """Return the next message with this text. refused: a text that none before it may have."""
        while text not in (message := self._queue.get(timeout=WAIT_S)):
            assert refused is None or refused not in message
        return message


@pytest.fixture
def messages() -> Iterator[Messages]:
    handler, loggers = Messages(), [logging.getLogger(module.__name__) for module in (links, presence)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield handler
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is: what follows from the end of a link is decided."""
    for name in ("SUSPECT_S", "DECIDE_S"):
        monkeypatch.setattr(links, name, 10 * WAIT_S)
    monkeypatch.setattr(links, "CALL_TIMEOUT_S", WAIT_S)


def instead_of_pauses(monkeypatch: pytest.MonkeyPatch, of_s: float, act: Callable[[], object]) -> None:
    """Have the links call this, on a thread of its own, where they would pause for so long."""
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        await (in_thread(act) if seconds == of_s else sleep(seconds))

    monkeypatch.setattr(links.asyncio, "sleep", pause)


def pauses(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[None]:
    """The pauses of watchers that try no longer in a hurry; they are short here."""
    found = queue.Queue[None]()
    monkeypatch.setattr(links, "RETRY_S", 10 * WAIT_S)
    instead_of_pauses(monkeypatch, links.RETRY_S, lambda: found.put(None))
    return found


@pytest.fixture
def answered(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Node b, which lives, has all the time that it needs to answer a doubt, and etcd to answer it."""
    monkeypatch.setattr(links, "CONFIRM_S", CONFIRM_S)
    monkeypatch.setattr(presence, "REACH_S", WAIT_S)
    with EtcdClient(server.endpoint) as client:
        instead_of_pauses(monkeypatch, CONFIRM_S, lambda: until(lambda: client.get(KEYS.doubt("b")).kv is None))
        yield


def stands_still(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Callable[[], object]:
    """Return what makes this module believe that a long time has passed."""
    passed: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed)))
    return lambda: passed.append(100 * WAIT_S)


class Deaf(Peers):
    """Of a node that hears of no doubts: it is frozen, or dead."""

    def answer(self, others: Collection[str] = ()) -> Standing:
        return Standing(False, frozenset(others))

    def watch_doubts(self, on_item: Callable[[Item], None]) -> Watch:
        return Watch(self._client, "/elsewhere", start_revision=FROM_NOW, callback=lambda item: None)


class Agent:
    """The links of one agent, and its record in etcd under its own lease.

    Attributes:
        reasons: why it has given up.
    """

    def __init__(self, stack: ExitStack, endpoint: str, name: str, answers: bool = True, kind: type[Peers] = Peers) -> None:
        """answers: it hears of doubts. kind: of its records."""
        self.client = stack.enter_context(EtcdClient(endpoint))
        self.name, self.reasons = name, queue.Queue[str]()
        self.lease = self.client.lease_grant(600).lease_id
        self.records = (kind if answers else Deaf)(self.client, KEYS, RecordReader(), name, lambda: self.lease)
        given_up = lambda reason, certain: self.reasons.put(f"{reason}, {certain}")  # noqa: E731
        self.links = Links("job", name, listen_at("127.0.0.1"), self.records, given_up)
        stack.callback(self.links.close)
        self.reached_at(self.links.port)

    def reached_at(self, port: int) -> None:
        node = Node(0, 1, "", "127.0.0.1", 1, link=LinkPort(port, self.links.key))
        self.client.put(KEYS.node(self.name), encode(node), lease_id=self.lease)

    def in_job(self) -> bool:
        return self.client.get(KEYS.node(self.name)).kv is not None


def linked(
    stack: ExitStack, endpoint: str, messages: Messages, second: str | None = None, **of_b: object
) -> tuple[Agent, Agent, Proxy]:
    """Return two agents, and what is between them: `a` keeps a link to `b`. second: another endpoint for `b`."""
    watching, watched = Agent(stack, endpoint, "a"), Agent(stack, second or endpoint, "b", **of_b)
    between = stack.enter_context(Proxy(watched.links.port))
    watched.reached_at(between.port)
    watching.links.follow(["b"])
    messages.until("linked to node b")
    return watching, watched, between


@pytest.mark.seam
@pytest.mark.usefixtures("answered")
def test_a_reset_between_living_hosts_costs_nothing(server, stack, messages):
    """The link and new connections are refused for a while: the node answers in etcd, and is watched again later."""
    _, watched, between = linked(stack, server.endpoint, messages)
    between.stop()
    messages.until("node b stays in the job")
    assert watched.in_job()
    assert watched.reasons.empty()
    between.start()
    messages.until("linked to node b")


@pytest.mark.full
def test_a_silent_node_is_taken_out_once(server, stack, messages):
    watching, watched, between = linked(stack, server.endpoint, messages, answers=False)
    between.stop()
    messages.until("node b counts as dead")
    assert not watched.in_job()
    # It lived after all, and learns of it. It comes back, and from now on only its lease tells.
    assert Peers.answer(watched.records).dead
    again = Agent(stack, server.endpoint, "b")
    for ids in ([], ["b"], ["c"]):
        watching.links.follow(ids)
    Agent(stack, server.endpoint, "c")
    messages.until("linked to node c")
    assert again.links.presence.incoming == 0


async def ends_without_a_goodbye(connection: socket.socket, agent: Agent, messages: Messages) -> None:
    """Take in a link for this agent, and end it as the kernel does for an agent that is killed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    _, welcome = await handshake.admit(reader, writer, "job", agent.name, agent.links.key)
    writer.write(welcome)
    await in_thread(lambda: messages.until(f"linked to node {agent.name}"))
    writer.close()
    await writer.wait_closed()


@pytest.mark.seam
def test_a_reset_while_connecting_is_no_refusal(monkeypatch):
    """The other host has taken the connection, so who held the port has ended since: this side may not know yet."""
    within, listening = presence.within, listen_at("127.0.0.1")

    async def ends_meanwhile(seconds: float, connecting: asyncio.Task[None]) -> None:
        begun = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(begun.set_result, None)  # after the task: on loopback, the kernel connects at once
        await begun
        listening.close()
        await within(seconds, connecting)

    monkeypatch.setattr(presence, "within", ends_meanwhile)
    peer = Peer("b", "127.0.0.1", listening.getsockname()[1], "key", created=1, lease_id=1)
    assert asyncio.run(links._connect(peer)) is LinkEnd.UNANSWERED


@pytest.mark.seam
def test_a_slow_reapers_end_shows_its_agents_death(server, stack, messages, monkeypatch):
    """It has the socket of the agent, as long as workers hold their devices: nobody links meanwhile, nor suspects."""
    later, reaper = stands_still(monkeypatch, links), stack.enter_context(listen_at("127.0.0.1"))
    watching, killed = Agent(stack, server.endpoint, "a"), Agent(stack, server.endpoint, "b", answers=False)
    killed.reached_at(reaper.getsockname()[1])
    watching.links.follow(["b"])
    reaper.settimeout(WAIT_S)
    connection, _ = reaper.accept()
    asyncio.run(ends_without_a_goodbye(connection, killed, messages))
    assert select.select([reaper], [], [], WAIT_S)[0], "nobody has connected again"
    later()
    reaper.close()
    messages.until("node b counts as dead")
    assert not killed.in_job()


@pytest.mark.seam
def test_a_node_cut_off_from_all_gives_up(server, stack, messages):
    to_etcd = stack.enter_context(Proxy(int(server.endpoint.rpartition(":")[2])))
    _, watched, between = linked(stack, server.endpoint, messages, second=to_etcd.endpoint)
    to_etcd.stop()
    between.stop()
    assert "etcd does not answer" in watched.reasons.get(timeout=WAIT_S)
    messages.until("node b counts as dead")


@pytest.mark.seam
@pytest.mark.usefixtures("answered")
def test_a_doubt_of_two_is_answered_for_both(server, stack, messages):
    _, watched, between = linked(stack, server.endpoint, messages)
    third = Agent(stack, server.endpoint, "c")
    third.links.follow(["b"])
    messages.until("linked to node b")
    between.stop()
    for _ in range(2):
        messages.until("node b stays in the job")
    assert watched.in_job()


@pytest.mark.seam
def test_nodes_that_die_together_are_all_missed(server, stack, messages):
    """Only a keeps a link to b. b kept those to c and d, and c that to e; d lives."""
    watching, _, between = linked(stack, server.endpoint, messages, answers=False)
    dead = [Agent(stack, server.endpoint, name, answers=False) for name in "ce"]
    alive = Agent(stack, server.endpoint, "d")
    for each in dead:
        each.reached_at(free_port())  # nothing listens there
    for name, near in {"b": ("c", "d", "a"), "c": ("e", "a")}.items():
        watching.client.put(KEYS.assignment(name), encode(Assignment(1, 0, 0, 0, 1, neighbors=near)))
    between.stop()
    for name in "bce":
        messages.until(f"node {name} counts as dead")
    assert [each.in_job() for each in dead] == [False, False]
    assert alive.in_job()
    assert watching.in_job()


@pytest.mark.seam
def test_a_node_linked_to_two_dead_is_checked(server, stack, messages):
    """Otherwise the second look would report that it stays in the job. The end of c comes last."""
    watching, _, between = linked(stack, server.endpoint, messages, answers=False)
    dead = [Agent(stack, server.endpoint, name, answers=False) for name in "cdefg"]
    for each in dead:
        each.reached_at(free_port())
    for name, near in {"b": ("d", "e"), "d": ("f",), "e": ("f",), "f": ("g",), "g": ("c",)}.items():
        watching.client.put(KEYS.assignment(name), encode(Assignment(1, 0, 0, 0, 1, neighbors=near)))
    between.stop()
    said = messages.until("node c counts as dead", refused="stays in the job")
    assert said.startswith(
        "elastic_ext: node c counts as dead and is out of the job: node g, which kept a link to it, has ended, and "
    )
    for each in dead:
        until(lambda each=each: not each.in_job())


@pytest.mark.seam
def test_a_row_of_dead_is_doubted_at_once(server, stack, messages, monkeypatch):
    """One after the other would take CONFIRM_S each, so that the time ends before the row: then only the leases show the rest."""
    monkeypatch.setattr(links, "CONFIRM_S", CONFIRM_S)
    watching, _, between = linked(stack, server.endpoint, messages, answers=False)
    row = "cdefghijkl"
    for each in [Agent(stack, server.endpoint, name, answers=False) for name in row]:
        each.reached_at(free_port())
    for name, following in zip("b" + row, row, strict=False):
        watching.client.put(KEYS.assignment(name), encode(Assignment(1, 0, 0, 0, 1, neighbors=(following,))))
    first = iter([True])
    all_doubted = functools.partial(until, lambda: all(watching.client.get(KEYS.doubt(name)).kv for name in row))
    instead_of_pauses(monkeypatch, CONFIRM_S, lambda: next(first, False) or all_doubted())
    between.stop()
    for _ in row:
        messages.until("counts as dead", refused="stays in the job")
    until(lambda: all(watching.client.get(KEYS.node(name)).kv is None for name in row))


@pytest.mark.seam
def test_two_doubting_nodes_take_out_one_together(server, stack):
    """A second doubt in place of the first would undo it, and the first, repeated, the second."""
    doubting = [Agent(stack, server.endpoint, name).records for name in "ac"]
    Agent(stack, server.endpoint, "b", answers=False)
    found = [(records, records.find("b")) for records in doubting]
    doubts = [records.doubt(peer, WAIT_S) for records, peer in found]
    assert doubts[0] == doubts[1]
    assert [records.remove(peer, doubt, WAIT_S) for (records, peer), doubt in zip(found, doubts, strict=True)] == [True, False]


@pytest.mark.seam
def test_a_node_declared_dead_can_be_doubted_again(server, stack):
    """It has registered again. What it was told before does not end its next round."""
    doubting = Agent(stack, server.endpoint, "a").records
    Agent(stack, server.endpoint, "b", answers=False)
    peer = doubting.find("b")
    assert doubting.remove(peer, doubting.doubt(peer, WAIT_S), WAIT_S)
    again = Agent(stack, server.endpoint, "b", answers=False)
    peer = doubting.find("b")
    assert doubting.remove(peer, doubting.doubt(peer, WAIT_S), WAIT_S)
    assert Peers.answer(again.records).dead
    assert not Peers.answer(again.records).dead


class Counting(Peers):
    """Counts the answers; the first one comes as the watch begins."""

    answers = 0

    def until_answered(self, count: int) -> None:
        until(lambda: self.answers == count and self._client.get(KEYS.doubt(self._node_id)).kv is None, f"{count} answers")

    def answer(self, others: Collection[str] = ()) -> Standing:
        self.answers += 1
        return super().answer(others)


@pytest.mark.seam
def test_a_doubt_is_answered_once(server, stack, messages):
    """Not again when the answer itself is told, and not for what was said of an earlier record."""
    watched = Agent(stack, server.endpoint, "b", kind=Counting)
    watched.records.since = 2
    watched.records.until_answered(1)
    for count, value in enumerate(["doubt", f"{DEAD} 1", "doubt"], 2):
        watched.client.put(KEYS.doubt("b"), value)
        watched.records.until_answered(count)
    assert watched.reasons.empty()


@pytest.mark.seam
@pytest.mark.usefixtures("answered")
def test_a_node_out_of_the_job_declares_none(server, stack):
    """Neither doubts it nor waits for it: see `Presence`."""
    doubting = Agent(stack, server.endpoint, "a")
    watched = Agent(stack, server.endpoint, "b", kind=Counting)
    watched.records.until_answered(1)
    peer = doubting.records.find("b")
    doubted = doubting.records.doubt(peer, WAIT_S)
    doubting.client.delete(KEYS.node("a"))
    watched.records.until_answered(2)
    watched.client.put(KEYS.doubt("b"), "doubt")
    assert doubting.records.doubt(peer, WAIT_S) != doubted
    assert not doubting.records.remove(peer, doubted, WAIT_S)
    watched.records.until_answered(3)
    assert doubting.records.doubt(peer, WAIT_S) is None
    linked_by_hand(watched, "a").close()
    until(lambda: watched.records.answers > 3 and not watched.links.presence._looking)
    assert watched.records.answers == 4


@pytest.mark.full
def test_a_reset_makes_nobody_a_suspect(server, stack, messages, monkeypatch):
    """A dead process closes its connections. Something on the way resets them, and may refuse others for a while."""
    paused = pauses(monkeypatch)
    _, watched, between = linked(stack, server.endpoint, messages, answers=False)
    between.reset()
    paused.get(timeout=WAIT_S)
    assert watched.in_job()


class Unanswered(Counting):
    """Etcd does not answer it any more, once `away` is there; until `over`."""

    away: threading.Event | None = None
    over: threading.Event

    def answer(self, others: Collection[str] = ()) -> Standing:
        if self.away is None:
            return super().answer(others)
        self.away.set()
        assert self.over.wait(WAIT_S)
        raise Unavailable("no endpoint answers")


@pytest.mark.full
def test_a_relinked_node_outlasts_an_absent_etcd(server, stack, messages, monkeypatch):
    """Something has reset all its connections. Without the first agent nobody could declare it dead."""
    monkeypatch.setattr(presence, "REACH_S", 2 * WAIT_S)
    watching, watched, between = linked(stack, server.endpoint, messages, kind=Unanswered)
    watched.records.until_answered(1)  # its watch of doubts has begun: that it asks from now on comes of its link
    watched.records.over = threading.Event()
    watched.records.away = asked = threading.Event()
    between.reset()
    between.start()
    messages.until("linked to node b")
    assert asked.wait(WAIT_S)
    watched.records.over.set()
    until(lambda: not watched.links.presence._looking)
    assert watched.reasons.empty()
    assert watching.in_job()


def linked_by_hand(agent: Agent, name: str) -> socket.socket:
    """A link from a node of this name."""

    async def greet() -> bool:
        reader, writer = await asyncio.open_connection(sock=link.dup())
        try:
            hello = handshake.Hello("job", name, agent.name, handshake.new_key())
            return await handshake.greet(reader, writer, hello, agent.links.key)
        finally:
            writer.close()

    link = socket.create_connection(("127.0.0.1", agent.links.port))
    assert asyncio.run(greet())
    return link


@pytest.mark.seam
def test_an_earlier_links_end_is_no_loss(server, stack, messages):
    to_etcd = stack.enter_context(Proxy(int(server.endpoint.rpartition(":")[2])))
    watched = Agent(stack, to_etcd.endpoint, "b")
    first, second = (stack.enter_context(linked_by_hand(watched, "a")) for _ in range(2))
    to_etcd.deaf()
    first.close()
    messages.until("node a has lost its link")
    assert not watched.links.presence._lost
    second.close()
    assert "etcd does not answer" in watched.reasons.get(timeout=WAIT_S)


@pytest.mark.full
def test_it_looks_until_it_cannot_be_declared_dead(server, stack, messages, monkeypatch):
    """Although etcd does not answer: the fence may not let it give up, because nobody reaches etcd."""
    monkeypatch.setattr(presence, "REACH_S", 0.1)
    monkeypatch.setattr(presence, "DOUBTED_S", 10 * WAIT_S)
    late = stands_still(monkeypatch, presence)
    to_etcd = stack.enter_context(Proxy(int(server.endpoint.rpartition(":")[2])))
    watched = Agent(stack, to_etcd.endpoint, "b")
    link = linked_by_hand(watched, "a")
    to_etcd.deaf()
    link.close()
    for _ in range(3):
        assert "etcd does not answer" in watched.reasons.get(timeout=WAIT_S)
    late()
    until(lambda: not watched.links.presence._looking)


@pytest.mark.seam
def test_a_node_registered_again_is_missed_as_soon(server, stack, messages):
    """Its lease had ended in an outage; the link lasted."""
    _, watched, between = linked(stack, server.endpoint, messages, answers=False)
    watched.client.lease_revoke(watched.lease)
    watched.lease = watched.client.lease_grant(60).lease_id
    watched.reached_at(between.port)
    between.stop()
    messages.until("node b counts as dead")


@pytest.mark.seam
def test_a_decision_that_comes_too_late_is_dropped(server, stack, messages, monkeypatch):
    """The other node stops looking for it."""
    monkeypatch.setattr(links, "CONFIRM_S", CONFIRM_S)
    instead_of_pauses(monkeypatch, CONFIRM_S, stands_still(monkeypatch, links))
    _, watched, between = linked(stack, server.endpoint, messages, answers=False)
    between.stop()
    messages.until("node b stays in the job")
    assert watched.in_job()


@pytest.mark.seam
def test_a_goodbye_is_no_suspicion(server, stack, messages):
    _, watched, _ = linked(stack, server.endpoint, messages, answers=False)
    watched.links.close()
    messages.until("node b left on purpose")
    assert watched.in_job()


@pytest.mark.seam
def test_an_earlier_rounds_neighbor_is_no_suspicion(server, stack, messages):
    watching, watched, _ = linked(stack, server.endpoint, messages)
    watching.links.follow([])
    messages.until("node a has ended its link")
    assert watched.reasons.empty()


@pytest.mark.seam
@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 100_000,
        b'{"schema": 1, "job": "other", "node": "a", "to": "b"}\n',
        b'{"schema": 1, "job": "job", "node": "a", "to": "somebody"}\n',
        b'{"schema": 2, "job": "job", "node": "a", "to": "b"}\n',
        b"[" * 1500 + b"\n",
    ],
    ids=["nothing", "http", "much", "other-job", "other-node", "other-version", "deep"],
)
def test_a_stranger_is_sent_away(server, stack, messages, line):
    agent = Agent(stack, server.endpoint, "b")
    with socket.create_connection(("127.0.0.1", agent.links.port)) as stranger:
        stranger.settimeout(WAIT_S)
        try:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(100):
                pass  # an agent that expects another node is told who is here
        except ConnectionError:
            pass  # closed before all was read
    messages.until("a connection from outside ended")
    assert agent.reasons.empty()


def stranger(agent: Agent) -> socket.socket:
    """A connection of somebody without a key."""
    connection = socket.create_connection(("127.0.0.1", agent.links.port))
    connection.settimeout(WAIT_S)
    return connection


@pytest.mark.seam
def test_idle_strangers_make_room(server, stack, messages, monkeypatch):
    monkeypatch.setattr(presence, "HELLO_TIMEOUT_S", 10 * WAIT_S)
    agent = Agent(stack, server.endpoint, "b")
    idle = [stack.enter_context(stranger(agent)) for _ in range(3 * presence.MAX_UNPROVED)]
    first = Agent(stack, server.endpoint, "a")
    first.links.follow(["b"])
    messages.until("linked to node b")
    # They take no room from a link that is there, either.
    idle += [stack.enter_context(stranger(agent)) for _ in range(2 * presence.MAX_UNPROVED)]
    first.links.follow([])
    messages.until("node a has ended its link", refused="lost its link")


class RawLink:
    """A link to b, made step by step. node: who it says that it is."""

    def __init__(self, agent: Agent, node: str, address: str = "127.0.0.1") -> None:
        self._hello, self._key = handshake.Hello("job", node, "b", "nonce"), agent.links.key
        self.connection = socket.create_connection(("127.0.0.1", agent.links.port), WAIT_S, source_address=(address, 0))
        self._lines = self.connection.makefile("rb")
        self._challenge = records.read(handshake.Challenge, self._lines.readline(), "a challenge", handshake.SCHEMA)

    def prove(self) -> RawLink:
        proof = handshake._proof(self._key, handshake._CONNECTING, self._challenge, self._hello)
        self.connection.sendall(handshake._line(replace(self._hello, proof=proof)))
        assert len(self._lines.readline()) == 65, "it counts as a link"
        return self

    def is_reset(self) -> bool:
        """Whether the other side ends it, and how: a node that it resets makes itself suspect to no other."""
        with pytest.raises(ConnectionResetError):
            self._lines.readline()
        return True

    def __enter__(self) -> RawLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lines.close()
        self.connection.close()


CROWD = "127.0.0.2"  # another host than that of the node


@pytest.mark.seam
def test_a_crowd_takes_no_neighbors_place(server, stack, messages, monkeypatch):
    """Before a slow node has proved itself, more others come than there are places."""
    monkeypatch.setattr(presence, "HELLO_TIMEOUT_S", 10 * WAIT_S)
    agent = Agent(stack, server.endpoint, "b")
    slow = stack.enter_context(RawLink(agent, "a"))
    for number in range(3 * presence.MAX_UNPROVED):
        stack.enter_context(RawLink(agent, f"made-up-{number}", CROWD))
    slow.prove()


@pytest.mark.seam
def test_links_of_one_host_make_room(server, stack, messages):
    """Also of one that reads the job's records, so that each of its links counts: that it has to go is no loss of a link."""
    agent = Agent(stack, server.endpoint, "b")
    neighbor = stack.enter_context(RawLink(agent, "a")).prove()
    crowd = [stack.enter_context(RawLink(agent, f"made-up-{n}", CROWD)).prove() for n in range(presence.MAX_LINKS - 1)]
    stack.enter_context(RawLink(agent, "c")).prove()
    assert crowd[0].is_reset()
    stack.enter_context(RawLink(agent, "made-up", CROWD)).prove()
    assert crowd[1].is_reset()
    assert agent.links.presence.incoming == presence.MAX_LINKS
    assert not agent.links.presence._lost
    neighbor.connection.shutdown(socket.SHUT_WR)
    messages.until("node a has lost its link")
    until(lambda: "a" not in agent.links.presence._open, "no name is kept that has no link")


@pytest.mark.seam
def test_an_idle_stranger_does_not_stay(server, stack, messages, monkeypatch):
    monkeypatch.setattr(presence, "HELLO_TIMEOUT_S", 0.2)
    with stranger(Agent(stack, server.endpoint, "b")) as idle, contextlib.suppress(ConnectionError):
        while idle.recv(1000):
            pass


def made_up(number: int) -> Iterator[bytes]:
    """What a stranger can send who knows the job, in each version of the protocol: a name for every line."""
    yield b'{"schema": 1, "job": "job", "node": "made-up-%d", "to": "b"}\n' % number
    yield b'{"schema": 2, "job": "job", "node": "made-up-%d", "to": "b", "nonce": "n", "proof": "%064d"}\n' % (number, number)


@pytest.mark.seam
def test_strangers_ends_are_no_losses(server, stack, messages):
    """The store does not answer meanwhile: after the end of a link of the job, that would count."""
    to_etcd = stack.enter_context(Proxy(int(server.endpoint.rpartition(":")[2])))
    agent = Agent(stack, to_etcd.endpoint, "b", kind=Counting)
    agent.records.until_answered(1)
    to_etcd.deaf()
    for line in (line for number in range(100) for line in made_up(number)):
        with stranger(agent) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(line)
            while connection.recv(1000):
                pass
        messages.until("a connection from outside ended", refused="lost its link")
    assert agent.reasons.empty()
    assert not agent.links.presence._lost
    assert agent.records.answers == 1


@pytest.mark.seam
def test_no_request_grows_with_lost_links(server, stack):
    """Etcd takes no more than 128 operations; who is not asked for may still declare this node dead."""
    names = ["a", *(f"gone-{number}" for number in range(500))]
    records = [Agent(stack, server.endpoint, name).records for name in "ab"][1]
    assert records.answer(names).in_job == {"a", *names[links.MOST_ASKED :]}


# Real agents.


CONF = "lease_ttl=300,last_call_timeout=30"  # the lease is longer than a test may take


UNHURRIED = "from elastic_ext.rendezvous import links\nlinks.SUSPECT_S = links.DECIDE_S = 600.0\n"


@pytest.fixture
def unhurried_agents(tmp_path: Path) -> dict[str, str]:
    """Variables of agents that decide on a lost link, however busy this machine is."""
    (tmp_path / "sitecustomize.py").write_text(UNHURRIED)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))}


def die_whole(pid: int) -> None:
    """Kill an agent and all that it has started, its reaper too, so that none of them can act in between."""
    pids = descendants(pid)
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for each in pids:
            os.kill(each, sig)


@pytest.mark.seam
def test_a_wholly_dead_node_is_missed_early(server: EtcdServer, nodes: Nodes, unhurried_agents: dict[str, str]) -> None:
    jobs = [nodes.start(name, server.endpoint, "2:3", conf=CONF, **unhurried_agents) for name in "abc"]
    nodes.wait_for(r'"world": 3')
    die_whole(jobs.pop().process.pid)
    nodes.wait_for(r'"world": 2', "ab")
    assert "counts as dead" in "".join(job.err for job in jobs)
    nodes.finish("ab")


@pytest.mark.full
def test_a_killed_agents_reaper_gets_its_time(server: EtcdServer, nodes: Nodes, unhurried_agents: dict[str, str]) -> None:
    """It kills the workers before the others go on: as long as it lives, nobody declares the node dead."""
    jobs = [nodes.start(name, server.endpoint, "1:2", conf=CONF, **unhurried_agents) for name in "ab"]
    nodes.wait_for(r'"world": 2')
    (worker,) = [line["pid"] for line in reports(jobs[0]) if line["world"] == 2]
    (reaper,) = [pid for pid in descendants(jobs[0].process.pid) if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(reaper, signal.SIGSTOP)
    jobs[0].process.kill()
    assert wait_gone([worker], timeout_s=2) == [worker], "without its reaper nobody kills it"
    assert "taken for dead" not in jobs[1].err
    os.kill(reaper, signal.SIGCONT)
    jobs[1].wait_for(r'"world": 1, "attempt": [1-9]')
    assert wait_gone([worker], timeout_s=0) == []
    assert "taken for dead" not in jobs[1].err
    nodes.finish("b")


@pytest.mark.full
def test_a_wrongly_declared_node_kills_its_workers(server: EtcdServer, nodes: Nodes, tmp_path: Path) -> None:
    """Not with the usual grace: the others may have begun the next round."""
    patient = {"conf": CONF, "PET_SHUTDOWN_TIMEOUT": "600", **stop_grace(tmp_path, 600)}
    jobs = [nodes.start("a", server.endpoint, "1:2", conf=CONF), nodes.start("b", server.endpoint, "1:2", "deaf:0", **patient)]
    nodes.wait_for(r'"world": 2')
    (worker,) = [line["pid"] for line in reports(jobs[1]) if line["world"] == 2]
    with EtcdClient(server.endpoint) as client:
        ids = [kv.key.decode().rpartition("/")[2] for kv in client.get_prefix(KEYS.nodes).kvs]
        other, wrong = (next(id_ for id_ in ids if f"-{job.process.pid}-" in id_) for job in jobs)
        records = Peers(client, KEYS, RecordReader(), other, lambda: client.lease_grant(60).lease_id)
        peer = records.find(wrong)
        assert peer is not None
        os.kill(jobs[1].process.pid, signal.SIGSTOP)
        doubted = records.doubt(peer, WAIT_S)
        assert doubted is not None
        assert records.remove(peer, doubted, WAIT_S)
        os.kill(jobs[1].process.pid, signal.SIGCONT)
    assert wait_gone([worker]) == []
    # As it goes on, it may hear first of the round's end, and that its record was deleted.
    jobs[1].wait_for("may continue without this one: another node has declared this one dead|round 1 is over: lost node")
    nodes.wait_for(r'"world": 2, "attempt": [1-9]')
    nodes.finish()
