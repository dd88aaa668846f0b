"""Who can get in: where a job listens, and how its nodes agree although anybody may write to the store of a round."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base.contracts import SingleNode
from elastic_ext.base.errors import BadCheckpoints, RoundOver, UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import nodes
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.rendezvous.address import loopback, own_address
from elastic_ext.rendezvous.configuration import WorkerProgram
from elastic_ext.rendezvous.contract import AgentHooks
from elastic_ext.rendezvous.handler import EtcdRendezvous
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Agreed
from elastic_ext.rendezvous.round_store import serve
from tests.checkpoints.agreement.test_agreement import exchanges_of, save
from tests.etcd_client import EtcdClient
from tests.jobs import AGENT, Gate, Job, descendants, open_files
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import wait_for_nodes

KEYS = JobKeys("job")
LONG_S = 60.0

# Who listens where.


def listening(pids: list[int]) -> dict[int, list[str]]:
    """Local addresses of the listening TCP sockets of each process."""
    by_inode = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                number = bytes.fromhex(words[1].partition(":")[0])
                packed = b"".join(number[at : at + 4][::-1] for at in range(0, len(number), 4))
                by_inode[words[9]] = socket.inet_ntop(family, packed).removeprefix("::ffff:")  # gRPC, of an IPv4 address
    found: dict[int, list[str]] = {}
    for pid in pids:
        for link in open_files(pid):
            if (address := by_inode.get(link.removeprefix("socket:[").rstrip("]"))) is not None:
                found.setdefault(pid, []).append(address)
    return found


COMES_UP = """
import fcntl, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
# One write: two workers share the stream.
sys.stdout.write(f"up {os.environ['MASTER_ADDR']} {os.environ['TORCHELASTIC_USE_AGENT_STORE']}\\n")
sys.stdout.flush()
fcntl.flock(open("gate"), fcntl.LOCK_SH)
dist.barrier()
dist.destroy_process_group()
"""


TWO_AGENTS = ("--local-addr=127.0.0.1", "--nnodes=2")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["etcd", "one agent", "two agents"])
def test_a_one_machine_job_listens_on_loopback_only(request, tmp_path, kind):
    """The round's store, the job's, metrics, standbys; and gloo's own, where it is told to (GLOO_SOCKET_IFNAME)."""
    (tmp_path / "worker.py").write_text(COMES_UP)
    gate, agents = Gate(tmp_path / "gate"), 2 if kind == "two agents" else 1
    where = {
        "etcd": lambda: ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={request.getfixturevalue('server').endpoint}"],
        "one agent": lambda: ["--rdzv-backend=ext_c10d", "--rdzv-endpoint=localhost:0"],
        "two agents": lambda: ["--rdzv-backend=ext_c10d", f"--rdzv-endpoint=localhost:{free_port()}", *TWO_AGENTS],
    }[kind]()
    command = [*AGENT, *where, f"--nproc-per-node={2 // agents}", "--rdzv-id=job", "worker.py"]
    with ExitStack() as stack:
        env = {"GLOO_SOCKET_IFNAME": "lo", "ELASTIC_EXT_STANDBY": "on"}
        jobs = [stack.enter_context(Job(command, tmp_path, **env)) for _ in range(agents)]
        for job in jobs:
            job.wait_for(r"up 127\.0\.0\.1 True", 2 // agents)
        found = [address for job in jobs for each in listening(descendants(job.process.pid)).values() for address in each]
        # The round's store, two workers, metrics of each agent; and the job's store.
        assert len(found) >= 3 + agents + (kind == "two agents"), found
        assert {ipaddress.ip_address(address).is_loopback for address in found} == {True}, found
        gate.open()
        for job in jobs:
            assert job.finish().returncode == 0, job.err


@pytest.mark.seam
def test_the_address_of_a_node():
    assert own_address(None, "etcd0", 1) == loopback() == "127.0.0.1"
    assert own_address(None, "localhost", 4) == own_address("localhost", "etcd0", 4) == "127.0.0.1"
    assert own_address("10.1.2.3", "localhost", 1) == "10.1.2.3"
    assert own_address(None, "127.0.0.2", 4) == "127.0.0.2"


@pytest.mark.seam("::1-::1", "localhost-127.0.0.1", "127.0.0.2-127.0.0.2", "127.0.0.1-127.0.0.1")
@pytest.mark.parametrize(
    ("address", "listens"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("127.1", None)],
)
def test_a_store_listens_where_it_is_reached(address, listens):
    if address == "::1" and not ipv6():
        pytest.skip("no IPv6 loopback on this machine")
    before = Counter(listening([os.getpid()]).get(os.getpid(), []))
    store = serve(address)
    store.set("key", "value")
    (found,) = Counter(listening([os.getpid()])[os.getpid()]) - before
    assert found == listens if listens else ipaddress.ip_address(found).is_unspecified
    del store
    assert Counter(listening([os.getpid()]).get(os.getpid(), [])) == before  # torch has closed what it was given


def ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
            return True
        except OSError:
            return False


# What the nodes tell each other.


NAMES = [
    *(("../evil.pt", "checkpoint_dir"), ("/tmp/evil.pt", "checkpoint_dir"), ("..", "checkpoint_dir"), ("a\0b", "checkpoint_dir")),
    *(("x" * 5000, "checkpoint_dir"), ("s3://bucket/evil.pt", "checkpoint_dir"), ("a.pt", "resume_from"), ("a.pt", "elsewhere")),
    *(("evil.pt", "local_dir"), ("step_00000007.g0001", "local_dir"), ("", "local_dir")),  # this node has no local_dir
]
CHOICES = [
    *({"name": name, "step": 1, "reason": "", "tier": tier, "schema": 2} for name, tier in NAMES),
    {"path": "/tmp/evil.pt", "step": 1, "reason": ""},
    {"name": "a.pt", "step": "1", "schema": 2},
    {"name": "a.pt", "step": 1, "schema": 3},
]


@pytest.mark.parametrize("text", ["", "[]", "null", "{" * 50_000, '{"name": 3}', " " * 100_000, *map(json.dumps, CHOICES)])
def test_a_choice_that_is_none(tmp_path, text):
    """Forged, or of another version: one line, nothing is loaded."""
    zero, one = exchanges_of(2)
    zero.publish(text)
    with pytest.raises(UsageError):
        nodes.agree(Settings(checkpoint_dir=str(tmp_path)), "run", one, NodeInRound(1, 2))


def test_node_0s_error_is_one_line(tmp_path):
    zero, one = exchanges_of(2)
    zero.publish(json.dumps({"name": "", "error": "a\x1b[2J\nb" + "x" * 9000, "bad": True, "schema": 2}))
    with pytest.raises(BadCheckpoints) as raised:
        nodes.agree(Settings(checkpoint_dir=str(tmp_path)), "run", one, NodeInRound(1, 2))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 3000


def test_one_in_another_directory_that_resume_from_names(tmp_path):
    """All nodes are told the same, so that its name is enough; a node that is not told refuses."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    path = save(there, 5)
    settings = Settings(checkpoint_dir=str(here), resume_from=str(path))
    zero, one, two = exchanges_of(3)
    said = nodes.agree(settings, "run", zero, NodeInRound(0, 3))
    assert (said.path, said.step) == (str(path), 5)
    assert nodes.agree(settings, "run", one, NodeInRound(1, 3)) == said
    with pytest.raises(UsageError, match="the same resume_from"):
        nodes.agree(Settings(checkpoint_dir=str(here)), "run", two, NodeInRound(2, 3))


def started(work: Callable[[], object]) -> Future:
    """Runs it on a thread of its own."""
    answer: Future = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised where the answer is asked for)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


class Agents:
    """Rendezvous handlers of one job, without the rest of their agents."""

    def __init__(self, endpoint: str, nnodes: tuple[int, int]) -> None:
        self.endpoint, self._nnodes = endpoint, nnodes
        self.all: list[EtcdRendezvous] = []

    def enter(self, name: str, **settings: object) -> EtcdRendezvous:
        """The order of the names is that of the ranks, whoever came first."""
        params = RendezvousParameters("ext_etcd", self.endpoint, "job", *self._nnodes, last_call_timeout=60)
        told = Settings(node_name=name, topology=name, lease_ttl=10, **settings)
        agent = EtcdRendezvous(params, told)
        agent.prepare(WorkerProgram("true", "default", 1, 3, {}), AgentHooks())
        self.all.append(agent)
        return agent


@pytest.fixture
def agents(server) -> Iterator[Agents]:
    made = Agents(server.endpoint, (1, 2))
    yield made
    for each in made.all:
        each.leave()


def meet(*agents: EtcdRendezvous) -> None:
    """All come to the same round."""
    answers = [started(agent.next_rendezvous) for agent in agents]
    wait_for_all(answers, LONG_S)
    assert {answer.result(0).world_size for answer in answers} == {len(agents)}
    assert [answer.result(0).rank for answer in answers] == list(range(len(agents)))


def pair(agents: Agents, **settings: object) -> tuple[EtcdRendezvous, EtcdRendezvous]:
    """Rank 0 and 1; the one of rank 1 leads."""
    one = agents.enter("b", **settings)
    first = started(one.next_rendezvous)
    wait_for_nodes(agents, 1)
    zero = agents.enter("a", **settings)
    second = started(zero.next_rendezvous)
    assert (second.result(LONG_S).rank, first.result(LONG_S).rank) == (0, 1)
    return zero, one


@pytest.mark.seam
def test_on_etcd_one_choice_lasts_one_round(agents):
    zero, one = pair(agents)
    zero.part.server.set("elastic_ext/elastic_ext.resume", "a stranger's")  # where an earlier version looked
    waits = started(lambda: one.part.exchange.choice(LONG_S))
    old = zero.part.exchange
    old.publish("7")
    assert waits.result(LONG_S) == "7"
    assert one.part.exchange.choice(LONG_S) == "7"
    one.part.break_off("once more")
    meet(zero, one)
    assert {of._place.participant.header.agreed for of in (zero, one)} == {Agreed()}
    with pytest.raises(RoundOver):
        old.publish("stale")
    waits = started(lambda: one.part.exchange.choice(LONG_S))
    zero.part.exchange.publish("8")
    assert waits.result(LONG_S) == "8"


@pytest.mark.seam
@pytest.mark.parametrize("lost", [0, 1])
def test_on_etcd_a_node_lost_early_delays_none(agents, lost):
    """The one of rank 0, that was to choose; and the leader."""
    both = pair(agents)
    other = both[1 - lost]
    waits = started(lambda: other.part.exchange.choice(LONG_S) if lost == 0 else other.part.exchange.offers(LONG_S))
    both[lost].leave()
    if lost == 0:
        with pytest.raises(RoundOver, match="lost node"):
            waits.result(LONG_S)
    meet(other)
    assert isinstance(other.part.exchange, SingleNode)


@pytest.mark.seam
def test_on_etcd_node_0_learns_of_each_disk(agents, tmp_path):
    """Only where all nodes have such a disk; what was told in the round before is gone."""
    zero, one = pair(agents, checkpoint_dir=str(tmp_path), local_dir=str(tmp_path))
    waits = started(lambda: zero.part.exchange.offers(LONG_S))
    one.part.exchange.offer("of 1")
    zero.part.exchange.offer("of 0")
    assert waits.result(LONG_S) == ["of 0", "of 1"]
    zero.part.break_off("once more")
    meet(zero, one)
    waits = started(lambda: zero.part.exchange.offers(LONG_S))
    zero.part.exchange.offer("again 0")
    one.part.exchange.offer("again 1")
    assert waits.result(LONG_S) == ["again 0", "again 1"]
    with EtcdClient(agents.endpoint) as client:
        assert len(client.get_prefix("/elastic_ext/job/offers/").kvs) == 2
    one.part.exchange.offer("late")
    one.leave()
    meet(zero)


@pytest.mark.full
def test_on_etcd_disk_lists_outlive_a_lost_etcd(agents, server, tmp_path):
    """Else node 0 would wait in vain, and all resume from an older checkpoint."""
    zero, one = pair(agents, checkpoint_dir=str(tmp_path), local_dir=str(tmp_path))
    one.part.exchange.offer("of 1")
    with EtcdClient(agents.endpoint) as client, client.watch_with_snapshot(KEYS.offers("")[:-1]) as watch:
        while not client.get_prefix(KEYS.offers("")[:-1]).kvs:
            assert watch.get(LONG_S) is not None
    server.kill()
    server.wipe()
    server.start()
    waits = started(lambda: zero.part.exchange.offers(LONG_S))
    zero.part.exchange.offer("of 0")
    assert waits.result(LONG_S) == ["of 0", "of 1"]


@pytest.mark.seam
def test_on_etcd_without_local_disks_none_is_asked(agents):
    zero, one = pair(agents)
    assert zero.part.exchange.offers(LONG_S) is None
    one.part.exchange.offer("nothing")
    with EtcdClient(agents.endpoint) as client:
        zero.part.exchange.publish("7")
        assert client.get_prefix("/elastic_ext/job/offers/").kvs == ()
