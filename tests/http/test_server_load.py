"""A storm at the metrics port: 1,000 scrapes a second, idle connections, rubbish. Nothing leaks, and the server still answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.base.tls import trusting
from elastic_ext.http.server import CLIENT_TIMEOUT_S, MAX_CLIENTS
from elastic_ext.http.tls import PemFiles, ServerTls
from tests.etcd_server import Certificates
from tests.http.serving import serving
from tests.jobs import ROOT
from tests.until import until

STORM = ROOT / "benchmarks" / "workers" / "scrape_storm.py"
KINDS = ("rubbish", "TLS garbage", "10 MB headers", "idle connections", "slow readers")
SPARE = 8  # descriptors of this test's own scrape and of the storm's pipes


@contextlib.contextmanager
def storm(port: int | None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(STORM), str(port), str(CLIENT_TIMEOUT_S)]  # until the first clients have been dropped
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_a_storm_leaves_nothing_and_excludes_no_client(tmp_path: Path, with_tls: bool) -> None:
    """With TLS all of the storm is rubbish, and only this test's own scrapes are not."""
    tls = trust = None
    if with_tls:
        certificates = Certificates.make(tmp_path)
        tls = ServerTls(PemFiles(certificates.path("server.crt"), certificates.path("server.key")))
        trust = trusting(certificates.path("ca.crt"))
    with serving(tls=tls) as server:

        def scrape() -> None:
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=CLIENT_TIMEOUT_S, context=trust) as answer:
                assert b"elastic_ext_round" in answer.read()

        def gets_in() -> bool:
            """On a busy machine a scraper may lose its slot between its connection and its request: it comes again."""
            with contextlib.suppress(OSError, http.client.HTTPException):
                scrape()
                return True
            return False

        descriptors, threads = open_descriptors(), threading.active_count()
        until(gets_in)
        with storm(server.port) as process:
            while process.poll() is None:
                until(gets_in)
                assert open_descriptors() <= descriptors + MAX_CLIENTS + SPARE
                assert threading.active_count() <= threads + MAX_CLIENTS
            assert process.stdout is not None
            came = json.load(process.stdout)
        until(gets_in)
        assert [kind for kind in KINDS if not came.get(kind)] == []
        assert not (with_tls and came.get("scrapes"))
        # The server closes its end a moment later.
        until(lambda: open_descriptors() <= descriptors and threading.active_count() <= threads)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
