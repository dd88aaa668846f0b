"""The etcd of a run: three members that the suite runs, or that the job brings (`job:`); or the store that its first host has."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from elastic_ext.embedded.hosting import DEFAULT_PORT
from elastic_ext.failures.ledger import Ledger, decode_ledger
from elastic_ext.own_etcd import certificates
from elastic_ext.own_etcd import folder as own_folder
from elastic_ext.own_etcd.endpoint import make_plan
from elastic_ext.rendezvous.keys import JobKeys
from tests.chaos.processes import Process
from tests.etcd_server import EtcdServer, distro_binary

SECRET = "a secret of the chaos suite"
PATIENCE_S = 20  # for an answer, while no fault is on


class Members(Protocol):
    """endpoint: as for --rdzv-endpoint. environ: of agents."""

    endpoint: str
    environ: dict[str, str]

    def running(self) -> dict[str, int]:
        """Pids of the members that run, by host."""

    def etcdctl(self, host: str) -> list[str]:
        """Arguments with which etcdctl asks the member of this host."""

    def kill(self, host: str) -> None:
        """With SIGKILL, if there is one."""

    def start(self, host: str) -> None:
        """Unless it runs, or starts by itself."""

    def replace(self, host: str) -> None:
        """The host is another machine under the same address."""


class Ours:
    """Members on these hosts whose data survives them, on a volume."""

    def __init__(
        self,
        folder: Path,
        addresses: Mapping[str, str],
        hosts: Sequence[str],
        inside: Callable[[str], list[str]],
        stack: ExitStack,
    ) -> None:
        self._servers = {
            host: EtcdServer(folder / f"etcd-{host}", host, address=addresses[host], inside=inside(host)) for host in hosts
        }
        self._initial = ",".join(f"{member.name}={member.peer_url}" for member in self._servers.values())
        self.endpoint = ",".join(member.endpoint for member in self._servers.values())
        self.environ: dict[str, str] = {}
        for host, member in self._servers.items():
            stack.callback(member.__exit__)
            self.start(host)

    def await_ready(self) -> None:
        for member in self._servers.values():
            member.await_ready()

    def running(self) -> dict[str, int]:
        return {host: member.process.pid for host, member in self._servers.items() if member.process is not None}

    def etcdctl(self, host: str) -> list[str]:
        return [f"--endpoints={self._servers[host].endpoint}"]

    def kill(self, host: str) -> None:
        if host in self._servers:
            self._servers[host].kill()

    def start(self, host: str) -> None:
        if host in self._servers and self._servers[host].process is None:
            self._servers[host].start(self._initial, wait=False)

    replace = start


class Brought:
    """The agents start them on these hosts, and again when they end. Their data goes with the host."""

    def __init__(
        self, run_id: str, addresses: Mapping[str, str], hosts: Sequence[str], processes_of: Callable[[str], list[Process]]
    ) -> None:
        self._addresses = {host: addresses[host] for host in hosts}
        self.endpoint = f"job:{','.join(self._addresses.values())}"
        self.environ = {"ELASTIC_EXT_JOB_SECRET": SECRET}
        self._plan = make_plan(self.endpoint, run_id, ())
        self._processes_of = processes_of

    def running(self) -> dict[str, int]:
        return {host: process.pid for host in self._addresses if (process := self._member(host)) is not None}

    def _member(self, host: str) -> Process | None:
        found = (each for each in self._processes_of(host) if [os.path.basename(part) for part in each.command[:1]] == ["etcd"])
        return next(found, None)

    def etcdctl(self, host: str) -> list[str]:
        files = self._folder(host)
        tls = [f"--cacert={files / 'ca.pem'}", f"--cert={files / 'own.pem'}", f"--key={files / 'own.key'}"]
        return [f"--endpoints=https://{self._addresses[host]}:{self._plan.client_port}", *tls]

    def _folder(self, host: str) -> Path:
        return own_folder.folder_of(self._plan.run_id, self._plan.hosts, self._addresses[host], {})

    def kill(self, host: str) -> None:
        if (member := self._member(host)) is not None:
            member.send(signal.SIGKILL)

    def start(self, host: str) -> None:
        pass

    def replace(self, host: str) -> None:
        if host in self._addresses:
            shutil.rmtree(self._folder(host), ignore_errors=True)


class Embedded:
    """The agent of this host starts it, and again when it ends. With it all goes that it knows."""

    def __init__(
        self, run_id: str, host: str, address: str, processes_of: Callable[[str], list[Process]], visitor: Path | None
    ) -> None:
        """visitor: a folder for certificates, of a job with a secret."""
        self.endpoint = f"{address}:{DEFAULT_PORT}"
        self.environ = {"ELASTIC_EXT_JOB_SECRET": SECRET} if visitor is not None else {}
        self._host, self._processes_of = host, processes_of
        self._asks = [f"--endpoints={self.endpoint}"]
        if visitor is not None:
            visitor.mkdir()
            files = certificates.write(SECRET.encode(), run_id, ("visitor",), visitor)
            tls = [f"--cacert={files.ca}", f"--cert={files.cert}", f"--key={files.key}"]
            self._asks = [f"--endpoints=https://{self.endpoint}", *tls]

    def running(self) -> dict[str, int]:
        return dict([(self._host, each.pid) for each in self._processes_of(self._host) if each.role == "store"][:1])

    def etcdctl(self, host: str) -> list[str]:
        return self._asks

    def kill(self, host: str) -> None:
        if pid := self.running().get(host):
            os.kill(pid, signal.SIGKILL)

    def start(self, host: str) -> None:
        pass

    replace = start


def leader(members: Members, inside: Callable[[str], list[str]]) -> str:
    """The host of the member that leads; "" where nobody knows."""
    for host in members.running():
        shown = _asked(members, host, inside, 1, "endpoint", "status", "--write-out=fields") or ""
        fields = dict(line.split(" : ") for line in shown.splitlines() if " : " in line)
        if fields.get('"MemberID"') and fields['"MemberID"'] == fields['"Leader"']:
            return host
    return ""


def registered(members: Members, inside: Callable[[str], list[str]], run_id: str) -> list[str]:
    """The ids of the nodes in the job, waiting ones too; none where no member tells."""
    prefix = JobKeys(run_id).nodes
    for host in members.running():
        text = _asked(members, host, inside, PATIENCE_S, "get", "--prefix", prefix, "--keys-only")
        if text is not None:
            return [line.removeprefix(prefix).strip("/") for line in text.splitlines() if line.startswith(prefix)]
    return []


def ledger(members: Members, inside: Callable[[str], list[str]], run_id: str) -> Ledger | None:
    """The job's; None where no member tells, as of those that the job brought once it is over."""
    for host in members.running():
        text = _asked(members, host, inside, PATIENCE_S, "get", JobKeys(run_id).ledger, "--print-value-only")
        if text is not None:
            return decode_ledger(text) if text.strip() else Ledger()
    return None


def _asked(members: Members, host: str, inside: Callable[[str], list[str]], seconds: int, *what: str) -> str | None:
    """What etcdctl is told by the member of this host; None: nothing, in so many seconds."""
    limits = [f"--command-timeout={seconds}s", f"--dial-timeout={seconds}s"]
    command = [*inside(host), str(distro_binary("etcdctl")), *members.etcdctl(host), *limits]
    env = {**os.environ, "ETCDCTL_API": "3"}
    done = subprocess.run([*command, *what], capture_output=True, text=True, env=env, timeout=120, check=False)
    return done.stdout if done.returncode == 0 else None
