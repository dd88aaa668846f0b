"""Which hosts do not answer the workers of a node, when the job hangs. Pure, standard library only; times are in seconds.

If the way between two hosts is cut, the workers of all nodes wait, and TCP sends the same data again and again for a quarter of
an hour. Nothing else names the two: each rank waits for others, in the same collective. Only the side with data under way
notices. A peer that is merely busy, stopped or in a debugger is no such case: its kernel acknowledges.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# R1 of RFC 1122, 4.2.3.5 suspects the path, not loss, from three on. But if a fifth of the packets is lost both ways, each
# try fails with 36 %: four of them in a row are 1 in 60, six (with the first one) 1 in 460.
RETRANSMISSIONS = 5
EXPLAINS_S = 10.0  # the least silence that explains a hang: well above loss, and below the least limit of `detector`
MAX_ADDRESSES = 32


@dataclass(frozen=True)
class TcpConnection:
    """A TCP socket, from the kernel's inet_diag_msg and tcp_info."""

    inode: int
    # local, peer: addresses, in the form of `ipaddress`
    local: str
    peer: str
    port: int  # the peer's
    connecting: bool = False  # the peer has not accepted the connection yet
    retransmissions: int = 0  # of the oldest segment, without an answer
    backoff: int = 0  # how often the timeout has doubled since
    window_probes: int = 0  # probes of a full receiver, without an answer
    timeout_s: float = 0.0  # the current retransmission timeout
    left_s: float = 0.0  # until it is over
    acked_s: float = 0.0  # seconds since the last acknowledgement; meaningless while connecting

    @property
    def unanswered_s(self) -> float:
        """For how long the peer's kernel has not answered what was sent; 0 if it has, or if that may be chance."""
        if self.retransmissions >= RETRANSMISSIONS:
            initial = self.timeout_s / 2.0**self.backoff
            last = initial * (max(0, self.retransmissions - self.backoff) + 2.0**self.backoff - 1)  # when it was sent again
            waited = last + max(0.0, self.timeout_s - self.left_s)
            return waited if self.connecting else min(waited, self.acked_s)
        return self.acked_s if self.window_probes >= RETRANSMISSIONS and not self.connecting else 0.0


@dataclass(frozen=True)
class Unanswered:
    """rank: of a worker that has had no answer from this address and port for for_s seconds."""

    rank: int
    address: str
    port: int
    for_s: float

    @property
    def text(self) -> str:
        return f"rank {self.rank} gets no answer from {self.address} (port {self.port}) for {self.for_s:.3g} s"


def silent_hosts(connections: Mapping[int, Iterable[TcpConnection]]) -> list[Unanswered]:
    """Return the other hosts that have not answered the workers of a node for so long that it explains a hang, longest first.

    A host has been silent for no longer than since its kernel last acknowledged anything on the same way: one connection may be
    dead alone, to a container that is gone or a port that a firewall now blocks.

    connections: by global rank.
    """
    own = {each.local for found in connections.values() for each in found}
    answered_s = _answered_s(each for found in connections.values() for each in found)
    longest: dict[str, Unanswered] = {}
    for rank, found in connections.items():
        for each in found:
            for_s = min(each.unanswered_s, answered_s.get((each.local, each.peer), math.inf))
            known = longest.get(each.peer)
            of_other = each.peer not in own and _between_hosts(each.peer)
            if for_s >= EXPLAINS_S and of_other and (known is None or known.for_s < for_s):
                longest[each.peer] = Unanswered(rank, each.peer, each.port, for_s)
    return sorted(longest.values(), key=lambda one: -one.for_s)[:MAX_ADDRESSES]


def _answered_s(connections: Iterable[TcpConnection]) -> dict[tuple[str, str], float]:
    """Return how many seconds ago the last acknowledgement came, by local address and peer."""
    latest: dict[tuple[str, str], float] = {}
    for each in connections:
        if not each.connecting:
            way = each.local, each.peer
            latest[way] = min(each.acked_s, latest.get(way, math.inf))
    return latest


def _between_hosts(address: str) -> bool:
    """Return whether the address can name a host to others: no loopback, and none that is valid on one link only."""
    known = ipaddress.ip_address(address)
    return not (known.is_loopback or known.is_link_local or known.is_unspecified)
