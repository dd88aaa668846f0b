"""Two hosts that reach etcd through a gateway of their own, on their loopback: they must not give that to each other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer, etcd_binary
from tests.jobs import TORCHRUN, Job
from tests.networks import SERVER, Host, Network, network
from tests.own_etcd.hosts import lose
from tests.rendezvous.test_etcd_jobs import CONF, Nodes, seen
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


def start(nodes: Nodes, host: Host, conf: str = "") -> Job:
    launcher = [*host.inside, *TORCHRUN]
    return nodes.start(host.address, f"localhost:{PORT}", "2", launcher=launcher, conf=f"{CONF}{conf}")


def test_a_loopback_is_not_given_to_another_host(two: Network, nodes: Nodes) -> None:
    jobs = [start(nodes, host) for host in two.hosts]
    until(lambda: any(job.process.poll() is not None for job in jobs))  # the later of the two
    (left,) = (job.finish() for job in jobs if job.process.poll() is not None)
    assert left.returncode == 78
    assert "another host or container has nodes of this job" in left.err


def test_with_an_interface_the_job_runs(two: Network, nodes: Nodes) -> None:
    for host in two.hosts:
        start(nodes, host, ",address=net0")
    nodes.wait_for(seen(2, 0))
    nodes.finish()
