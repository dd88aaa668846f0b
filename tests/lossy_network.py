"""Hosts as network namespaces, behind links that lose, delay and reorder packets. Needs root and /dev/net/tun.

Every host has one TUN device, and a process between them (`python -m tests.lossy_network`, started by LossyNetwork) carries the
packets. It does what the kernel's netem would do, which many kernels lack. A packet passes two links: out of its sender's, into
its receiver's.

Wire protocol, lines on the relay's stdin and stdout: it is told the names of the namespaces in its arguments, and answers "ready"
once all devices are up; then each line {"links": {NAME: [[loss, delay_s, reorder] out, [the same] in], ...}, "apart": [[NAME,
NAME], ...], "largest": BYTES, "ports": [PORT, ...]} changes these links, tells which hosts do not reach each other, which packets
pass (of which size; on which TCP ports, all where none is given), and is answered "done". The end of its stdin ends it, and with
it go the devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

DEVICE = "tun0"
_SUBNET = "10.213.78"
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h
_MTU = 65536
HELD_S = 0.02

_numbers = itertools.count()


def unavailable() -> str | None:
    """Why there can be no such network here; None: there can."""
    if os.geteuid() != 0:
        return "network namespaces and TUN devices need root"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    name = f"lossy{os.getpid()}"
    if (made := _ip("netns", "add", name)).returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def required() -> None:
    """Skip the test that calls this where there can be no such network, or fail it where all it needs is required."""
    from tests import programs  # and pytest with it, which the process between the hosts does without

    programs.needs("ip", "nsenter")
    why = unavailable()
    programs.required(why is None, str(why))


@dataclass(frozen=True)
class Way:
    """One direction of a host's link. loss, reorder: shares of packets, 0 to 1; those that are reordered come HELD_S later."""

    loss: float = 0.0
    delay_s: float = 0.0
    reorder: float = 0.0


CLEAN = Way()


class LossyNetwork:
    """The hosts and the process that carries their packets. All links are clean at first."""

    def __init__(self, hosts: Sequence[str]) -> None:
        number = next(_numbers)
        self.namespaces = {host: f"lossy{os.getpid()}.{number}.{host}" for host in hosts}
        self.addresses = {host: f"{_SUBNET}.{index}" for index, host in enumerate(hosts, 1)}
        self._apart: list[list[str]] = []
        self._largest, self._ports = _MTU, list[int]()
        self._stack = ExitStack()

    def __enter__(self) -> LossyNetwork:
        with ExitStack() as stack:
            for name in self.namespaces.values():
                made = _ip("netns", "add", name)
                assert made.returncode == 0, made.stderr
                stack.callback(_ip, "netns", "del", name)
            command = [sys.executable, __file__, *self.namespaces.values()]
            self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(self._end)
            self._answer("ready")
            for host, name in self.namespaces.items():
                for args in (
                    ("address", "add", f"{self.addresses[host]}/24", "dev", DEVICE),
                    ("link", "set", DEVICE, "up"),
                    ("link", "set", "lo", "up"),
                ):
                    done = _ip("-n", name, *args)
                    assert done.returncode == 0, done.stderr
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.close()
        self._relay.wait()
        self._relay.stdout.close()

    @property
    def pid(self) -> int:
        """Of the process that carries the packets."""
        return self._relay.pid

    def inside(self, host: str) -> list[str]:
        """The start of a command line that runs on this host."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    def change(self, links: Mapping[str, tuple[Way, Way]]) -> None:
        """Change these hosts' links, each out and in. Returns when it is done."""
        self._tell(
            {self.namespaces[host]: [[way.loss, way.delay_s, way.reorder] for way in both] for host, both in links.items()}
        )

    def part(self, *pairs: tuple[str, str]) -> None:
        """These hosts do not reach each other any more; all others do. Returns when it is done."""
        self._apart = [[self.namespaces[host] for host in pair] for pair in pairs]
        self._tell({})

    def believe(self, mtu: int) -> None:
        """Give all hosts this MTU, by default 1,500, whatever gets through."""
        for name in self.namespaces.values():
            done = _ip("-n", name, "link", "set", DEVICE, "mtu", str(mtu))
            assert done.returncode == 0, done.stderr

    def swallow_above(self, largest: int) -> None:
        """Lose each larger packet without a word, as a network does whose hosts believe in a larger MTU than it has."""
        self._largest = largest
        self._tell({})

    def open_only(self, *ports: int) -> None:
        """Lose each packet that is of none of these TCP ports, as a firewall does. None given: all are open."""
        self._ports = list(ports)
        self._tell({})

    def _tell(self, ways: Mapping[str, object]) -> None:
        assert self._relay.stdin is not None
        rules = {"links": ways, "apart": self._apart, "largest": self._largest, "ports": self._ports}
        print(json.dumps(rules), file=self._relay.stdin, flush=True)
        self._answer("done")

    def _answer(self, expected: str) -> None:
        assert self._relay.stdout is not None
        answer = self._relay.stdout.readline().strip()
        assert answer == expected, f"the relay answered {answer!r}, expected {expected!r}"


def _ip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *args], check=False, capture_output=True, text=True)


# The process between the hosts.


class _Relay:
    def __init__(self, namespaces: Sequence[str]) -> None:
        self._fds = [_device(name) for name in namespaces]
        self._of = dict(zip(namespaces, self._fds, strict=True))
        self._to = {f"{_SUBNET}.{index}": fd for index, fd in enumerate(self._fds, 1)}
        self._out = dict.fromkeys(self._fds, CLEAN)
        self._in = dict.fromkeys(self._fds, CLEAN)
        self._apart: set[frozenset[int]] = set()
        self._largest, self._ports = _MTU, frozenset[int]()
        self._queue: list[tuple[float, int, int, bytes]] = []  # when to deliver, a number that keeps the order, to whom, packet
        self._count = itertools.count()

    def run(self) -> None:
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([*self._fds, sys.stdin.fileno()], [], [], self._deliver())
            for fd in readable:
                if fd != sys.stdin.fileno():
                    self._take(fd)
                elif not self._change(sys.stdin.readline()):
                    return

    def _deliver(self) -> float | None:
        """Deliver what is due; return the seconds until the next packet is."""
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            *_, fd, packet = heapq.heappop(self._queue)
            try:
                os.write(fd, packet)
            except OSError:  # the device is down, or its queue is full: lost
                pass
        return self._queue[0][0] - now if self._queue else None

    def _take(self, fd: int) -> None:
        while True:
            try:
                packet = os.read(fd, _MTU)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue
            to = self._to.get(".".join(map(str, packet[16:20])))
            if to is None or frozenset((fd, to)) in self._apart or not self._passes(packet):
                continue
            ways = self._out[fd], self._in[to]
            if all(random.random() >= way.loss for way in ways):
                at = time.monotonic() + sum(way.delay_s + HELD_S * (random.random() < way.reorder) for way in ways)
                heapq.heappush(self._queue, (at, next(self._count), to, packet))

    def _passes(self, packet: bytes) -> bool:
        if len(packet) > self._largest:
            return False
        at = 4 * (packet[0] & 0xF)  # the ports of its sender and its receiver are the first in the header of TCP
        return not self._ports or not self._ports.isdisjoint(struct.unpack_from("!2H", packet, at))

    def _change(self, line: str) -> bool:
        if not line:
            return False
        told = json.loads(line)
        self._apart = {frozenset(self._of[name] for name in pair) for pair in told["apart"]}
        self._largest, self._ports = told["largest"], frozenset(told["ports"])
        for name, (out, into) in told["links"].items():
            self._out[self._of[name]], self._in[self._of[name]] = Way(*out), Way(*into)
        print("done", flush=True)
        return True


def _device(namespace: str) -> int:
    """Make the TUN device in this namespace; it lasts as long as the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, other = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", Path("/var/run/netns", namespace)))
    try:
        _enter(libc, other)
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            return fd
        finally:
            _enter(libc, own)
    finally:
        os.close(own)
        os.close(other)


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    _Relay(sys.argv[1:]).run()
