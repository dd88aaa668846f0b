"""Counts the bytes that the TCP sockets of this machine have moved. I/O for `process_stats`, standard library only.

/proc/PID/io counts read(2) and write(2) but not send(2) and recv(2), so an upload from memory looks idle there. The kernel
reports the bytes of each socket by netlink (sock_diag(7), which `ss -ti` uses); /proc/PID/fd lists the sockets of a process.

Not counted: other protocols (QUIC, RDMA, sockets to a daemon on this machine), other network namespaces, and what a connection
moved between the previous check and its end.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping

_TIMEOUT_S = 1.0  # the kernel answers at once, or not at all

# From linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h; the same on every architecture.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, extensions, states, any address
_INODE_AT, _ATTRIBUTES_AT = 68, 72  # in inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_MOVED = struct.Struct("=QQ")  # of tcp_info: tcpi_bytes_acked, tcpi_bytes_received
_MOVED_AT = 120
# TCP states (net/tcp_states.h) in which a socket can move bytes: established, fin wait 1 and 2, close wait, last ack, closing.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))

_SOCKET = re.compile(r"socket:\[(\d+)\]")


def by_inode() -> dict[int, int] | None:
    """Return the bytes sent and acknowledged, or received, by each TCP socket of this network namespace; None: not known."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_S)
            return {inode: moved for family in (socket.AF_INET, socket.AF_INET6) for inode, moved in _ask(kernel, family)}
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


def _ask(kernel: socket.socket, family: int) -> Iterator[tuple[int, int]]:
    """Yield the inode and the bytes of each socket of one address family. Raises OSError if the kernel refuses."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _STATES)
    kernel.send(
        _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, family, 0) + request
    )
    while True:
        for kind, body in _messages(kernel.recv(1 << 16)):
            if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                code = struct.unpack_from("=i", body)[0] if body else 0
                if code:
                    raise OSError(-code, os.strerror(-code))
                return
            yield from _socket(body)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + length]
        at += _padded(max(length, _HEADER.size))


def _socket(body: bytes) -> Iterator[tuple[int, int]]:
    inode = struct.unpack_from("=I", body, _INODE_AT)[0]
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INET_DIAG_INFO:
            acked, received = _MOVED.unpack_from(body[: at + length], at + _ATTRIBUTE.size + _MOVED_AT)
            yield inode, acked + received
        at += _padded(max(length, _ATTRIBUTE.size))


def _padded(length: int) -> int:
    """Round up, because messages and attributes begin at multiples of four."""
    return (length + 3) & ~3
