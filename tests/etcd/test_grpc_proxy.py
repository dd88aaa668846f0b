"""A client, and a job, behind etcd's own proxy, which speaks etcd's API somewhat differently from a server."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from elastic_ext.etcd import LeaseSession, Put
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer, etcd_binary
from tests.jobs import wait_gone
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import Nodes, reports, seen
from tests.until import until

pytestmark = pytest.mark.seam

LONG_S = 60.0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def proxy(server: EtcdServer) -> Iterator[str]:
    """The endpoint of a grpc-proxy in front of etcd."""
    port = free_port()
    where = [f"--endpoints={server.endpoint}", f"--listen-addr=127.0.0.1:{port}"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([str(etcd_binary()), "grpc-proxy", "start", *where], **quiet)
    try:
        until(lambda: listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_leases_are_renewed(proxy):
    with EtcdClient(proxy) as client:
        leases = [client.lease_grant(30).lease_id for _ in range(3)]
        kept = client.lease_keep_alive([*leases, 12345]).ttl_s
        assert kept.pop(12345) <= 0
        assert kept == dict.fromkeys(leases, 30)
        session = LeaseSession(client, 2)
        first = session.alive_until
        until(lambda: session.alive_until > first)
        session.revoke()


def test_each_watch_gets_its_own_events(proxy):
    """Several begin at once, and one of them is closed; others come later."""
    with EtcdClient(proxy) as client, ExitStack() as stack:
        keys = [f"/w/{number}" for number in range(8)]
        revision = client.revision("/w/0")
        watches = {key: stack.enter_context(client.watch(key, start_revision=revision + 1)) for key in keys}
        watches.pop("/w/3").close()
        watches["/w"] = stack.enter_context(client.watch("/w/", prefix=True, start_revision=revision + 1))
        for key in keys:
            client.txn([], [Put(key, key)])
        for key in keys:
            if key in watches:
                (event,) = watches[key].get(LONG_S).events
                assert (event.kv.key.decode(), event.kv.value.decode()) == (key, key)
        found: list[str] = []
        while len(found) < len(keys):
            found += [event.kv.key.decode() for event in watches["/w"].get(LONG_S).events]
        assert found == keys


def test_a_job_restarts_and_loses_a_node(proxy, tmp_path):
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack)
        first, second = (nodes.start(name, proxy, "1:2") for name in "ab")
        nodes.wait_for(seen(2, r"\d"))
        last = max(line["attempt"] for line in reports(first))
        workers = [line["pid"] for line in reports(second) if line["attempt"] == last]
        second.process.kill()
        assert wait_gone(workers) == []
        first.wait_for(seen(1, last + 1))
        nodes.finish("a")
