"""Nothing of the job is in etcd any more, or nobody can reach it: the round that trains goes on, or one free restart.

Real etcd, agents and workers. Who trains on is decided in test_fence; one outage of each kind is here, and `make chaos` runs
three minutes of each (ELASTIC_EXT_TEST_OUTAGE_S).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_ext.base.settings import Settings
from elastic_ext.failures.ledger import Ledger, decode_ledger
from elastic_ext.rendezvous.judging import AgentPolicy
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.place import Participant
from elastic_ext.rendezvous.round_records import Header, Node, State, decode
from elastic_ext.rendezvous.rounds import Limits
from elastic_ext.rendezvous.tasks import Dispatcher, NodeConfig
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.jobs import wait_gone
from tests.rendezvous.test_etcd_jobs import Nodes, reports, seen, wait_for_nodes

PREFIX = JobKeys("job").prefix
BACK_S = 60.0  # for all to be as before; a failed test waits for it, no other
GRACE_S = 60.0  # that an agent has to end: 5 s for its workers, and what its threads may be in


class Trio(Nodes):
    """Three agents of one job that needs all of them, and their ways to etcd: one `shared`, a `link` of the last one's own."""

    def __init__(self, folder: Path, stack: ExitStack, server: EtcdServer, ttl_s: int) -> None:
        super().__init__(folder, stack)
        self.server = server
        self.client = stack.enter_context(EtcdClient(server.endpoint))
        port = int(server.endpoint.rpartition(":")[2])
        self.shared, self.link = (stack.enter_context(Proxy(port)) for _ in range(2))
        for name in "abc":
            endpoint = (self.link if name == "c" else self.shared).endpoint
            self.start(name, endpoint, "3", conf=f"lease_ttl={ttl_s},last_call_timeout=0.5")
        self.wait_for(seen(3, 0))
        self.workers = [line["pid"] for line in reports(*self.jobs.values())]
        self.until(lambda: len(self.keys("nodes/")) == len(self.keys("assign/")) == 3)

    @property
    def agents(self) -> list[int]:
        return [job.process.pid for job in self.jobs.values()]

    def keys(self, below: str) -> list[str]:
        return [kv.key.decode()[len(PREFIX + below) :] for kv in self.client.get_prefix(PREFIX + below).kvs]

    def header(self) -> Header:
        found = self.client.get(PREFIX + "round").kv
        return decode(Header, found.value, "round") if found is not None else Header()

    def worlds(self) -> list[int]:
        """Numbers of the rounds that have run, in their order; of one that was over and ran again twice."""
        found: list[tuple[int, str]] = []
        runs = None
        with self.client.watch(PREFIX + "round", start_revision=1) as history:
            while (batch := history.get(BACK_S)) is not None:
                for header in (decode(Header, event.kv.value, "round") for event in batch.events if event.kind == "put"):
                    if header.state is State.RUNNING and runs != header.seal:
                        found.append((header.round, header.seal))
                    runs = header.seal if header.state is State.RUNNING else None
                    if header.state is State.DONE:
                        return [number for number, _ in found]
        raise AssertionError("the job is not done")

    def until(self, holds: Callable[[], bool]) -> None:
        """Look after each change below the job's prefix."""
        with self.client.watch(PREFIX, prefix=True) as news:
            while not holds():
                there = "\n".join(f"{kv.key.decode()} {kv.value.decode()}" for kv in self.client.get_prefix(PREFIX).kvs)
                logs = "\n".join(f"-- {name}\n{job.err}" for name, job in self.jobs.items())
                assert news.get(BACK_S) is not None, f"nothing happens for {BACK_S} s:\n{there}\n{logs}"

    def is_whole(self) -> bool:
        """All records are there, and all nodes are in the round that runs."""
        header = self.header()
        nodes = set(self.keys("nodes/"))
        return (
            header.state is State.RUNNING
            and len(nodes) == 3
            and set(self.keys("assign/")) == nodes
            and {"job", "round"} <= set(self.keys(""))
        )

    def end(self, restarts: int) -> None:
        """All end well, have seen so many restarts at most, and none was charged; nobody has stumbled."""
        self.finish()
        for name, job in self.jobs.items():
            assert "Traceback" not in job.out + job.err, f"node {name}\n{job.err}"
        assert max(self.attempts()) <= restarts, "\n".join(job.err for job in self.jobs.values())
        assert self.worlds() == sorted(set(self.worlds()))
        assert self.keys("charges/") == []
        assert decode_ledger(self.client.get(PREFIX + "ledger").kv.value) == Ledger(done=self.header().round)


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def frozen_etcd(trio: Trio) -> Iterator[None]:
    trio.server.pause()
    try:
        yield
    finally:
        trio.server.resume()


@contextmanager
def deaf(*links: Proxy) -> Iterator[None]:
    for link in links:
        link.deaf()
    yield
    for link in links:
        link.stop()
        link.start()


def all_links(trio: Trio) -> Iterator[None]:
    return deaf(trio.shared, trio.link)


def one_link(trio: Trio) -> Iterator[None]:
    return deaf(trio.link)


@contextmanager
def frozen_agents(trio: Trio) -> Iterator[None]:
    """As when the machines are suspended: agents and workers."""
    pids = [*trio.agents, *trio.workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a worker that its agent, already awake, has killed
                os.kill(pid, signal.SIGCONT)


# What goes away, and how many restarts that may cost. Where one node alone is cut off, or stood still while its lease ended, it
# must stop its workers; and so must those of which none can know that all others stood still as well.
OUTAGES = {"etcd": (frozen_etcd, 0), "links": (all_links, 0), "link": (one_link, 1), "agents": (frozen_agents, 1)}
LEASE_S = 10  # a busy machine may lose a much shorter one
# Longer than the leases of the nodes, or also than that of the job's records, which is three times as long.
GRID = [("etcd", 20), ("links", 35), ("agents", 35)]  # one link: test_etcd_jobs
if LONGER := os.environ.get("ELASTIC_EXT_TEST_OUTAGE_S"):
    GRID = [(what, int(LONGER)) for what in OUTAGES]


@pytest.mark.seam
@pytest.mark.full("links-", "agents-")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("what", "seconds"), GRID)
def test_the_job_outlives(server, tmp_path, stack, what, seconds):
    outage, restarts = OUTAGES[what]
    trio = Trio(tmp_path, stack, server, LEASE_S)
    before = {pid: cpu_s(pid) for pid in trio.agents}
    with outage(trio):
        gone = wait_gone(trio.agents, timeout_s=seconds) != trio.agents
    used = {pid: cpu_s(pid) - before[pid] for pid in trio.agents}
    assert not gone, "\n".join(job.err for job in trio.jobs.values())
    assert max(used.values()) < 1 + 0.25 * seconds, used  # none spins, however slow this machine is
    trio.until(trio.is_whole)
    if trio.header().round > 1:
        trio.wait_for(seen(3, 1))
    trio.end(restarts)


@pytest.mark.full
def test_a_jobs_nnodes_outlive_its_records(server, tmp_path, stack):
    """A node with another one is the first to come to the empty store; the members restore theirs, and take it in."""
    nodes, link = Nodes(tmp_path, stack), stack.enter_context(Proxy(int(server.endpoint.rpartition(":")[2])))
    for name in "ab":
        nodes.start(name, link.endpoint, "2:3")
    nodes.wait_for(seen(2, 0))
    with deaf(link):
        server.kill()
        server.wipe()
        server.start()
        nodes.start("c", server.endpoint, "2:4")
        wait_for_nodes(server, 1)
    nodes.wait_for(seen(3, 1))
    with EtcdClient(server.endpoint) as client:
        job = client.get(JobKeys("job").job).kv
    assert {"min_nodes": 2, "max_nodes": 3}.items() <= json.loads(job.text).items()
    nodes.finish()


@pytest.mark.full
def test_sigterm_ends_agents_that_cannot_reach_etcd(server, tmp_path, stack):
    trio = Trio(tmp_path, stack, server, 2)
    trio.server.pause()
    stack.callback(trio.server.resume)
    trio.wait_for("etcd leases are not being renewed")
    # Two wait for the verdict on the death of their workers when they are told to go, the third trains.
    for line in reports(trio.jobs["b"], trio.jobs["c"]):
        os.kill(line["pid"], signal.SIGKILL)
    trio.wait_for("still waiting for the verdict of the job", "bc")
    for job in trio.jobs.values():
        job.process.send_signal(signal.SIGTERM)
    assert wait_gone(trio.agents) == []
    assert wait_gone(trio.workers) == []


@pytest.mark.full
def test_sigterm_ends_an_agent_joining_a_silent_store(server, stack, nodes):
    """As when the link to the host of rank 0 breaks while the round is formed. Then a round that ends; then a signal."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    silent.settimeout(BACK_S)
    host = stack.enter_context(EtcdClient(server.endpoint))
    dispatcher = Dispatcher()
    stack.callback(dispatcher.close, GRACE_S)
    policy = AgentPolicy(Settings(), lambda: None)
    first = Participant(host, dispatcher, NodeConfig("job", "silent", Limits(2, 2, 0.0), 10), lambda: None, policy)
    mine = Node(after=0, workers=1, role="", address="127.0.0.1", port=silent.getsockname()[1])
    first.ready(mine)
    wait_for_nodes(server, 1)  # it leads, and will have rank 0
    job = nodes.start("b", server.endpoint, "2", conf="lease_ttl=10")
    silent.accept()
    first.end_round(1, State.BROKEN, "its first try")
    first.ready(dataclasses.replace(mine, after=1))
    silent.accept()
    job.process.send_signal(signal.SIGTERM)
    assert wait_gone([job.process.pid]) == []


def test_a_dispatcher_is_closed_during_its_threads_call():
    class Sits:
        def run(self, work: Callable[[], None]) -> None:
            work()

        def on_timer(self) -> None:
            pass

    def sit() -> None:
        entered.set()
        released.wait(BACK_S)
        released.set()

    dispatcher, entered, released = Dispatcher(), threading.Event(), threading.Event()
    dispatcher.post(Sits(), sit)
    assert entered.wait(BACK_S)
    dispatcher.close(0.1)
    assert not released.is_set()
    released.set()
