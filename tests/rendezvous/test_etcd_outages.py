"""What happens to etcd and to agents, what real jobs make of it, and the invariants of `rounds` over the history of each job."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.etcd import Event, QuotaExceeded
from elastic_ext.rendezvous.keys import JobKeys
from tests.chaos.seeded.surroundings import clocks, unavailable
from tests.etcd_client import EtcdClient
from tests.etcd_server import Certificates, EtcdCluster, EtcdServer
from tests.jobs import Job, command_of, descendants, wait_gone
from tests.programs import required
from tests.rendezvous.random_jobs import Invariants
from tests.rendezvous.test_etcd_jobs import Nodes, assert_one_line, reports, seen

pytestmark = pytest.mark.full

KEYS = JobKeys("job")
PREFIX = KEYS.prefix
OUTAGE_S = 15.0  # the lease is 10 s: long enough for every one to end, if it can
NEWS_S = 60.0
PASSWORD = "ann-secret-5527"
TOKEN_TTL_S = 2


class History:
    """All that is written under the job's prefix, from the first revision on."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._watch = client.watch(PREFIX, prefix=True, start_revision=1)
        self.events: list[Event] = []

    def close(self) -> None:
        self._watch.close()

    def until(self, happened: Callable[[Event], bool]) -> Event:
        """Read on to the next event of which this is true."""
        while (batch := self._watch.get(NEWS_S)) is not None:
            self.events += batch.events
            for event in batch.events:
                if happened(event):
                    return event
        raise AssertionError(f"no such news in {NEWS_S} s; so far:\n" + "\n".join(map(shown, self.events)))

    def all(self) -> list[Event]:
        """Everything until now."""
        end = (PREFIX + "end-of-history").encode()
        written = self._client.put(end, "").revision
        self.until(lambda event: event.kv.key == end and event.kv.mod_revision == written)
        return self.events


def shown(event: Event) -> str:
    return f"{event.kv.mod_revision} {event.kind} {event.kv.key.decode()} {event.kv.value.decode()}"


def violations(events: Sequence[Event]) -> list[str]:
    """What in the recorded history of one job contradicts the invariants of `rounds`; see its module docstring."""
    invariants = Invariants([])
    for event in events:
        invariants.take(event)
    return invariants.wrong


class Watched(Nodes):
    """Agents of one job, all at one endpoint, and its history."""

    def __init__(self, folder: Path, stack: ExitStack, client: EtcdClient, endpoint: str, **variables: str) -> None:
        super().__init__(folder, stack)
        self._endpoint, self._variables = endpoint, variables
        self.history = History(client)
        stack.callback(self.history.close)

    def enter(self, names: str, nnodes: str, **variables: str) -> Job:
        """Start agents with these names; return the last one."""
        for name in names:
            job = self.start(name, self._endpoint, nnodes, **{**self._variables, **variables})
        return job

    def form(self, names: str, nnodes: str) -> None:
        """Let the job begin, with these."""
        self.enter(names, nnodes)
        self.wait_for(seen(len(names), 0))

    def end(self) -> None:
        """Open the gate; every node that has not been killed must end well, and the history must be right."""
        self.finish("".join(name for name, job in self.jobs.items() if job.process.poll() != -signal.SIGKILL))
        assert violations(self.history.all()) == []

    def pids(self, attempt: int) -> dict[str, int]:
        return {line["node"]: line["pid"] for line in reports(*self.jobs.values()) if line["attempt"] == attempt}

    def leading(self) -> str:
        """The name of the node that leads the rendezvous: its key is the oldest, and its agent's pid is in the node's id."""
        keys = [event.kv for event in self.history.all() if event.kv.key.startswith(KEYS.nodes.encode())]
        pid = int(min(keys, key=lambda kv: kv.create_revision).key.decode().rsplit("-", 2)[1])
        return next(name for name, job in self.jobs.items() if job.process.pid == pid)


def on(stack: ExitStack, folder: Path, endpoint: str) -> Watched:
    return Watched(folder, stack, stack.enter_context(EtcdClient(endpoint)), endpoint)


@pytest.fixture
def watched(server: EtcdServer, tmp_path: Path, stack: ExitStack) -> Watched:
    return on(stack, tmp_path, server.endpoint)


# etcd goes away.


def test_long_lost_etcd_members_restart_nothing(tmp_path, stack):
    """The leader, the hardest to lose. Afterwards all is as before: a third node joins."""
    cluster = stack.enter_context(EtcdCluster(tmp_path / "cluster"))
    nodes = on(stack, tmp_path, ",".join(cluster.endpoints))
    nodes.form("ab", "2:3")
    cluster.leader().kill()
    pids = list(nodes.pids(0).values())
    assert wait_gone(pids, timeout_s=OUTAGE_S) == pids
    assert nodes.attempts() == {0}
    nodes.enter("c", "2:3")
    nodes.wait_for(seen(3, 1))
    nodes.end()
    assert nodes.attempts() == {0, 1}


# Clocks jump.


def is_marker(event: Event) -> bool:
    return event.kv.key.endswith(b"/end-of-history")


def is_claim(event: Event) -> bool:
    """A node that is there writes its record again, mostly to claim that its workers stall: here they wait at a gate."""
    return b"/nodes/" in event.kv.key and event.kind == "put" and event.kv.create_revision != event.kv.mod_revision


def test_clocks_that_jump_an_hour_cost_nothing(watched, tmp_path):
    """That of one node forwards, that of the other back, for longer than a lease; one of them leads. A server of etcd cannot have
    a clock of its own: Go asks the kernel without the C library.
    """
    required(not unavailable("clock step"), unavailable("clock step"))
    by_name = clocks(tmp_path, "ab")
    for name, clock in by_name.items():
        watched.enter(name, "2:3", **clock.environ)
    watched.wait_for(seen(2, 0))
    pids = list(watched.pids(0).values())
    told = len(watched.history.all())
    for (name, clock), hours in zip(by_name.items(), (1, -1), strict=True):
        clock.step(3600 * hours)
        assert clock.environ["LD_PRELOAD"] in Path(f"/proc/{watched.jobs[name].process.pid}/maps").read_text()
    assert wait_gone(pids, timeout_s=OUTAGE_S) == pids
    for_people = (KEYS.goodput, KEYS.goodput_sum, KEYS.reports)  # written all the time
    after = [event for event in watched.history.all()[told:] if not event.kv.key.decode().startswith(for_people)]
    changed = [shown(event) for event in after if not (is_marker(event) or is_claim(event))]
    assert changed == []  # no lease was lost: its node would be gone, and come again
    assert watched.attempts() == {0}
    watched.enter("c", "2:3")
    watched.wait_for(seen(3, 1))
    watched.end()
    assert watched.attempts() == {0, 1}


# etcd with a lock on the door.


@pytest.fixture
def auth_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """User ann may read and write below the job's prefix. A token that is not used for two seconds is worth nothing any more."""
    with EtcdServer(tmp_path / "auth", args=[f"--auth-token-ttl={TOKEN_TTL_S}"]) as started:
        started.lock("root-secret-1180", PASSWORD, "/elastic_ext/")
        yield started


@pytest.fixture
def auth_job(auth_server: EtcdServer, tmp_path: Path, stack: ExitStack) -> Watched:
    client = stack.enter_context(EtcdClient(auth_server.endpoint, user="ann", password=PASSWORD))
    secret = {"ELASTIC_EXT_ETCD_USER": "ann", "ELASTIC_EXT_ETCD_PASSWORD": PASSWORD}
    return Watched(tmp_path, stack, client, auth_server.endpoint, LOGLEVEL="DEBUG", **secret)


def test_with_a_password_jobs_form_without_leaking_it(auth_job):
    """The workers do not even get it."""
    auth_job.form("ab", "2")
    pids = auth_job.pids(0)
    alive = list(pids.values())
    assert wait_gone(alive, timeout_s=2 * TOKEN_TTL_S) == alive
    jobs = auth_job.jobs.values()
    told = [pid for job in jobs for pid in descendants(job.process.pid) if PASSWORD in command_of(pid)]
    inherited = Path(f"/proc/{pids['a']}/environ").read_text(errors="replace")
    os.kill(pids["a"], signal.SIGKILL)
    auth_job.wait_for(seen(2, 1))
    auth_job.end()
    assert told == []
    assert ("NODE=a" in inherited, PASSWORD in inherited) == (True, False)
    for job in jobs:
        assert PASSWORD not in job.out + job.err


@pytest.mark.parametrize("expires", [pytest.param(False, marks=pytest.mark.seam), True])
def test_with_certificates_on_both_sides(tmp_path, stack, expires):
    """One that expires is an outage until it is renewed on disk: the same nodes go on. The CA changes, so they must read it."""
    own = Certificates.make(tmp_path / "certificates")
    server = stack.enter_context(EtcdServer(tmp_path / "etcd", certificates=own, client_certificates=True))
    client = stack.enter_context(EtcdClient(server.endpoint, tls=own.tls(client=True)))
    files = {"CA": "ca.crt", "CERT": "client.crt", "KEY": "client.key"}
    variables = {f"ELASTIC_EXT_ETCD_{name}": own.path(file) for name, file in files.items()}
    nodes = Watched(tmp_path, stack, client, server.endpoint, **variables)
    nodes.form("ab", "2")
    if expires:
        Certificates.make(tmp_path / "certificates").renew("client", days=-1)
        server.restart()
        nodes.wait_for("not being renewed.* expired at .*: renew it in place")
        assert_one_line(nodes.start("late", server.endpoint, "2", **variables).finish(), 78, "expired at")
        del nodes.jobs["late"]
        own.renew("client")
        assert nodes.attempts() == {0}
    os.kill(nodes.pids(0)["b"], signal.SIGKILL)
    nodes.wait_for(seen(2, 1))
    nodes.end()


def test_a_leader_that_may_not_write_leaves(auth_server, auth_job):
    root = ("--user", "root:root-secret-1180")
    for command in ("user add bob --new-user-password bob-secret-9041", "user grant-role bob ann"):
        auth_server.etcdctl(*root, *command.split())
    auth_job.form("a", "1:2")
    auth_server.etcdctl(*root, "user", "revoke-role", "ann", "ann")
    other = auth_job.enter("b", "1:2", ELASTIC_EXT_ETCD_USER="bob", ELASTIC_EXT_ETCD_PASSWORD="bob-secret-9041")
    other.wait_for(seen(1, 1))
    done = auth_job.jobs["a"].finish()
    assert done.returncode != 0
    assert "this node can no longer take part in the job: " in done.err
    assert "permission denied" in done.err
    assert wait_gone([auth_job.pids(0)["a"]], timeout_s=0) == []
    auth_job.finish("b")


def fill(client: EtcdClient) -> None:
    """Until etcd takes no write at all: before its alarm it refuses large ones only."""
    for size in (100_000, 1):
        with contextlib.suppress(QuotaExceeded):
            while True:
                client.put("/of-others", "x" * size)


def test_a_full_etcd_is_one_line_and_75(tmp_path, stack, nodes):
    server = stack.enter_context(EtcdServer(tmp_path / "etcd", args=["--quota-backend-bytes=1000000"]))
    fill(stack.enter_context(EtcdClient(server.endpoint)))
    done = nodes.start("a", server.endpoint, "1").finish()
    assert_one_line(done, 75, "database space exceeded; compact and defragment etcd")


def test_a_failure_waits_until_full_etcd_has_room(tmp_path, stack):
    """A worker of the node that does not lead fails: once there is room, that node writes, and the one that leads does."""
    server = stack.enter_context(EtcdServer(tmp_path / "etcd", args=["--quota-backend-bytes=4000000"]))
    nodes = on(stack, tmp_path, server.endpoint)
    nodes.form("ab", "2")
    failing = "ab".replace(nodes.leading(), "")
    client = stack.enter_context(EtcdClient(server.endpoint))
    fill(client)
    pids = nodes.pids(0)
    alive = list(pids.values())
    assert wait_gone(alive, timeout_s=OUTAGE_S) == alive
    os.kill(pids[failing], signal.SIGKILL)
    nodes.jobs[failing].wait_for("space exceeded; compact and defragment etcd .* the running round continues")
    client.compact(client.revision("/of-others"))
    server.etcdctl("defrag")
    server.etcdctl("alarm", "disarm")
    nodes.wait_for(seen(2, 1))
    assert nodes.attempts() == {0, 1}
    nodes.finish()
