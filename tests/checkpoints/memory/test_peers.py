"""Agents that send each other parts of copies in memory, over real sockets."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, StoredFile, directory_name, encode
from elastic_ext.checkpoints.memory import contract, peers, wire
from elastic_ext.checkpoints.memory.contract import AgentGone, Send
from elastic_ext.checkpoints.memory.peers import Circle, PeerService
from elastic_ext.checkpoints.memory.wire import GET, PUT, PartAnswer, PartRequest, PeerError, TimedConnection
from elastic_ext.checkpoints.storage import Storage, open_storage
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.seam

STALL_S = wire.STALL_S
LONG_S = 600.0  # in place of each limit that a test is not about: a busy machine may take long
KEY = "the key of this round"
SIZE = 300_000


class Node:
    """One agent: two ranks, of which the first is twice its number."""

    def __init__(self, folder: Path, number: int, rate: float = 0.0) -> None:
        folder.mkdir()
        self.number, self.own = number, range(2 * number, 2 * number + 2)
        self.storage: Storage = open_storage(str(folder / "memory"))
        self.sent: list[int] = []
        self.not_sent = 0
        listening = socket.create_server(("127.0.0.1", 0))
        self.service = PeerService(listening, str(folder / "peers"), self.storage, rate, self)
        self.at = ("127.0.0.1", self.service.port)

    def part_sent(self, size: int | None) -> None:
        if size is None:
            self.not_sent += 1
        else:
            self.sent.append(size)

    def adopt(self, peer: tuple[str, int], key: str = KEY, limit: int = 100 * SIZE) -> None:
        self.service.adopt(Circle(key, peer, self.own, limit))

    def write(self, step: int, rank: int, size: int = SIZE) -> Send:
        """Write a part as a worker does; return what it then asks for."""
        data = (bytes([rank, step]) * size)[:size]
        path = Path(self.storage.path(f"{directory_name(step, 1)}/{memory_file(rank)}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        kept = directory_name(step - 1, 1)
        return Send(directory_name(step, 1), memory_file(rank), size, xxhash.xxh3_64_hexdigest(data), kept, LONG_S)

    def send(self, step: int, rank: int, size: int = SIZE) -> str:
        return contract.send(self.service.socket_path, self.write(step, rank, size))

    def files(self) -> list[str]:
        root = Path(self.storage.path("."))
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    limits = {wire: ("CONNECT_S", "STALL_S"), peers: ("ADOPT_S", "LIMIT_S"), contract: ("MARGIN_S",)}
    for owner, names in limits.items():
        for name in names:
            monkeypatch.setattr(owner, name, LONG_S)
    with ExitStack() as stack:

        def make(number: int, **options: float) -> Node:
            node = Node(tmp_path / str(number), number, **options)
            stack.callback(node.service.close)
            return node

        yield make


def paired(nodes: Callable[..., Node], **options: float) -> tuple[Node, Node]:
    """Two nodes of a round. options: of the first."""
    one, two = nodes(0, **options), nodes(1)
    one.adopt(two.at)
    two.adopt(one.at)
    return one, two


@pytest.fixture
def pair(nodes) -> tuple[Node, Node]:
    return paired(nodes)


def path(step: int, rank: int) -> str:
    return f"{directory_name(step, 1)}/{memory_file(rank)}"


def test_a_part_is_with_the_peer_whole_and_the_last_two_copies_only(pair):
    one, two = pair
    for step in (1, 2, 3):
        assert one.send(step, 0) == ""
        assert one.send(step, 1, size=wire.BLOCK + 17) == ""
    assert two.files() == [path(2, 0), path(2, 1), path(3, 0), path(3, 1)]
    assert Path(two.storage.path(path(3, 1))).read_bytes() == Path(one.storage.path(path(3, 1))).read_bytes()
    assert one.sent == [SIZE, wire.BLOCK + 17] * 3
    assert tiers.own_checkpoints(two.storage)[0] == directory_name(3, 1)


def test_no_more_than_the_limit_also_counting_what_is_there_at_the_start(pair):
    one, two = pair
    assert one.send(1, 0) == one.send(2, 0) == ""
    two.adopt(one.at, limit=2 * SIZE)  # the next round
    assert "memory_limit leaves 0 bytes" in one.send(2, 1)
    assert two.files() == [path(1, 0), path(2, 0)]
    one.adopt(two.at)
    assert one.send(3, 0) == ""  # copy 1 goes, 2 is kept
    assert two.files() == [path(2, 0), path(3, 0)]
    one.adopt(two.at)
    assert "a part of 600001 bytes" in one.send(3, 1, size=2 * SIZE + 1)


def test_what_still_comes_counts_until_it_ends(pair):
    one, two = pair
    two.adopt(one.at, limit=2 * SIZE)
    with call(two, PART) as stalled:
        assert one.send(3, 0) == ""
        assert "memory_limit leaves 0 bytes" in one.send(4, 0)
        stalled._sock.sendall(DATA)
        assert stalled.hear(PartAnswer).reason == ""
    assert two.files() == [path(1, 0), path(3, 0)]
    one.adopt(two.at)
    assert one.send(4, 0) == ""
    assert two.files() == [path(3, 0), path(4, 0)]


def test_a_service_that_cannot_begin_leaves_nothing_open(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(OSError):
            PeerService(listening, str(tmp_path / "none" / "peers"), open_storage(str(tmp_path)), 0.0, None)
        assert listening.fileno() == -1


def test_a_worker_has_an_answer_whatever_fails_in_the_agent(pair, monkeypatch, caplog):
    one, _ = pair
    monkeypatch.setattr(wire, "ask", None)
    assert one.send(1, 0) == "TypeError"
    assert "could not be sent" in caplog.text


def test_after_a_failure_nothing_is_sent_for_a_while(pair, monkeypatch, caplog):
    one, two = pair
    called, genuine = [], wire.connected
    monkeypatch.setattr(wire, "connected", lambda *args: called.append(args) or genuine(*args))
    monkeypatch.setattr(peers, "FIRST_PAUSE_S", peers.MAX_PAUSE_S)
    two.service.close()
    assert "refused" in one.send(1, 0)
    one.adopt(two.at)
    for _ in range(2):  # the second time as before, and nobody is called
        assert "refused" in one.send(1, 0)
        assert len(called) == 2
    assert one.not_sent == 3
    assert caplog.text.count("copies in memory are on this node only") == 2  # one for each round


GIVEN_UP = "too long|timed out"  # by whichever of its two limits; both end at the same moment


def test_a_peer_that_does_not_answer_costs_the_limit_and_no_more(pair):
    one, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one.adopt(("127.0.0.1", silent.getsockname()[1]))
        assert re.search(GIVEN_UP, contract.send(one.service.socket_path, replace(one.write(1, 0), limit_s=0.2)))


def test_an_own_agent_that_does_not_answer_is_another_matter_than_a_peer_that_does_not(pair):
    one, _ = pair
    wanted = one.write(1, 0)
    one.service.close()
    with pytest.raises(AgentGone, match="the agent does not answer"):
        contract.send(one.service.socket_path, wanted)


def test_strangers_block_neither_the_peer_nor_the_workers_of_the_node(pair):
    """Callers without a key that say nothing, more than are served at once."""
    one, two = pair
    with ExitStack() as stack:
        for _ in range(peers.UNPROVEN + peers.CONNECTIONS):
            stranger = stack.enter_context(wire.connected(two.at, float("inf")))
            stranger.hear(wire.ServerHello)  # it is being served
        assert one.send(1, 0) == ""
        assert two.send(1, 2) == ""


def waiting(node: Node, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set once a caller waits for the agent to adopt its round."""
    waits, callers = threading.Event(), node.service._callers
    genuine = callers.may_wait
    monkeypatch.setattr(callers, "may_wait", lambda sock: waits.set() or genuine(sock))
    return waits


def test_who_waits_for_an_unknown_round_goes_when_too_many_call(pair, monkeypatch):
    _, two = pair
    waits = waiting(two, monkeypatch)
    before = set(threading.enumerate())
    with ExitStack() as stack:
        first = stack.enter_context(wire.connected(two.at, float("inf")))
        first.hear(wire.ServerHello)
        (thread,) = set(threading.enumerate()) - before
        first.say(PartRequest(GET, directory_name(1, 1), MANIFEST, key_id="0" * 16))
        assert waits.wait(LIMIT_S)
        for _ in range(peers.UNPROVEN):
            stack.enter_context(wire.connected(two.at, float("inf"))).hear(wire.ServerHello)
        assert first._reader.read() == b""
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_caller_that_drips_is_not_heard_for_long(pair, monkeypatch):
    _, two = pair
    monkeypatch.setattr(wire, "STALL_S", 0.3)
    with socket.create_connection(two.at) as stranger:
        stranger.setblocking(False)

        def ended() -> bool:
            try:
                stranger.sendall(b" ")
                return not stranger.recv(1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError:  # it was ended while a byte was on its way
                return True

        until(ended, "the service ends the connection")


def test_an_agent_of_another_round_is_refused_and_one_that_is_early_waits(pair, monkeypatch):
    one, two = pair
    with monkeypatch.context() as patch:
        patch.setattr(peers, "ADOPT_S", 0.1)
        one.adopt(two.at, key="another key")
        assert "this node is not in that round" in one.send(1, 0)
    assert two.files() == []
    one.adopt(two.at, key="the next key")
    waits = waiting(two, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(one.send, 1, 0)
        assert waits.wait(LIMIT_S)
        two.adopt(one.at, key="the next key")
        assert said.result() == ""
    assert two.files() == [path(1, 0)]


def call(node: Node, asked: PartRequest, key: str = KEY) -> TimedConnection:
    """Ask as another agent; the connection is at the bytes of the file."""
    connection = wire.connected(node.at, float("inf"))
    wire.ask(connection, key, asked)
    return connection


DATA = b"x" * SIZE
CHECKSUM = xxhash.xxh3_64_hexdigest(DATA)
PART = PartRequest(PUT, directory_name(1, 1), memory_file(0), SIZE, CHECKSUM)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (replace(PART, file=memory_file(2)), "a part of this node"),
        (replace(PART, file=MANIFEST), "no part of a copy"),
        (replace(PART, file="rank_00000.pt"), "no part of a copy"),
        (replace(PART, file="rank_0.mem"), "no part of a copy"),
        (replace(PART, name=".."), "no part of a copy"),
        (PartRequest(GET, ".elastic_ext", MANIFEST), "no part of a copy"),
        (PartRequest(GET, directory_name(1, 1), ".."), "no part of a copy"),
        (replace(PART, size=0), "a part of 0 bytes"),
        (PartRequest(GET, directory_name(9, 1), memory_file(0)), "No such file"),
        (PartRequest("list", directory_name(1, 1), memory_file(0)), "unknown request"),
    ],
)
def test_what_is_refused(pair, asked, reason):
    _, two = pair
    with pytest.raises(PeerError, match=reason):
        call(two, asked)
    assert two.files() == []


def test_names_with_a_slash_are_no_messages(pair):
    _, two = pair
    with pytest.raises((ElasticExtError, OSError)):
        call(two, replace(PART, file="../rank_00000.mem"))
    assert two.files() == []


def test_without_the_key_nobody_gets_or_gives_anything(pair, monkeypatch):
    """The id of the key is no secret: it is not enough."""
    _, two = pair
    with wire.connected(two.at, float("inf")) as connection:
        connection.hear(wire.ServerHello)
        connection.say(replace(PART, key_id=wire.key_id(KEY), proof="0" * 64))
        assert "wrong proof" in connection.hear(PartAnswer).reason
    two.service.adopt(None)
    monkeypatch.setattr(peers, "ADOPT_S", 0.1)
    with pytest.raises(PeerError, match="not in that round"):
        wire.ask(wire.connected(two.at, float("inf")), KEY, PartRequest(GET, directory_name(1, 1), memory_file(0)))


@pytest.mark.parametrize("proof", ['"\u00e9"', '"\\ud800"'])
def test_a_proof_may_be_any_text(pair, caplog, proof):
    _, two = pair
    with wire.connected(two.at, float("inf")) as connection:
        connection.hear(wire.ServerHello)
        line = f'{{"schema": 1, "do": "put", "name": "a", "file": "b", "key_id": "{wire.key_id(KEY)}", "proof": {proof}}}\n'
        connection._sock.sendall(line.encode())
        assert "wrong proof" in connection.hear(PartAnswer).reason
    assert caplog.text == ""


@pytest.mark.parametrize("proof", ["0", "\u00e9"])
def test_a_server_without_the_key_gets_no_state(pair, proof):
    """An impostor that answers yes is not sent a byte."""
    one, _ = pair
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b'{"schema": 1, "nonce": "0"}\n')
                sock.recv(1 << 16)
                sock.sendall(f'{{"schema": 1, "reason": "", "size": 0, "proof": "{proof}"}}\n'.encode())
                got.append(sock.recv(1 << 16))

        thread = threading.Thread(target=serve)
        thread.start()
        one.adopt(("127.0.0.1", server.getsockname()[1]))
        assert "does not have the key" in one.send(1, 0)
        thread.join()
    assert got == [b""]


@pytest.mark.parametrize("how", ["cut", "damaged"])
def test_nothing_partial_is_ever_in_its_place(pair, how, caplog):
    _, two = pair
    connection = call(two, PART)
    if how == "cut":
        connection._sock.sendall(DATA[: SIZE // 2])
        connection._sock.shutdown(socket.SHUT_WR)
    else:
        connection._sock.sendall(b"y" + DATA[1:])
        assert "came with checksum" in connection.hear(PartAnswer).reason
    assert connection._reader.read() == b""  # it has given up
    connection.__exit__()
    assert two.files() == []
    with call(two, PART) as connection:  # and the room is free again
        connection._sock.sendall(DATA)
        assert connection.hear(PartAnswer).reason == ""
    assert two.files() == [path(1, 0)]
    assert caplog.text == ""  # it knew why it gave up


def test_a_next_round_ends_what_was_still_coming(pair):
    one, two = pair
    with call(two, PART) as connection:
        two.adopt(one.at, key="the next key")
        connection._sock.sendall(DATA)
        assert "No such file" in connection.hear(PartAnswer).reason
    assert two.files() == []


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_next_round_begins_whatever_was_still_coming(pair, monkeypatch, caplog, error):
    """The thread that writes it removes it at the same moment; or it cannot be removed."""
    one, two = pair
    genuine = os.unlink

    def unlink(*args, **options):
        if error is FileNotFoundError:
            genuine(*args, **options)
        raise error

    with call(two, PART):
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            two.adopt(one.at, key="the next key")
        assert ("could not be removed" in caplog.text) == (error is PermissionError)
    one.adopt(two.at, key="the next key")
    assert one.send(1, 0) == ""


def commit(node: Node, step: int, world: int) -> str:
    """Write the manifest of a copy on a node; return its digest."""
    folder = Path(node.storage.path(directory_name(step, 1)))
    files = [
        StoredFile(memory_file(rank), SIZE, xxhash.xxh3_64_hexdigest((bytes([rank, step]) * SIZE)[:SIZE]))
        for rank in range(world)
    ]
    data = encode(Manifest(step=step, generation=1, world_size=world, files=tuple(files), nodes=(2,) * (world // 2)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(data)
    return tiers.digest(data)


def test_a_replacement_gets_its_parts_from_the_peer_of_the_lost_node(nodes, pair):
    one, two = pair
    assert [two.send(5, rank) for rank in two.own] == ["", ""]
    for rank in one.own:
        one.write(5, rank)
    digest = commit(one, 5, 4)
    two.service.close()
    new = nodes(7)
    new.own = two.own
    for node, other in ((one, new), (new, one)):
        node.adopt(other.at, key="round 2")
    new.service.fetch(directory_name(5, 1), digest, {2: one.at, 3: one.at})
    assert new.files() == [f"{directory_name(5, 1)}/{MANIFEST}", path(5, 2), path(5, 3)]
    assert tiers.offers(new.storage)[0].ranks == (2, 3)
    assert tiers.offers(one.storage)[0].ranks == (0, 1, 2, 3)


def test_the_rate_limit_holds_up_no_replacement(nodes):
    one, two = paired(nodes, rate=1.0)
    one.write(5, 2)
    two.service.fetch(directory_name(5, 1), commit(one, 5, 4), {2: one.at})
    assert path(5, 2) in two.files()


@pytest.mark.full
def test_a_low_rate_is_no_silence(nodes, monkeypatch):
    """It takes six seconds, by a clock that no pause is waited for on, and a byte comes all the time."""
    pauses: list[float] = []
    one, _ = paired(nodes, rate=SIZE / 6)
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(pauses)))
    monkeypatch.setattr(one.service._pace, "_ended", SimpleNamespace(wait=pauses.append))
    began = time.monotonic()
    assert one.send(1, 0) == ""
    assert time.monotonic() - began + sum(pauses) > 5.5
    assert max(pauses) < STALL_S / 10


def test_a_low_rate_holds_up_no_worker(nodes):
    one, _ = paired(nodes, rate=1e-4)
    assert re.search(GIVEN_UP, contract.send(one.service.socket_path, replace(one.write(1, 0), limit_s=0.2)))


class Dripping:
    """A node of the round that sends one byte after the other, for hours; to be given up by who listens."""

    def __init__(self) -> None:
        self._server, self._done = socket.create_server(("127.0.0.1", 0)), threading.Event()
        self.at = ("127.0.0.1", self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        sock, _ = self._server.accept()
        with TimedConnection(sock, float("inf")) as connection, suppress(OSError):
            _, sign = wire.greet(connection, lambda _: KEY)
            connection.say(sign(PartAnswer(size=10 * SIZE)))
            while not self._done.wait(0.01):
                sock.sendall(b" ")

    def __enter__(self) -> Dripping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._server.close()


@pytest.mark.parametrize("why", ["the round is over", GIVEN_UP])
def test_a_fetch_from_a_node_that_drips_is_given_up(pair, monkeypatch, why):
    _, two = pair
    if why == GIVEN_UP:
        monkeypatch.setattr(peers, "LIMIT_S", 0.5)
    with Dripping() as node, pytest.raises((PeerError, TimeoutError), match=why):
        two.service.fetch(directory_name(5, 1), "0" * 64, {2: node.at}, lambda: why == "the round is over")


def test_what_is_damaged_or_another_copy_is_not_fetched(nodes, pair):
    one, two = pair
    assert two.send(5, 2) == ""
    digest = commit(one, 5, 4)
    with pytest.raises(PeerError, match="not the one that was chosen"):
        two.service.fetch(directory_name(5, 1), "0" * 64, {2: one.at})
    os.truncate(one.storage.path(path(5, 2)), SIZE - 1)
    two.storage.remove_tree(directory_name(5, 1))
    with pytest.raises(PeerError, match=f"has {SIZE - 1} bytes there, expected {SIZE}"):
        two.service.fetch(directory_name(5, 1), digest, {2: one.at})
    with pytest.raises(PeerError, match="no part of rank 4"):
        two.service.fetch(directory_name(5, 1), digest, {2: one.at, 4: one.at})
    Path(one.storage.path(path(5, 2))).write_bytes(DATA)
    with pytest.raises(PeerError, match="came with checksum"):
        two.service.fetch(directory_name(5, 1), digest, {2: one.at})
    with pytest.raises(PeerError, match="No such file"):
        two.service.fetch(directory_name(5, 1), digest, {3: one.at})
    assert two.files() == []


def test_the_limit_of_the_rate_is_asked_about_every_byte(pair, monkeypatch):
    one, _ = pair
    asked: list[int] = []
    monkeypatch.setattr(one.service._pace._bucket, "take", lambda size, now: asked.append(size) or 0.0)
    assert one.send(1, 0, size=wire.BLOCK + 5) == ""
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda rank: one.send(2, rank, wire.BLOCK), one.own)) == ["", ""]
    assert sum(one.sent) == sum(asked) == 3 * wire.BLOCK + 5


@pytest.mark.parametrize("lacks", ["descriptors", "threads"])
def test_it_listens_on_after_it_failed_a_caller(nodes, monkeypatch, caplog, lacks):
    monkeypatch.setattr(peers, "RETRY_S", 0.01)
    fails = [True]

    def or_fail(genuine, error):
        def tried(*args):
            with suppress(IndexError):  # it was another of these threads
                if threading.current_thread().name == "elastic_ext-peers":
                    fails.pop()
                    raise error
            return genuine(*args)

        return tried

    if lacks == "descriptors":
        monkeypatch.setattr(socket.socket, "accept", or_fail(socket.socket.accept, OSError(errno.EMFILE, "too many open files")))
    else:
        monkeypatch.setattr(threading.Thread, "start", or_fail(threading.Thread.start, RuntimeError("can't start new thread")))
    one, two = paired(nodes)
    while fails:
        with suppress(OSError), wire.connected(one.at, float("inf")) as caller:
            caller.hear(wire.ServerHello)
    assert one.send(1, 0) == two.send(1, 2) == ""
    assert caplog.text.count("for now") == 1


def test_a_closed_service_ends_its_threads(nodes):
    node = nodes(0)
    threads = [each for each in threading.enumerate() if each.name == "elastic_ext-peers"]
    node.service.close()
    for each in threads:
        each.join(LIMIT_S)
    assert not any(each.is_alive() for each in threads)
