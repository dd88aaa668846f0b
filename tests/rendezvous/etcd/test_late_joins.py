"""A host that joins a running job again and again, and restarts everybody each time, is refused after `max_rejoins` times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.rendezvous.etcd.keys import JobKeys
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.rendezvous.etcd.test_etcd_jobs import CONF, Nodes

KEYS = JobKeys("job")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


@pytest.mark.full
def test_a_host_that_joins_too_often_may_not_come_back(nodes: Nodes, server: EtcdServer) -> None:
    """That its next agent ends with 69 is the same for each reason: test_etcd_failures."""
    conf = f"{CONF},max_rejoins=0"
    steady = nodes.start("steady", server.endpoint, "1:2", conf=f"{conf},node_name=steady")
    steady.wait_for('"world": 1')
    late = nodes.start("late", server.endpoint, "1:2", conf=f"{conf},node_name=late")
    late.wait_for("once it has left, this host may not come back .* joined the running job once within 60 minutes")
    with EtcdClient(server.endpoint) as client:
        assert [client.get(KEYS.refusal(name)).kv is not None for name in ("late", "steady")] == [True, False]
    for job in (steady, late):
        job.wait_for('"world": 2')
    nodes.open_gate()
    assert [job.finish().returncode for job in (steady, late)] == [0, 0]
