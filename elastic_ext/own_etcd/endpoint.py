"""What `--rdzv-endpoint=job:...` asks for: the hosts of the members and their ports. Pure.

`early_options` reads torchrun's options before torch can. It guesses: only torch knows which options take a value. A wrong guess
costs a process that ends again (`launch.begin`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.rendezvous.address import is_loopback

PREFIX = "job:"
MEMBERS = 3  # a majority outlives the loss of any one; more would only cost writes
# Ports that no kernel gives out unasked (ip_local_port_range begins at 32768): two for each job, by its run id.
FIRST_PORT, PORT_PAIRS = 20000, 6000

_HOST = re.compile(r"\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+)", re.ASCII)
_EXAMPLE = "expected job: under Slurm, or job:host1,host2,host3[:port]"


@dataclass(frozen=True)
class Plan:
    """The etcd of one job, the same on all its hosts."""

    run_id: str
    hosts: tuple[str, ...]  # of the members at the start, as the hosts of the job know them; IPv6 without brackets
    others: tuple[str, ...]  # further hosts of the job, in their order: the first to take the place of one that is lost
    client_port: int  # of each member; its peer port is the next one

    @property
    def peer_port(self) -> int:
        return self.client_port + 1

    @property
    def loopback(self) -> bool:
        """Whether the whole job is on this machine."""
        return all(map(is_loopback, self.hosts))

    def client_url(self, host: str) -> str:
        return url(host, self.client_port)

    def peer_url(self, host: str) -> str:
        return url(host, self.peer_port)

    @property
    def endpoints(self) -> str:
        """As for `--rdzv-endpoint`."""
        return ",".join(map(self.client_url, self.hosts))

    @property
    def initial_cluster(self) -> str:
        """As for etcd's option of that name. A member has the name of its host."""
        return ",".join(f"{host}={self.peer_url(host)}" for host in self.hosts)


def is_job(endpoint: str) -> bool:
    """Return whether the job is to bring its own etcd. "job:2379" is an etcd on a host of that name, as it always was."""
    text = endpoint.strip()
    return text.startswith(PREFIX) and not text.removeprefix(PREFIX).isdigit()


def url(host: str, port: int) -> str:
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def make_plan(endpoint: str, run_id: str, listed: Sequence[str]) -> Plan:
    """Return the plan for an endpoint `job:...`. listed: the hosts of Slurm's list; none outside Slurm.

    Raises UsageError: no hosts, a bad host or port, or hosts of which some are the loopback.
    """
    text, port = _split_port(endpoint.strip().removeprefix(PREFIX).strip(), endpoint)
    named = tuple(dict.fromkeys(_host(each, endpoint) for each in text.split(",") if each.strip()))
    hosts = named or tuple(listed)
    if not hosts:
        raise UsageError(
            f"--rdzv-endpoint={printable(endpoint)}: no hosts are named, and Slurm lists none (SLURM_JOB_NODELIST, scontrol); "
            f"{_EXAMPLE}"
        )
    local = [host for host in hosts if is_loopback(host)]
    if local and len(local) < len(hosts):
        raise UsageError(
            f"--rdzv-endpoint={printable(endpoint)}: {local[0]} means another machine on each host; "
            "expected names that all hosts know, or job:localhost for a job on one machine"
        )
    count = MEMBERS if len(hosts) >= MEMBERS and not local else 1
    others = hosts[count:] + tuple(each for each in listed if each not in hosts)
    return Plan(run_id, hosts[:count], () if local else others, port or port_of(run_id))


def port_of(run_id: str) -> int:
    """Return the client port of a job without `:port`: all hosts derive the same."""
    digest = hashlib.sha256(b"elastic_ext job etcd port\0" + run_id.encode()).digest()
    return FIRST_PORT + 2 * (int.from_bytes(digest[:8], "big") % PORT_PAIRS)


def _split_port(text: str, endpoint: str) -> tuple[str, int | None]:
    hosts, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        return text, None
    if not 0 < int(port) < 65535:  # its peer port is the next one
        raise UsageError(
            f"--rdzv-endpoint={printable(endpoint)}: expected a port from 1 to 65534, which also leaves the next one"
        )
    return hosts, int(port)


def _host(text: str, endpoint: str) -> str:
    match = _HOST.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--rdzv-endpoint={printable(endpoint)}: {printable(text)!r} is no host; {_EXAMPLE}")
    return match["v6"] or match["name"]


_NAMES = ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr", "rdzv_backend")
BACKEND = "ext_etcd"


@dataclass(frozen=True)
class Options:
    """As of torchrun. rdzv_conf: its keys and values."""

    endpoint: str
    run_id: str
    local_addr: str | None
    rdzv_conf: Mapping[str, str]


def early_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options | None:
    """Return the options before the script; None unless the backend is ours on etcd, or where they cannot be read."""
    found = {name: environ[f"PET_{name.upper()}"] for name in _NAMES if f"PET_{name.upper()}" in environ}
    waiting = ""  # an option whose value may follow
    for word in argv:
        if word.startswith("-") and word != "-m":
            option, equals, value = word.lstrip("-").partition("=")
            option = option.replace("-", "_")
            if equals and option in _NAMES:
                found[option] = value
            waiting = "" if equals else option
        elif waiting:
            found |= {waiting: word} if waiting in _NAMES else {}
            waiting = ""
        else:
            break
    conf = _conf_of(found.get("rdzv_conf", ""))
    if found.get("rdzv_backend") != BACKEND or conf is None or not found.get("rdzv_id"):
        return None
    return Options(found.get("rdzv_endpoint", ""), found["rdzv_id"], found.get("local_addr"), conf)


def _conf_of(text: str) -> dict[str, str] | None:
    """Return the pairs of --rdzv-conf; None if torch would refuse them."""
    pairs = [pair.partition("=") for pair in text.strip().split(",") if text.strip()]
    if not all(key.strip() and equals and value.strip() for key, equals, value in pairs):
        return None
    return {key.strip(): value.strip() for key, _, value in pairs}
