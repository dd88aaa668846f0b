"""How names of etcd's hosts are looked up: a name in /etc/hosts needs no name server."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, run
from tests.programs import needs, required

# A name server that never answers: a host of that address is said to be behind a link that nobody is on.
SILENT = """
set -e
ip link set lo up
ip link add near type veth peer name far
ip addr add 10.9.9.2/24 dev near
ip link set near up
ip link set far up
ip neigh add 10.9.9.9 lladdr 02:00:00:00:00:01 dev near
echo "nameserver 10.9.9.9" > resolv.conf
(cat /etc/hosts; echo "127.0.0.1 etcd-here") > hosts
mount --bind resolv.conf /etc/resolv.conf
mount --bind hosts /etc/hosts
exec {command}
"""
GET = "import os; from tests.etcd.test_names import get; get()"


def get() -> None:
    """In the namespace: an etcd of its own, asked by a name."""
    with EtcdServer(Path("etcd")) as server:
        from elastic_ext.etcd import EtcdClient

        with EtcdClient(f"etcd-here:{server.client_port}") as client:
            assert client.get("x").kv is None
    assert "GRPC_DNS_RESOLVER" not in os.environ  # else the workers had it, too


@pytest.mark.full
def test_a_name_in_etc_hosts_needs_no_server(tmp_path: Path) -> None:
    needs("unshare", "ip")
    required(os.geteuid() == 0, "needs root for a network namespace")
    script = SILENT.format(command=shlex.join([sys.executable, "-c", GET]))
    done = run(["unshare", "-m", "-n", "sh", "-c", script], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.err
