"""Hosts behind a router, in network namespaces, for tests that cut the way between two of them. Needs root."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SERVER = "10.213.0.1"  # an address of the router, which all hosts reach
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host. inside: the start of a command line that runs there."""

    address: str
    inside: list[str]


@dataclass(frozen=True)
class Network:
    """inside: the start of a command line that runs on the router."""

    inside: list[str]
    hosts: list[Host]

    def cut(self, one: Host, other: Host) -> None:
        """Have the router drop without a word what the two send each other; both still reach everything else."""
        for here, there in ((one, other), (other, one)):
            _run(*self.inside, "ip", "rule", "add", "from", here.address, "to", there.address, "blackhole")

    def mend(self, one: Host, other: Host) -> None:
        for here, there in ((one, other), (other, one)):
            _run(*self.inside, "ip", "rule", "del", "from", here.address, "to", there.address, "blackhole")

    def add_link(self, host: Host, name: str) -> None:
        """Give the host another interface, without an address."""
        far = self._far(host, name)
        _run(*self.inside, "ip", "link", "add", far, "type", "veth", "peer", "name", name, "netns", host.inside[-1])
        _run(*self.inside, "ip", "link", "set", far, "up")
        _run(*host.inside, "ip", "link", "set", name, "up")

    def pull(self, host: Host, name: str) -> None:
        """Have this interface of the host lose its carrier, as where its cable is pulled."""
        _run(*self.inside, "ip", "link", "set", self._far(host, name), "down")

    def _far(self, host: Host, name: str) -> str:
        return f"{name}{self.hosts.index(host)}"


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Make a router, and hosts that reach each other through it. Each has one interface besides its loopback, `net0`."""
    with ExitStack() as stack:
        router = _namespace(stack)
        _run("ip", "-n", router, "address", "add", f"{SERVER}/32", "dev", "lo")
        _run(*_inside(router), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        yield Network(_inside(router), [_host(stack, router, number) for number in range(1, hosts + 1)])


def _host(stack: ExitStack, router: str, number: int) -> Host:
    name, near, far = _namespace(stack), f"10.213.{number}.1", f"10.213.{number}.2"
    _run("ip", "-n", router, "link", "add", f"to{number}", "type", "veth", "peer", "name", "net0", "netns", name)
    _run("ip", "-n", router, "address", "add", f"{near}/30", "dev", f"to{number}")
    _run("ip", "-n", name, "address", "add", f"{far}/30", "dev", "net0")
    _run("ip", "-n", router, "link", "set", f"to{number}", "up")
    _run("ip", "-n", name, "link", "set", "net0", "up")
    _run("ip", "-n", name, "route", "add", "default", "via", near)
    return Host(far, _inside(name))


def _namespace(stack: ExitStack) -> str:
    name = f"ee{os.getpid()}.{next(_numbers)}"
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "del", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
