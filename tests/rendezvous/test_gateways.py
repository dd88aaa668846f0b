"""Two hosts that reach etcd through a gateway of their own, on their loopback: they must not give that to each other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer, etcd_binary
from tests.jobs import TORCHRUN, Job
from tests.networks import SERVER, Network, network
from tests.own_etcd.hosts import lose
from tests.rendezvous.test_etcd_jobs import CONF, ELASTIC, Nodes, seen
from tests.until import until

pytestmark = pytest.mark.full

PORT = 2379


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Network]:
    """Hosts with a gateway each, and etcd on the router."""
    with network(2) as made, EtcdServer(tmp_path / "etcd", address=SERVER, inside=made.inside) as server:
        try:
            for host in made.hosts:
                where = [f"--listen-addr=127.0.0.1:{PORT}", f"--endpoints={server.endpoint}"]
                gateway = [*host.inside, str(etcd_binary()), "gateway", "start", *where]
                subprocess.Popen(gateway, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            yield made
        finally:
            for host in made.hosts:
                lose(host)


class Hosts(Nodes):
    """A node on each host."""

    def on(self, two: Network, index: int, conf: str = "") -> Job:
        where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint=localhost:{PORT}", "--rdzv-id=job", "--nnodes=2"]
        options = [*where, f"--rdzv-conf={CONF}{conf}", "--max-restarts=3"]
        command = [*two.hosts[index].inside, *TORCHRUN, *options, ELASTIC]
        return self.stack.enter_context(Job(command, self.tmp_path, NODE=f"n{index}", GATE=str(self.gate.path)))


def test_a_loopback_is_not_given_to_another_host(two: Network, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = Hosts(tmp_path, stack)
        jobs = [hosts.on(two, index) for index in range(2)]
        until(lambda: any(job.process.poll() is not None for job in jobs))  # the later of the two
        (left,) = (job.finish() for job in jobs if job.process.poll() is not None)
        assert left.returncode == 78
        assert "another host or container has nodes of this job" in left.err


def test_with_an_interface_the_job_runs(two: Network, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = Hosts(tmp_path, stack)
        jobs = [hosts.on(two, index, ",address=net0") for index in range(2)]
        for job in jobs:
            job.wait_for(seen(2, 0))
        hosts.open_gate()
        assert [job.finish().returncode for job in jobs] == [0, 0]
