"""A job of two hosts, and a stranger on a third one: whatever it does at the job's ports, no round ends, and steps go on.

Also while the store of the job dies again and again.

`pytest -s` shows the steps per second before and while each attack lasts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_ext.own_etcd import certificates
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, SCRIPTS, TORCHRUN, Job, command_of, wait_gone
from tests.networks import SERVER, Host, network
from tests.own_etcd.hosts import lose, pids_in
from tests.rendezvous.test_etcd_jobs import Nodes
from tests.until import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PORT = 29400
SECRET = "0123456789abcdef"
FILES = 1024  # that each agent and the store beside it may open: less than the stranger has connections
STEPS = 150  # of each measurement: three seconds at least
SLOW_S = 3.0
LONG_S = 240.0
MINUTE_S, EVERY_S = 60.0, 4.0  # for how long a store is killed, and how often

TRAINS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
with open(f"steps-{dist.get_rank()}", "ab", buffering=0) as steps:
    ends = torch.zeros(1)
    while not ends:
        ends = torch.tensor([float(os.path.exists("end"))])
        dist.all_reduce(ends)
        steps.write(b"%d %.6f\\n" % (os.getpid(), time.monotonic()))
        time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""
# Waits for the records of both nodes. The arguments: the address of the store, and paths of certificates, or none.
RECORDS = """
import json, sys
from elastic_ext.etcd import EtcdClient, Tls
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, Node, decode
endpoint, *files = sys.argv[1:]
keys = JobKeys("job")
tls = Tls(*files) if files else None
with EtcdClient(endpoint, tls=tls, timeout_s=60) as client, client.watch_with_snapshot(keys.prefix) as watch:
    while (kv := client.get(keys.header).kv) is None or len(kvs := client.get_prefix(keys.nodes).kvs) < 2:
        assert watch.get(60) is not None
header = decode(Header, kv.value, "the header")
nodes = {kv.key.decode().rpartition("/")[2]: decode(Node, kv.value, "a node") for kv in kvs}
links = [[node.address, node.link.port, node_id] for node_id, node in nodes.items()]
print(json.dumps({"state": [header.round, header.state.name], "links": links}))
"""


@dataclass(frozen=True)
class Attack:
    """kind, count: see scripts/stranger.py. at: "links" or "store". slow: the store stands still for SLOW_S meanwhile."""

    name: str
    kind: str
    at: str = "links"
    count: int = 1
    slow: bool = False


AT_LINKS = (
    Attack("made-up and real names", "names"),
    Attack("the same, the store stands still for 3 s", "names", slow=True),
    Attack("500 idle connections to each", "idle", count=500),
    Attack("garbage", "garbage"),
    Attack("a flood, 100 at a time", "flood", count=100),
)
AT_STORE = (
    Attack("1,500 idle connections", "idle", "store", count=1500),
    Attack("1,500 that begin TLS", "tls", "store", count=1500),
    Attack("garbage", "garbage", "store"),
    Attack("a flood, 100 at a time", "flood", "store", count=100),
)


@dataclass(frozen=True)
class Pace:
    """steps: per second. longest_s: between two steps."""

    steps: float
    longest_s: float

    @staticmethod
    def of(times: Sequence[float]) -> Pace:
        return Pace((len(times) - 1) / (times[-1] - times[0]), max(b - a for a, b in pairwise(times)))


def passed(at: float) -> None:
    """Wait for this time, monotonic: until then something goes on."""
    until(lambda: time.monotonic() > at)


class Attacked:
    """The job, and the stranger."""

    def __init__(self, folder: Path, stack: ExitStack, backend: str, secret: str) -> None:
        self.folder, self.backend = folder, backend
        self.hosts: list[Host] = []
        self._nodes = Nodes(folder, stack)
        made = stack.enter_context(network(3))
        for host in made.hosts:
            stack.callback(lose, host)
        *self.hosts, self._stranger = made.hosts
        self._etcd: EtcdServer | None = None
        self.store = (self.hosts[0].address, PORT)
        if backend == "ext_etcd":
            self._etcd = stack.enter_context(EtcdServer(folder / "etcd", address=SERVER, inside=made.inside))
            self.store = (SERVER, self._etcd.client_port)
        self._files: list[str] = []
        self._variables: dict[str, str] = {}
        self.state: list[object] = []  # of the job: the number of its round, and how that is
        self._links: list[list[object]] = []  # where they are: address, port, and node id of each agent
        if secret:
            (folder / "visitor").mkdir()
            files = certificates.write(secret.encode(), "job", ("visitor",), folder / "visitor")
            self._files = [files.ca, files.cert, files.key]
            self._variables = {"ELASTIC_EXT_JOB_SECRET": secret}
        self._nodes.options = [f"--rdzv-backend={backend}"]
        (folder / "worker.py").write_text(TRAINS)

    @property
    def jobs(self) -> list[Job]:
        return [*self._nodes.jobs.values()]

    @property
    def said(self) -> str:
        return "\n---\n".join(job.err for job in self.jobs)

    def start(self, conf: str = "") -> None:
        conf = f"lease_ttl=30,last_call_timeout=0.5,metrics_port=off{conf}"
        for host in self.hosts:
            launcher = [*host.inside, "prlimit", f"--nofile={FILES}:{FILES}", *TORCHRUN]
            how = {"script": "worker.py", "conf": conf, "launcher": launcher, "GLOO_SOCKET_IFNAME": "net0"}
            self._nodes.start(host.address, "{}:{}".format(*self.store), "2", **how, **self._variables)
        self.await_steps(1)
        found = self.records()
        self.state, self._links = found["state"], found["links"]
        assert all(port for _, port, _ in self._links)

    def finish(self) -> None:
        (self.folder / "end").touch()
        assert [job.finish().returncode for job in self.jobs] == [0, 0], self.said

    # What the workers do.

    def steps(self, rank: int = 0) -> list[tuple[int, float]]:
        """The process and the time of each step that it has made, monotonic."""
        try:
            *lines, _ = (self.folder / f"steps-{rank}").read_text().split("\n")
        except FileNotFoundError:
            return []
        return [(int(pid), float(at)) for pid, at in map(str.split, lines)]

    def worker(self, rank: int = 0) -> int:
        return self.steps(rank)[-1][0]

    def await_steps(self, count: int, since: float = 0.0, of: int = 0) -> list[float]:
        """Wait for this number of steps; return their times. of: a worker that must have made all of them; 0: any."""

        def made() -> list[tuple[int, float]]:
            assert all(job.process.poll() is None for job in self.jobs), self.said
            return [(pid, at) for pid, at in self.steps() if at >= since]

        until(lambda: len(made()) >= count, self.said, LONG_S)
        found = made()
        assert not of or {pid for pid, _ in found} == {of}, f"a round has ended\n{self.said}"
        return [at for _, at in found]

    # What the store knows.

    def records(self) -> dict:
        command = [*self.hosts[0].inside, sys.executable, "-c", RECORDS, "{}:{}".format(*self.store), *self._files]
        return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)

    def store_process(self) -> int:
        if self._etcd is not None:
            assert self._etcd.process is not None
            return self._etcd.process.pid
        (pid,) = (each for each in pids_in(self.hosts[0]) if "\0elastic_ext.embedded.process\0" in command_of(each))
        return pid

    # What the stranger does.

    @contextmanager
    def under(self, attack: Attack) -> Iterator[None]:
        """It lasts until the end of this."""
        targets = self._links if attack.at == "links" else [(*self.store, "")]
        script = str(SCRIPTS / "stranger.py")
        command = [*self._stranger.inside, sys.executable, script, attack.kind, str(attack.count), json.dumps(targets)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.readline() == "attacks\n"
                yield
                assert process.poll() is None
                process.stdin.close()
                print(f"connections: {process.stdout.readline().strip()}", end="; ")
            finally:
                process.kill()

    def endure(self, attack: Attack) -> None:
        """Nothing stops, and the workers go on; say how fast."""
        worker = self.worker()
        before = Pace.of(self.await_steps(STEPS, time.monotonic()))
        with self.under(attack):
            began = time.monotonic()
            if attack.slow:
                store = self.store_process()
                os.kill(store, signal.SIGSTOP)
                passed(began + SLOW_S)
                os.kill(store, signal.SIGCONT)
            during = Pace.of(self.await_steps(STEPS, began, worker))
            assert self.records()["state"] == self.state, self.said  # one that has just come gets in, too
        assert "stopping its workers" not in self.said
        row = f"| {self.backend} | {attack.at} | {attack.name} | {before.steps:.0f} | {during.steps:.0f} |"
        print(f"{row} {before.longest_s:.2f} | {during.longest_s:.2f} |")

    def lose_worker(self, attack: Attack) -> None:
        """A new round begins while this attack lasts."""
        worker = self.worker()
        with self.under(attack):
            os.kill(worker, signal.SIGKILL)
            until(lambda: self.worker() != worker, self.said, LONG_S)
            self.await_steps(STEPS, time.monotonic(), self.worker())
            assert self.records()["state"] == [2, "RUNNING"], self.said


@pytest.mark.parametrize(
    ("backend", "secret", "attacks"),
    [("ext_etcd", "", AT_LINKS), ("ext_c10d", "", AT_LINKS + AT_STORE), ("ext_c10d", SECRET, AT_LINKS[:2] + AT_STORE)],
    ids=["etcd", "embedded", "embedded-secret"],
)
def test_no_stranger_stops_a_job(tmp_path, backend, secret, attacks):
    """Nor keeps it from a new round: a worker is lost while the worst of them lasts."""
    with ExitStack() as stack:
        attacked = Attacked(tmp_path, stack, backend, secret)
        attacked.start()
        for attack in attacks:
            attacked.endure(attack)
        attacked.lose_worker(attacks[-2 if backend == "ext_etcd" else -4])
        attacked.finish()


# The store that dies


@contextmanager
def full(disk: Path) -> Iterator[None]:
    fill = disk / "fill"
    with suppress(OSError), fill.open("wb", buffering=0) as file:
        while True:
            file.write(b"x")
    yield
    fill.unlink()


def test_a_store_killed_all_minute_comes_back(tmp_path):
    """A worker fails in between, without a store; then the disk of the ledger is full, and a stranger holds what descriptors
    there are. The job comes back each time."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        attacked = Attacked(tmp_path, stack, "ext_c10d", SECRET)
        attacked.start(f",ledger_file={disk / 'ledger'}")
        first, began, deaths = attacked.worker(), time.monotonic(), 0
        troubles = stack.enter_context(ExitStack())
        while deaths < 8 or time.monotonic() < began + MINUTE_S:
            store, killed = attacked.store_process(), time.monotonic()
            os.kill(store, signal.SIGKILL)
            assert wait_gone([store]) == []
            deaths += 1
            if deaths == 2:
                os.kill(first, signal.SIGKILL)
            if deaths == 3:
                until((disk / "ledger").exists)  # of the failure
                troubles.enter_context(full(disk))
            if deaths == 7:
                troubles.close()
            attacked.records()
            attacked.await_steps(10, time.monotonic())
            print(f"death {deaths}: back after {time.monotonic() - killed:.1f} s")
            if deaths == 4:  # while there is a store to hold connections to; it makes them again with the next ones
                troubles.enter_context(attacked.under(AT_STORE[0]))
            passed(killed + EVERY_S)
        assert len({pid for pid, _ in attacked.steps()}) == 2, f"more than one round has ended\n{attacked.said}"
        attacked.finish()
        assert not (disk / "ledger").exists(), "of a job that is done"
