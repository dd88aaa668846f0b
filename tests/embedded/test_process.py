"""The process of an embedded store: whose agents it takes, for which job, and what outlives it."""

from __future__ import annotations

import base64
import dataclasses
import os
import queue
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elastic_ext.base.helper_process import Helper, HelperConnection, peer_of, text_of
from elastic_ext.embedded.plan import StorePlan, socket_of
from elastic_ext.etcd import Put
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, State, encode
from tests.etcd_client import EtcdClient
from tests.ports import free_port
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

KEYS = JobKeys("job")


class Agent:
    """An agent's connection to the store of its host."""

    def __init__(self, plan: StorePlan) -> None:
        self.said: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        helper = Helper("the store", "elastic_ext.embedded.process", socket_of(plan.port), plan.dump(), job=plan.job)
        self.connection = HelperConnection(
            helper, lambda message: self.said.put((text_of(message, "say"), text_of(message, "text")))
        )


@contextmanager
def agent(plan: StorePlan) -> Iterator[Agent]:
    made = Agent(plan)
    try:
        yield made
    finally:
        made.connection.close()


@pytest.fixture
def plan() -> StorePlan:
    return StorePlan("127.0.0.1", free_port(), run_id="job")


def birth(plan: StorePlan) -> int:
    """The first revision of the store, by which two are told apart."""
    with EtcdClient(f"127.0.0.1:{plan.port}") as client:
        return client.revision("any") >> 32


KILLED = """
import os, sys
from tests.embedded.test_process import Agent, StorePlan
Agent(StorePlan("127.0.0.1", int(sys.argv[1]), job=sys.argv[2]))
os._exit(9)
"""


def start_and_die(plan: StorePlan, job: str) -> None:
    """An agent that starts a store and is killed: the store waits for the next one."""
    subprocess.run([sys.executable, "-c", KILLED, str(plan.port), job], check=False, timeout=LIMIT_S)


def test_an_idle_store_makes_way_for_another_job(plan):
    start_and_die(plan, "secret a")
    first = birth(plan)
    with agent(dataclasses.replace(plan, job="secret b")):
        until(lambda: birth(plan) != first)


def test_a_busy_store_refuses_another_job(plan):
    with agent(dataclasses.replace(plan, job="secret a")) as busy, agent(dataclasses.replace(plan, job="secret b")) as other:
        say, text = other.said.get(timeout=LIMIT_S)
        assert (say, "serves another job" in text) == ("failed", True)
        assert busy.said.get(timeout=LIMIT_S) == ("taken", "")
        assert busy.said.empty()


STRANGER = """
import os, sys
from elastic_ext.base.helper_process import HelperFailed
from tests.embedded.test_process import Agent, StorePlan
os.setuid(65534)
try:
    Agent(StorePlan("127.0.0.1", int(sys.argv[1])))
except HelperFailed as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_the_agent_of_another_user_is_refused(plan):
    with agent(plan):
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, str(plan.port)], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
    assert done.stdout == "the store on this host is that of user 0: use another port, or wait for its end\n"


def write(plan: StorePlan, **values: str) -> None:
    with EtcdClient(f"127.0.0.1:{plan.port}") as client:
        lease = client.lease_grant(3600).lease_id
        client.txn([], [Put(getattr(KEYS, name), value, lease_id=lease) for name, value in values.items()])


def test_the_ledger_outlives_the_store(plan, tmp_path):
    path = tmp_path / "ledger"
    kept = dataclasses.replace(plan, ledger_file=str(path))
    with agent(kept):
        write(kept, ledger="what has failed", last_node="n1")
        until(path.exists)
    until(lambda: not reachable(kept))
    with agent(kept), EtcdClient(f"127.0.0.1:{kept.port}") as client:
        found = client.get(KEYS.ledger).kv
        assert found.value == b"what has failed"
        assert 3000 < client.lease_left_s(found.lease_id) <= 3600
        assert client.get(KEYS.last_node).kv is None
        write(kept, header=encode(Header(1, State.DONE)))
    until(lambda: not path.exists())


def test_an_unreadable_ledger_file_stops_nothing(plan, tmp_path):
    path = Path(tmp_path / "ledger")
    path.write_text("no JSON")
    kept = dataclasses.replace(plan, ledger_file=str(path))
    with agent(kept) as made:
        assert made.said.get(timeout=LIMIT_S)[0] == "taken"
        say, text = made.said.get(timeout=LIMIT_S)
        assert (say, "starting a new ledger" in text) == ("warning", True)
        write(kept, ledger="new")
        until(lambda: '"launch"' in path.read_text() and len(path.read_text()) > 60)


def test_a_ledger_that_cannot_be_written_is_reported(plan, tmp_path):
    kept = dataclasses.replace(plan, ledger_file=str(tmp_path / "no" / "ledger"))
    with agent(kept) as made:
        write(kept, ledger="new")
        until(lambda: "cannot be written" in made.said.get(timeout=LIMIT_S)[1])


def test_an_isolated_node_keeps_the_store(plan):
    """The host's agent has left in order, and the only other node has lost its connection: its lease is still there."""
    with agent(plan), EtcdClient(f"127.0.0.1:{plan.port}") as client:
        lease = client.lease_grant(60).lease_id
        client.txn([], [Put(KEYS.node("n2"), "{}", lease_id=lease)])
        watch = client.watch(KEYS.header)
        assert watch.get(0) is None
    first = birth(plan)
    with pytest.raises(AssertionError):
        until(lambda: not reachable(plan), limit_s=3.0)
    assert birth(plan) == first
    with EtcdClient(f"127.0.0.1:{plan.port}") as client:
        client.lease_revoke(lease)
    until(lambda: not reachable(plan))


def reachable(plan: StorePlan) -> bool:
    """Whether a store listens: its name is in the kernel's table of Unix sockets."""
    return f"@{socket_of(plan.port)[1:]}\n" in Path("/proc/net/unix").read_text()


def store_of(plan: StorePlan) -> int:
    """The process of the store."""
    with socket.socket(socket.AF_UNIX) as asks:
        asks.connect(socket_of(plan.port).encode())
        return peer_of(asks).pid


@contextmanager
def no_descriptor_left(plan: StorePlan) -> Iterator[None]:
    """The store can open nothing."""
    store = store_of(plan)
    before = resource.prlimit(store, resource.RLIMIT_NOFILE)
    resource.prlimit(store, resource.RLIMIT_NOFILE, (3, before[1]))
    yield
    resource.prlimit(store, resource.RLIMIT_NOFILE, before)


@contextmanager
def full_disk(plan: StorePlan) -> Iterator[None]:
    """The disk of the ledger has no room."""
    fill = Path(plan.ledger_file).with_name("fill")
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(b"x")
    yield
    fill.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("trouble", "said"), [(no_descriptor_left, "Too many open files"), (full_disk, "No space left on device")]
)
def test_an_unwritten_record_is_written_later(plan, small_disk, trouble, said):
    """What it meets is named once. The store goes on, and its file holds all records once it can be written."""
    path = small_disk / "ledger"
    kept = dataclasses.replace(plan, ledger_file=str(path))
    with agent(kept) as made, EtcdClient(f"127.0.0.1:{kept.port}") as client:
        assert made.said.get(timeout=LIMIT_S)[0] == "taken"
        first = client.revision(KEYS.ledger) >> 32  # the connection is there
        with trouble(kept):
            client.txn([], [Put(KEYS.ledger, "first")])
            warning = made.said.get(timeout=LIMIT_S)
            client.txn([], [Put(KEYS.ledger, "second")])
        assert warning[0] == "warning"
        assert f"cannot be written; until it can, the budget outlives no launch: {said}" in warning[1]
        assert made.said.get(timeout=LIMIT_S) == ("warning", f"ledger_file {path} is written again")
        until(lambda: base64.b64encode(b"second").decode() in path.read_text())
        assert birth(kept) == first
        assert made.said.empty()
