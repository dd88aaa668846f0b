"""One node's files over real sockets on loopback."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.base import records
from elastic_ext.checkpoints.sharing import catalogue, part_requests, part_server, peers
from elastic_ext.checkpoints.sharing.all_nodes import AllNodes
from elastic_ext.checkpoints.sharing.catalogue import catalogue_of
from elastic_ext.checkpoints.sharing.fetching import fetch
from elastic_ext.checkpoints.sharing.part_requests import MAX_LINE, SCHEMA, Asked, PartAnswer, PartGreeting, PartRequest
from elastic_ext.checkpoints.sharing.part_server import PartServer
from elastic_ext.checkpoints.sharing.peers import NodePeer
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.choice.scenes import put, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes
from tests.until import until

pytestmark = pytest.mark.seam
SECRET = "a secret of the job"
LARGE = 64 << 20  # bytes: more than the buffers of both sockets


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


@pytest.fixture
def server(directory: Path) -> Iterator[PartServer]:
    made = PartServer(LocalStorage(str(directory)), "127.0.0.1", SECRET, "127.0.0.1")
    yield made
    made.close()


def peer_of(server: PartServer, secret: str = SECRET) -> NodePeer:
    return NodePeer(server.place, secret, node=3)


def read(server: PartServer, name: str, size: int) -> bytes:
    with peer_of(server).open(name, size) as file:
        return file.read()


def test_a_catalogue_comes_over_the_wire(server: PartServer, directory: Path) -> None:
    saved(directory / "step_10" / "model.pt")
    assert peer_of(server).catalogue(time.monotonic() + 60) == catalogue_of(LocalStorage(str(directory)))


READS = ((0, 0, 10), (-22, 2, 22), (-3000, 2, 2500), (5, 1, 7), (0, 0, -1), (12_340, 0, 99), (990, 0, 20))


def test_a_remote_file_reads_as_a_local_one(server: PartServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BLOCK", 1000)
    data = os.urandom(12_345)
    put(directory / "step_10" / "a.bin", data)
    with open(directory / "step_10" / "a.bin", "rb") as local, peer_of(server).open("step_10/a.bin", len(data)) as remote:
        for offset, whence, count in (
            (0, 0, 10),
            (-22, 2, 22),
            (-3000, 2, 2500),
            (5, 1, 7),
            (0, 0, -1),
            (12_340, 0, 99),
            (990, 0, 20),
        ):
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            assert remote.read(count) == local.read(count)
            assert remote.tell() == local.tell()


def test_a_zip_archive_is_read_from_its_end(server: PartServer, directory: Path) -> None:
    with zipfile.ZipFile(directory / "a.zip", "w") as archive:
        archive.writestr("big", bytes(5_000_000))
        archive.writestr("small", b"123")
    size = (directory / "a.zip").stat().st_size
    with peer_of(server).open("a.zip", size) as file, zipfile.ZipFile(file) as archive:
        assert archive.read("small") == b"123"
        assert archive.testzip() is None


def test_large_files_arrive_whole(server: PartServer, directory: Path, tmp_path: Path) -> None:
    """100 MB, by four connections at once."""
    for number in range(4):
        (directory / f"{number}").write_bytes(os.urandom(1 << 20) * 25)
    peer = peer_of(server)

    def get(number: int) -> None:
        with open(tmp_path / f"got_{number}", "wb") as file:
            peer.copy(f"{number}", 25 << 20, file)

    threads = [threading.Thread(target=get, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number in range(4):
        assert digest(tmp_path / f"got_{number}") == digest(directory / f"{number}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_empty_file_is_served(server: PartServer, directory: Path) -> None:
    put(directory / "empty", b"")
    assert read(server, "empty", 0) == b""


OUT = ("up", "root", "away/secret", ".elastic_ext/saves/000001.00000001.a", ".elastic_ext", "marks/000001.00000001.a", "held_up")


@pytest.mark.parametrize("name", OUT)
def test_nothing_outside_is_served(server: PartServer, directory: Path, name: str) -> None:
    put(directory.parent / "secret", b"12345")
    put(directory / ".elastic_ext/saves/000001.00000001.a", b"12345")
    (directory / ".elastic_ext/held").mkdir()
    (directory / "up").symlink_to("../secret")
    (directory / "root").symlink_to("/etc/passwd")
    (directory / "away").symlink_to("..")
    (directory / "marks").symlink_to(".elastic_ext/saves")
    (directory / "held_up").symlink_to(".elastic_ext/held/../saves/000001.00000001.a")
    with pytest.raises(PermissionError, match=r"node 3 at 127.0.0.1: it is not below the directory"):
        read(server, name, 5)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "step_10/../../secret", "", "."])
def test_a_strange_path_is_not_looked_at(server: PartServer, directory: Path, name: str) -> None:
    """The connection ends: no client of ours asks for it."""
    put(directory.parent / "secret", b"12345")
    with pytest.raises(OSError):
        read(server, name, 5)


@pytest.mark.parametrize("name", ["none", "pipe", "folder"])
def test_only_regular_files_are_served(server: PartServer, directory: Path, name: str) -> None:
    os.mkfifo(directory / "pipe")
    (directory / "folder").mkdir()
    with pytest.raises(FileNotFoundError if name == "none" else OSError):
        read(server, name, 5)


def test_what_lies_within_is_served(server: PartServer, directory: Path) -> None:
    put(directory / ".elastic_ext/held/000001/step_10/a.pt", b"12345")
    put(directory / "step_10" / "b.pt", b"12345")
    (directory / "latest").symlink_to("step_10")
    (directory / "step_10" / "c.pt").symlink_to("../.elastic_ext/held/000001/step_10/a.pt")
    for name in (".elastic_ext/held/000001/step_10/a.pt", "latest/b.pt", "step_10/c.pt"):
        assert read(server, name, 5) == b"12345"


def test_a_directory_behind_a_link_is_served(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    put(directory / "a.pt", b"12345")
    server = PartServer(LocalStorage(str(tmp_path / "link")), "127.0.0.1", SECRET, "127.0.0.1")
    assert read(server, "a.pt", 5) == b"12345"
    server.close()


# Who may ask, and whom to believe.


@pytest.mark.parametrize("wrong", ["key", "secret", "no secret", "host"])
def test_a_stranger_reads_nothing(server: PartServer, directory: Path, wrong: str) -> None:
    """By another host: whoever passes all on from an address of his own, that he has given to the client."""
    put(directory / "a.pt", b"12345")
    changes = {"key": {"key": "0" * 32}, "host": {"host": "localhost"}}.get(wrong, {})
    secret = {"secret": "another secret", "no secret": ""}.get(wrong, SECRET)
    peer = NodePeer(replace(server.place, **changes), secret, node=3)
    for ask in (lambda: peer.catalogue(time.monotonic() + 60), lambda: peer.open("a.pt", 5).read(1)):  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError, match=r"node 3 at .* has closed the connection"):
            ask()


def test_without_a_secret_the_key_counts(directory: Path) -> None:
    put(directory / "a.pt", b"12345")
    server = PartServer(LocalStorage(str(directory)), "127.0.0.1", "", "127.0.0.1")
    with NodePeer(server.place).open("a.pt", 5) as file:
        assert file.read() == b"12345"
    with pytest.raises(ConnectionError):
        NodePeer(server.place, SECRET).catalogue(time.monotonic() + 60)
    server.close()


class Impostor:
    """Answers each connection with these bytes, a line of the client's after the first."""

    def __init__(self, *lines: bytes) -> None:
        self._lines = lines
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, client.makefile("rb") as read:
                for line in self._lines:
                    client.sendall(line)
                    read.readline()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


GREETING = records.encode(PartGreeting("0" * 32), SCHEMA).encode() + b"\n"


def answer(**fields: object) -> bytes:
    return records.encode(PartAnswer(**fields), SCHEMA).encode() + b"\n"  # type: ignore[arg-type]


WRONG = {
    "no proof": (GREETING, answer(size=5, whole=5) + b"12345"),
    "a made-up proof": (GREETING, answer(size=5, whole=5, proof="0" * 64) + b"12345"),
    "an error without a proof": (GREETING, answer(number=2, text="not there")),
    "no answer": (GREETING,),
    "nothing": (),
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
    "another version": (GREETING.replace(b'"schema":1', b'"schema":2'),),
    "a long line": (b"x" * (MAX_LINE + 10),),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_server_must_prove_itself(server: PartServer, case: str) -> None:
    impostor = Impostor(*WRONG[case])
    peer = NodePeer(replace(server.place, port=impostor.port), SECRET, node=3)
    with pytest.raises(ConnectionError, match="node 3") as caught:
        peer.open("a.pt", 5).read(5)  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)
    impostor.close()


def test_a_proof_is_for_one_answer(server: PartServer, directory: Path) -> None:
    """Who sits between both can change neither the size nor the error of it."""
    put(directory / "a.pt", b"12345")
    greeting, request = PartGreeting("1"), PartRequest("2", Asked.FILE, "a.pt")
    whole = PartAnswer(5, 5)
    proofs = {
        part_requests.proof_of_server("k", server.place, greeting, request, each)
        for each in (whole, replace(whole, size=4), replace(whole, whole=4), replace(whole, number=2), replace(whole, text="x"))
    }
    proofs |= {
        part_requests.proof_of_client("k", server.place, greeting, each)
        for each in (request, replace(request, name="b"), replace(request, offset=1), replace(request, length=1))
    }
    proofs.add(part_requests.proof_of_client("k", server.place, PartGreeting("3"), request))
    proofs.add(part_requests.proof_of_client("k", replace(server.place, port=1), greeting, request))
    assert len(proofs) == 11


# What goes wrong on the way.


def test_a_node_that_is_gone_is_named(server: PartServer) -> None:
    server.close()
    with pytest.raises(ConnectionError, match=r"node 3 at 127.0.0.1 cannot be reached: Connection refused"):
        peer_of(server).catalogue(time.monotonic() + 60)


def test_a_server_that_says_nothing(server: PartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = NodePeer(replace(server.place, port=silent.getsockname()[1]), SECRET, node=3)
        with pytest.raises(TimeoutError, match=r"node 3 at 127.0.0.1 does not answer in time"):
            peer.catalogue(time.monotonic() + 0.2)
        monkeypatch.setattr(peers, "ANSWER_S", 0.2)
        with pytest.raises(TimeoutError, match=r"node 3 at 127.0.0.1 does not answer in time"):
            peer.open("a.pt", 5).read(5)  # type: ignore[attr-defined]


def test_a_peer_that_dies_in_mid_file(server: PartServer, directory: Path) -> None:
    """The server is closed once the first bytes have come."""
    (directory / "large.pt").write_bytes(bytes(LARGE))

    class Closing(io.BytesIO):
        def write(self, data: object) -> int:
            server.close()
            return super().write(data)  # type: ignore[arg-type]

    got = Closing()
    with pytest.raises(ConnectionError, match=r"node 3 at 127.0.0.1 "):
        peer_of(server).copy("large.pt", LARGE, got)
    assert 0 < len(got.getvalue()) < LARGE


def test_a_peer_that_dies_between_reads(server: PartServer, directory: Path) -> None:
    (directory / "large.pt").write_bytes(bytes(LARGE))
    with peer_of(server).open("large.pt", LARGE) as file:
        file.read(10)
        server.close()
        file.seek(LARGE // 2)
        with pytest.raises(ConnectionError, match=r"node 3 at 127.0.0.1 "):
            file.read(10)


def test_a_file_that_has_changed(server: PartServer, directory: Path, tmp_path: Path) -> None:
    put(directory / "a.pt", b"12345")
    with pytest.raises(ConnectionError, match=r"a.pt has 5 bytes, and had 6 when it was listed"):
        read(server, "a.pt", 6)
    with open(tmp_path / "got", "wb") as file, pytest.raises(ConnectionError, match="had 4 when it was listed"):
        peer_of(server).copy("a.pt", 4, file)


def test_an_error_of_the_node_is_passed_on(server: PartServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MAX_FILES", 0)
    put(directory / "a.pt", b"12345")
    with pytest.raises(OSError, match="it holds 1 names, expected 0 at most"):
        peer_of(server).catalogue(time.monotonic() + 60)


# Clients that hold it up.


def connected(server: PartServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.place.port))


def ended(client: socket.socket) -> bool:
    """Whether the server has ended the connection; waits for that."""
    client.settimeout(60)
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_client_that_says_nothing_is_cut(server: PartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_server, "REQUEST_S", 0.2)
    with connected(server) as client:
        assert ended(client)


def test_a_client_that_dribbles_is_cut(server: PartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the request does not."""
    monkeypatch.setattr(part_server, "REQUEST_S", 0.5)
    with connected(server) as client:
        client.settimeout(0.05)
        seen = b"."

        def is_cut() -> bool:
            nonlocal seen
            try:
                client.sendall(b"x")
                seen = client.recv(1 << 16)
            except TimeoutError:
                return False
            except ConnectionError:
                return True
            return not seen

        until(is_cut)


def test_a_long_request_is_cut(server: PartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_server, "REQUEST_S", 600.0)
    with connected(server) as client:
        client.sendall(b"x" * (MAX_LINE + 1))
        assert ended(client)


def test_a_client_that_stalls_is_cut(server: PartServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has proved itself, asked for much, and takes nothing."""
    monkeypatch.setattr(part_server, "STALLED_S", 0.3)
    (directory / "large.pt").write_bytes(bytes(LARGE))
    with peer_of(server)._asked(PartRequest("1", Asked.FILE, "large.pt")):
        until(lambda: not server._clients)


def test_strangers_lock_nobody_out(server: PartServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(part_server, "REQUEST_S", 600.0)
    put(directory / "a.pt", b"12345")
    strangers = [connected(server) for _ in range(10)]
    assert read(server, "a.pt", 5) == b"12345"
    assert ended(strangers[0])
    for each in strangers:
        each.close()


def test_strangers_cut_nobody_off(server: PartServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has proved itself keeps its place, and the stranger waits."""
    monkeypatch.setattr(part_server, "MAX_CONNECTIONS", 1)
    (directory / "large.pt").write_bytes(bytes(LARGE))
    with peer_of(server)._asked(PartRequest("1", Asked.FILE, "large.pt")) as (connection, answer), connected(server):
        got = memoryview(bytearray(answer.size))
        connection.fill(got[: LARGE // 2])
        connection.fill(got[LARGE // 2 :])
    assert answer.size == LARGE


def test_a_closed_server_leaves_nothing(directory: Path) -> None:
    def ours() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("elastic_ext-part")]

    server = PartServer(LocalStorage(str(directory)), "127.0.0.1", SECRET, "127.0.0.1")
    clients = [connected(server) for _ in range(3)]
    until(lambda: len(server._clients) == 3)
    server.close()
    server.close()
    assert all(map(ended, clients))
    until(lambda: not ours())


def test_a_port_that_is_taken(server: PartServer, directory: Path) -> None:
    with pytest.raises(OSError):
        PartServer(LocalStorage(str(directory)), "127.0.0.1", SECRET, "127.0.0.1", server.place.port)


@pytest.mark.parametrize(("host", "bind"), [("::1", "::1"), ("::1", ""), ("127.0.0.1", ""), ("localhost", "")])
def test_both_families_of_addresses(directory: Path, host: str, bind: str) -> None:
    put(directory / "a.pt", b"12345")
    server = PartServer(LocalStorage(str(directory)), host, SECRET, bind)
    assert read(server, "a.pt", 5) == b"12345"
    server.close()


# All of it together.


def test_two_nodes_share_a_save(tmp_path: Path) -> None:
    nodes = SeveralNodes(tmp_path)
    saved(nodes[0] / "step_10" / "model.pt", {"model": {}})
    saved(nodes[1] / "step_10" / "optimizer.pt", {"state": {}, "param_groups": []})
    nodes.recorded("step_10")
    servers = [PartServer(nodes.storage(node), "127.0.0.1", SECRET, "127.0.0.1") for node in (0, 1)]
    for own in (0, 1):
        others = {node: NodePeer(each.place, SECRET, node) for node, each in enumerate(servers) if node != own}
        catalogues = {node: each.catalogue(time.monotonic() + 60) for node, each in others.items()}
        shared = AllNodes(nodes.storage(own), own, {own: catalogue_of(nodes.storage(own)), **catalogues}, others)
        path = fetch(nodes.storage(own), "step_10", 1, shared.files_of_save("step_10"), own, others)
        assert {each.name: each.read_bytes() for each in Path(path).iterdir()} == {
            "model.pt": (nodes[0] / "step_10" / "model.pt").read_bytes(),
            "optimizer.pt": (nodes[1] / "step_10" / "optimizer.pt").read_bytes(),
        }
    for each in servers:
        each.close()
