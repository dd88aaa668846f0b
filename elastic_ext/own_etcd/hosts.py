"""Which host of the job this machine is, and by which address the others reach it."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_ext.own_etcd.endpoint import Plan, is_loopback


@dataclass(frozen=True)
class Host:
    """A host. name: as the other hosts know it. address: numeric; "" if the name leads to none, or to the loopback."""

    name: str
    address: str


def own_host(plan: Plan, environ: Mapping[str, str], fallback: str) -> Host:
    """Return this machine. fallback: its address where it is none of the plan's hosts.

    Slurm tells the name; else it is that of the machine, or the first whose address is this machine's.
    """
    names = plan.hosts + plan.others
    known = {environ.get("SLURMD_NODENAME", ""), platform.node(), platform.node().partition(".")[0]}
    for name in names:
        if name in known:
            return Host(name, _routable(addresses(name)))
    for name in names:
        if own := [each for each in addresses(name) if is_own(each)]:
            return Host(name, _routable(own))
    return Host(fallback, _routable(addresses(fallback)))


def addresses(name: str) -> list[str]:
    """Return the numeric addresses of a name; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


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
