"""A host that joins a running job again and again, and restarts everybody each time, is refused after `max_rejoins` times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.rendezvous.etcd.job_records import LateJoins
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.tasks import HostRefused
from elastic_ext.rendezvous.late_joins import WINDOW_S
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.rendezvous.etcd.test_etcd_jobs import CONF, Nodes

KEYS = JobKeys("job")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


class Tasks:
    """Runs each task at once."""

    def post(self, task) -> None:
        task()

    def run(self, task) -> None:
        task()


@pytest.mark.seam
def test_only_a_node_that_was_not_in_the_round_before_is_counted(server: EtcdServer) -> None:
    with EtcdClient(server.endpoint) as client:

        def count() -> list[bytes]:
            return [kv.key.rpartition(b"/")[2] for kv in client.get_prefix(KEYS.joins("n1")).kvs]

        from_the_start = LateJoins(client, KEYS, "n1", 1, 60)
        for round_ in (1, 2, 3):
            from_the_start.entered(round_, Tasks())
        assert count() == []
        from_the_start.entered(5, Tasks())
        assert count() == [b"5"]
        LateJoins(client, KEYS, "n2", 1, 60).entered(5, Tasks())
        from_the_start.entered(6, Tasks())
        assert count() == [b"5"]
        assert client.get(KEYS.refusal("n1")).kv is None
        LateJoins(client, KEYS, "n1", 1, 60).entered(7, Tasks())
        assert client.get(KEYS.refusal("n1")).kv is not None
        with pytest.raises(HostRefused, match="joined the running job 3 times within 60 minutes"):
            LateJoins(client, KEYS, "n1", 1, 60).entered(9, Tasks())
        (lease,) = {kv.lease_id for kv in client.get_prefix(KEYS.join("n1", 5)).kvs}
        assert WINDOW_S - 60 < client.lease_left_s(lease) <= WINDOW_S


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
