"""Ports for servers that a test starts by number."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from elastic_ext.cli import preflight
from elastic_ext.own_etcd.endpoint import FIRST_PORT, PORT_PAIRS

LOWEST, HIGHEST = 10_000, 65_535
OF_JOBS = range(FIRST_PORT, FIRST_PORT + 2 * PORT_PAIRS)  # those that `job:` takes by the run id
OF_STEPS = range(preflight.FIRST_PORT, preflight.FIRST_PORT + preflight.PORTS)  # those that a step of Slurm takes by its number
OF_TORCH = (29_400, 29_500)  # where torch's rendezvous and its workers meet if nothing else is said

_given: set[int] = set()
# If byte N of the file is locked, port N is somebody's. Nobody may write to another user's file.
_locks = (Path(tempfile.gettempdir()) / f"elastic_ext-test-ports-{os.geteuid()}").open("ab")


def free_port() -> int:
    """One that nobody listens on, out of those that the kernel gives to nobody. It stays this process's until the process ends.

    It is used some time after this has looked, and in between the kernel may give any port of its own range to a stranger: to
    the end of a connection, or to a server that asks for "any". A server that a test stops and starts again needs its port back
    as well: tests beside this one are kept off it by a record lock, which ends with the process and which no child inherits.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    own = owned_by_tests(range(low, high + 1))
    while True:
        port = random.SystemRandom().choice(own)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def owned_by_tests(of_the_kernel: range) -> list[int]:
    """Those that no program takes unless a test tells it to. of_the_kernel: those that it gives out itself."""
    others = of_the_kernel, OF_JOBS, OF_STEPS, OF_TORCH
    return [port for port in range(LOWEST, HIGHEST + 1) if not any(port in each for each in others)]


def _is_free(port: int) -> bool:
    """Whether nobody listens on it and no other process has been given it. If so, it is locked."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
            fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            return False
        return True
