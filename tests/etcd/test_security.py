"""TLS and passwords on real servers: what works, one clear error for what does not, and secrets in no message."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from elastic_ext.etcd import AuthError, Batch, ConfigError, LeaseSession, Tls, TlsError, Unavailable
from elastic_ext.etcd.values import Reading
from elastic_ext.own_etcd import certificates as certificates_of_job
from tests.etcd.call_proxy import CallProxy
from tests.etcd.conftest import SECRETS, TOKEN_TTL_S, take
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import Certificates, EtcdServer
from tests.until import LIMIT_S, until


@pytest.fixture(autouse=True)
def no_secret_is_told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    for secret in SECRETS:
        assert secret not in caplog.text
        assert secret not in printed.out + printed.err


# TLS


@pytest.mark.seam
def test_tls_with_client_certificate(tls_server: EtcdServer, certificates: Certificates, prefix: str):
    with EtcdClient(tls_server.endpoint, tls=certificates.tls(client=True)) as client:
        session = LeaseSession(client, 5)
        client.put(prefix + "a", "1", lease_id=session.lease_id)
        with client.watch(prefix, prefix=True, start_revision=1) as watch:
            assert isinstance(watch.get(LIMIT_S), Batch)
        session.revoke()


@pytest.mark.seam
@pytest.mark.parametrize("host", ["localhost", "https://localhost", "https://127.0.0.1"])
def test_tls_by_name_and_address(tls_server: EtcdServer, certificates: Certificates, host: str):
    with EtcdClient(f"{host}:{tls_server.client_port}", tls=certificates.tls(client=True)) as client:
        client.status()


@pytest.mark.seam
@pytest.mark.parametrize(
    ("files", "server_name", "said"),
    [
        ({"client": True, "ca": "other-ca.crt"}, None, r"(?i)handshake failed.*check the CA"),
        ({}, None, r"client certificate"),
        ({"client": True}, "etcd0", r"Hostname Verification|not in peer certificate"),
    ],
    ids=["wrong CA", "no client certificate", "another host"],
)
def test_tls_that_fails(tls_server: EtcdServer, certificates: Certificates, files: dict, server_name: str | None, said: str):
    tls = replace(certificates.tls(**files), server_name=server_name)
    with EtcdClient(tls_server.endpoint, tls=tls) as client, pytest.raises(TlsError, match=said):
        client.get("a")


@pytest.mark.full
def test_http_to_a_tls_server_and_conversely(server: EtcdServer, tls_server: EtcdServer, certificates: Certificates):
    for endpoint, tls in ((tls_server.endpoint, None), (server.endpoint, certificates.tls())):
        with EtcdClient(endpoint, tls=tls, timeout_s=3) as client, pytest.raises(Unavailable, match="http:// versus https://"):
            client.get("a")


@pytest.mark.seam
def test_one_endpoint_of_another_ca_is_skipped(tmp_path: Path, tls_server: EtcdServer, certificates: Certificates):
    others = Certificates.make(tmp_path)
    with EtcdServer(tmp_path / "etcd", certificates=others) as stranger:
        endpoints = [stranger.endpoint, tls_server.endpoint]
        with EtcdClient(endpoints, tls=certificates.tls(client=True), first=0) as client:
            client.put("a", "1")


def refusal(client: EtcdClient) -> TlsError:
    """Of a certificate. Before that, a call may not have seen yet that etcd is back."""
    while True:
        try:
            client.get("a")
        except TlsError as error:
            return error
        except Unavailable:
            continue


@pytest.mark.seam
def test_certificates_renewed_on_disk_are_read_again(tmp_path: Path):
    """The CA changes, so that nothing that the client holds is of use; what is on disk has expired at first."""
    own = Certificates.make(tmp_path / "own")
    with (
        EtcdServer(tmp_path / "etcd", certificates=own, client_certificates=True) as server,
        EtcdClient(server.endpoint, tls=own.tls(client=True), timeout_s=5) as client,
        client.watch("a", start_revision=1) as watch,
    ):
        session = LeaseSession(client, 60)
        client.put("a", "1", lease_id=session.lease_id)
        assert isinstance(watch.get(LIMIT_S), Batch)
        Certificates.make(tmp_path / "own").renew("client", days=-1)
        server.restart()
        assert f"client certificate {own.path('client.crt')} expired at 20" in str(refusal(client))
        own.renew("client")
        assert client.get("a").kv is not None
        client.put("a", "2", lease_id=session.lease_id)
        batch = watch.get(LIMIT_S)
        assert batch is not None
        assert [event.kv.value for event in batch.events] == [b"2"]
        assert not session.lost.is_set()


@pytest.mark.seam
def test_half_renewed_certificates_wait(tmp_path: Path):
    own, others = (Certificates.make(tmp_path / name) for name in ("own", "others"))
    with (
        EtcdServer(tmp_path / "etcd", certificates=own, client_certificates=True) as server,
        EtcdClient(server.endpoint, tls=own.tls(client=True)) as client,
    ):
        client.put("a", "1")
        shutil.copy(others.path("client.key"), own.path("client.key"))
        server.restart()
        assert client.get("a").kv is not None
        with pytest.raises(ConfigError, match=r"client\.key is not the key of .*client\.crt"):
            EtcdClient(server.endpoint, tls=own.tls(client=True))


def test_what_a_refused_certificate_needs(tmp_path: Path):
    made = certificates_of_job.write(b"s" * 32, "job", ["localhost"], tmp_path)
    tls, now = Tls(made.ca, made.cert, made.key), time.time()
    assert tls.advice(now) == f"check the CA {made.ca}, the client certificate {made.cert} and http/https"
    assert re.fullmatch(
        rf"the client certificate {made.cert} expired at \S+ \S+ UTC: renew it in place, the files are read again",
        tls.advice(now + 500 * 86400),
    )
    Path(made.key).unlink()
    assert tls.advice(now) == f"TLS file {made.key} cannot be read: No such file or directory; renew it"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls": Tls(ca="/no/such/file")}, "/no/such/file cannot be read: No such file"),
        ({"tls": Tls(ca=__file__)}, "contains no PEM block"),
        ({"tls": Tls(ca=None, cert="a.crt")}, "both the certificate and its key"),
        ({"user": "ann"}, "both a user and a password"),
    ],
)
def test_what_nobody_can_get_in_with(given: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        EtcdClient("127.0.0.1:1", **given)


@pytest.mark.seam
def test_certificates_for_an_http_endpoint(certificates: Certificates):
    with pytest.raises(ConfigError, match="use https:// or remove them"):
        EtcdClient("http://127.0.0.1:1", tls=certificates.tls())


# Passwords


@pytest.mark.seam
def test_token_is_in_no_log_line(ann: EtcdClient, caplog: pytest.LogCaptureFixture):
    """Nor is it refused without TLS, as gRPC refuses etcd3's, which are call credentials."""
    ann.put("/ann/a", "1")
    with ann.watch("/ann/", prefix=True) as watch:
        until(lambda: watch.live)
    assert token_of(ann) not in caplog.text + repr(vars(ann)) + repr(vars(ann._caller))


@pytest.mark.seam
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"user": "ann", "password": SECRETS[2]}, r"authentication failed.*user 'ann'.*check the user and password"),
        ({}, r"no user given.*check the user"),
    ],
    ids=["wrong", "none"],
)
def test_a_password_that_does_not_do(auth_server: EtcdServer, given: dict, said: str):
    with EtcdClient(auth_server.endpoint, **given) as client:
        for call in (
            lambda: client.get("/ann/a"),
            lambda: client.put("/ann/a", "1"),
            lambda: client.watch("/ann/a", start_revision=1).get(),
        ):
            with pytest.raises(AuthError, match=said) as caught:
                call()
            told = "".join(traceback.format_exception(caught.value)) + repr(client)
            assert not any(secret in told for secret in SECRETS)


@pytest.mark.seam
def test_no_permission(ann: EtcdClient):
    with pytest.raises(AuthError, match=r"transaction on /bob/a: .*permission denied \(user 'ann'\)"):
        ann.put("/bob/a", "1")


@pytest.mark.full
def test_a_watch_without_permission_ends_alone(ann: EtcdClient):
    with ann.watch("/ann/", prefix=True) as mine, ann.watch("/bob/", prefix=True, start_revision=1) as others:
        with pytest.raises(AuthError, match=r"/bob/.*refused it: permission denied \(user 'ann'\)"):
            others.get(LIMIT_S)
        assert others.closed
        revision = ann.put("/ann/alone", "1").revision
        batch = mine.get(LIMIT_S)
    assert batch.revision == revision


@pytest.mark.seam
def test_password_on_a_server_without_authentication(server: EtcdServer, prefix: str):
    with EtcdClient(server.endpoint, user="ann", password=SECRETS[0]) as client:
        client.put(prefix, "1")
        with client.watch(prefix, start_revision=1) as watch:
            assert watch.get(LIMIT_S) is not None


def token_of(client: EtcdClient) -> str:
    (pair,) = client._tokens.metadata(client._endpoints.current(), 5)
    return pair[1]


def await_expiry(server: EtcdServer, token: str) -> None:
    """Return when etcd knows the token no more. To ask prolongs it, so its time must pass before each look."""

    def has_expired() -> bool:
        threading.Event().wait(2 * TOKEN_TTL_S)
        with EtcdClient(server.endpoint, user="ann", password=SECRETS[0]) as probe:
            probe._tokens._token = token
            probe.get("/ann/a")
            return probe._tokens._token != token

    until(has_expired, "the end of the token")


@pytest.mark.seam
def test_token_expired_at_a_put_and_watch(ann: EtcdClient, auth_server: EtcdServer):
    """The server answers a new watch with id -1 then, and is silent ever after; those that are open must not miss a thing."""
    with ann.watch("/ann/", prefix=True) as old:
        until(lambda: old.live)
        await_expiry(auth_server, token_of(ann))
        revisions = [ann.put("/ann/expired", "1").revision]
        await_expiry(auth_server, token_of(ann))
        with ann.watch("/ann/new", start_revision=1) as new:
            until(lambda: new.live)
            revisions.append(ann.put("/ann/new", "2").revision)
            assert [event.kv.mod_revision for event in take(new, 1)] == revisions[1:]
        assert [event.kv.mod_revision for event in take(old, 2)] == revisions


@contextmanager
def server_of_root(folder: Path) -> Iterator[EtcdServer]:
    """Its tokens last for minutes."""
    with EtcdServer(folder / "etcd") as server:
        server.lock(SECRETS[1])
        yield server


@pytest.mark.seam
def test_token_lost_by_a_restart_of_the_server(tmp_path: Path):
    """Simple tokens live in the server's memory."""
    with server_of_root(tmp_path) as server, EtcdClient(server.endpoint, user="root", password=SECRETS[1]) as client:
        session = LeaseSession(client, 60)
        with client.watch("a") as watch:
            client.put("a", "1", lease_id=session.lease_id)
            server.restart()
            client.put("a", "2", lease_id=session.lease_id)
            assert [event.kv.value for event in take(watch, 2)] == [b"1", b"2"]
        assert not session.lost.is_set()


@pytest.mark.seam
def test_one_thread_authenticates_for_all(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with server_of_root(tmp_path) as server, EtcdClient(server.endpoint, user="root", password=SECRETS[1]) as client:
        together = threading.Barrier(16)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: (together.wait(LIMIT_S), client.put("many", "1")), range(16)))
    assert caplog.text.count("gave a token to user root") == 1


@pytest.mark.seam
@pytest.mark.usefixtures("patient_grpc")
def test_a_stalled_connection_holds_up_no_token(auth_server: EtcdServer):
    """Another connection gets a token of its own, and so a lease is renewed."""
    with Proxy(auth_server.client_port) as proxy, EtcdClient(proxy.endpoint, user="ann", password=SECRETS[0]) as client:
        lease_id = client.lease_grant(60).lease_id
        client._tokens._token = None
        proxy.hold(but=0, new=False)
        assert client.lease_keep_alive([lease_id], beside_s=0.2).ttl_s == {lease_id: 60}
        proxy.release()


@pytest.mark.seam
def test_others_use_the_old_token_during_renewal(tmp_path: Path):
    """A call met a member that does not know the token (it was started again, say) and that is silent when asked for another."""
    with (
        server_of_root(tmp_path) as server,
        CallProxy(server.client_port) as proxy,
        EtcdClient(proxy.endpoint, user="root", password=SECRETS[1], timeout_s=5 * LIMIT_S) as client,
    ):
        lease_id = client.lease_grant(60).lease_id
        proxy.refuse_one("Range", grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")
        proxy.hold("Authenticate")
        read: list[Reading] = []
        renewing = threading.Thread(target=lambda: read.append(client.get("a")))
        renewing.start()
        assert proxy.holding.wait(LIMIT_S)
        assert client.lease_keep_alive([lease_id], timeout_s=LIMIT_S).ttl_s == {lease_id: 60}
        client.put("a", "1", timeout_s=LIMIT_S)
        assert client.get("a", timeout_s=LIMIT_S).kv is not None
        assert read == []
        proxy.release()
        renewing.join()
    assert len(read) == 1


@pytest.mark.seam
def test_who_was_refused_a_token_gets_another_one(ann: EtcdClient, caplog: pytest.LogCaptureFixture):
    """And asks for none if another thread already has."""
    connection = ann._endpoints.current()
    first = ann._tokens.metadata(connection, 5)
    assert ann._tokens.metadata(connection, 5) == first
    second = ann._tokens.metadata(connection, 5, refused=first)
    assert second != first
    assert ann._tokens.metadata(connection, 5, refused=first) == ann._tokens.metadata(connection, 5) == second
    assert caplog.text.count("gave a token to user ann") == 2
