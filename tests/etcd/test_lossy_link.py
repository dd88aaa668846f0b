"""Leases behind a link that loses a fifth of the packets each way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS
from tests.lossy_network import LossyNetwork, Way, unavailable

LOSSY = Way(loss=0.2, delay_s=0.1)
LEASES, HELD_S = 30, 90  # with one connection each, up to four were lost in a minute


@pytest.mark.full
def test_a_lossy_link_costs_no_lease(tmp_path: Path):
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with (
        LossyNetwork(["client", "server"]) as network,
        EtcdServer(tmp_path, address=network.addresses["server"], inside=network.inside("server")) as server,
    ):
        command = [sys.executable, str(SCRIPTS / "leases.py"), server.endpoint, str(LEASES), str(HELD_S)]
        with subprocess.Popen(
            [*network.inside("client"), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            try:
                assert holder.stdin is not None
                assert holder.stdout.readline() == "held\n"
                network.change({"client": (LOSSY, LOSSY)})
                holder.stdin.write("go\n")
                holder.stdin.flush()
                assert holder.stdout.readline() == "lost 0\n"
            finally:
                holder.kill()
