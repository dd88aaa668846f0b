"""Strangers at the port of an embedded store: whose connections are ended, and that members get in."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from elastic_ext.embedded.strangers import MOST, RESERVE, SILENT_S, Bounds, Eviction, SilentConnection, decide
from elastic_ext.etcd import Tls
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.own_etcd import certificates
from tests.embedded_server import EmbeddedServer
from tests.etcd_client import EtcdClient
from tests.until import LIMIT_S

BOUNDS = Bounds(total=100, silent=5, per_address=3)


@pytest.mark.parametrize(
    ("files", "bounds"),
    [
        (16, Bounds(8, 4, 1)),
        (1024, Bounds(1024 - RESERVE, 480, 30)),
        (20_000, Bounds(20_000 - RESERVE, MOST, 256)),
        (1 << 20, Bounds((1 << 20) - RESERVE, MOST, 256)),
    ],
)
def test_half_of_the_descriptors_are_for_members(files, bounds):
    assert Bounds.of(files) == bounds


def silent(address: str, *since: float) -> list[SilentConnection]:
    return [SilentConnection(int(each), address, int(each), each) for each in since]


@pytest.mark.parametrize(
    ("connections", "ended"),
    [
        ([], {}),
        (silent("a", 95, 96, 97), {}),
        (silent("a", 90, 91), {90: ""}),
        (silent("a", 94, 95, 96, 97), {94: "more than 3 connections from a ask for nothing"}),
        (silent("a", 85, 95, 96, 97), {85: ""}),
        (
            silent("a", 95, 96, 97) + silent("b", 92, 93, 94),
            {92: "more than 5 connections ask for nothing"},
        ),
        (
            silent("a", 92, 93, 98, 99, 97) + silent("b", 96) + silent("c", 95),
            {
                93: "more than 3 connections from a ask for nothing",
                92: "more than 3 connections from a ask for nothing",
            },
        ),
    ],
)
def test_the_newest_silent_connections_stay(connections, ended):
    assert decide(connections, BOUNDS, 90 + SILENT_S) == [
        Eviction(next(each for each in connections if each.port == port), crowd) for port, crowd in ended.items()
    ]


# Arguments: the port, how many connections to hold, and "tls" if each begins TLS. One that is ended is made again.
HOLD = """
import contextlib, selectors, socket, ssl, sys
from elastic_ext.base import open_files
port, count = map(int, sys.argv[1:3])
hello = ssl.MemoryBIO()
if sys.argv[3] == "tls":
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
hello = hello.read()
open_files.raised()
poll = selectors.DefaultSelector()
def connect():
    connection = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
    with contextlib.suppress(OSError):
        connection.sendall(hello)
    poll.register(connection, selectors.EVENT_READ)
for _ in range(count):
    connect()
print("held", flush=True)
while True:
    for key, _ in poll.select():
        try:
            ended = not key.fileobj.recv(10000)
        except OSError:
            ended = True
        if ended:
            poll.unregister(key.fileobj)
            key.fileobj.close()
            connect()
"""


@contextmanager
def strangers(port: int, count: int, begins: str = "") -> Iterator[None]:
    """They hold this many connections to the port, and say nothing. begins: "tls": but for the beginning of TLS."""
    command = [sys.executable, "-c", HOLD, str(port), str(count), begins]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield
        finally:
            process.kill()


@pytest.mark.seam
@pytest.mark.parametrize(("files", "count"), [(1024, 1500), (4096, 3000)])
def test_members_get_in_beside_many_strangers(files, count):
    """Their connections are more than the store may have in the first case."""
    with EmbeddedServer(files=files) as store, strangers(store.client_port, count):
        for _ in range(5):
            with EtcdClient(store.endpoint, timeout_s=LIMIT_S / 2) as member:
                assert member.revision("any")


@pytest.mark.seam("too-many-tls")
@pytest.mark.full
@pytest.mark.parametrize("begins", ["", "tls"], ids=["nothing", "tls"])
@pytest.mark.parametrize(("files", "count"), [(1024, 1500), (4096, 3000)], ids=["too-many", "fewer"])
def test_members_with_the_secret_get_in(tmp_path, files, count, begins):
    """Strangers need no certificate for what comes before the end of the handshake of TLS."""
    for name in ("store", "member"):
        (tmp_path / name).mkdir()
    of_store = certificates.write(b"s" * 32, "job", ["localhost", "127.0.0.1"], tmp_path / "store")
    own = certificates.write(b"s" * 32, "job", ["member"], tmp_path / "member")
    with EmbeddedServer(files=files, tls=of_store) as store, strangers(store.client_port, count, begins):
        for _ in range(5):
            with EtcdClient(store.endpoint, tls=Tls(own.ca, own.cert, own.key), timeout_s=LIMIT_S / 2) as member:
                assert member.revision("any")


@pytest.mark.full
def test_only_silent_connections_are_ended():
    """A member that has called once keeps its connection, by IPv4 and IPv6."""
    with EmbeddedServer(host="::") as store:
        members, states = [], list[grpc.ChannelConnectivity]()
        for host in ("127.0.0.1", "[::1]"):
            channel = grpc.insecure_channel(f"{host}:{store.client_port}")
            channel.subscribe(states.append)
            ask = channel.unary_unary(
                "/etcdserverpb.KV/Range",
                etcdrpc().RangeRequest.SerializeToString,
                etcdrpc().RangeResponse.FromString,
            )
            members.append((channel, ask))
            ask(etcdrpc().RangeRequest(key=b"any"), timeout=LIMIT_S)
        with (
            socket.create_connection(("127.0.0.1", store.client_port), LIMIT_S) as first,
            socket.create_connection(("::1", store.client_port), LIMIT_S) as second,
        ):
            for each in (first, second):
                while each.recv(1000):
                    pass
        for channel, ask in members:
            ask(etcdrpc().RangeRequest(key=b"any"), timeout=LIMIT_S)
            channel.close()
        assert states.count(grpc.ChannelConnectivity.READY) == 2
        assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states
