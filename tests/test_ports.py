"""A port that a test has got stays its own until its program binds it."""

from __future__ import annotations

import socket
import sys

import pytest

from tests import ports
from tests.jobs import HOSTS, ROOT, TORCHRUN, Job
from tests.until import LIMIT_S

KERNELS = range(32_768, 61_000)  # as most kernels have it
FIRST, LAST = 12_000, 12_599
TAKES_300 = f"""
import signal
from tests import ports
ports.LOWEST, ports.HIGHEST = {FIRST}, {LAST}
print(f"has {{' '.join(str(ports.free_port()) for _ in range(300))}} in all", flush=True)
signal.pause()
"""


def test_ports_that_only_tests_take():
    own = ports.owned_by_tests(KERNELS)
    assert len(own) > 10_000
    assert {*KERNELS, *ports.OF_JOBS, *ports.OF_STEPS, *ports.OF_TORCH}.isdisjoint(own)


@pytest.mark.seam
def test_two_processes_share_no_port(monkeypatch):
    """Nothing listens on any of them yet."""
    monkeypatch.setattr(ports, "LOWEST", FIRST)
    monkeypatch.setattr(ports, "HIGHEST", LAST)
    with Job([sys.executable, "-c", TAKES_300], ROOT) as job:
        (theirs,) = job.wait_for(r"has ([\d ]+) in all")  # an unbuffered line comes in pieces
        ours = {ports.free_port() for _ in range(200)}
        assert len(ours | set(map(int, theirs[1].split()))) == 500


@pytest.mark.seam
def test_a_taken_port_ends_stock_at_once(tmp_path):
    """Without HOSTS it is a client of what listens there, and waits for the answer without a word."""
    port = ports.free_port()
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--nnodes=2"]
    with socket.create_server(("127.0.0.1", port)), Job([*TORCHRUN, *where, *HOSTS, "job.py"], tmp_path) as first:
        done = first.finish(LIMIT_S)
    assert done.returncode == 1
    assert "EADDRINUSE" in done.err
