"""Which connections of the workers get no answer, and when that makes a silence of all workers a matter of seconds. Pure.

If the way between two hosts is cut, the workers of all nodes wait, and TCP sends the same data again and again for a quarter of
an hour. Only the side with data under way notices. A peer that is merely busy, stopped or in a debugger is no such case: its
kernel acknowledges. So a connection without an answer explains a silence, and it need not last for the limits of `detector`.

The limit is UNANSWERED_S, or longer if the job's steps take longer, or the setting hang_timeout; it holds before the first sign
of life, too. All workers of a node must have done nothing for that time, and not be in a phase that is long by nature.

Standard library only; times are in seconds.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.hangs import detector

# With an initial timeout of 1 s that doubles (RFC 6298), the first segment of a connection is sent again after 1, 3, 7, 15, 31 s;
# since Linux 6.5, four times a second apart before it doubles (tcp_syn_linear_timeouts). Linux begins at 0.2 s in a fast network:
# data is sent again for the sixth time after 12.6 s. The limit leaves 2 s for the answer to what is sent at 15 s.
UNANSWERED_S = 17.0
# R1 of RFC 1122, 4.2.3.5 suspects the path, not loss, from three on. But if a fifth of the packets is lost both ways, each
# try fails with 36 %: four of them in a row are 1 in 60, six (with the first one) 1 in 460.
RETRANSMISSIONS = 5
EXPLAINS_S = 10.0  # the least silence that explains a hang of any kind: well above loss, and not all notice a cut at once
MAX_ADDRESSES = 32  # of a node, and that do not answer it


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


@dataclass(frozen=True)
class Reachability:
    """The addresses of a node that its workers use, and the other hosts' addresses that do not answer them, longest first."""

    addresses: tuple[str, ...] = ()
    unanswered: tuple[Unanswered, ...] = ()


def reach_of(connections: Mapping[int, Iterable[TcpConnection]]) -> Reachability:
    """Sum up the connections of a node's workers. connections: by global rank.

    A host has been silent for no longer than since its kernel last acknowledged anything on the same way: one connection may be
    dead alone, to a container that is gone or a port that a firewall now blocks.
    """
    own = {each.local for found in connections.values() for each in found if _between_hosts(each.local)}
    answered_s = _answered_s(each for found in connections.values() for each in found)
    longest: dict[str, Unanswered] = {}
    for rank, found in connections.items():
        for each in found:
            for_s = min(each.unanswered_s, answered_s.get((each.local, each.peer), math.inf))
            known = longest.get(each.peer)
            if for_s and each.peer not in own and _between_hosts(each.peer) and (known is None or known.for_s < for_s):
                longest[each.peer] = Unanswered(rank, each.peer, each.port, for_s)
    by_time = sorted(longest.values(), key=lambda one: -one.for_s)
    return Reachability(tuple(sorted(own)[:MAX_ADDRESSES]), tuple(by_time[:MAX_ADDRESSES]))


def _answered_s(connections: Iterable[TcpConnection]) -> dict[tuple[str, str], float]:
    """Return how many seconds ago the last acknowledgement came, by local address and peer."""
    latest: dict[tuple[str, str], float] = {}
    for each in connections:
        if not each.connecting:
            way = each.local, each.peer
            latest[way] = min(each.acked_s, latest.get(way, math.inf))
    return latest


def lasting(reach: Reachability, limit_s: float) -> Reachability:
    return Reachability(reach.addresses, tuple(each for each in reach.unanswered if each.for_s >= limit_s))


def explaining(reach: Reachability, fixed_s: float | None) -> Reachability:
    """Leave out what is too short to be why the job hangs, when it does. fixed_s: see `limit_s`."""
    return lasting(reach, EXPLAINS_S if fixed_s is None else min(EXPLAINS_S, fixed_s))


def _between_hosts(address: str) -> bool:
    """Return whether the address can name a host to others: no loopback, and none that is valid on one link only."""
    known = ipaddress.ip_address(address)
    return not (known.is_loopback or known.is_link_local or known.is_unspecified)


def limit_s(workers: Sequence[detector.WorkerStatus], fixed_s: float | None) -> float:
    """Return for how long all workers of a node may do nothing while a host does not answer. fixed_s: see `detector.assess`."""
    if fixed_s is not None:
        return fixed_s
    gaps = (detector.gaps_s(worker.gaps) for worker in workers)
    return max(UNANSWERED_S, *(detector.LONGEST_FACTOR * usual for usual, _ in gaps), 0.0)


def is_quiet(workers: Sequence[detector.WorkerStatus], limit_s: float) -> bool:
    """Return whether all workers have done nothing for limit_s seconds, so that an answer may be all that is missing."""
    if not workers or any(not each.known or each.debugged or each.phase in detector.LONG_PHASES for each in workers):
        return False
    return all(each.quiet_s >= limit_s for each in workers) and detector.activity_of(workers) is detector.Activity.NONE


def needs_stats(workers: Sequence[detector.WorkerStatus], limit_s: float) -> bool:
    """Return whether all workers have been quiet for so long that their process stats are needed."""
    return all(each.quiet_s >= detector.STATS_SHARE * limit_s for each in workers)


def window_s(limit_s: float) -> float:
    """Return over how many seconds, at least, the process stats are compared; the first are read at half of the limit."""
    return min(detector.WINDOW_SHARE * limit_s / 2, detector.window_s())


def next_check_s(workers: Sequence[detector.WorkerStatus], limit_s: float, reach: Reachability | None) -> float:
    """Return after how many seconds there may be news: `is_quiet`, or of those that do not answer.

    reach: see `reach_of`; None: not all workers are quiet. While they are, this node claims it, and checks every CALL_CHECK_S at
    most.
    """
    quiet_s = min((each.quiet_s for each in workers), default=0.0)
    until = [share * limit_s - quiet_s for share in (0.5, 1.0)]
    if reach is not None:
        until += [min(detector.CALL_CHECK_S, limit_s / 2), *(limit_s - each.for_s for each in reach.unanswered)]
    return max(detector.MIN_CHECK_S, min((left_s for left_s in until if left_s > 0), default=limit_s / 2))
