"""Jobs of several nodes for real: stock torchrun, agents, etcd or the embedded store, and what happens to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base import settings
from elastic_ext.base.errors import UsageError
from elastic_ext.cli import main
from elastic_ext.rendezvous.handler import EtcdRendezvous
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, Node, decode
from tests.embedded_server import EmbeddedServer
from tests.etcd.proxy import Proxy
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Finished, Gate, Job, run, wait_gone

KEYS = JobKeys("job")

GLOO = str(SCRIPTS / "gloo_job.py")
ELASTIC = str(SCRIPTS / "elastic_job.py")
CONF = "lease_ttl=10,last_call_timeout=0.5"


class Nodes:
    """Agents of one job, by name; their workers go on when the gate is opened."""

    def __init__(self, tmp_path: Path, stack: ExitStack, gate: Gate | None = None) -> None:
        self.tmp_path = tmp_path
        self.stack = stack
        self.gate = gate or Gate(tmp_path / "gate")
        self.options = ["--rdzv-backend=ext_etcd"]
        self.run_id = "job"
        self.jobs: dict[str, Job] = {}

    def start(self, name, endpoint, nnodes, *more, script=ELASTIC, conf=CONF, launcher=TORCHRUN, **variables: str) -> Job:
        """more: options of the script. launcher: how torchrun is started."""
        where = [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={self.run_id}", f"--nnodes={nnodes}"]
        command = [*launcher, *self.options, *where, f"--rdzv-conf={conf}", "--max-restarts=3", script, *more]
        job = Job(command, self.tmp_path, NODE=name, GATE=str(self.gate.path), **variables)
        self.jobs[name] = self.stack.enter_context(job)
        return job

    def wait_for(self, pattern: str, names: str = "") -> None:
        """Until the output of these nodes, or of all, has it."""
        for name in names or self.jobs:
            self.jobs[name].wait_for(pattern)

    def attempts(self) -> set[int]:
        return {line["attempt"] for line in reports(*self.jobs.values())}

    def open_gate(self) -> None:
        self.gate.open()

    def finish(self, names: str = "") -> None:
        """Open the gate; these nodes, or all, end well."""
        self.gate.open()
        for name in names or self.jobs:
            done = self.jobs[name].finish()
            assert done.returncode == 0, f"node {name}\n{done.err}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def nodes(tmp_path: Path, stack: ExitStack, request: pytest.FixtureRequest) -> Nodes:
    """Of a job on `store`, where a test has that; else on etcd."""
    made = Nodes(tmp_path, stack)
    if "store" in request.fixturenames:
        made.options = request.getfixturevalue("store").options
    return made


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


def wait_for_header(server: Store, holds: Callable[[Header], object]) -> None:
    """Until this is true of the job's header."""
    with EtcdClient(server.endpoint) as client, client.watch_with_snapshot(KEYS.header) as watch:
        while (kv := client.get(KEYS.header).kv) is None or not holds(decode(Header, kv.value, "round")):
            assert watch.get(60) is not None, "not after 60 s without news"


def assert_one_line(done: Finished, code: int, said: str) -> None:
    """The agent has ended with this code, and says why in one line."""
    assert done.returncode == code, done.all
    (line,) = [line for line in done.err.splitlines() if " ERROR elastic_ext: " in line]
    assert said in line
    assert "Traceback" not in done.err


@pytest.mark.seam
def test_one_nodes_failure_costs_one_round(store, tmp_path):
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
@pytest.mark.parametrize("store", ["embedded"], indirect=True)
def test_an_early_end_on_another_node_is_named(store, tmp_path):
    """Nothing failed there, but its report carries it; no matter which agent has which rank."""
    options = [f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job", "--nnodes=2", "--max-restarts=1"]
    command = [*TORCHRUN, *store.options, *options, "--nproc-per-node=1", GLOO, "leave:1"]
    with Job(command, tmp_path) as first, Job(command, tmp_path) as second:
        ended = [first.finish(), second.finish()]
    assert [each.returncode for each in ended] == [0, 0], ended[0].err + ended[1].err
    for each in ended:
        assert "restart: " in each.err
        assert "rank 1 ended with 0, the others wait for it, as with a bug or uneven data; then rank 0 raised Runt" in each.err
        assert "restart 1 of 1 (kind code, rule ended-early)" in each.err
    assert sum("the cause was on " in each.err for each in ended) == 1


@pytest.mark.seam
def test_nodes_join_and_leave_and_ranks_stay(store, nodes):
    for attempt, name in enumerate("abc"):
        nodes.start(name, store.endpoint, "1:3")
        nodes.wait_for(seen(attempt + 1, attempt))
    nodes.start("d", store.endpoint, "1:3")
    wait_for_nodes(store, 4)
    # A node that is told to stop leaves at once: the others go on without it, and the spare steps in.
    nodes.jobs["b"].process.send_signal(signal.SIGTERM)
    assert nodes.jobs["b"].finish().returncode == 75
    nodes.wait_for(seen(3, 3), "acd")
    ranks = {(line["attempt"], line["node"]): line["rank"] for line in reports(*nodes.jobs.values())}
    assert [ranks[3, name] for name in "acd"] == [0, 1, 2]
    nodes.finish("acd")


@pytest.mark.seam
def test_a_killed_agent_takes_its_workers_along(store, nodes):
    """The other one learns of it by its link: the lease would end long after the test."""
    conf = "lease_ttl=900,join_timeout=1800,last_call_timeout=0.5"
    first = nodes.start("a", store.endpoint, "1:2", conf=conf)
    first.wait_for(seen(1, 0))
    second = nodes.start("b", store.endpoint, "1:2", conf=conf)
    nodes.wait_for(seen(2, 1))
    (pid,) = [line["pid"] for line in reports(first) if line["attempt"] == 1]
    first.process.kill()
    assert wait_gone([pid]) == []
    second.wait_for(seen(1, 2))
    second.wait_for("lost node")
    with EtcdClient(store.endpoint) as client:
        assert client.get(KEYS.ledger).kv is None, "nothing is charged"
    nodes.finish("b")


@pytest.mark.seam
def test_an_isolated_node_stops_before_others_go_on(store, nodes):
    with Proxy(int(store.endpoint.rpartition(":")[2])) as proxy:
        first = nodes.start("a", store.endpoint, "1:2")
        first.wait_for(seen(1, 0))
        second = nodes.start("b", proxy.endpoint, "1:2", conf=f"{CONF},is_host=0")
        nodes.wait_for(seen(2, 1))
        (pid,) = [line["pid"] for line in reports(second)]
        proxy.deaf()
        assert wait_gone([pid]) == []
        second.wait_for("cut off from the job's store")
        first.wait_for(seen(1, 2))
        # The link is back: it joins again.
        proxy.stop()
        proxy.start()
        nodes.wait_for(seen(2, 3))
        with EtcdClient(store.endpoint) as client:
            found = [decode(Node, kv.value, "nodes") for kv in client.get_prefix(KEYS.nodes).kvs]
        assert sorted(node.cut for node in found) == [0, 2]
        nodes.finish()


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
def test_a_returning_lost_node_explains_workers_failures(store, nodes, tmp_path):
    """Its agent was paused: its lease ends, the others go on without it, and its worker fails as theirs are gone. No restart is
    charged: with a budget of none the job would end."""
    first, second = waiting_pair(store, nodes, tmp_path, "2")
    first.wait_for("lost node")
    second.process.send_signal(signal.SIGCONT)
    assert [job.finish().returncode for job in (first, second)] == [0, 0], first.err + second.err
    assert "trains b 1" in second.out


@pytest.mark.full
def test_a_node_left_behind_sees_no_failure(store, nodes, tmp_path):
    """The job has gone on without it, and ended: its verdict on that round is not to be had."""
    first, second = waiting_pair(store, nodes, tmp_path, "1:2")
    assert first.finish().returncode == 0, first.err
    second.process.send_signal(signal.SIGCONT)
    assert second.finish().returncode == 0, second.err
    assert "this node judges for itself" in second.err


def waiting_pair(server: Store, nodes: Nodes, tmp_path: Path, nnodes: str) -> list[Job]:
    """Two agents; the second one is paused, and its worker has failed."""
    (tmp_path / "waits.py").write_text(ONE_WAITS_FOR_THE_OTHER)
    own = {"script": "waits.py", "conf": "lease_ttl=6,last_call_timeout=60", "ELASTIC_EXT_MAX_RESTARTS": "0"}
    first, second = (nodes.start(name, server.endpoint, nnodes, **own) for name in "ab")
    first.wait_for("trains a 0")
    pid = int(second.wait_for(r"trains b 0 (\d+)")[0][1])
    second.process.send_signal(signal.SIGSTOP)
    assert wait_gone([pid]) == []
    return [first, second]


@pytest.mark.seam("embedded")
@pytest.mark.full
def test_a_bug_on_one_node_ends_all(store, nodes):
    """At the second time: before the first step, the node may only lack something."""
    first = nodes.start("a", store.endpoint, "2")
    second = nodes.start("b", store.endpoint, "2", "bug:0", "bug:1")
    assert second.finish().returncode == 65
    assert first.finish().returncode == 65
    assert "Traceback" not in first.err.partition("ChildFailedError")[0].partition("elastic_ext: stop")[0]
    assert "a bug on one node" in second.err
    assert max(line["attempt"] for line in reports(first, second)) == 1


@pytest.mark.seam("etcd")
@pytest.mark.full
def test_a_crash_following_its_rank_is_a_bug(store, nodes):
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


MEGATRON = """
import logging, os, signal, sys

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
print(f"at {attempt} {rank}", flush=True)
if attempt == 0 and rank == 1:
    logging.warning("First rerun: unexpected result is reproducible. Need to rerun on a different GPU to verify correctness")
if attempt == 1 and rank == 1:
    logging.error("Second rerun: unexpected result is not reproducible on a different GPU")
    logging.error("Rank 1, node n, device 0, iteration 7: Possible persistent error!!")
if attempt < 2:
    open("said", "w" if rank == 1 else "r").close()
    if rank == 1:
        signal.pause()  # it ends more slowly than the other, and the agent stops it
    sys.exit(16 + attempt)
"""


@pytest.mark.seam("etcd")
@pytest.mark.full
def test_megatron_finds_the_bad_node(store, nodes, tmp_path):
    """It asks for a step to be computed on another GPU. Where the result differs there, the first node leaves."""
    (tmp_path / "megatron.py").write_text(MEGATRON)
    os.mkfifo(tmp_path / "said")
    both = {
        name: nodes.start(
            name, store.endpoint, "1:2", script="megatron.py", ELASTIC_EXT_NODE_NAME=f"n{name}", conf=f"{CONF},standby=off"
        )
        for name in "ab"
    }
    codes = {name: job.finish().returncode for name, job in both.items()}
    (bad,) = (name for name, job in both.items() if "at 0 1" in job.out)
    assert codes == {"a": 0, "b": 0} | {bad: 69}, [job.err for job in both.values()]
    said = "".join(job.err for job in both.values())
    assert "its ranks move to another node" in said
    assert "rule rerun-differs" in both[bad].err


@pytest.mark.full
def test_a_run_id_can_be_reused(server, nodes):
    nodes.start("a", server.endpoint, "1")
    nodes.finish()
    # With another number of nodes: nobody is in the old job any more.
    nodes.start("a", server.endpoint, "2")
    nodes.start("b", server.endpoint, "2")
    nodes.wait_for(seen(2, 0))
    nodes.finish()
    with EtcdClient(server.endpoint) as client:
        leases = {kv.lease_id for kv in client.get_prefix("/elastic_ext/").kvs}
        assert 0 not in leases  # whatever is left expires


@pytest.mark.full
def test_a_spare_waits_while_the_job_trains(nodes, server):
    """join_timeout is for a job that does not train: a scheduler counts each 75 of a spare as a failure."""
    first = nodes.start("a", server.endpoint, "1")
    first.wait_for(seen(1, 0))
    spare = nodes.start("b", server.endpoint, "1", conf="lease_ttl=2,last_call_timeout=0.5,join_timeout=3")
    wait_for_nodes(server, 2)
    with pytest.raises(subprocess.TimeoutExpired):
        spare.process.wait(4.5)
    first.process.send_signal(signal.SIGTERM)
    spare.wait_for(seen(1, 1))
    nodes.finish("b")


@pytest.mark.seam
def test_the_status_names_the_signal_that_ended_all(nodes, server, capsys):
    job = nodes.start("a", server.endpoint, "1", conf="lease_ttl=60")  # the status stays for three times as long
    job.wait_for(seen(1, 0))
    job.process.send_signal(signal.SIGTERM)
    assert job.finish().returncode == 75
    assert main.main(["status", f"--rdzv-endpoint={server.endpoint}", f"--rdzv-id={nodes.run_id}"]) == 3
    assert "SIGTERM stopped the job; no agent is left" in capsys.readouterr().out


@pytest.mark.full
def test_an_etcd_away_at_start_is_awaited(server, tmp_path):
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
    assert_one_line(away, 75, "127.0.0.1:1 has not answered for 3 s")


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
