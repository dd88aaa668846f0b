"""Real etcd servers as fixtures. Those that a test kills, freezes or fills are its own; the others serve the whole session."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.etcd import Event
from elastic_ext.etcd.endpoints import CHANNEL_OPTIONS
from tests.embedded_server import EmbeddedServer
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient, QueuedWatch
from tests.etcd_server import Certificates, EtcdCluster, EtcdServer
from tests.until import LIMIT_S

SECRETS = ("ann-secret-7731", "root-secret-9954", "wrong-secret-4410")
TOKEN_TTL_S = 1

_numbers = itertools.count()


def take(watch: QueuedWatch, count: int, timeout_s: float = LIMIT_S) -> list[Event]:
    """The next `count` events; how they come in batches depends on when the watch was opened."""
    events: list[Event] = []
    while len(events) < count:
        batch = watch.get(timeout_s)
        assert batch is not None, f"{len(events)} of {count} events after {timeout_s} s"
        events += batch.events
    return events


def ends(thread: threading.Thread) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Stays up: for tests that do it no harm."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as started:
        yield started
        assert started.process is not None
        ended = started.process.poll()
        assert ended is None, f"etcd has ended with {ended}: {(started.folder / 'log').read_text()[-2000:]}"


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


STORES = {"etcd": "server", "embedded": "embedded_server"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What needs nothing but a client holds on both: real etcd, and the embedded store."""
    if "client" in metafunc.fixturenames and not {"server", "proxy", "own_server"} & set(metafunc.fixturenames):
        metafunc.parametrize("client", list(STORES), indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[EtcdClient]:
    with EtcdClient(request.getfixturevalue(STORES[getattr(request, "param", "etcd")]).endpoint) as made:
        yield made


@pytest.fixture
def patient_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC itself does not give up a connection that stands still; 3 s after an answer it could, as it pings then."""
    pings = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    changed = tuple((name, 600_000 if name in pings else value) for name, value in CHANNEL_OPTIONS)
    assert changed != CHANNEL_OPTIONS
    monkeypatch.setattr("elastic_ext.etcd.endpoints.CHANNEL_OPTIONS", changed)


@pytest.fixture
def prefix() -> str:
    """Keys of this test alone."""
    return f"/test{next(_numbers)}/"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "own") as started:
        yield started


@pytest.fixture
def proxy(server: EtcdServer) -> Iterator[Proxy]:
    """In front of `server`."""
    with Proxy(server.client_port) as started:
        yield started


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members of this test alone: etcd 3.5.0 to 3.5.2 may lose writes on a member that is killed, for good.

    (etcd's issue 13766: after one kill among writes, the revision of this member stayed one behind that of the others.)
    """
    with EtcdCluster(tmp_path / "cluster") as started:
        yield started


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[EtcdServer]:
    """Wants a client certificate."""
    folder = tmp_path_factory.mktemp("tls")
    with EtcdServer(folder, certificates=certificates, client_certificates=True) as started:
        yield started


@pytest.fixture(scope="session")
def auth_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """User ann may read and write below /ann/. Tokens that are not used for a second expire."""
    ann, root, _ = SECRETS
    with EtcdServer(tmp_path_factory.mktemp("auth"), args=[f"--auth-token-ttl={TOKEN_TTL_S}"]) as started:
        started.lock(root, ann, "/ann/")
        yield started


@pytest.fixture
def ann(auth_server: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(auth_server.endpoint, user="ann", password=SECRETS[0]) as made:
        yield made
