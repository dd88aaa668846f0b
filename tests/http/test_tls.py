"""TLS and client certificates at the metrics port: who gets in, who does not, and what wrong files are told."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.agent import plugin
from elastic_ext.base import settings, tls
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.http import server as server_module
from elastic_ext.http.pages import CpuBudget, Page
from elastic_ext.http.server import MetricsServer
from elastic_ext.http.tls import PemFiles, ServerTls, of_settings
from tests.etcd_server import Certificates
from tests.http.serving import is_cut, serving
from tests.jobs import AGENT, Gate, Job
from tests.ports import free_port
from tests.reference import DOCS
from tests.until import LIMIT_S, until


@pytest.fixture
def certificates(certificates: Certificates, tmp_path: Path) -> Certificates:
    """Copies, which a test may replace."""
    shutil.copytree(certificates.folder, tmp_path, dirs_exist_ok=True)
    return Certificates(tmp_path)


@pytest.fixture(autouse=True)
def nobody_is_cut_for_being_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 600.0)


def plain_tls(certificates: Certificates) -> ServerTls:
    return ServerTls(PemFiles(certificates.path("server.crt"), certificates.path("server.key")))


def mutual(certificates: Certificates) -> ServerTls:
    return ServerTls(PemFiles(*(certificates.path(name) for name in ("server.crt", "server.key", "ca.crt"))))


def get(server: MetricsServer, path: str = "/metrics", trust: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    assert server.url is not None
    found = urllib.parse.urlsplit(server.url)
    assert found.scheme == ("http" if trust is None else "https")
    assert found.hostname is not None
    if trust is None:
        asking = http.client.HTTPConnection(found.hostname, found.port, timeout=LIMIT_S)
    else:
        asking = http.client.HTTPSConnection(found.hostname, found.port, timeout=LIMIT_S, context=trust)
    with contextlib.closing(asking):
        asking.request("GET", path)
        answer = asking.getresponse()
        return answer.status, answer.read()


def trusting(certificates: Certificates, client: str | None = None, ca: str = "ca.crt") -> ssl.SSLContext:
    context = tls.trusting(certificates.path(ca))
    if client is not None:
        context.load_cert_chain(certificates.path(f"{client}.crt"), certificates.path(f"{client}.key"))
    return context


# Who gets in.


@pytest.mark.seam
def test_pages_come_by_tls_alone(certificates: Certificates) -> None:
    with serving(tls=plain_tls(certificates)) as server:
        trust = trusting(certificates)
        assert get(server, "/healthz", trust) == (200, b"ok\n")
        assert get(server, "/readyz", trust)[0] == 503
        assert get(server, "/absent", trust)[0] == 404
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server, trust=trusting(certificates, ca="other-ca.crt"))
        with pytest.raises((OSError, http.client.HTTPException)):  # not TLS
            urllib.request.urlopen(str(server.url).replace("https", "http"), timeout=LIMIT_S)


@pytest.mark.seam
def test_a_client_certificate_is_demanded(certificates: Certificates) -> None:
    with serving(tls=mutual(certificates)) as server:
        assert get(server, trust=trusting(certificates, "client"))[0] == 200
        for stranger in (None, "other-ca"):  # nothing, or signed by nobody that the server trusts
            with pytest.raises((ssl.SSLError, ConnectionError)):
                get(server, "/healthz", trusting(certificates, stranger))


@pytest.mark.seam
def test_a_long_page_comes_whole(certificates: Certificates) -> None:
    """7 MB: more than the buffers of a connection hold, so TLS is written in many parts."""
    page = Page(HTTPStatus.OK, "text/plain", os.urandom(7 << 20))
    with contextlib.closing(MetricsServer({"/": lambda _: page}, tls=plain_tls(certificates))) as server:
        assert get(server, "/", trusting(certificates)) == (200, page.body)


@pytest.mark.seam
def test_a_request_may_come_in_pieces(certificates: Certificates) -> None:
    with (
        serving(tls=plain_tls(certificates)) as server,
        socket.create_connection(("127.0.0.1", server.port or 0)) as plain,
        trusting(certificates).wrap_socket(plain, server_hostname="localhost") as client,
    ):
        for piece in (b"GE", b"T / HT", b"TP/1.1\r\nx: " + 16_000 * b"y" + b"\r\n", b"\r", b"\n"):
            client.sendall(piece)
        assert client.recv(15) == b"HTTP/1.0 200 OK"


@pytest.mark.seam
def test_new_certificates_are_taken_up(certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Certificates.make(tmp_path / "rotated")
    with serving(tls=plain_tls(certificates)) as server:
        old, new = trusting(certificates), trusting(other)
        assert accepts(server, old)
        os.replace(other.path("server.crt"), certificates.path("server.crt"))  # its key has not come yet
        for _ in range(3):
            assert accepts(server, old)
        (warned,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert "the certificates that were read before stay in force: metrics_certfile" in warned
        os.replace(other.path("server.key"), certificates.path("server.key"))
        until(lambda: accepts(server, new))
        assert not accepts(server, old)


def accepts(server: MetricsServer, trust: ssl.SSLContext) -> bool:
    try:
        return get(server, "/healthz", trust)[0] == 200
    except ssl.SSLCertVerificationError:
        return False


# Strangers.


@pytest.mark.seam
def test_threads_and_descriptors_are_given_back(certificates: Certificates) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with serving(tls=plain_tls(certificates)) as server:
        assert get(server, trust=trusting(certificates))[0] == 200
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01" + os.urandom(600), os.urandom(600), b"GET / HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port or 0)) as client:
                client.sendall(sent)
        assert get(server, trust=trusting(certificates))[0] == 200
        silent = socket.create_connection(("127.0.0.1", server.port or 0))
    with silent:
        assert is_cut(silent)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    until(lambda: threading.active_count() <= threads)  # they are at their ends


@pytest.mark.full
def test_a_handshake_has_the_deadline_of_a_request(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 1.0)
    with (
        serving(tls=plain_tls(certificates)) as server,
        socket.create_connection(("127.0.0.1", server.port or 0), LIMIT_S) as client,
    ):
        client.sendall(b"\x16\x03\x01\x02\x00")  # a hello that never goes on
        assert is_cut(client)
        monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 600.0)
        assert get(server, trust=trusting(certificates))[0] == 200


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


@pytest.mark.seam
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cert": "absent.crt"}, r"metrics_certfile \S*absent\.crt: No such file or directory"),
        ({"key": "absent.key"}, r"metrics_keyfile \S*absent\.key: No such file or directory"),
        ({"key": "client.key"}, r"metrics_certfile .* with metrics_keyfile .*client\.key: .*mismatch"),
        ({"key": "locked.key"}, "the key without a password"),
        ({"client_ca": "server.key"}, r"metrics_client_cafile \S*server\.key: .*: expected PEM files"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(certificates: Certificates, wrong: dict[str, str], told: str) -> None:
    if "locked.key" in wrong.values():
        lock = ("openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", "server.key", "-out", "locked.key")
        subprocess.run(lock, cwd=certificates.folder, check=True, capture_output=True)
    right = PemFiles(certificates.path("server.crt"), certificates.path("server.key"))
    with pytest.raises(UsageError, match=told) as error:
        ServerTls(replace(right, **{name: certificates.path(file) for name, file in wrong.items()}))
    assert "\n" not in str(error.value)


@pytest.mark.seam
def test_the_settings_on_the_page_are_accepted(certificates: Certificates, tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (DOCS / "metrics.md").read_text(), re.DOTALL)
    for name in ("crt", "key"):
        shutil.copy(certificates.path(f"server.{name}"), certificates.path(f"tls.{name}"))
    (tmp_path / "settings.toml").write_text(shown.replace("/certificates", str(certificates.folder)))
    made = of_settings(settings.read({}, {"ELASTIC_EXT_CONFIG": str(tmp_path / "settings.toml")}))
    assert made is not None
    assert made.demands_certificates


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"metrics_certfile": "x"}, "metrics_keyfile not set"),
        ({"metrics_keyfile": "x"}, "metrics_certfile not set"),
        ({"metrics_client_cafile": "x"}, "metrics_certfile and metrics_keyfile not set"),
        ({}, ""),
    ],
)
def test_a_missing_file_is_named(given: dict[str, str], missing: str) -> None:
    if missing:
        with pytest.raises(UsageError, match=missing):
            of_settings(Settings(**given))  # type: ignore[arg-type]
    else:
        assert of_settings(Settings()) is None


@pytest.mark.parametrize("create", [plugin.create_c10d, plugin.create_etcd])
def test_a_wrong_file_ends_the_agent_before_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], create: Callable
) -> None:
    """Where torch's launcher asks for its rendezvous: it has no agent yet."""
    monkeypatch.setenv("ELASTIC_EXT_METRICS_CERTFILE", str(tmp_path / "tls.crt"))
    monkeypatch.setenv("ELASTIC_EXT_METRICS_KEYFILE", str(tmp_path / "tls.key"))
    with pytest.raises(SystemExit, match="78"):
        create(RendezvousParameters("ext", "localhost:0", "job", 1, 1))
    assert f"elastic_ext: metrics_certfile {tmp_path}/tls.crt: No such file or directory" in capfd.readouterr().err


@pytest.mark.full
def test_an_agents_address_says_https(certificates: Certificates) -> None:
    found = certificates.folder / "sd"
    script = certificates.folder / "up.py"
    script.write_text("import signal; print('up', flush=True); signal.pause()")
    given = f"metrics_certfile=server.crt,metrics_keyfile=server.key,metrics_discovery_dir={found}"
    with Job([*AGENT, f"--rdzv-conf={given}", script], certificates.folder) as job:
        job.wait_for("(?m)^up$")
        ((target,),) = [json.loads(each.read_text()) for each in found.iterdir()]
        assert target["labels"]["__scheme__"] == "https"
        (address,) = target["targets"]
        assert f"metrics https://{address}" in job.err


@pytest.mark.seam
@pytest.mark.parametrize(
    ("host", "made", "warns"),
    [
        ("0.0.0.0", mutual, False),
        ("0.0.0.0", plain_tls, True),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("127.0.0.1", None, False),
        ("::1", plain_tls, False),
    ],
)
def test_what_strangers_can_read_is_told_once(
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    host: str,
    made: Callable[[Certificates], ServerTls] | None,
    warns: bool,
) -> None:
    with serving(host, made(certificates) if made is not None else None) as server:
        for _ in range(2):
            get(server, "/healthz", trusting(certificates, "client") if made is not None else None)
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == warns
        for line in lines:
            assert f"anyone who reaches {host} port {server.port} can read the metrics and status of this job" in line
            assert "set metrics_client_cafile (client certificates), or metrics_host=127.0.0.1" in line


# A real Prometheus.

WAITS = """
import fcntl, sys
with open(sys.argv[1]) as gate:
    print("waits", flush=True)
    fcntl.flock(gate, fcntl.LOCK_SH)
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no binary named prometheus")
def test_prometheus_scrapes_with_its_certificate(certificates: Certificates, tmp_path: Path) -> None:
    """By the agent's discovery file, which says https. One scrape job may; the others lack something."""
    (tmp_path / "job.py").write_text(WAITS)
    own = {name: certificates.path(file) for name, file in (("cert_file", "client.crt"), ("key_file", "client.key"))}
    ca = {"ca_file": certificates.path("ca.crt")}
    jobs = {"allowed": {"tls_config": {**ca, **own}}, "no_certificate": {"tls_config": ca}, "no_ca": {"tls_config": own}}
    found = {"file_sd_configs": [{"files": [str(tmp_path / "sd" / "*.json")]}]}
    scrapes = [{"job_name": name, "honor_labels": True, **found, **job} for name, job in jobs.items()]
    (tmp_path / "prometheus.yml").write_text(
        json.dumps({"global": {"scrape_interval": "5s", "scrape_timeout": "5s"}, "scrape_configs": scrapes})  # JSON is YAML
    )
    gate = Gate(tmp_path / "gate")
    files = {"METRICS_CERTFILE": "server.crt", "METRICS_KEYFILE": "server.key", "METRICS_CLIENT_CAFILE": "ca.crt"}
    given = {f"ELASTIC_EXT_{name}": file for name, file in {**files, "METRICS_DISCOVERY_DIR": "sd"}.items()}
    command = [*AGENT, "--nproc-per-node=1", "job.py", "gate"]
    with Job(command, tmp_path, **given) as job:
        job.wait_for("waits")
        with prometheus(tmp_path) as ask:

            def all_are_scraped() -> bool:
                """The one that may get in, also if a scrape was too late; the others never do."""
                assert job.process.poll() is None
                up = {each["metric"]["job"]: each["value"][1] for each in ask("up")}
                assert {up.get(name, "0") for name in jobs if name != "allowed"} == {"0"}, up
                return up == {"allowed": "1", "no_certificate": "0", "no_ca": "0"}

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
