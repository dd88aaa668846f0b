"""Jobs of several nodes for real: stock torchrun, agents, etcd or the embedded store, and what happens to them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base import settings
from elastic_ext.base.errors import UsageError
from elastic_ext.rendezvous.handler import EtcdRendezvous
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Node, decode
from tests.embedded_server import EmbeddedServer
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Gate, Job, run, wait_gone

KEYS = JobKeys("job")

GLOO = str(SCRIPTS / "gloo_job.py")
ELASTIC = str(SCRIPTS / "elastic_job.py")
CONF = "lease_ttl=10,last_call=0.5,stop_grace=2"


class Nodes:
    """Agents of one job; their workers go on when the gate is opened."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.tmp_path = tmp_path
        self.stack = stack
        self.gate = Gate(tmp_path / "gate")
        self.options = ["--rdzv-backend=ext_etcd"]

    def start(
        self, name: str, endpoint: str, nnodes: str, *more: str, script: str = ELASTIC, conf: str = CONF, **variables: str
    ) -> Job:
        where = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", f"--nnodes={nnodes}"]
        command = [*TORCHRUN, *self.options, *where, f"--rdzv-conf={conf}", "--max-restarts=3", script, *more]
        return self.stack.enter_context(Job(command, self.tmp_path, NODE=name, GATE=str(self.gate.path), **variables))

    def open_gate(self) -> None:
        self.gate.open()


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Of a job on `store`, where a test has that; else on etcd."""
    with ExitStack() as stack:
        made = Nodes(tmp_path, stack)
        if "store" in request.fixturenames:
            made.options = request.getfixturevalue("store").options
        yield made


Store: TypeAlias = EtcdServer | EmbeddedServer


@pytest.fixture(params=["etcd", "embedded"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """What a job agrees through: the one protocol must do the same on each."""
    with EtcdServer(tmp_path / "etcd") if request.param == "etcd" else EmbeddedServer() as started:
        yield started


def reports(*jobs: Job) -> list[dict]:
    return [json.loads(line) for job in jobs for line in re.findall(r"\{\"rank\".*\}", job.out)]


def seen(world: int, attempt: int) -> str:
    return rf'"world": {world}, "attempt": {attempt}\b'


def wait_for_nodes(server: Store, count: int) -> None:
    """Until so many nodes are registered, waiting ones too."""
    with EtcdClient(server.endpoint) as client, client.watch_with_snapshot(KEYS.nodes) as watch:
        while len(client.get_prefix(KEYS.nodes).kvs) < count:
            assert watch.get(60) is not None, f"fewer than {count} nodes after 60 s without news"


@pytest.mark.seam
def test_a_failure_on_one_node_is_everybodys_news_and_costs_one_round(store, tmp_path):
    """Mixed local world sizes and roles; every node takes part in the second round, none fails on its own account."""
    options = [f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job", "--nnodes=2", "--max-restarts=3"]
    base = [*TORCHRUN, *store.options, *options]
    with (
        Job([*base, "--nproc-per-node=1", "--role=reader", GLOO, "kill:2"], tmp_path) as first,
        Job([*base, "--nproc-per-node=2", "--role=trainer", GLOO, "kill:2"], tmp_path) as second,
    ):
        assert first.finish().returncode == 0, first.err
        assert second.finish().returncode == 0, second.err
        found = reports(first, second)
        assert {line["world"] for line in found} == {3}
        assert sorted({line["attempt"] for line in found}) in ([0, 1], [0, 1, 2])
        last = [line["rank"] for line in found if line["attempt"] == max(line["attempt"] for line in found)]
        assert sorted(last) == [0, 1, 2]


@pytest.mark.seam
def test_nodes_join_and_leave_and_ranks_stay(store, nodes):
    first = nodes.start("a", store.endpoint, "1:3")
    first.wait_for(seen(1, 0))
    second = nodes.start("b", store.endpoint, "1:3")
    first.wait_for(seen(2, 1))
    second.wait_for(seen(2, 1))
    third = nodes.start("c", store.endpoint, "1:3")
    for job in (first, second, third):
        job.wait_for(seen(3, 2))
    spare = nodes.start("d", store.endpoint, "1:3")
    wait_for_nodes(store, 4)
    # A node that is told to stop leaves at once: the others go on without it, and the spare steps in.
    second.process.send_signal(signal.SIGTERM)
    assert second.finish().returncode == 75
    for job in (first, third, spare):
        job.wait_for(seen(3, 3))
    ranks = {(line["attempt"], line["node"]): line["rank"] for line in reports(first, second, third, spare)}
    assert [ranks[3, name] for name in "acd"] == [0, 1, 2]
    nodes.open_gate()
    assert [job.finish().returncode for job in (first, third, spare)] == [0, 0, 0]


@pytest.mark.seam
def test_a_killed_agent_takes_its_workers_along_and_the_others_go_on(store, nodes):
    first = nodes.start("a", store.endpoint, "1:2")
    first.wait_for(seen(1, 0))
    second = nodes.start("b", store.endpoint, "1:2")
    second.wait_for(seen(2, 1))
    first.wait_for(seen(2, 1))
    (pid,) = [line["pid"] for line in reports(first) if line["attempt"] == 1]
    first.process.kill()
    assert wait_gone([pid]) == []
    second.wait_for(seen(1, 2))
    second.wait_for("lost node")
    nodes.open_gate()
    assert second.finish().returncode == 0


@pytest.mark.full
def test_etcd_down_for_longer_than_the_lease_restarts_nothing(server, nodes):
    jobs = [nodes.start(name, server.endpoint, "2", conf="lease_ttl=10") for name in "ab"]
    for job in jobs:
        job.wait_for(seen(2, 0))
    server.kill()
    assert wait_gone([line["pid"] for line in reports(*jobs)], timeout_s=14) == [line["pid"] for line in reports(*jobs)]
    server.restart()
    nodes.open_gate()
    assert [job.finish().returncode for job in jobs] == [0, 0]
    assert {line["attempt"] for line in reports(*jobs)} == {0}, [job.err for job in jobs]


@pytest.mark.seam
def test_a_node_that_is_cut_off_stops_before_the_others_go_on_without_it(store, nodes):
    with Proxy(int(store.endpoint.rpartition(":")[2])) as proxy:
        first = nodes.start("a", store.endpoint, "1:2")
        first.wait_for(seen(1, 0))
        second = nodes.start("b", proxy.endpoint, "1:2", conf=f"{CONF},is_host=0")
        second.wait_for(seen(2, 1))
        first.wait_for(seen(2, 1))
        (pid,) = [line["pid"] for line in reports(second)]
        proxy.deaf()
        assert wait_gone([pid]) == []
        second.wait_for("cut off from the job's store")
        first.wait_for(seen(1, 2))
        # The link is back: it joins again.
        proxy.stop()
        proxy.start()
        second.wait_for(seen(2, 3))
        first.wait_for(seen(2, 3))
        with EtcdClient(store.endpoint) as client:
            found = [decode(Node, kv.value, "nodes") for kv in client.get_prefix(KEYS.nodes).kvs]
        assert sorted(node.cut for node in found) == [0, 2]
        nodes.open_gate()
        assert [job.finish().returncode for job in (first, second)] == [0, 0]


ONE_WAITS_FOR_THE_OTHER = """
import fcntl, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("trains", os.environ["NODE"], attempt, os.getpid(), flush=True)
if attempt != "0":
    dist.barrier()
elif os.environ["NODE"] == "a":
    fcntl.flock(open(os.environ["GATE"]), fcntl.LOCK_SH)
else:
    dist.recv(torch.ones(1), src=1 - dist.get_rank())
"""


@pytest.mark.full
def test_a_node_that_was_lost_and_is_back_explains_the_failure_of_its_worker(store, nodes, tmp_path):
    """Its agent was paused: its lease ends, the others go on without it, and its worker fails as theirs are gone. No restart is
    charged: with --max-restarts=0 the job would end."""
    first, second = waiting_pair(store, nodes, tmp_path, "2")
    first.wait_for("lost node")
    second.process.send_signal(signal.SIGCONT)
    assert [job.finish().returncode for job in (first, second)] == [0, 0], first.err + second.err
    assert "trains b 1" in second.out


@pytest.mark.full
def test_a_node_that_was_left_behind_does_not_take_that_for_a_failure(store, nodes, tmp_path):
    """The job has gone on without it, and ended: its verdict on that round is not to be had."""
    first, second = waiting_pair(store, nodes, tmp_path, "1:2")
    assert first.finish().returncode == 0, first.err
    second.process.send_signal(signal.SIGCONT)
    assert second.finish().returncode == 0, second.err
    assert "this node judges for itself" in second.err


def waiting_pair(server: Store, nodes: Nodes, tmp_path: Path, nnodes: str) -> list[Job]:
    """Two agents; the second one is paused, and its worker has failed."""
    script = tmp_path / "waits.py"
    script.write_text(ONE_WAITS_FOR_THE_OTHER)
    where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", f"--nnodes={nnodes}", "--rdzv-conf=lease_ttl=6,last_call=60"]
    command = [*TORCHRUN, *server.options, *where, "--max-restarts=0", str(script)]
    env = {"GATE": str(nodes.gate.path)}
    first, second = (nodes.stack.enter_context(Job(command, tmp_path, NODE=name, **env)) for name in "ab")
    first.wait_for("trains a 0")
    pid = int(second.wait_for(r"trains b 0 (\d+)")[0][1])
    second.process.send_signal(signal.SIGSTOP)
    assert wait_gone([pid]) == []
    return [first, second]


@pytest.mark.full
def test_a_node_that_is_cut_off_does_not_wait_for_a_worker_that_ignores_sigterm(store, nodes):
    """The grace would be 30 s, the lease is over in 10: the others go on then, and must be alone."""
    conf = "lease_ttl=10,last_call=0.5,stop_grace=30"
    with Proxy(int(store.endpoint.rpartition(":")[2])) as proxy:
        first = nodes.start("a", store.endpoint, "1:2", conf=conf)
        first.wait_for(seen(1, 0))
        second = nodes.start("b", proxy.endpoint, "1:2", "deaf:1", conf=f"{conf},is_host=0")
        second.wait_for(seen(2, 1))
        first.wait_for(seen(2, 1))
        (pid,) = [line["pid"] for line in reports(second)]
        proxy.deaf()
        first.wait_for(seen(1, 2))
        assert wait_gone([pid], timeout_s=0) == []
        nodes.open_gate()
        assert first.finish().returncode == 0


@pytest.mark.seam
def test_a_bug_on_one_node_ends_the_job_on_all(store, nodes):
    first = nodes.start("a", store.endpoint, "2")
    second = nodes.start("b", store.endpoint, "2", "bug:0")
    assert second.finish().returncode == 65
    assert first.finish().returncode == 65
    assert "Traceback" not in first.err.partition("ChildFailedError")[0].partition("elastic_ext: stop")[0]
    assert "a bug on one node" in second.err
    assert {line["attempt"] for line in reports(first, second)} == {0}


@pytest.mark.seam
def test_a_crash_that_follows_its_rank_is_a_bug(store, nodes):
    """No node leaves for it, and it costs one restart: the ranks of the node have moved to the other one."""
    faults = ["segv1:0", "segv1:1"]
    conf = f"{CONF},standby=off"
    both = [nodes.start(name, store.endpoint, "2", *faults, conf=conf, ELASTIC_EXT_NODE_NAME=f"n{name}") for name in "ab"]
    nodes.open_gate()  # a third try would end well
    assert [job.finish().returncode for job in both] == [65, 65], [job.err for job in both]
    places = {(line["attempt"], line["rank"]): line["node"] for line in reports(*both)}
    assert places[0, 1] != places[1, 1]
    said = "".join(job.err for job in both)
    assert "its ranks move to another node" in said
    assert "recurred on another node without progress" in said


@pytest.mark.full
def test_a_run_id_can_be_used_again_and_nothing_is_left(server, nodes):
    nodes.open_gate()
    job = nodes.start("a", server.endpoint, "1")
    assert job.finish().returncode == 0, job.err
    # With another number of nodes: nobody is in the old job any more.
    both = [nodes.start(name, server.endpoint, "2") for name in "ab"]
    for job in both:
        job.wait_for(seen(2, 0))
    assert [job.finish().returncode for job in both] == [0, 0]
    with EtcdClient(server.endpoint) as client:
        leases = {kv.lease_id for kv in client.get_prefix("/elastic_ext/").kvs}
        assert 0 not in leases  # whatever is left expires


@pytest.mark.full
def test_a_spare_waits_for_as_long_as_the_job_trains(nodes, server):
    """join_timeout is for a job that does not train: a scheduler counts each 75 of a spare as a failure."""
    first = nodes.start("a", server.endpoint, "1")
    first.wait_for(seen(1, 0))
    spare = nodes.start("b", server.endpoint, "1", conf="lease_ttl=2,last_call=0.5,stop_grace=2,join_timeout=3")
    wait_for_nodes(server, 2)
    with pytest.raises(subprocess.TimeoutExpired):
        spare.process.wait(4.5)
    first.process.send_signal(signal.SIGTERM)
    spare.wait_for(seen(1, 1))
    nodes.open_gate()
    assert spare.finish().returncode == 0, spare.err


@pytest.mark.full
def test_an_etcd_that_is_away_at_the_start_is_waited_for(server, tmp_path):
    """Its pods may start later than those of the job. Where it stays away, a scheduler is asked to try again."""
    (tmp_path / "ok.py").write_text("print('started')")
    command = [*TORCHRUN, "--rdzv-backend=ext_etcd", "--rdzv-id=j"]
    server.kill()
    conf = "--rdzv-conf=join_timeout=60,lease_ttl=2"  # enough for it to start
    with Job([*command, conf, f"--rdzv-endpoint={server.endpoint}", "ok.py"], tmp_path) as job:
        job.wait_for(f"etcd at {server.endpoint} does not answer; trying for 60 s")
        server.start()
        assert job.finish().returncode == 0, job.err
    conf = "--rdzv-conf=join_timeout=3,lease_ttl=2"
    away = run([*command, conf, "--rdzv-endpoint=127.0.0.1:1", "ok.py"], tmp_path)
    assert away.returncode == 75, away.all
    (line,) = [line for line in away.err.splitlines() if " ERROR elastic_ext: " in line]
    assert "127.0.0.1:1 has not answered for 3 s" in line
    assert "Traceback" not in away.err


@pytest.mark.parametrize(
    ("run_id", "endpoint", "conf", "said"),
    [
        ("none", "h:1", {}, "needs --rdzv-id"),
        ("j", "", {}, "needs --rdzv-endpoint"),
        ("j", "h:1", {"lease_ttl": "1"}, "2 or more"),
        ("j", "h:1", {"lease_ttl": "60", "join_timeout": "30"}, "lease_ttl=60"),
        ("j", "h:1", {"etcd_user": "u"}, "password"),
        ("j", "h:1", {"etcd_ca": "/no/such/ca"}, "/no/such/ca"),
    ],
)
def test_wrong_usage_is_one_line(run_id, endpoint, conf, said):
    def begin() -> None:
        settings.check_times(known := settings.read(conf, {}), conf, 30.0)
        EtcdRendezvous(RendezvousParameters("ext_etcd", endpoint, run_id, 1, 1), known)

    with pytest.raises(UsageError, match=said) as error:
        begin()
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_wrong_usage_is_one_line_and_78(tmp_path):
    (tmp_path / "ok.py").write_text("print('started')")
    options = ["--rdzv-id=j", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=etcd_ca=/no/such/ca"]
    job = run([*TORCHRUN, "--rdzv-backend=ext_etcd", *options, "ok.py"], tmp_path)
    assert job.returncode == 78, job.all
    (line,) = [line for line in job.err.splitlines() if " ERROR elastic_ext: " in line]
    assert "/no/such/ca" in line
    assert "Traceback" not in job.err
    assert "started" not in job.out
