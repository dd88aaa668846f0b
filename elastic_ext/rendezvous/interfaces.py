"""The addresses of this machine's interfaces, from the kernel (getifaddrs), and where its name leads. Standard library only."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True)
class HostName:
    """Where the name of this host leads: gloo has other workers connect there, unless it is told an interface.

    Attributes:
        resolved: the addresses of the name.
        loops: gloo would take the loopback, where workers of other hosts reach nobody.
        interface: the one by which the other nodes reach this host; "": none has that address.
    """

    name: str
    resolved: tuple[str, ...]
    loops: bool
    interface: str

    def __str__(self) -> str:
        return f"the host name {self.name} resolves to {', '.join(self.resolved) or 'no address'}"


def interface_of(addresses: Iterable[str], own: Sequence[Address]) -> str:
    """Return the interface that has one of these addresses; "" if none has, or only the loopback."""
    found = (each.interface for address in addresses for each in own if each.address == address and not _is_loopback(address))
    return next(found, "")


def host_name(name: str, resolved: Sequence[str], reached_at: Sequence[str], own: Sequence[Address]) -> HostName:
    """Return where the name of this host leads. Gloo takes the first address that is this host's; if none is, the loopback.

    Args:
        resolved: the addresses of the name.
        reached_at: those by which the other nodes reach this host.
        own: those of its interfaces.
    """
    here = [address for address in resolved if _is_loopback(address) or any(each.address == address for each in own)]
    return HostName(name, tuple(resolved), not here or _is_loopback(here[0]), interface_of(reached_at, own))


def look_up(address: str) -> HostName:
    """Look where the name of this host leads; may ask a name server. address: by which other nodes reach it. Raises OSError."""
    name = platform.node()
    return host_name(name, resolved(name), resolved(address), addresses())


def resolved(name: str) -> list[str]:
    """Return the addresses of a name, or of an address itself; none if there are none."""
    try:
        return list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
