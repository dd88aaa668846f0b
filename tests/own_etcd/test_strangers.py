"""Who does not have the job's secret gets nothing from its etcd, on either port: no answer, no key, no member."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.base import settings
from elastic_ext.etcd import EtcdError, Put, Tls
from elastic_ext.own_etcd import certificates, launch
from tests.etcd_client import EtcdClient
from tests.etcd_server import Certificates
from tests.own_etcd.hosts import OwnEtcdJob

pytestmark = pytest.mark.seam

SECRET = "0123456789abcdef0123456789abcdef"
CALL_S = 60.0


@pytest.fixture(scope="module")
def attached(tmp_path_factory):
    """An etcd of a job on this machine, and its run id."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("job")
        job = OwnEtcdJob(folder, stack, ["localhost"], Path())
        known = settings.read({"job_secret": SECRET}, {})
        attachment = launch.attach(job.endpoint, job.run_id, None, known, os.environ)
        stack.callback(attachment.close)
        yield job, attachment.await_access(60)
    assert job.folders() == []


@pytest.fixture
def files(tmp_path):
    """What strangers could make: certificates of another secret, of another job with this secret, and of a CA of their own."""
    places = [tmp_path / name for name in ("secret", "run")]
    for place in places:
        place.mkdir()
    return {
        "nothing": None,
        "another secret": certificates.write(b"f" * 32, "RUN", ["localhost"], places[0]),
        "another job": certificates.write(SECRET.encode(), "another-job", ["localhost"], places[1]),
    }


def test_who_has_the_secret_gets_in(attached, tmp_path):
    """On any host, from the secret alone; so the refusals below have this one cause."""
    job, access = attached
    own = certificates.write(SECRET.encode(), job.run_id, ["elsewhere"], tmp_path)
    with EtcdClient(access.endpoints, tls=Tls(own.ca, own.cert, own.key)) as client:
        client.txn([], [Put("/known", "yes")])
        kv = client.get("/known").kv
        assert kv is not None
        assert kv.value == b"yes"


@pytest.mark.parametrize("port", ["client", "peer"])
@pytest.mark.parametrize("who", ["nothing", "another secret", "another job"])
def test_a_raw_client_gets_no_byte(attached, files, port, who):
    """Plain HTTP/1, gRPC's preface (HTTP/2), and TLS without a certificate or with a wrong one that trusts anybody."""
    job, _ = attached
    address = ("127.0.0.1", job.plan.client_port if port == "client" else job.plan.peer_port)
    for hello in (b"GET /members HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)):
        with socket.create_connection(address, CALL_S) as plain:
            plain.settimeout(CALL_S)
            plain.sendall(hello)
            answer = _all_of(plain)
            assert b"{" not in answer, "no members, no version"
            # Go's TLS server tells HTTP clients in one line that they are wrong here; else there is only an alert of TLS.
            assert answer[:1] in (b"", b"\x15") or answer.startswith(b"HTTP/1.0 400"), answer
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files[who] is not None:
        context.load_cert_chain(files[who].cert, files[who].key)
    for path in ("/members", "/version", "/v3/kv/range", "/metrics", "/debug/pprof/", "/raft/probing"):
        with pytest.raises((ssl.SSLError, ConnectionResetError, BrokenPipeError, EOFError)):
            _ask(address, context, path)


def _ask(address: tuple[str, int], context: ssl.SSLContext, path: str) -> bytes:
    """With TLS 1.3 the handshake ends before the server looks at our certificate: it refuses what follows."""
    with socket.create_connection(address, CALL_S) as plain, context.wrap_socket(plain) as tls:
        tls.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = tls.recv(1000)
        if not answer:
            raise EOFError
        return answer


def _all_of(plain: socket.socket) -> bytes:
    found = b""
    try:
        while part := plain.recv(1000):
            found += part
    except (TimeoutError, ConnectionResetError):
        pass
    return found


@pytest.mark.full
def test_a_strangers_own_ca_fails(attached, tmp_path):
    job, _ = attached
    made = Certificates.make(tmp_path / "own")
    with (
        EtcdClient(
            f"https://localhost:{job.plan.client_port}",
            tls=Tls(made.path("ca.crt"), made.path("client.crt"), made.path("client.key")),
        ) as client,
        pytest.raises(EtcdError),
    ):
        client.get("/known", timeout_s=CALL_S)


def test_the_secret_is_in_no_arguments_or_environment(attached):
    job, _ = attached
    pids = job.keepers()
    assert len(pids) == 2
    for pid in pids:
        for name in ("cmdline", "environ"):
            assert SECRET not in Path(f"/proc/{pid}/{name}").read_text()
    (place,) = job.folders()
    assert {each.name for each in place.iterdir() if each.is_file() and SECRET.encode() in each.read_bytes()} <= set()
    assert all(not each.stat().st_mode & 0o077 for each in place.iterdir() if each.suffix in (".pem", ".key"))
