"""The kernel's list of the TCP sockets of this network namespace, by netlink: sock_diag(7), which `ss -ti` uses.

The constants are those of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h; the same on every architecture.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

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


def sockets(states: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the inet_diag_msg and the tcp_info of each TCP socket, of both address families.

    states: a bit for each TCP state (net/tcp_states.h).

    Raises:
        OSError: the kernel refuses, or knows no such netlink family.
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
