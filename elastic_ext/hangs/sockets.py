"""The TCP sockets of this network namespace, by netlink: sock_diag(7), which `ss -ti` uses. Standard library only.

The constants are those of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h; the same on every architecture.

Bytes: /proc/PID/io counts read(2) and write(2) but not send(2) and recv(2), so an upload from memory looks idle there. Not
counted here: other protocols (QUIC, RDMA, sockets to a daemon on this machine), other network namespaces, and what a connection
moved between the previous check and its end.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator, Mapping

from elastic_ext.hangs.unanswered import TcpConnection

_TIMEOUT_S = 1.0  # the kernel answers at once, or not at all

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, extensions, states, any address
_ATTRIBUTES_AT = 72  # in inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_INODE_AT = 68  # in inet_diag_msg
_MOVED = struct.Struct("=QQ")  # of tcp_info: tcpi_bytes_acked, tcpi_bytes_received
_MOVED_AT = 120
# TCP states (net/tcp_states.h) in which a socket can move bytes: established, fin wait 1 and 2, close wait, last ack, closing.
_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _CLOSE_WAIT, _LISTEN = 1, 2, 4, 8, 10  # net/tcp_states.h
_ENDS_KNOWN = sum(1 << state for state in (_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _CLOSE_WAIT, _LISTEN))
# inet_diag_msg: family, state, timer; ports and addresses in network byte order; ms until the timer expires; inode
_MESSAGE = struct.Struct("=BBBx2x2s16s16s12xI12xI")
_FAMILY_BYTES = {2: 4, 10: 16}  # AF_INET, AF_INET6
_RETRANSMIT, _PROBE = 1, 4  # timers
# tcp_info: retransmits, probes, backoff; rto in us; ms since the last acknowledgement
_INFO = struct.Struct("=2xBBB3xI44xI")


def sockets(states: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the inet_diag_msg and the tcp_info of each TCP socket, of both address families.

    states: a bit for each TCP state (net/tcp_states.h).

    Raises OSError: the kernel refuses, or knows no such netlink family.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            yield from _ask(kernel, family, states)


def _ask(kernel: socket.socket, family: int, states: int) -> Iterator[tuple[bytes, bytes]]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), states)
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
            yield from ((body, info) for info in _infos(body))


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + length]
        at += _padded(max(length, _HEADER.size))


def _infos(body: bytes) -> Iterator[bytes]:
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INET_DIAG_INFO:
            yield body[at + _ATTRIBUTE.size : at + length]
        at += _padded(max(length, _ATTRIBUTE.size))


def _padded(length: int) -> int:
    """Round up, because messages and attributes begin at multiples of four."""
    return (length + 3) & ~3


def moved_by_inode() -> dict[int, int] | None:
    """Return the bytes sent and acknowledged, or received, by each TCP socket of this network namespace; None: not known."""
    try:
        return {
            struct.unpack_from("=I", message, _INODE_AT)[0]: sum(_MOVED.unpack_from(info, _MOVED_AT))
            for message, info in sockets(_STATES)
        }
    except (OSError, struct.error):  # no such netlink family, no such module, Linux before 4.2
        return None


def inodes_of(pid: int) -> set[int]:
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


def bytes_moved(before: Mapping[int, int], now: Mapping[int, int]) -> int:
    """Return the bytes moved between two checks by the sockets that are open now."""
    return sum(max(0, total - before.get(inode, 0)) for inode, total in now.items())


def connections(inodes: Mapping[int, Collection[int]]) -> dict[int, list[TcpConnection]] | None:
    """Return the TCP connections among the sockets of each worker's family; None: not known. By global rank, as `inodes`."""
    try:
        found = {each.inode: each for message, info in sockets(_ENDS_KNOWN) if (each := _connection(message, info))}
    except (OSError, struct.error):
        return None
    return {rank: [found[inode] for inode in own if inode in found] for rank, own in inodes.items()}


def _connection(message: bytes, info: bytes) -> TcpConnection | None:
    family, state, timer, port, local, peer, left_ms, inode = _MESSAGE.unpack_from(message)
    retransmissions, probes, backoff, timeout_us, acked_ms = _INFO.unpack_from(info)
    size = _FAMILY_BYTES.get(family)
    if size is None:
        return None
    waits = timer == _RETRANSMIT and state != _LISTEN
    return TcpConnection(
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
