"""A job whose links all lose a fifth of the packets: it forms again as long as they carry anything."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Job
from tests.lossy_network import CLEAN, DEVICE, LossyNetwork, Way, unavailable

LOSSY = Way(loss=0.2, delay_s=0.1)
NODES = ("a", "b", "c")
KILLS = 2  # the third one of its kind without a step would end the job
AGAIN_S = 300.0  # gloo alone takes up to a minute on such links


@pytest.mark.full
def test_a_killed_worker_is_replaced_despite_lost_packets(tmp_path: Path):
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        network = stack.enter_context(LossyNetwork([*NODES, "etcd"]))
        address = network.addresses["etcd"]
        server = stack.enter_context(EtcdServer(tmp_path / "etcd", address=address, inside=network.inside("etcd")))
        where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=3"]
        options = [*where, "--rdzv-conf=backoff=0", "--max-restarts=20", str(SCRIPTS / "stepping_job.py")]
        jobs = []
        for node in NODES:
            command = [*network.inside(node), *TORCHRUN, f"--local-addr={network.addresses[node]}", *options]
            jobs.append(stack.enter_context(Job(command, tmp_path, GLOO_SOCKET_IFNAME=DEVICE)))
        trains = [job.wait_for(r"trains: \d+ \d+ (\d+)")[-1] for job in jobs]
        network.change(dict.fromkeys([*NODES, "etcd"], (LOSSY, CLEAN)))
        for number in range(KILLS):
            victim = int(trains[number % len(jobs)][1])
            seen = [job.out.count("trains: ") for job in jobs]
            os.kill(victim, signal.SIGKILL)
            trains = [
                job.wait_for(r"trains: \d+ \d+ (\d+)", before + 1, AGAIN_S)[-1] for job, before in zip(jobs, seen, strict=True)
            ]
        network.change(dict.fromkeys([*NODES, "etcd"], (CLEAN, CLEAN)))
        for job in jobs:
            assert "network-cut" not in job.err
