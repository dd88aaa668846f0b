"""The addresses of this machine's interfaces, from the kernel (getifaddrs). Standard library only."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """A numeric address of an interface that is up."""

    interface: str
    address: str


class _Entry(ctypes.Structure):
    """The beginning of struct ifaddrs (getifaddrs(3))."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]
_IFF_UP = 1  # net/if.h
_OFFSETS = {socket.AF_INET: 4, socket.AF_INET6: 8}  # of the address in struct sockaddr_in and sockaddr_in6


def addresses() -> list[Address]:
    """Return all of them, IPv4 first, in the kernel's order; without IPv6 addresses that hold on one link only."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        found = list(_entries(first))
    finally:
        libc.freeifaddrs(first)
    return [each for family in _OFFSETS for each, own in found if own == family and not each.address.startswith("fe80:")]


def _entries(pointer: ctypes._Pointer[_Entry]) -> Iterator[tuple[Address, int]]:
    while pointer:
        entry = pointer.contents
        if entry.address and entry.flags & _IFF_UP:
            family = ctypes.cast(entry.address, ctypes.POINTER(ctypes.c_ushort))[0]
            if family in _OFFSETS:
                size = 4 if family == socket.AF_INET else 16
                packed = ctypes.string_at(entry.address + _OFFSETS[socket.AddressFamily(family)], size)
                yield Address(os.fsdecode(entry.name), socket.inet_ntop(family, packed)), family
        pointer = entry.next
