"""TLS, client certificates and passwords at the metrics port: who gets in, who does not, and what strangers cannot hold up."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from elastic_ext.base import tls
from elastic_ext.http import gate
from elastic_ext.http import server as server_module
from elastic_ext.http.gate import MAX_WAITING, Gate, Login, first, superfluous
from elastic_ext.http.pages import CpuBudget, Page
from elastic_ext.http.server import MetricsServer
from tests.etcd_server import Certificates
from tests.http import serving as of_agent
from tests.jobs import AGENT, Job
from tests.jobs import Gate as JobGate
from tests.ports import free_port
from tests.until import LIMIT_S, until

bcrypt = pytest.importorskip("bcrypt", reason="needs elastic_ext[web]")
pytest.importorskip("yaml", reason="needs elastic_ext[web]")

TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"
MUTUAL = TLS.replace("}", ", client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}")
CHEAP = 4  # bcrypt's lowest cost


def users(cost: int = CHEAP) -> str:
    return f"basic_auth_users: {{alice: '{bcrypt.hashpw(b'right', bcrypt.gensalt(cost)).decode()}'}}\n"


@pytest.fixture
def certificates(certificates: Certificates, tmp_path: Path) -> Certificates:
    """Copies, which a test may replace."""
    shutil.copytree(certificates.folder, tmp_path, dirs_exist_ok=True)
    return Certificates(tmp_path)


@pytest.fixture(autouse=True)
def nobody_is_cut_for_being_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 600.0)


def serving(
    certificates: Certificates, config: str | None, host: str = "127.0.0.1"
) -> contextlib.AbstractContextManager[MetricsServer]:
    """config: None for no file."""
    if config is None:
        return of_agent.serving(host)
    path = certificates.folder / "web.yml"
    path.write_text(config)
    return of_agent.serving(host, Gate(str(path)))


def get(
    server: MetricsServer,
    path: str = "/metrics",
    *,
    login: str = "",
    trust: ssl.SSLContext | None = None,
    source: str | None = None,
) -> tuple[int, bytes]:
    assert server.url is not None
    found = urllib.parse.urlsplit(server.url)
    assert found.scheme == ("http" if trust is None else "https")
    assert found.hostname is not None
    kind = {"timeout": LIMIT_S, "source_address": (source, 0) if source is not None else None}
    if trust is None:
        asking = http.client.HTTPConnection(found.hostname, found.port, **kind)
    else:
        asking = http.client.HTTPSConnection(found.hostname, found.port, context=trust, **kind)
    with contextlib.closing(asking):
        headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
        asking.request("GET", path, headers=headers)
        answer = asking.getresponse()
        assert answer.status != 401 or answer.headers["WWW-Authenticate"].startswith("Basic ")
        return answer.status, answer.read()


def trusting(certificates: Certificates, client: str | None = None, ca: str = "ca.crt") -> ssl.SSLContext:
    context = tls.trusting(certificates.path(ca))
    if client is not None:
        context.load_cert_chain(certificates.path(f"{client}.crt"), certificates.path(f"{client}.key"))
    return context


# Who gets in.


@pytest.mark.seam
def test_pages_need_the_password_and_probes_do_not(certificates: Certificates) -> None:
    with serving(certificates, TLS + users()) as server:
        trust = trusting(certificates)
        status = {login: get(server, login=login, trust=trust)[0] for login in ("", "alice:wrong", "bob:right", "alice:right")}
        assert status == {"": 401, "alice:wrong": 401, "bob:right": 401, "alice:right": 200}
        assert get(server, login="alice:" + 80 * "x", trust=trust)[0] == 401  # more than bcrypt takes
        assert get(server, "/healthz", trust=trust) == (200, b"ok\n")
        assert get(server, "/readyz", trust=trust)[0] == 503
        for other in ("/status.json", "/", "/absent", "/metrics?x", "//healthz"):
            assert get(server, other, trust=trust)[0] == 401, other
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server, trust=trusting(certificates, ca="other-ca.crt"))
        with pytest.raises(OSError):  # not TLS
            urllib.request.urlopen(str(server.url).replace("https", "http"), timeout=LIMIT_S)


@pytest.mark.seam
def test_what_is_no_login_is_refused(certificates: Certificates) -> None:
    wrong = ["Basic", "Basic !", "Basic YWxpY2U=", "Bearer YWxpY2U6cmlnaHQ=", "Basic /w==", "Basic \xff", "Basic YWxpY2U6cmlnaHQ"]
    with serving(certificates, users()) as server:
        for header in wrong:
            with socket.create_connection(("127.0.0.1", server.port or 0)) as client:
                client.sendall(f"GET /metrics HTTP/1.0\r\nauthorization: {header}\r\n\r\n".encode("latin-1"))
                assert client.recv(100).startswith(b"HTTP/1.0 401 "), header


@pytest.mark.seam
def test_a_client_certificate_is_demanded(certificates: Certificates) -> None:
    with serving(certificates, MUTUAL) as server:
        assert get(server, trust=trusting(certificates, "client"))[0] == 200
        for stranger in (None, "other-ca"):  # nothing, or signed by nobody that the server trusts
            with pytest.raises((ssl.SSLError, ConnectionError)):
                get(server, "/healthz", trust=trusting(certificates, stranger))


@pytest.mark.seam
def test_a_long_page_comes_whole(certificates: Certificates) -> None:
    """7 MB: more than the buffers of a connection hold, so TLS is written in many parts."""
    page = Page(HTTPStatus.OK, "text/plain", os.urandom(7 << 20))
    (certificates.folder / "web.yml").write_text(TLS)
    server = MetricsServer({"/": lambda _: page}, gate=Gate(str(certificates.folder / "web.yml")))
    try:
        assert get(server, "/", trust=trusting(certificates)) == (200, page.body)
    finally:
        server.close()


@pytest.mark.seam
def test_a_request_may_come_in_pieces(certificates: Certificates) -> None:
    with (
        serving(certificates, TLS) as server,
        socket.create_connection(("127.0.0.1", server.port or 0)) as plain,
        trusting(certificates).wrap_socket(plain, server_hostname="localhost") as client,
    ):
        for piece in (b"GE", b"T / HT", b"TP/1.1\r\nx: " + 16_000 * b"y" + b"\r\n", b"\r", b"\n"):
            client.sendall(piece)
        assert client.recv(15) == b"HTTP/1.0 200 OK"


# Rotation.


def replace(certificates: Certificates, *names: str, by: Path) -> None:
    for name in names:
        shutil.copy(by / name, certificates.folder / f"{name}.new")
        os.replace(certificates.folder / f"{name}.new", certificates.folder / name)


@pytest.mark.full
def test_new_certificates_and_passwords_are_taken_up(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Certificates.make(tmp_path / "rotated")
    with serving(certificates, TLS + users()) as server:
        old, new = trusting(certificates), trusting(other)
        assert get(server, login="alice:right", trust=old)[0] == 200
        replace(certificates, "server.crt", by=other.folder)  # its key has not come yet
        for _ in range(3):
            assert get(server, login="alice:right", trust=old)[0] == 200
        assert [record.getMessage() for record in caplog.records if "stays in force" in record.getMessage()] != []
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        replace(certificates, "server.key", by=other.folder)
        until(lambda: accepts(server, new))
        hashed = bcrypt.hashpw(b"changed", bcrypt.gensalt(CHEAP)).decode()
        (certificates.folder / "web.yml").write_text(f"{TLS}basic_auth_users: {{alice: '{hashed}'}}")
        until(lambda: get(server, login="alice:changed", trust=new)[0] == 200)
        assert get(server, login="alice:right", trust=new)[0] == 401
        (certificates.folder / "web.yml").write_text("")  # nobody turns TLS off by an unfinished file
        assert get(server, login="alice:changed", trust=new)[0] == 200
        assert "stays in force" in caplog.text


@pytest.mark.seam
def test_half_of_a_file_opens_nothing(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    with serving(certificates, users()) as server:
        (certificates.folder / "web.yml").write_text("")  # as an editor does before it writes
        assert get(server)[0] == 401
        assert "no longer asks for a password" in caplog.text


def accepts(server: MetricsServer, trust: ssl.SSLContext) -> bool:
    try:
        return get(server, "/healthz", trust=trust)[0] == 200
    except ssl.SSLCertVerificationError:
        return False


# Strangers.


@pytest.mark.seam
def test_a_right_password_is_checked_once(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bytes] = []
    real = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda password, hashed: checked.append(password) or real(password, hashed))
    with serving(certificates, users()) as server:
        for _ in range(5):
            assert get(server, login="alice:right")[0] == 200
        assert get(server, login="alice:wrong")[0] == 401
        assert get(server, login="alice:right")[0] == 200
    assert checked == [b"right", b"wrong"]


@pytest.mark.full
def test_wrong_passwords_hold_up_no_scrape(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one address as fast as they can. They get their share of a core, and a newcomer from another address gets in, too."""
    monkeypatch.setattr(gate, "CPU_BURST_S", 0.02)
    checks: list[float] = []
    real = bcrypt.checkpw

    def timed(password: bytes, hashed: bytes) -> bool:
        began = time.thread_time()
        right = real(password, hashed)
        checks.append(time.thread_time() - began)
        return bool(right)

    monkeypatch.setattr(bcrypt, "checkpw", timed)
    over = threading.Event()
    told: set[int] = set()

    def guess(server: MetricsServer) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):  # one of them made room for another
                told.add(get(server, login="alice:wrong")[0])

    with serving(certificates, users(cost=7)) as server, contextlib.ExitStack() as stack:
        began = time.monotonic()
        assert get(server, login="alice:right", source="127.0.0.2")[0] == 200
        for _ in range(MAX_WAITING + 2):
            thread = threading.Thread(target=guess, args=(server,))
            thread.start()
            stack.callback(thread.join)
        stack.callback(over.set)
        until(lambda: told == {401, 429} and len(checks) > 15, limit_s=300)  # a slow processor takes long to check one
        for _ in range(50):
            assert get(server, login="alice:right", source="127.0.0.2")[0] == 200  # verified
        (certificates.folder / "web.yml").write_text(users(cost=7))  # another salt: nobody is verified any more
        until(lambda: get(server, login="alice:right", source="127.0.0.3")[0] == 200)
        spent_s, took_s = sum(checks), time.monotonic() - began
    assert spent_s <= 0.02 + gate.CPU_SHARE * took_s + 2 * max(checks)


@pytest.mark.seam
def test_checks_wait_for_their_share_of_a_core(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a share that allows one check: the next login waits, and those verified do not."""
    monkeypatch.setattr(gate, "CPU_BURST_S", 0.0)
    monkeypatch.setattr(gate, "CPU_SHARE", 1e-9)
    with (
        serving(certificates, users()) as server,
        socket.create_connection(("127.0.0.1", server.port or 0)) as guessing,
    ):
        assert get(server, login="alice:right")[0] == 200
        guessing.sendall(b"GET / HTTP/1.0\r\nAuthorization: Basic YWxpY2U6d3Jvbmc=\r\n\r\n")
        for _ in range(50):
            assert get(server, login="alice:right")[0] == 200
        guessing.setblocking(False)
        with pytest.raises(BlockingIOError):
            guessing.recv(1)


@pytest.mark.seam
def test_threads_and_descriptors_are_given_back(certificates: Certificates) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with serving(certificates, TLS + users()) as server:
        assert get(server, login="alice:right", trust=trusting(certificates))[0] == 200
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01" + os.urandom(600), os.urandom(600), b"GET / HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port or 0)) as client:
                client.sendall(sent)
        assert get(server, login="alice:right", trust=trusting(certificates))[0] == 200
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [each.name for each in threading.enumerate() if each.name.startswith("elastic_ext-metrics")] == []


@pytest.mark.full
def test_a_handshake_has_the_deadline_of_a_request(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 1.0)
    with serving(certificates, TLS) as server, socket.create_connection(("127.0.0.1", server.port or 0)) as client:
        client.settimeout(LIMIT_S)
        client.sendall(b"\x16\x03\x01\x02\x00")  # a hello that never goes on
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 600.0)
        assert get(server, trust=trusting(certificates))[0] == 200


def of(address: str) -> Login:
    return Login(object(), address, "alice", b"", b"", True)


def test_fewest_guesses_come_first_most_guesses_go() -> None:
    waiting = [of(address) for address in ("a", "b", "c", "b")]
    assert first(waiting, {"a": 3}) is waiting[1]
    assert first(waiting, {"a": 3, "b": 3, "c": 3}) is waiting[0]
    assert superfluous(waiting, {"a": 9}) is None
    waiting.append(of("c"))
    assert superfluous(waiting, {"a": 9}) is waiting[0]
    assert superfluous(waiting, {}) is waiting[4]
    assert superfluous(waiting, {"b": 1}) is waiting[3]


def test_a_budget_allows_bursts_then_a_share() -> None:
    budget = CpuBudget(share=0.1, burst_s=1.0)
    assert budget.wait_s(100.0) == 0
    budget.spend(1.5, 100.0)
    assert budget.wait_s(100.0) == pytest.approx(5.0)
    assert budget.wait_s(103.0) == pytest.approx(2.0)
    assert budget.wait_s(105.1) == 0
    budget.spend(1.0, 1000.0)
    assert budget.wait_s(1000.0) == 0


# What is told.


@pytest.mark.full
def test_an_agents_address_says_https(certificates: Certificates) -> None:
    (certificates.folder / "web.yml").write_text(TLS)
    found = certificates.folder / "sd"
    settings = f"metrics_web_config={certificates.path('web.yml')},metrics_discovery_dir={found}"
    script = certificates.folder / "up.py"
    script.write_text("import signal; print('up', flush=True); signal.pause()")
    with Job([*AGENT, f"--rdzv-conf={settings}", script], certificates.folder) as job:
        job.wait_for("(?m)^up$")
        ((target,),) = [json.loads(each.read_text()) for each in found.iterdir()]
        assert target["labels"]["__scheme__"] == "https"
        (address,) = target["targets"]
        assert f"metrics https://{address}" in job.err


@pytest.mark.seam
@pytest.mark.parametrize(
    ("host", "config", "told"),
    [
        ("0.0.0.0", TLS + users(), ""),
        ("0.0.0.0", MUTUAL, ""),
        ("0.0.0.0", TLS, "can read the metrics and status of this job (no passwords, no client certificates)"),
        ("0.0.0.0", users(), "anyone on the way to 0.0.0.0 port {port} can read the password"),
        ("0.0.0.0", None, "this job: set metrics_web_config (TLS and passwords), or"),
        ("::", "", "anyone who reaches :: port {port} can read the metrics and status of this job: add it to the file"),
        ("127.0.0.1", "", ""),
        ("::1", users(), ""),
    ],
    ids=["all", "certificates", "TLS", "passwords", "no file", "nothing", "loopback", "loopback of IPv6"],  # not the salts
)
def test_what_is_open_to_whom_is_told_once(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, host: str, config: str | None, told: str
) -> None:
    with serving(certificates, config, host=host) as server:
        for _ in range(2):
            get(server, "/healthz", trust=trusting(certificates, "client") if "tls" in (config or "") else None)
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == bool(told)
        assert told.format(port=server.port) in "".join(lines)
        assert not told or "metrics_host=127.0.0.1" in lines[0]


# A real Prometheus.

WAITS = """
import fcntl, sys
with open(sys.argv[1]) as gate:
    print("waits", flush=True)
    fcntl.flock(gate, fcntl.LOCK_SH)
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no binary named prometheus")
def test_prometheus_scrapes_with_tls_password_and_certificate(certificates: Certificates, tmp_path: Path) -> None:
    """By the agent's discovery file, which says https. One scrape job may; the others lack something."""
    (tmp_path / "web.yml").write_text(MUTUAL + users())
    (tmp_path / "job.py").write_text(WAITS)
    tls = {name: certificates.path(file) for name, file in (("cert_file", "client.crt"), ("key_file", "client.key"))}
    ca = {"ca_file": certificates.path("ca.crt")}
    jobs = {
        "allowed": {"basic_auth": {"username": "alice", "password": "right"}, "tls_config": {**ca, **tls}},
        "wrong_password": {"basic_auth": {"username": "alice", "password": "wrong"}, "tls_config": {**ca, **tls}},
        "no_password": {"tls_config": {**ca, **tls}},
        "no_certificate": {"basic_auth": {"username": "alice", "password": "right"}, "tls_config": ca},
    }
    found = {"file_sd_configs": [{"files": [str(tmp_path / "sd" / "*.json")]}]}
    scrapes = [{"job_name": name, "honor_labels": True, **found, **job} for name, job in jobs.items()]
    (tmp_path / "prometheus.yml").write_text(
        json.dumps({"global": {"scrape_interval": "5s", "scrape_timeout": "5s"}, "scrape_configs": scrapes})  # JSON is YAML
    )
    gate = JobGate(tmp_path / "gate")
    settings = {"ELASTIC_EXT_METRICS_WEB_CONFIG": "web.yml", "ELASTIC_EXT_METRICS_DISCOVERY_DIR": "sd"}
    command = [*AGENT, "--nproc-per-node=1", "job.py", "gate"]
    with Job(command, tmp_path, **settings) as job:
        job.wait_for("waits")
        with prometheus(tmp_path) as ask:

            def all_are_scraped() -> bool:
                """The one that may get in, also if a scrape was too late; the others never do."""
                assert job.process.poll() is None
                up = {each["metric"]["job"]: each["value"][1] for each in ask("up")}
                assert {up.get(name, "0") for name in jobs if name != "allowed"} == {"0"}, up
                return up == {"allowed": "1", "wrong_password": "0", "no_password": "0", "no_certificate": "0"}

            def states() -> list[tuple[str, str]]:
                """Those of the last scrape: none if it has failed."""
                found = ask('elastic_ext_agent_state{state="running"}')
                return [(each["metric"]["job"], each["value"][1]) for each in found]

            until(all_are_scraped, limit_s=120)
            until(lambda: states() == [("allowed", "1")], limit_s=120)
        gate.open()
        assert job.finish().returncode == 0


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[object]:
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log) as process,
    ):

        def ask(query: str) -> list[dict[str, object]]:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            try:
                with urllib.request.urlopen(
                    f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=30
                ) as got:
                    return list(json.load(got)["data"]["result"])
            except OSError:
                return []  # it starts

        try:
            yield ask
        finally:
            process.terminate()
