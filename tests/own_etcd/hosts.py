"""Jobs that bring their own etcd, on hosts in network namespaces or on this machine; and what they leave behind."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ext.own_etcd import folder
from elastic_ext.own_etcd.endpoint import Plan, make_plan
from tests.jobs import AGENT, SCRIPTS, Gate, Job
from tests.networks import Host, network
from tests.until import until

ELASTIC = str(SCRIPTS / "elastic_job.py")
CONF = "lease_ttl=10,last_call_timeout=0.5"
GONE_S = 120.0  # a keeper without agents ends after half a minute


def pids_in(host: Host) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", host.inside[-1]], capture_output=True, text=True, check=True)
    return [int(each) for each in found.stdout.split()]


def lose(host: Host) -> None:
    """Take a host's network away and kill all that runs there: what a host without power looks like to the others."""
    subprocess.run([*host.inside, "ip", "link", "set", "net0", "down"], check=True)
    for pid in pids_in(host):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def revive(host: Host) -> None:
    """A new machine in the place of the lost one: the same address, empty."""
    near = host.address.rpartition(".")[0] + ".1"
    subprocess.run([*host.inside, "ip", "link", "set", "net0", "up"], check=True)
    subprocess.run([*host.inside, "ip", "route", "replace", "default", "via", near], check=True)


@dataclass
class OwnEtcdJob:
    """Agents of one job."""

    folder: Path
    stack: ExitStack
    hosts: Sequence[str]
    secret: Path
    others: Sequence[str] = ()
    run_id: str = ""
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.gate = Gate(self.folder / "gate")
        # Namespaces share /dev/shm, and other sessions may run the same test: each job has its own name.
        self.run_id = "job" + hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]

    @property
    def endpoint(self) -> str:
        return f"job:{','.join(self.hosts)}"

    @property
    def plan(self) -> Plan:
        return make_plan(self.endpoint, self.run_id, ())

    def start(
        self,
        nnodes: str,
        *script: str,
        inside: Sequence[str] = (),
        name: str = "a",
        command: Sequence[str] = AGENT,
        **settings: str,
    ) -> Job:
        """inside: the start of the command line, for a host. settings: more of them."""
        conf = {"metrics_port": "off", **dict(each.split("=") for each in CONF.split(",")), **settings}
        if self.secret.name:
            conf.setdefault("job_secret_file", str(self.secret))
        options = [
            *("--rdzv-backend=ext_etcd", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}", f"--nnodes={nnodes}"),
            *("--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()), "--max-restarts=3"),
        ]
        job = Job(
            [*inside, *command, *options, *(script or [ELASTIC])],
            self.folder,
            forks=False,
            NODE=name,
            GATE=str(self.gate.path),
            ELASTIC_EXT_NODE_NAME=name,
        )
        return self.stack.enter_context(job)

    def start_on(self, hosts: Sequence[Host], nnodes: str, *script: str, **settings: str) -> list[Job]:
        """One agent on each of these hosts."""
        return [
            self.start(nnodes, *script, inside=host.inside, name=f"n{number}", **settings) for number, host in enumerate(hosts)
        ]

    def lose(self, host: Host) -> None:
        """Lose a host and its memory."""
        lose(host)
        folder.remove(self.folder_of(host.address))

    def finish(self, agents: Sequence[Job]) -> None:
        """Open the gate; these agents end well."""
        self.gate.open()
        assert [agent.finish().returncode for agent in agents] == [0] * len(agents), "\n---\n".join(each.err for each in agents)

    def folders(self) -> list[Path]:
        """What keepers of this job have on this machine."""
        made = [self.folder_of(each) for each in (*self.hosts, *self.others)]
        return [each for each in made if each.exists()]

    def folder_of(self, host: str) -> Path:
        return folder.folder_of(self.run_id, self.plan.hosts, host, {})

    def keepers(self) -> list[int]:
        """The processes of this job's etcd: those that have a file or directory of its folders open, or run a member there."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                links = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
            except OSError:
                continue
            places = [str(self.folder_of(each)) for each in (*self.hosts, *self.others)]
            opened = " ".join(each for each in links if not each.endswith("/agents"))  # agents hold that one
            if any(place in command or place in opened for place in places):
                found.append(pid)
        return found

    def assert_gone(self) -> None:
        """Wait until no process, port or file of the job's etcd is left."""
        try:
            until(lambda: not self._left(), limit_s=GONE_S)
        except AssertionError:
            logs = [f"{each}: {log.read_text()[-3000:]}" for each in self.folders() if (log := each / "log").exists()]
            raise AssertionError(f"left behind after {GONE_S:g} s: {self._left()}\n" + "\n".join(logs)) from None

    def _left(self) -> list[object]:
        return [*self.folders(), *self.keepers(), *self._ports()]

    def _ports(self) -> list[str]:
        """Of this machine's own network; those of a namespace go with their processes."""
        found = []
        for port in (self.plan.client_port, self.plan.peer_port):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(f"port {port}")
        return found


def wait_for(agents: Sequence[Job], pattern: str, count: int = 1) -> None:
    """Until the output of all has it."""
    for agent in agents:
        agent.wait_for(pattern, count=count)


@contextmanager
def hosts_of(tmp_path: Path, count: int, members: int = 3) -> Iterator[tuple[OwnEtcdJob, list[Host]]]:
    """A job on hosts of their own; those after `members` are named by nobody."""
    with network(count) as made, ExitStack() as stack:
        job = OwnEtcdJob(tmp_path, stack, [host.address for host in made.hosts[:members]], tmp_path / "secret")
        job.others = [host.address for host in made.hosts[members:]]
        try:
            yield job, made.hosts
        finally:
            for host in made.hosts:
                lose(host)
            for each in job.folders():  # the memory of a lost host is this machine's
                folder.remove(each)
