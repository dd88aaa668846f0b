"""The rendezvous alone, under agents that are not ours: torch's own LocalElasticAgent, and a loop."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from elastic_ext.agent import plugin
from elastic_ext.base import log_records, torch_private
from elastic_ext.base.settings import Settings
from elastic_ext.embedded.one_machine import OneMachine
from elastic_ext.rendezvous.handler import EtcdRendezvous
from tests.jobs import SCRIPTS, Job
from tests.ports import free_port
from tests.until import until

pytestmark = pytest.mark.seam

PLAIN = [sys.executable, str(SCRIPTS / "plain_agent.py")]
GLOO = str(SCRIPTS / "gloo_job.py")
ELASTIC = str(SCRIPTS / "elastic_job.py")
WARNING = "used by an agent other than elastic_ext's"
CONF = {
    "ext_etcd": "lease_ttl=6,last_call_timeout=0.5",
    "ext_c10d": "keep_alive_interval=1,keep_alive_max_attempt=30,last_call_timeout=1,join_timeout=60",  # torch's keys
}
BACKENDS = pytest.mark.parametrize("backend", ["ext_etcd", "ext_c10d"])


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, backend: str) -> str:
    return request.getfixturevalue("server").endpoint if backend == "ext_etcd" else f"localhost:{free_port()}"


def start(tmp_path: Path, backend: str, endpoint: str, nnodes: str, *command: str, **variables: str) -> Job:
    return Job([*PLAIN, backend, endpoint, nnodes, *command], tmp_path, CONF=CONF[backend], **variables)


def worlds(job: Job) -> list[int]:
    return [json.loads(line)["world"] for line in re.findall(r"\{\"rank\".*\}", job.out)]


@pytest.mark.full
@BACKENDS
def test_a_worker_fails_and_both_nodes_restart(backend, endpoint, tmp_path):
    with (
        start(tmp_path, backend, endpoint, "2", GLOO, "kill:1", NPROC="1") as first,
        start(tmp_path, backend, endpoint, "2", GLOO, "kill:1", NPROC="2") as second,
    ):
        for job in (first, second):
            assert job.finish().returncode == 0, job.err
            assert job.err.count(WARNING) == 1
        assert set(worlds(first) + worlds(second)) == {3}
        assert (first.out + second.out).count("finished") == 3


@contextmanager
def two(backend: str, endpoint: str) -> Iterator[list[Any]]:
    create = EtcdRendezvous if backend == "ext_etcd" else plugin.c10d_rendezvous
    params = RendezvousParameters(backend, endpoint, "job", 2, 2, "127.0.0.1", last_call_timeout=0.1)
    handlers = [create(params, Settings()) for _ in range(2)]
    try:
        yield handlers
    finally:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda handler: handler.shutdown(), handlers)) == [True, True]
        for handler in handlers:
            handler.shutdown()  # once more does no harm


@pytest.mark.full("ext_c10d")
@BACKENDS
def test_a_loop_that_calls_next_rendezvous(backend, endpoint, caplog):
    with two(backend, endpoint) as (a, b), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda handler: handler.next_rendezvous(), (a, b)))
        assert sorted(info.rank for info in found) == [0, 1]
        assert {info.world_size for info in found} == {2}
        assert found[0].bootstrap_store_info == found[1].bootstrap_store_info
        found[0].store.set("key", "first round")
        assert found[1].store.get("key") == b"first round"
        assert [handler.num_nodes_waiting() for handler in (a, b)] == [0, 0]

        again = pool.submit(a.next_rendezvous)  # its workers have failed, say
        until(lambda: b.num_nodes_waiting() > 0)
        found = [b.next_rendezvous(), again.result(60)]
        assert sorted(info.rank for info in found) == [0, 1]
        assert not found[0].store.check(["key"])  # each round has a store of its own
        assert [handler.num_nodes_waiting() for handler in (a, b)] == [0, 0]

        a.set_closed()
        until(b.is_closed)
        with pytest.raises(RendezvousClosedError):
            b.next_rendezvous()
        assert sum(WARNING in text for text in caplog.messages) == 2  # one for each


def test_a_loop_on_one_node_without_any_service(caplog):
    handler = OneMachine(RendezvousParameters("ext_c10d", "localhost:0", "job", 1, 1), Settings())
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert (second.rank, second.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    assert sum(WARNING in text for text in caplog.messages) == 1
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_nodes_wait_for_a_checkpoint_whatever_the_agent(server, tmp_path, monkeypatch):
    monkeypatch.setattr(log_records, "install", lambda: None)
    monkeypatch.setattr(torch_private, "install_agent", lambda agent, handler: None)
    conf = {"grow_at": "checkpoint", "checkpoint_dir": str(tmp_path)}
    handler: Any = plugin.create_etcd(RendezvousParameters("ext_etcd", server.endpoint, "job", 1, 2, **conf))
    try:
        assert not handler._place.policy.may_grow(1)
        torch.save({"step": 1}, tmp_path / "step_1.pt")
        assert handler._place.policy.may_grow(1)
    finally:
        handler.leave()
