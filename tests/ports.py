"""Ports for servers that a test starts by number."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_535

_given: set[int] = set()


def free_port() -> int:
    """One that nobody listens on, out of those that the kernel gives to nobody.

    It is used some time after this has looked, and in between the kernel may give any port of its own range to a stranger: to
    the end of a connection, or to a server that asks for "any". At random, for other tests look for ports at the same time; no
    port twice in a process, because the servers of a test often start after all have their ports.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [port for port in range(LOWEST, HIGHEST + 1) if not low <= port <= high and port not in _given]
    while True:
        port = random.SystemRandom().choice(outside)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                _given.add(port)
                return port
            except OSError:
                continue
