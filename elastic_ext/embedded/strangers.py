"""Which connections to the store are ended, so that its members get in whatever strangers hold.

Anybody who reaches the port can connect to it. Whether it is a member shows with its first call, which with TLS needs the job's
secret. Until then a connection is silent. gRPC bounds neither how many of those there are nor how many come from one address,
and hands out no connection: so this looks through the descriptors of the process.

Invariant: after each look there are no more silent connections than `Bounds` says, and none is older than SILENT_S.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LOOK_S = 0.5  # between two looks
SILENT_S = 10.0  # a member calls as soon as it is connected, and has 3 s for that; see `etcd.endpoints`
MOST = 4096  # of silent connections, whatever the limit on open files: they cost memory, too
SHARE = 16  # what one address may have of them
RESERVE = 64  # descriptors for what the store opens itself: its file, and the agents of its host


@dataclass(frozen=True)
class Bounds:
    """How many connections there may be. total: all. silent, per_address: those without a call."""

    total: int
    silent: int
    per_address: int

    @staticmethod
    def of(files: int) -> Bounds:
        """Return those of a process that may open this many files. Half of them are for members."""
        total = max(files - RESERVE, files // 2)
        silent = min(MOST, total // 2)
        return Bounds(total, silent, max(1, silent // SHARE))


@dataclass(frozen=True)
class SilentConnection:
    """A connection without a call. port: of the peer. since: when a look saw it first, monotonic."""

    descriptor: int
    address: str
    port: int
    since: float


@dataclass(frozen=True)
class Eviction:
    """A connection to end. crowd: for the log, why there are too many; "": it has been silent for too long."""

    connection: SilentConnection
    crowd: str


def decide(silent: Iterable[SilentConnection], bounds: Bounds, now: float) -> list[Eviction]:
    """Return which connections to end. The newest stay: a member is silent for a moment only."""
    evicted, kept = list[Eviction](), Counter[str]()
    for each in sorted(silent, key=lambda connection: -connection.since):
        if now - each.since >= SILENT_S:
            evicted.append(Eviction(each, ""))
        elif kept[each.address] >= bounds.per_address:
            evicted.append(Eviction(each, f"more than {bounds.per_address} connections from {each.address} ask for nothing"))
        elif kept.total() >= bounds.silent:
            evicted.append(Eviction(each, f"more than {bounds.silent} connections ask for nothing"))
        else:
            kept[each.address] += 1
    return evicted


class Strangers:
    """Ends connections of one process. For one thread."""

    def __init__(self, files: int) -> None:
        """files: how many this process may open."""
        self.bounds, self._files = Bounds.of(files), files
        self._called: set[int] = set()  # ports of peers that have made a call. Whose they are does not matter: few are equal
        self._seen: dict[tuple[str, int], float] = {}  # since when, by address and port

    def has_called(self, peer: str) -> None:
        """Note who has made a call. peer: as gRPC writes it; whatever the form of the address, the port is at the end."""
        port = peer.rpartition(":")[2]
        if port.isdecimal():
            self._called.add(int(port))

    def look(self, now: float) -> str:
        """End what is too much. Return what to warn of; "": nothing."""
        found = {(address, port): descriptor for descriptor, address, port in self._connections()}
        self._called &= {port for _, port in found}
        self._seen = {peer: self._seen.get(peer, now) for peer in found}
        silent = [
            SilentConnection(found[peer], *peer, since) for peer, since in self._seen.items() if peer[1] not in self._called
        ]
        evicted = decide(silent, self.bounds, now)
        for each in evicted:
            _end(each.connection)
        return next((each.crowd for each in evicted if each.crowd), "")

    def _connections(self) -> Iterator[tuple[int, str, int]]:
        """Yield descriptor, address and port of all connections over the network."""
        for descriptor in self._open():
            if (peer := _peer(descriptor)) is not None:
                yield descriptor, *peer

    def _open(self) -> Iterable[int]:
        try:
            return [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError:  # none is left to list them: all are open
            return range(self._files)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Give a socket for a descriptor of somebody else, who may close it any time. Raises OSError for other files."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _peer(descriptor: int) -> tuple[str, int] | None:
    try:
        with _borrowed(descriptor) as connection:
            name = connection.getpeername()
    except OSError:
        return None
    return (name[0], name[1]) if isinstance(name, tuple) else None  # not on a Unix socket


def _end(silent: SilentConnection) -> None:
    """End a connection; gRPC then closes its descriptor. A stranger's descriptor may be another's since the look."""
    if _peer(silent.descriptor) == (silent.address, silent.port):
        with contextlib.suppress(OSError), _borrowed(silent.descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
