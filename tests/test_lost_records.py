"""Nothing of the job is in etcd any more, or nobody can reach it: the round that trains goes on, or one free restart.

Real etcd, agents and workers. What is out of reach and for how long is a grid (`make chaos` runs all of it).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.rounds import Header, State, decode
from tests.etcd.proxy import Proxy
from tests.etcd_server import EtcdServer
from tests.jobs import TORCHRUN, Gate, Job, wait_gone
from tests.test_etcd_jobs import ELASTIC, reports, seen

PREFIX = "/elastic_ext/job/"
NAMES = ("a", "b", "c")
BACK_S = 60.0  # for all to be as before; a failed test waits for it, no other
GRACE_S = 20.0  # that an agent has to end: stop_grace, and what its threads may be in


class Trio:
    """Three agents of one job that needs all of them, and their ways to etcd: one `shared`, a `link` of the last one's own."""

    def __init__(self, folder: Path, stack: ExitStack, server: EtcdServer, ttl_s: int) -> None:
        self.server = server
        self.gate = Gate(folder / "gate")
        self.client = stack.enter_context(EtcdClient(server.endpoint))
        port = int(server.endpoint.rpartition(":")[2])
        self.shared, self.link = (stack.enter_context(Proxy(port)) for _ in range(2))
        self.jobs: dict[str, Job] = {}
        for name in NAMES:
            endpoint = (self.link if name == "c" else self.shared).endpoint
            where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--nnodes=3"]
            conf = f"--rdzv-conf=lease_ttl={ttl_s},last_call=0.5,stop_grace=2"
            command = [*TORCHRUN, *where, conf, "--max-restarts=3", ELASTIC]
            self.jobs[name] = stack.enter_context(Job(command, folder, NODE=name, GATE=str(self.gate.path)))
        for job in self.jobs.values():
            job.wait_for(seen(3, 0))
        self.workers = [line["pid"] for line in reports(*self.jobs.values())]
        self.until(lambda: len(self.keys("nodes/")) == len(self.keys("assign/")) == 3)
        self.id_of = {name: self._id_of(job) for name, job in self.jobs.items()}

    def _id_of(self, job: Job) -> str:
        return next(each for each in self.keys("nodes/") if int(each.rsplit("-", 2)[1]) == job.process.pid)

    def id_of_leader(self) -> str:
        nodes = self.client.get_prefix(PREFIX + "nodes/").kvs
        return min(nodes, key=lambda kv: kv.create_revision).key.decode()[len(PREFIX + "nodes/") :]

    @property
    def agents(self) -> list[int]:
        return [job.process.pid for job in self.jobs.values()]

    def attempts(self) -> set[int]:
        return {line["attempt"] for line in reports(*self.jobs.values())}

    def keys(self, below: str) -> list[str]:
        return [kv.key.decode()[len(PREFIX + below) :] for kv in self.client.get_prefix(PREFIX + below).kvs]

    def header(self) -> Header:
        found = self.client.get(PREFIX + "round").kv
        return decode(Header, found.value, "round") if found is not None else Header()

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

    def finish(self, restarts: int) -> None:
        """All end well, have seen so many restarts at most, and none was charged; nobody has stumbled."""
        self.gate.open()
        for name, job in self.jobs.items():
            assert job.finish().returncode == 0, f"node {name}\n{job.err}"
            assert "Traceback" not in job.out + job.err, f"node {name}\n{job.err}"
        assert max(self.attempts()) <= restarts, "\n".join(job.err for job in self.jobs.values())
        assert self.keys("charges/") == []
        assert self.keys("ledger") == []


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


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
            os.kill(pid, signal.SIGCONT)


# What goes away, and how many restarts that may cost. Where one node alone is cut off, or stood still while its lease ended, it
# must stop its workers; and so must those of which none can know that all others stood still as well.
OUTAGES = {"etcd": (frozen_etcd, 0), "links": (all_links, 0), "link": (one_link, 1), "agents": (frozen_agents, 1)}
SHORT = [("etcd", 5, 2), ("etcd", 8, 2), ("links", 8, 2), ("link", 8, 2), ("agents", 8, 2)]
GRID = [(what, seconds, ttl_s) for what in OUTAGES for ttl_s in (2, 10) for seconds in (5, 20, 60, 180)]


@pytest.mark.parametrize(("what", "seconds", "ttl_s"), [*SHORT, *(each for each in GRID if each not in SHORT)])
def test_the_job_outlives(server, tmp_path, stack, what, seconds, ttl_s):
    """Longer than the leases of the nodes, and than that of the job's records, which is three times as long."""
    outage, restarts = OUTAGES[what]
    trio = Trio(tmp_path, stack, server, ttl_s)
    before = {pid: cpu_s(pid) for pid in trio.agents}
    with outage(trio):
        gone = wait_gone(trio.agents, timeout_s=seconds) != trio.agents
    used = {pid: cpu_s(pid) - before[pid] for pid in trio.agents}
    assert not gone, "\n".join(job.err for job in trio.jobs.values())
    assert max(used.values()) < 1 + 0.05 * seconds, used
    trio.until(trio.is_whole)
    if trio.header().round > 1:
        for job in trio.jobs.values():
            job.wait_for(seen(3, 1))
    trio.finish(restarts)


@pytest.mark.timeout(300)
def test_a_key_that_is_deleted_comes_back_and_the_round_goes_on(server, tmp_path, stack):
    """Each of them, by hand, one after the other; then all at once."""
    trio = Trio(tmp_path, stack, server, 2)
    leader, other = trio.id_of_leader(), next(iter(set(trio.id_of.values()) - {trio.id_of_leader()}))
    for key in ("round", "job", "last", f"assign/{leader}", f"assign/{other}", f"nodes/{leader}"):
        trio.client.delete(PREFIX + key)
        trio.until(trio.is_whole)
    for below in ("assign/", "nodes/", ""):
        trio.client.delete_prefix(PREFIX + below)
        trio.until(trio.is_whole)
    assert wait_gone(trio.workers, timeout_s=0) == trio.workers
    trio.finish(restarts=0)


def test_a_nodes_key_that_is_deleted_costs_one_free_restart(server, tmp_path, stack):
    """To the leader it looks like the node's death."""
    trio = Trio(tmp_path, stack, server, 10)
    other = next(iter(set(trio.id_of.values()) - {trio.id_of_leader()}))
    trio.client.delete(f"{PREFIX}nodes/{other}")
    for job in trio.jobs.values():
        job.wait_for(seen(3, 1))
    trio.finish(restarts=1)


def test_sigterm_ends_agents_that_cannot_reach_etcd(server, tmp_path, stack):
    trio = Trio(tmp_path, stack, server, 2)
    trio.server.pause()
    stack.callback(trio.server.resume)
    for job in trio.jobs.values():
        job.wait_for("etcd leases are not being renewed")
    trio.jobs["a"].process.send_signal(signal.SIGTERM)
    assert wait_gone([trio.jobs["a"].process.pid], timeout_s=GRACE_S) == []
    # The threads of the others sit in calls by now: their worker's death was to be told.
    for pid in trio.workers:
        if wait_gone([pid], timeout_s=0):
            os.kill(pid, signal.SIGKILL)
    for name in "bc":
        trio.jobs[name].wait_for("failed")
        trio.jobs[name].process.send_signal(signal.SIGTERM)
    assert wait_gone(trio.agents, timeout_s=GRACE_S) == []
    assert wait_gone(trio.workers, timeout_s=0) == []
