"""Networks that carry some packets between the hosts and lose others: what the agents say of them, and how they end."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_ext.rendezvous import round_store
from elastic_ext.rendezvous.place import InterruptibleCondition
from elastic_ext.rendezvous.round_records import Header
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Job
from tests.lossy_network import DEVICE, LossyNetwork, required

PORT = 29400
HOSTS = ("a", "b")
LIMIT_S = 400.0


class Pair:
    """Two hosts, and a job on them. Its store is on the first."""

    def __init__(self, tmp_path: Path, stack: ExitStack, backend: str) -> None:
        self._tmp_path, self._stack = tmp_path, stack
        self.network = stack.enter_context(LossyNetwork(HOSTS))
        first, self.port = HOSTS[0], PORT
        if backend == "ext_etcd":
            address, inside = self.network.addresses[first], self.network.inside(first)
            self.port = stack.enter_context(EtcdServer(tmp_path / "etcd", address=address, inside=inside)).client_port
        self._options = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={self.network.addresses[first]}:{self.port}"]

    def start(self, script: str, conf: str = "backoff=0", **variables: str) -> list[Job]:
        return [self._start(name, script, conf, variables) for name in HOSTS]

    def _start(self, name: str, script: str, conf: str, variables: dict[str, str]) -> Job:
        inside, own = self.network.inside(name), f"--local-addr={self.network.addresses[name]}"
        of_job = ["--rdzv-id=job", "--nnodes=2", f"--rdzv-conf={conf}", "--max-restarts=3", str(SCRIPTS / script)]
        named = {"GLOO_SOCKET_IFNAME": DEVICE, "ELASTIC_EXT_NODE_NAME": name, **variables}
        return self._stack.enter_context(Job([*inside, *TORCHRUN, *self._options, own, *of_job], self._tmp_path, **named))


@pytest.fixture(params=["ext_etcd", "ext_c10d"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    required()
    with ExitStack() as stack:
        yield Pair(tmp_path, stack, request.param)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_one_open_port_ends_all_with_75(pair: Pair) -> None:
    pair.network.open_only(pair.port)
    ended = [job.finish() for job in pair.start("stepping_job.py")]
    assert [done.returncode for done in ended] == [75, 75], "\n---\n".join(done.err for done in ended)
    for done in ended:
        (line,) = [line for line in done.err.splitlines() if " ERROR elastic_ext: " in line]
        said = re.search(r"([ab]) \((.*)\) cannot reach (.*), the stores of 3 rounds in a row", line)
        assert said is not None, line
        assert said[2] == pair.network.addresses[said[1]]
        other = pair.network.addresses["b" if said[1] == "a" else "a"]
        assert {each.rpartition(":")[0] for each in said[3].split(", ")} == {other}
        assert "open all TCP ports between the hosts of the job" in line


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mtu", "largest", "join_timeout"), [(1500, 900, 60), (9000, 2000, 40), (9000, 2000, 120)])
def test_lost_large_messages_end_all_with_75(pair: Pair, tmp_path: Path, mtu: int, largest: int, join_timeout: int) -> None:
    """900 bytes: not even a claim that the workers hang gets through. 2,000: that does, but no report with their stacks.

    join_timeout: less than the time that the store has to take a report, or more. hang_timeout: ten times that counts before the
    first step, and this job has none.
    """
    pair.network.believe(mtu)
    jobs = pair.start(
        "growing_job.py", f"backoff=0,join_timeout={join_timeout},lease_ttl=10,hang_timeout=2", LARGE=str(tmp_path / "large")
    )
    for job in jobs:
        job.wait_for("trains: 0")
    pair.network.swallow_above(largest)
    (tmp_path / "large").touch()
    ended = [job.finish(LIMIT_S) for job in jobs]
    assert [done.returncode for done in ended] == [75, 75], "\n---\n".join(done.err for done in ended)
    # The store is on the other host: only what this one sends is lost, and the other may not hear why it has left.
    assert "the MTU between the" in ended[1].err, "\n---\n".join(done.err for done in ended)


@pytest.mark.full
def test_a_store_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a proxy that takes every connection. The round runs on: nothing else would end the wait."""
    monkeypatch.setattr(round_store, "GREET_S", 0.1)
    monkeypatch.setattr(round_store, "CONNECT", timedelta(seconds=0.5))  # so that torch, which tries again, gives up soon
    broken = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        header = Header(1, address="127.0.0.1", port=silent.getsockname()[1], nodes=2)
        connector = round_store.StoreConnector(InterruptibleCondition(), "here")
        assert connector.connect(header, lambda: None, broken.append) is None
    assert broken == ["the store of rank 0 does not answer"]
