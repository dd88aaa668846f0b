"""Counts the bytes that the TCP sockets of this machine have moved. I/O for `process_stats`, standard library only.

/proc/PID/io counts read(2) and write(2) but not send(2) and recv(2), so an upload from memory looks idle there. The kernel
reports the bytes of each socket by netlink (`sock_diag`); /proc/PID/fd lists the sockets of a process.

Not counted: other protocols (QUIC, RDMA, sockets to a daemon on this machine), other network namespaces, and what a connection
moved between the previous check and its end.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping

from elastic_ext.workers.hangs import sock_diag

_INODE_AT = 68  # in inet_diag_msg
_MOVED = struct.Struct("=QQ")  # of tcp_info: tcpi_bytes_acked, tcpi_bytes_received
_MOVED_AT = 120
# TCP states (net/tcp_states.h) in which a socket can move bytes: established, fin wait 1 and 2, close wait, last ack, closing.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))

_SOCKET = re.compile(r"socket:\[(\d+)\]")


def by_inode() -> dict[int, int] | None:
    """Return the bytes sent and acknowledged, or received, by each TCP socket of this network namespace; None: not known."""
    try:
        return {
            struct.unpack_from("=I", message, _INODE_AT)[0]: sum(_MOVED.unpack_from(info, _MOVED_AT))
            for message, info in sock_diag.sockets(_STATES)
        }
    except (OSError, struct.error):  # no such netlink family, no such module, Linux before 4.2
        return None


def inodes(pid: int) -> set[int]:
    """Return the inodes of all open sockets of the process. Raises OSError if it has ended or belongs to another user."""
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            match = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except FileNotFoundError:  # just closed
            continue
        if match:
            found.add(int(match[1]))
    return found


def moved(before: Mapping[int, int], now: Mapping[int, int]) -> int:
    """Return the bytes moved between two checks by the sockets that are open now."""
    return sum(max(0, total - before.get(inode, 0)) for inode, total in now.items())
