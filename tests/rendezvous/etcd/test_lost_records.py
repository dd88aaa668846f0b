"""Nothing of the job is in etcd any more, or nobody can reach it: the round that trains goes on, or one free restart.

Real etcd, agents and workers. Who trains on is decided in test_fence; one outage of each kind is here, and `make chaos` runs
three minutes of each (ELASTIC_EXT_TEST_OUTAGE_S).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_ext.etcd import Compare, Delete, Put, Unavailable
from elastic_ext.etcd.values import Op, TxnResult
from elastic_ext.failures.cuts import Reach, Silent
from elastic_ext.failures.ledger import decode_ledger
from elastic_ext.rendezvous.etcd.context import NodeConfig
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.etcd.round_part import EtcdRound
from elastic_ext.rendezvous.etcd.tasks import Dispatcher
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, State, decode, encode
from elastic_ext.rendezvous.rounds import Limits
from tests.agent.test_supervisor import DEAF
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, TORCHRUN, Gate, Job, wait_gone
from tests.participants import part_of
from tests.rendezvous.etcd.test_etcd_jobs import ELASTIC, reports, seen, wait_for_nodes
from tests.until import until

PREFIX = JobKeys("job").prefix
NAMES = ("a", "b", "c")
BACK_S = 60.0  # for all to be as before; a failed test waits for it, no other
GRACE_S = 60.0  # that an agent has to end: stop_grace, and what its threads may be in


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

    def finish(self, restarts: int) -> None:
        """All end well, have seen so many restarts at most, and none was charged; nobody has stumbled."""
        self.gate.open()
        for name, job in self.jobs.items():
            assert job.finish().returncode == 0, f"node {name}\n{job.err}"
            assert "Traceback" not in job.out + job.err, f"node {name}\n{job.err}"
        assert max(self.attempts()) <= restarts, "\n".join(job.err for job in self.jobs.values())
        assert self.worlds() == sorted(set(self.worlds()))
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
        for job in trio.jobs.values():
            job.wait_for(seen(3, 1))
    trio.finish(restarts)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_key_that_is_deleted_comes_back_and_the_round_goes_on(server, tmp_path, stack):
    """Each of them, by hand, one after the other; then all at once. Before that, to the leader a node's lost key looks like the
    node's death, which costs one free restart.
    """
    trio = Trio(tmp_path, stack, server, 20)
    trio.client.delete(f"{PREFIX}nodes/{next(iter(set(trio.id_of.values()) - {trio.id_of_leader()}))}")
    for job in trio.jobs.values():
        job.wait_for(seen(3, 1))
    trio.until(trio.is_whole)
    workers = [line["pid"] for line in reports(*trio.jobs.values()) if line["attempt"] == 1]
    leader, other = trio.id_of_leader(), next(iter(set(trio.id_of.values()) - {trio.id_of_leader()}))
    for key in ("round", "job", "last", f"assign/{leader}", f"assign/{other}", f"nodes/{leader}"):
        trio.client.delete(PREFIX + key)
        trio.until(trio.is_whole)
    for below in ("assign/", "nodes/", ""):
        trio.client.delete_prefix(PREFIX + below)
        trio.until(trio.is_whole)
    assert wait_gone(workers, timeout_s=0) == workers
    trio.finish(restarts=1)


@pytest.mark.full
def test_an_etcd_that_was_set_up_anew_costs_nothing(server, tmp_path, stack):
    """Its revisions begin again. What can be formed after that is a round like any other."""
    trio = Trio(tmp_path, stack, server, 10)
    server.kill()
    server.wipe()
    assert wait_gone(trio.workers, timeout_s=12) == trio.workers  # longer than the leases
    server.start()
    trio.until(trio.is_whole)
    assert trio.header().round == 1
    assert trio.attempts() == {0}
    os.kill(trio.workers[0], signal.SIGKILL)
    for job in trio.jobs.values():
        job.wait_for(seen(3, 1))
    trio.gate.open()
    for job in trio.jobs.values():
        assert job.finish().returncode == 0, job.err


@pytest.mark.full
def test_an_etcd_that_was_set_up_anew_and_has_been_written_to_since(server, stack):
    """Its revision is higher than all that the node has seen; that of the header, written by another node, is not."""
    alone = Alone(stack, server, ttl_s=2)
    written = threading.Event()
    stack.callback(written.set)
    alone.node.tasks.post(lambda: None if written.wait(BACK_S) else pytest.fail("the test did not let it go on"))
    server.kill()
    server.wipe()
    server.start()
    with EtcdClient(server.endpoint) as others:
        others.put(PREFIX + "round", encode(alone.node.header))
        for _ in range(alone.node.header_record.revision + 20):
            others.put("/others", "")
    written.set()
    alone.node.end_round(1, State.BROKEN, "over")
    assert alone.stored(lambda header: header.state is State.BROKEN).reason == "over"
    alone.join(1)


@pytest.mark.full
def test_the_budget_outlives_lost_records_and_the_job_a_lost_ledger(server, tmp_path, stack):
    trio = Trio(tmp_path, stack, server, 10)

    def fail(attempt: int) -> int:
        """Return how many restarts were charged by then."""
        line = next(line for line in reports(trio.jobs["a"]) if line["attempt"] == attempt)
        os.kill(line["pid"], signal.SIGKILL)
        for job in trio.jobs.values():
            job.wait_for(seen(3, attempt + 1))
        return decode_ledger(trio.client.get(PREFIX + "ledger").kv.value.decode()).charged

    assert fail(0) == 1
    trio.client.txn([], [Delete(PREFIX + key) for key in ("round", "job", "last")] + [Delete(PREFIX + "assign/", prefix=True)])
    trio.until(trio.is_whole)
    assert fail(1) == 2
    trio.client.delete(PREFIX + "ledger")
    assert fail(2) == 1
    trio.gate.open()
    for job in trio.jobs.values():
        done = job.finish()
        assert (done.returncode, "Traceback" in done.err) == (0, False), done.err


@pytest.mark.full
def test_sigterm_ends_agents_that_cannot_reach_etcd(server, tmp_path, stack):
    trio = Trio(tmp_path, stack, server, 2)
    trio.server.pause()
    stack.callback(trio.server.resume)
    for job in trio.jobs.values():
        job.wait_for("etcd leases are not being renewed")
    # Two wait for the verdict on the death of their workers when they are told to go, the third trains.
    for line in reports(trio.jobs["b"], trio.jobs["c"]):
        os.kill(line["pid"], signal.SIGKILL)
    for name in "bc":
        trio.jobs[name].wait_for("still waiting for the job's verdict in etcd")
    for job in trio.jobs.values():
        job.process.send_signal(signal.SIGTERM)
    assert wait_gone(trio.agents) == []
    assert wait_gone(trio.workers) == []


@pytest.mark.full
def test_a_signal_that_logging_swallows_ends_an_agent_that_waits_for_etcd(server, tmp_path, stack):
    (tmp_path / "sitecustomize.py").write_text(
        DEAF.replace("elastic_ext.agent.supervisor", "elastic_ext.rendezvous.etcd.place").format(
            told="still waiting for the job's verdict in etcd"
        )
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    gate = Gate(tmp_path / "gate")
    where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--max-restarts=3"]
    with Job([*AGENT, *where, ELASTIC], tmp_path, PYTHONPATH=path, NODE="a", GATE=str(gate.path)) as job:
        job.wait_for(seen(1, 0))
        server.pause()
        stack.callback(server.resume)
        os.kill(reports(job)[0]["pid"], signal.SIGKILL)
        job.wait_for("swallowed")
        assert job.finish(GRACE_S).returncode == 75


@pytest.mark.full
def test_sigterm_ends_agents_whose_header_is_gone(server, tmp_path, stack):
    """They are to break the round of which nothing is known any more."""
    trio = Trio(tmp_path, stack, server, 10)
    trio.client.delete(PREFIX + "round")
    for job in trio.jobs.values():
        job.process.send_signal(signal.SIGTERM)
    assert wait_gone(trio.agents) == []


@pytest.mark.full
def test_sigterm_ends_an_agent_that_joins_a_round_whose_store_says_nothing(server, tmp_path, stack):
    """As when the link to the host of rank 0 breaks while the round is formed. Then a round that ends; then a signal."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    silent.settimeout(BACK_S)
    host = stack.enter_context(EtcdClient(server.endpoint))
    dispatcher = Dispatcher()
    stack.callback(dispatcher.close, GRACE_S)
    first = Participant(host, dispatcher, NodeConfig("job", "silent", Limits(2, 2, 0.0), 10), lambda: None)
    mine = Node(after=0, workers=1, role="", address="127.0.0.1", port=silent.getsockname()[1])
    first.ready(mine)
    wait_for_nodes(server, 1)  # it leads, and will have rank 0
    where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=2"]
    job = stack.enter_context(Job([*TORCHRUN, *where, "--rdzv-conf=lease_ttl=10", ELASTIC], tmp_path, NODE="b", GATE="none"))
    silent.accept()
    first.end_round(1, State.BROKEN, "its first try")
    first.ready(dataclasses.replace(mine, after=1))
    silent.accept()
    job.process.send_signal(signal.SIGTERM)
    assert wait_gone([job.process.pid]) == []


class Alone:
    """The only node of a job, without workers, on its dispatcher."""

    def __init__(self, stack: ExitStack, server: EtcdServer, ttl_s: int = 10, nodes: int = 1) -> None:
        """nodes: that the job needs; with one it is in round 1 at once."""
        self.client = stack.enter_context(EtcdClient(server.endpoint))
        self._changed = threading.Condition()
        dispatcher = Dispatcher()
        stack.callback(dispatcher.close, GRACE_S)
        config = NodeConfig("job", "alone", Limits(nodes, nodes, 0.0), ttl_s)
        self.node = Participant(self.client, dispatcher, config, self._notify)
        if nodes == 1:
            self.join(0)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, BACK_S), (self.node.header, self.node.failure)

    def join(self, after: int) -> None:
        self.node.ready(Node(after=after, workers=1, role="", address="127.0.0.1", port=1))
        self.until(lambda: self.node.joined is not None and self.node.joined[0].round == after + 1)

    def stored(self, holds: Callable[[Header], bool]) -> Header:
        """Wait for a header of which this is true in etcd."""
        key = PREFIX + "round"
        with self.client.watch(key) as news:
            while (kv := self.client.get(key).kv) is None or not holds(decode(Header, kv.value, key)):
                assert news.get(BACK_S) is not None, kv
        return decode(Header, kv.value, key)

    @property
    def part(self) -> EtcdRound:
        return part_of(self.node)

    def says(self) -> Node | None:
        kv = self.client.get(PREFIX + "nodes/alone").kv
        return decode(Node, kv.value, "nodes/alone") if kv is not None else None

    def until_says(self, holds: Callable[[Node], bool]) -> None:
        with self.client.watch(PREFIX + "nodes/alone") as news:
            while (node := self.says()) is None or not holds(node):
                assert news.get(BACK_S) is not None, node

    def until_retried(self) -> None:
        """What has failed so far has been tried again, or is the next thing to be."""
        failed = threading.Event()
        self.node.tasks.post(failed.set)
        assert failed.wait(BACK_S)
        until(lambda: not self.node.tasks._retried)

    @contextmanager
    def refused_once(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """The next write of the node's own record fails; set when it has."""
        failed = threading.Event()
        txn = self.client.txn

        def refuse(compares: Sequence[Compare], *branches: Sequence[Op], **more: float) -> TxnResult:
            own = any(isinstance(op, Put) and op.key == PREFIX + "nodes/alone" for branch in branches for op in branch)
            if own and not failed.is_set():
                failed.set()
                raise Unavailable("no endpoint answers")
            return txn(compares, *branches, **more)

        with monkeypatch.context() as patch:
            patch.setattr(self.client, "txn", refuse)
            yield failed


@pytest.mark.seam
def test_a_write_of_what_a_node_says_that_fails_is_tried_again(server, stack, monkeypatch):
    """It has a part in a round that was over before it could take it: the others wait for it to say that it has not."""
    alone = Alone(stack, server, nodes=2)
    alone.node.ready(Node(after=0, workers=1, role="", address="h", port=1))
    alone.until_says(lambda node: node.after == 0)
    with alone.refused_once(monkeypatch) as failed:
        alone.client.put(PREFIX + "assign/alone", encode(Assignment(1, 0, 0, 0, 1, "s")))
        alone.client.put(PREFIX + "round", encode(Header(1, State.BROKEN, 1, 1, "h", 9, "over", "s", job="s")))
        assert failed.wait(BACK_S)
        alone.until_says(lambda node: node.after == 1)


@pytest.mark.full
def test_what_a_node_has_said_last_is_what_stays_said(server, stack, monkeypatch):
    alone = Alone(stack, server)
    with alone.refused_once(monkeypatch) as failed:
        alone.part.report_stall(True)
        assert failed.wait(BACK_S)
        alone.part.report_stall(False)
        alone.until_retried()
        alone.part.save_completed(1, 5)
        alone.until_says(lambda node: node.saved == 1)
    assert alone.says().stalled == 0


@pytest.mark.seam
def test_what_is_said_again_is_not_written_again(server, stack):
    """Agents repeat their claims at each check."""
    alone = Alone(stack, server)
    reach = Reach(("10.0.0.1",), (Silent(0, "10.0.0.2", 20.0),))
    alone.part.report_quiet(reach)
    alone.until_says(lambda node: node.quiet == 1)
    before = alone.client.get(PREFIX + "nodes/alone").kv
    for _ in range(5):
        alone.part.report_quiet(reach)
    alone.part.save_completed(1, 5)
    alone.until_says(lambda node: node.saved == 1)
    after = alone.client.get(PREFIX + "nodes/alone").kv
    assert after.version == before.version + 1


@pytest.mark.full
def test_what_is_done_in_one_round_is_not_said_of_the_next(server, stack, monkeypatch):
    alone = Alone(stack, server)
    with alone.refused_once(monkeypatch) as failed:
        alone.node.update(lambda node: dataclasses.replace(node, done=1))
        assert failed.wait(BACK_S)
        alone.node.end_round(1, State.BROKEN, "over")
        alone.join(1)
        alone.until_retried()
        alone.part.save_completed(1, 5)
        alone.until_says(lambda node: node.saved == 1)
    assert alone.says().done < 2
    assert alone.node.header.state is State.RUNNING


@pytest.mark.seam
def test_who_had_to_register_again_writes_nothing_before_it_is_known_who_leads(server, stack):
    """Others may have registered before. All stood still, say: then each of them has led for a moment."""
    alone = Alone(stack, server)
    written: Future[bool] = Future()

    def register_again() -> None:
        leader = alone.node.election.leader
        alone.client.delete(PREFIX + "nodes/alone")
        alone.node.recovery.write_own_key()
        written.set_result(leader.write_header(dataclasses.replace(alone.node.header, state=State.CLOSED)))

    alone.node.tasks.post(register_again)
    assert written.result(BACK_S) is False
    alone.node.end_round(1, State.BROKEN, "it leads again")
    alone.join(1)


def job_comes_back(alone: Alone, record: str) -> None:
    """Somebody writes this over the job's record, without a lease, while a round runs."""
    ours = alone.client.get(PREFIX + "job").kv
    alone.client.put(PREFIX + "job", record or ours.value)
    with alone.client.watch(PREFIX + "job") as news:
        while (kv := alone.client.get(PREFIX + "job").kv) is None or (kv.value, kv.lease_id) != (ours.value, ours.lease_id):
            assert news.get(BACK_S) is not None, (kv, alone.node.failure)
    assert alone.node.failure is None
    alone.node.end_round(1, State.BROKEN, "over")
    alone.join(1)


@pytest.mark.seam
@pytest.mark.parametrize("record", ["", '{"schema": 1, "min_nodes": 7, "max_nodes": 9}', '{"schema": 2}'])
def test_the_record_of_a_job_that_runs_comes_back_under_its_lease(server, stack, record):
    job_comes_back(Alone(stack, server, ttl_s=2), record)


@pytest.mark.seam
@pytest.mark.parametrize("blank", ["", " "])
def test_a_job_begins_where_its_record_lies_without_a_lease(server, stack, blank):
    with EtcdClient(server.endpoint) as client:
        client.put(PREFIX + "job", '{"schema": 1, "min_nodes": 1, "max_nodes": 1' + blank + "}")
        Alone(stack, server, ttl_s=2)
        assert client.get(PREFIX + "job").kv.lease_id == client.get(PREFIX + "round").kv.lease_id != 0


@pytest.mark.seam
def test_a_round_can_be_ended_while_its_header_is_gone(server, stack):
    alone = Alone(stack, server)
    alone.client.delete(PREFIX + "round")
    alone.node.end_round(1, State.BROKEN, "its end")
    assert alone.stored(lambda header: header.state is State.BROKEN).reason == "its end"


@pytest.mark.seam
def test_a_round_that_is_over_does_not_come_back(server, stack):
    """A node that had missed the news has written again what it knew."""
    alone = Alone(stack, server)
    first = alone.node.header
    alone.node.end_round(1, State.BROKEN, "over")
    alone.stored(lambda header: header.state is State.BROKEN)
    alone.join(1)
    second = alone.node.header
    alone.client.put(PREFIX + "round", encode(first))
    assert alone.stored(lambda header: header != first) == second
    assert alone.node.header == second


@pytest.mark.seam
def test_the_name_of_the_job_stays_and_another_job_has_another(server, stack):
    """Who may commit checkpoints is found by it (checkpoints/generations.py)."""
    alone = Alone(stack, server)
    name = alone.node.header.job
    alone.client.delete_prefix(PREFIX)
    alone.stored(lambda header: header.round == 1)
    alone.node.end_round(1, State.BROKEN, "over")
    alone.join(1)
    assert alone.node.header.job == name != ""
    alone.node.leave(GRACE_S)
    alone.client.delete_prefix(PREFIX)
    assert Alone(stack, server).node.header.job not in ("", name)


@pytest.mark.seam
def test_another_job_has_taken_the_run_id_meanwhile(server, stack):
    alone = Alone(stack, server)
    others = Put(PREFIX + "job", '{"schema": 1, "min_nodes": 7, "max_nodes": 9}')
    alone.client.txn([], [Delete(PREFIX + "round"), others])
    alone.until(lambda: alone.node.failure is not None)
    assert "another job with other settings has taken this --rdzv-id" in str(alone.node.failure)


@pytest.mark.seam
def test_another_job_has_taken_the_run_id_and_its_round_is_news_before_its_settings(server, stack):
    alone = Alone(stack, server)
    alone.client.put(PREFIX + "round", encode(Header(3, State.RUNNING, 7, 7, "h", 9, "others", "s", job="another")))
    alone.until(lambda: alone.node.header.job == "another")
    alone.client.put(PREFIX + "job", '{"schema": 1, "min_nodes": 7, "max_nodes": 9}')
    alone.until(lambda: alone.node.failure is not None)
    assert "another job with other settings has taken this --rdzv-id" in str(alone.node.failure)


def test_a_dispatcher_is_closed_while_its_thread_sits_in_a_call():
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
