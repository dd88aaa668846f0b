"""Jobs of two hosts for real, in network namespaces: who hosts the store, who gets in, and what the store's process survives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_ext.embedded.plan import socket_of
from elastic_ext.own_etcd import certificates
from tests.jobs import ROOT, SCRIPTS, TORCHRUN, Gate, Job, command_of, wait_gone
from tests.kubernetes.pods import NAMES
from tests.networks import Host, Network, network
from tests.own_etcd.hosts import lose, pids_in
from tests.rendezvous.test_etcd_jobs import reports, seen

pytestmark = pytest.mark.full

PORT = 29400
CONF = "lease_ttl=10,last_call_timeout=0.5,metrics_port=off"
ELASTIC = str(SCRIPTS / "elastic_job.py")
FIRST, SECOND = "10.213.1.2", "10.213.2.2"  # of the two hosts; see `networks`
BOTH_KNOWN = (f"{FIRST} first", f"{SECOND} second")
COLLECTIVE = """
import fcntl, json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(json.dumps({"rank": dist.get_rank(), "world": dist.get_world_size(), "attempt": 0}), flush=True)
fcntl.flock(open(os.environ["GATE"]), fcntl.LOCK_SH)
dist.barrier()
"""
# With a watch, as agents do. The argument: how many nodes.
AWAIT_RECORDS = """
import sys
from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.keys import JobKeys
endpoint, count = sys.argv[1:]
nodes = JobKeys("job").nodes
with EtcdClient(endpoint, timeout_s=60) as client, client.watch_with_snapshot(nodes) as watch:
    while len(client.get_prefix(nodes).kvs) < int(count):
        assert watch.get(60) is not None
    print(len(client.get_prefix(nodes).kvs))
"""
# The arguments: paths of certificates, or none.
READ = """
import sys
from elastic_ext.etcd import EtcdClient, EtcdError, Tls
from elastic_ext.rendezvous.keys import JobKeys
endpoint, *files = sys.argv[1:]
with EtcdClient(endpoint, tls=Tls(*files) if files else None, timeout_s=60 if files else 5) as client:
    try:
        print(len(client.get_prefix(JobKeys("job").nodes).kvs))
    except EtcdError as error:
        print("refused")
"""
OTHER_PROGRAM = f"""
import signal, socket
with socket.create_server(("", {PORT})):
    print("listens", flush=True)
    signal.pause()
"""


@dataclass
class Two:
    """Two hosts, and a job on them."""

    folder: Path
    stack: ExitStack
    network: Network
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.gate = Gate(self.folder / "gate")
        for host in self.network.hosts:
            (NAMES / host.inside[-1]).mkdir(parents=True)
            self.stack.callback(shutil.rmtree, NAMES / host.inside[-1])
            # gRPC asks DNS for an IPv6 address whatever `hosts` says: here it hears at once that there is no DNS.
            (NAMES / host.inside[-1] / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            self.know(host, BOTH_KNOWN)

    @property
    def hosts(self) -> list[Host]:
        return self.network.hosts

    def know(self, host: Host, names: Sequence[str]) -> None:
        """names: lines of this host's /etc/hosts."""
        (NAMES / host.inside[-1] / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")

    def ip(self, *command: str, host: Host | None = None) -> None:
        """Run `ip` on a host, or on the router between them."""
        inside = self.network.inside if host is None else host.inside
        subprocess.run([*inside, "ip", *command], check=True)

    def start(
        self,
        index: int,
        endpoint: str = f"{FIRST}:{PORT}",
        *,
        conf: str = "",
        script: str = ELASTIC,
        host_name: str = "",
        **variables: str,
    ) -> Job:
        """Start an agent on a host. host_name: of the host, as `uname -n` has it."""
        name = ("first", "second")[index]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host_name or name]
        where = ["--rdzv-backend=ext_c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--nnodes=2"]
        options = [*where, f"--rdzv-conf={','.join(filter(None, (CONF, conf)))}", "--max-restarts=3"]
        command = [*self.hosts[index].inside, *named, *TORCHRUN, *options, script]
        return self.stack.enter_context(Job(command, self.folder, NODE=name, GATE=str(self.gate.path), **variables))

    def stores(self, index: int) -> list[int]:
        """The processes of stores on a host."""
        return [pid for pid in pids_in(self.hosts[index]) if "\0elastic_ext.embedded.process\0" in command_of(pid)]

    def store(self) -> int:
        """The process of the one store, which is on the first host."""
        (pid,) = self.stores(0)
        assert self.stores(1) == []
        return pid

    def on_first(self, code: str, *arguments: str) -> str:
        """Run a program on the first host, with the address of the store and these arguments; return what it prints."""
        command = [*self.hosts[0].inside, sys.executable, "-c", code, f"{FIRST}:{PORT}", *arguments]
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def assert_no_store(self) -> None:
        assert [self.stores(index) for index in range(2)] == [[], []]
        for host in self.hosts:
            sockets = subprocess.run([*host.inside, "cat", "/proc/net/unix"], check=True, capture_output=True, text=True).stdout
            assert socket_of(PORT).replace("\0", "@") not in sockets


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with network(2) as made, ExitStack() as stack:
        try:
            yield Two(tmp_path, stack, made)
        finally:
            for host in made.hosts:
                lose(host)


def finish(two: Two, *jobs: Job) -> None:
    """Let the workers end: both agents leave with 0, and no store is left."""
    two.gate.open()
    assert [job.finish().returncode for job in jobs] == [0] * len(jobs), "\n---\n".join(job.err for job in jobs)
    two.assert_no_store()


def train(two: Two, conf: str = "", **variables: str) -> list[Job]:
    """Start both agents; return them when their workers run."""
    jobs = [two.start(index, conf=conf, **variables) for index in range(2)]
    for job in jobs:
        job.wait_for(seen(2, 0))
    return jobs


def workers(*jobs: Job) -> list[int]:
    return [line["pid"] for line in reports(*jobs)]


def attempts(*jobs: Job) -> set[int]:
    return {line["attempt"] for line in reports(*jobs)}


# Who hosts the store


def nothing(two: Two) -> None:
    pass


def second_address(two: Two) -> None:
    two.ip("address", "add", "10.213.1.9/32", "dev", "net0", host=two.hosts[0])
    two.ip("route", "add", "10.213.1.9", "via", FIRST)


def ipv6_only(two: Two) -> None:
    subprocess.run([*two.network.inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding"], check=True)
    for number, host in enumerate(two.hosts, 1):
        two.ip("address", "flush", "dev", "net0", "scope", "global", host=host)
        two.ip("address", "add", f"fd00::{number}/128", "dev", "net0", "nodad", host=host)
        two.ip("address", "add", "fe80::1/64", "dev", f"to{number}", "nodad")
        two.ip("route", "add", f"fd00::{number}", "dev", f"to{number}")
        two.ip("-6", "route", "add", "default", "via", "fe80::1", "dev", "net0", host=host)


def forwarded(two: Two) -> None:
    """The first host takes packets to an address that is on none of its interfaces, as behind NAT."""
    two.ip("route", "add", "local", "10.213.1.9", "dev", "lo", host=two.hosts[0])
    two.ip("route", "add", "10.213.1.9", "via", FIRST)


@dataclass(frozen=True)
class Case:
    """names: what each host has in its /etc/hosts. host_names, conf: of each host."""

    endpoint: str
    names: tuple[Sequence[str], Sequence[str]] = (BOTH_KNOWN, BOTH_KNOWN)
    host_names: tuple[str, str] = ("first", "second")
    prepare: Callable[[Two], None] = nothing
    conf: tuple[str, str] = ("", "")


CASES = {
    "a host name that leads nowhere": Case(f"{FIRST}:{PORT}", names=((), ())),
    "Debian's own name": Case(f"first:{PORT}", names=(("127.0.1.1 first", BOTH_KNOWN[1]), BOTH_KNOWN)),
    "a second address": Case(f"10.213.1.9:{PORT}", prepare=second_address),
    "IPv6 only": Case(f"[fd00::1]:{PORT}", names=((), ()), prepare=ipv6_only),
    "an alias": Case(f"master:{PORT}", names=([*BOTH_KNOWN, f"{FIRST} master"], [*BOTH_KNOWN, f"{FIRST} master"])),
    "two hosts of one name": Case(
        f"{FIRST}:{PORT}", names=((f"{FIRST} same",), (f"{SECOND} same",)), host_names=("same", "same")
    ),
    "an address of no interface": Case(f"10.213.1.9:{PORT}", prepare=forwarded, conf=("is_host=1", "is_host=0")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_host_of_the_endpoint_has_the_store(two, case):
    script = two.folder / "collective.py"
    script.write_text(COLLECTIVE)
    case.prepare(two)
    for host, names in zip(two.hosts, case.names, strict=True):
        two.know(host, names)
    jobs = [
        two.start(index, case.endpoint, conf=case.conf[index], script=str(script), host_name=case.host_names[index])
        for index in range(2)
    ]
    for job in jobs:
        job.wait_for(seen(2, 0))
    two.store()
    finish(two, *jobs)


# What happens to the agent and to the store


def test_the_store_outlives_its_agent(two):
    first, second = train(two)
    store = two.store()
    first.process.kill()
    first.finish()
    again = two.start(0)
    for job in (again, second):
        job.wait_for(seen(2, 1))
    assert two.store() == store
    finish(two, again, second)
    assert attempts(second) == {0, 1}
    assert "etcd" not in second.err, "it has never missed the store"


def test_a_store_that_is_killed_is_replaced(two):
    jobs = train(two)
    store = two.store()
    os.kill(store, signal.SIGKILL)
    jobs[0].wait_for("the embedded store on this host is gone; starting another")
    assert wait_gone([store]) == []
    assert two.on_first(AWAIT_RECORDS, "2") == "2"
    assert two.store() != store
    finish(two, *jobs)
    assert attempts(*jobs) == {0}, [job.err for job in jobs]


def test_a_store_that_keeps_dying_comes_back(two):
    """For as long as the job trains; a worker that is lost while there is no store costs a restart, as ever."""
    jobs = train(two)
    for death in range(6):
        store = two.store()
        os.kill(store, signal.SIGKILL)
        assert wait_gone([store]) == []
        if death == 4:
            os.kill(workers(*jobs)[0], signal.SIGKILL)
        assert two.on_first(AWAIT_RECORDS, "2") == "2"
    for job in jobs:
        job.wait_for(seen(2, 1))
    jobs[0].wait_for("the embedded store on this host is gone; starting another in 4 s: its end number 5")
    for job, which in zip(jobs, ("this", "that"), strict=True):
        job.wait_for(f"the job's store is at {FIRST}:{PORT}; its agents on {which} host start it again")
    finish(two, *jobs)
    assert attempts(*jobs) == {0, 1}, [job.err for job in jobs]


def test_a_store_that_stood_still_goes_on(two):
    ttl_s = 2
    jobs = train(two, f"lease_ttl={ttl_s}")
    pids, store = workers(*jobs), two.store()
    os.kill(store, signal.SIGSTOP)
    for job in jobs:
        job.wait_for("leases are not being renewed")
    assert wait_gone(pids, 2.0 * ttl_s) == pids
    os.kill(store, signal.SIGCONT)
    assert two.on_first(AWAIT_RECORDS, "2") == "2"
    assert wait_gone(pids, 2.0 * ttl_s) == pids, "nobody is taken for dead afterwards"
    assert two.store() == store
    finish(two, *jobs)
    assert attempts(*jobs) == {0}, [job.err for job in jobs]


# Who gets in


SECRET = "0123456789abcdef"
STRANGERS = {"no secret": {}, "another secret": {"ELASTIC_EXT_JOB_SECRET": SECRET[::-1]}}


@pytest.mark.parametrize("variables", STRANGERS.values(), ids=STRANGERS)
def test_an_agent_without_the_secret_is_out(two, variables):
    """Beside the store, and elsewhere. 75: an earlier job's store may still be there, and ends by itself."""
    jobs = train(two, ELASTIC_EXT_JOB_SECRET=SECRET)
    strangers = [two.start(index, conf="read_timeout=5", **variables) for index in range(2)]
    for stranger in strangers:
        done = stranger.finish()
        assert "Traceback" not in done.err
        assert "supervises this run" not in done.err
        assert done.out == ""
        assert len([line for line in done.err.splitlines() if " ERROR elastic_ext: " in line]) == 1, done.err
        assert done.returncode == 75, done.err  # today it is 78 with another secret, whatever read_timeout says
    finish(two, *jobs)
    assert attempts(*jobs) == {0}, [job.err for job in jobs]


def test_who_has_the_secret_reads_the_store(two):
    jobs = train(two, ELASTIC_EXT_JOB_SECRET=SECRET)
    found = {}
    for name, secret in {"the secret": SECRET, "another secret": SECRET[::-1]}.items():
        folder = two.folder / name
        folder.mkdir()
        files = certificates.write(secret.encode(), "job", ["anywhere"], folder)
        found[name] = two.on_first(READ, files.ca, files.cert, files.key)
    found["nothing"] = two.on_first(READ)
    assert found == {"the secret": "2", "another secret": "refused", "nothing": "refused"}
    finish(two, *jobs)


# What cannot be


@pytest.mark.parametrize(
    ("conf", "said"),
    [("read_timeout=5", "has not answered for 5 s"), ("read_timeout=5,is_host=1", "the embedded store cannot be started")],
)
def test_a_port_that_is_taken_is_named(two, conf, said):
    with subprocess.Popen([*two.hosts[0].inside, sys.executable, "-c", OTHER_PROGRAM], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"listens\n"
        done = two.start(0, conf=conf).finish()
        other.kill()
    assert done.returncode == 75, done.err
    (line,) = [line for line in done.err.splitlines() if " ERROR elastic_ext: " in line]
    assert said in line
    assert "another program of this host has the port" in line
    assert "Traceback" not in done.err
    two.assert_no_store()
