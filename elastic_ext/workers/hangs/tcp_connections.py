"""Reads how the connections of the workers fare: I/O for `unanswered`, standard library only."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping

from elastic_ext.workers.hangs import process_stats, sock_diag
from elastic_ext.workers.hangs.unanswered import Connection

_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _CLOSE_WAIT, _LISTEN = 1, 2, 4, 8, 10  # net/tcp_states.h
_STATES = sum(1 << state for state in (_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _CLOSE_WAIT, _LISTEN))
# inet_diag_msg: family, state, timer; ports and addresses in network byte order; ms until the timer expires; inode
_MESSAGE = struct.Struct("=BBBx2x2s16s16s12xI12xI")
_FAMILY_BYTES = {2: 4, 10: 16}  # AF_INET, AF_INET6
_RETRANSMIT, _PROBE = 1, 4  # timers
# tcp_info: retransmits, probes, backoff; rto in us; ms since the last acknowledgement
_INFO = struct.Struct("=2xBBB3xI44xI")


def by_rank(pids: Mapping[int, int]) -> dict[int, list[Connection]] | None:
    """Return the connections of each worker's family; None: not known. pids: of the workers, by global rank."""
    try:
        found = {each.inode: each for message, info in sock_diag.sockets(_STATES) if (each := _connection(message, info))}
    except (OSError, struct.error):
        return None
    inodes = process_stats.open_sockets(pids.values())
    return {rank: [found[inode] for inode in inodes[pid] if inode in found] for rank, pid in pids.items()}


def _connection(message: bytes, info: bytes) -> Connection | None:
    family, state, timer, port, local, peer, left_ms, inode = _MESSAGE.unpack_from(message)
    retransmissions, probes, backoff, timeout_us, acked_ms = _INFO.unpack_from(info)
    size = _FAMILY_BYTES.get(family)
    if size is None:
        return None
    waits = timer == _RETRANSMIT and state != _LISTEN
    return Connection(
        inode,
        _text(local[:size]),
        _text(peer[:size]),
        int.from_bytes(port, "big"),
        connecting=state == _SYN_SENT,
        retransmissions=retransmissions if waits else 0,
        backoff=backoff,
        window_probes=probes if timer == _PROBE else 0,
        timeout_s=timeout_us / 1e6,
        left_s=left_ms / 1000,
        acked_s=acked_ms / 1000,
    )


def _text(packed: bytes) -> str:
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None  # of a socket for both families
    return str(mapped or address)
