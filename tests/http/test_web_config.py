"""The file of metrics_web_config: what it may hold, and what a wrong one is told."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.agent import plugin
from elastic_ext.base.errors import UsageError
from elastic_ext.http import gate
from tests.etcd_server import Certificates
from tests.reference import DOCS

pytest.importorskip("yaml", reason="needs elastic_ext[web]")
HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"  # of exporter-toolkit's documentation
FILES = "cert_file: server.crt, key_file: server.key"


@pytest.mark.seam
def test_the_files_paths_are_relative_to_it(certificates: Certificates) -> None:
    path = certificates.folder / "web.yml"
    path.write_text(
        "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n  client_ca_file: ca.crt\n"
        f"  client_auth_type: RequireAndVerifyClientCert\n  min_version: TLS13\nbasic_auth_users:\n  alice: {HASH}\n"
    )
    loaded = gate.load(str(path))
    assert loaded.context is not None
    assert loaded.files == (str(path), *(certificates.path(name) for name in ("server.crt", "server.key", "ca.crt")))
    assert loaded.context.minimum_version.name == "TLSv1_3"
    assert loaded.context.verify_mode is ssl.CERT_REQUIRED
    assert loaded.users == {"alice": HASH.encode()}
    if shutil.which("promtool") is not None:  # Prometheus reads it too
        subprocess.run(["promtool", "check", "web-config", str(path)], check=True, capture_output=True)


@pytest.mark.seam
def test_the_file_on_the_page_is_accepted(certificates: Certificates) -> None:
    page = (DOCS / "metrics.md").read_text()
    (shown,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "tls_server_config" in block)
    for name in ("crt", "key"):
        shutil.copy(certificates.path(f"server.{name}"), certificates.path(f"tls.{name}"))
    path = certificates.folder / "shown.yml"
    path.write_text(shown)
    loaded = gate.load(str(path))
    assert loaded.context is not None
    assert loaded.users.keys() == {"prometheus"}


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "web.yml").touch()
    loaded = gate.load(str(tmp_path / "web.yml"))
    assert (loaded.users, loaded.context, loaded.asks) == ({}, None, False)


@pytest.mark.seam
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tls: {}", "the file has 'tls', which this server does not support: expected tls_server_config, basic_auth_users"),
        ("rate_limit: {burst: 1}", "has 'rate_limit', which this server does not support"),
        ("[]", "the file is list, expected"),
        ("{", "expected YAML, line 1"),
        (f"tls_server_config: {{{FILES}, cipher_suites: []}}", "tls_server_config has 'cipher_suites', which"),
        ("tls_server_config: {key_file: server.key}", "has no cert_file"),
        ("tls_server_config: {cert_file: 7, key_file: x}", "cert_file is 7, expected the name of a file"),
        (f"tls_server_config: {{{FILES}, min_version: TLS10}}", "min_version is 'TLS10', expected one of TLS12, TLS13"),
        (f"tls_server_config: {{{FILES}, min_version: TLS13, max_version: TLS12}}", "min_version is above max_version"),
        (f"tls_server_config: {{{FILES}, client_ca_file: ca.crt}}", "client_ca_file without client_auth_type"),
        (f"tls_server_config: {{{FILES}, client_auth_type: VerifyClientCertIfGiven}}", "client_auth_type without client_ca_file"),
        (f"tls_server_config: {{{FILES}, client_auth_type: RequireAnyClientCert}}", "expected one of NoClientCert, Verify"),
        ("tls_server_config: {cert_file: absent.crt, key_file: server.key}", "absent.crt: No such file or directory"),
        ("tls_server_config: {cert_file: server.crt, key_file: client.key}", "client.key: .*mismatch"),
        ("tls_server_config: {cert_file: server.crt, key_file: locked.key}", "the key without a password"),
        ("basic_auth_users: [alice]", "basic_auth_users is list, expected names"),
        ("basic_auth_users: {1: x}", "basic_auth_users has 1, expected a name without a colon; quote it"),
        ("basic_auth_users: {alice: secret}", "basic_auth_users.alice is not a bcrypt hash"),
        (f"basic_auth_users: {{alice: {HASH.replace('10', '15', 1)}}}", "cost 15, expected 4 to 14"),
        (f"basic_auth_users: {{a: {HASH}, a: {HASH}}}", "'a' is there twice"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(certificates: Certificates, text: str, told: str) -> None:
    path = certificates.folder / "wrong.yml"
    path.write_text(text)
    if "locked" in text:
        lock = ("openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", "server.key", "-out", "locked.key")
        subprocess.run(lock, cwd=certificates.folder, check=True, capture_output=True)
    with pytest.raises(UsageError, match=told) as error:
        gate.load(str(path))
    assert "\n" not in str(error.value)
    assert "web_config" in str(error.value)
    assert not any(secret in str(error.value) for secret in ("secret", HASH[8:]))


def test_an_absent_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"web\.yml.*No such file"):
        gate.load(str(tmp_path / "web.yml"))


@pytest.mark.parametrize("module", ["yaml", "bcrypt"])
def test_an_absent_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    (tmp_path / "web.yml").write_text(f"basic_auth_users: {{alice: {HASH}}}")
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"is not installed .*: pip install 'elastic_ext\[web\]'"):
        gate.load(str(tmp_path / "web.yml"))


@pytest.mark.seam
def test_libraries_are_imported_only_where_needed() -> None:
    code = "import sys, elastic_ext.http.server; print({'yaml', 'bcrypt'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("create", [plugin.create_c10d, plugin.create_etcd])
def test_a_wrong_file_ends_the_agent_before_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], create: Callable
) -> None:
    """Where torch's launcher asks for its rendezvous: it has no agent yet."""
    (tmp_path / "web.yml").write_text("http_server_config: {http2: true}")
    monkeypatch.setenv("ELASTIC_EXT_METRICS_WEB_CONFIG", str(tmp_path / "web.yml"))
    with pytest.raises(SystemExit, match="78"):
        create(RendezvousParameters("ext", "localhost:0", "job", 1, 1))
    assert f"elastic_ext: metrics_web_config {tmp_path}/web.yml: the file has 'http_server_config'" in capfd.readouterr().err
