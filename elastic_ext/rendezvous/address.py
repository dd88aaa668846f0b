"""The name and the address by which other nodes know this one, and what distinguishes machines of one name."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import logging
import os
import platform
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import MAX_NAME, is_name
from elastic_ext.base.settings import Settings

logger = logging.getLogger(__name__)

MAX_OWN = 32  # addresses in a report: the network of GPUs has one each


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


def own_addresses() -> tuple[str, ...]:
    """Return those at which other hosts may reach this one; none if they cannot be read."""
    try:
        return tuple(each.address for each in addresses() if not is_loopback(each.address))[:MAX_OWN]
    except OSError as error:
        logger.debug("cannot read the addresses of this host: %s", error)
        return ()


def own_interface(address: str) -> str:
    """Return the interface of this host that has this address; "" if none has, if it is the loopback, or if none can be read."""
    try:
        return interface_of([address], addresses())
    except OSError:
        return ""


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
    """Where the name of this host leads: gloo has other workers connect there, unless it is given an interface."""

    name: str
    resolved: tuple[str, ...]  # the addresses of the name
    loops: bool  # gloo would take the loopback, where workers of other hosts cannot reach this one
    interface: str  # the one by which the other nodes reach this host; "": none has that address

    def __str__(self) -> str:
        return f"the host name {self.name} resolves to {', '.join(self.resolved) or 'no address'}"


def interface_of(addresses: Iterable[str], own: Sequence[Address]) -> str:
    """Return the interface that has one of these addresses; "" if none has, or only the loopback."""
    found = (each.interface for address in addresses for each in own if each.address == address and not is_loopback(address))
    return next(found, "")


def host_name(name: str, resolved: Sequence[str], reached_at: Sequence[str], own: Sequence[Address]) -> HostName:
    """Return where the name of this host leads. Gloo takes the first address that is this host's; if none is, the loopback.

    Args:
        resolved: the addresses of the name.
        reached_at: those by which the other nodes reach this host.
        own: those of its interfaces.
    """
    here = [address for address in resolved if is_loopback(address) or any(each.address == address for each in own)]
    return HostName(name, tuple(resolved), not here or is_loopback(here[0]), interface_of(reached_at, own))


def look_up(address: str) -> HostName:
    """Look where the name of this host leads; may ask a name server. address: by which other nodes reach it. Raises OSError."""
    name = platform.node()
    return host_name(name, resolved(name), resolved(address), addresses())


def resolved(name: str) -> list[str]:
    """Return the addresses of a name, or of an address itself; () if it has none."""
    try:
        return list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def own_name(settings: Settings) -> str:
    """Return this node's name in a form that fits in a key. The kernel allows any bytes in a host name."""
    if settings.node_name is not None:
        return settings.node_name
    name = "".join(character if is_name(character) else "-" for character in platform.node())
    return name[:MAX_NAME] or "localhost"


def machine() -> str:
    """Return what the kernel calls this boot of this machine, in most containers as well; "" if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network() -> str:
    """Return a name of the network in which this process has its loopback, of this machine or of a container; "" if unknown."""
    try:
        return f"{machine()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


REACH_S = 3.0
_SIOCGIFFLAGS = 0x8913  # linux/sockios.h
LOOPBACK_NAMES = ("", "localhost", "localhost.localdomain", "ip6-localhost", "127.0.0.1", "::1")
MASTER_PORT = "29500"  # torchrun's default for --master-port


def endpoint_of(given: str, max_nodes: int, environ: Mapping[str, str]) -> str:
    """Return the endpoint of a job on c10d: that of --rdzv-endpoint, else the address that an operator gives to all nodes.

    Kubeflow Trainer sets PET_MASTER_ADDR and PET_MASTER_PORT and no endpoint. Torch uses them for its static rendezvous alone;
    with any other, each node would wait at a store of its own.
    """
    address = environ.get("PET_MASTER_ADDR", "")
    if given or max_nodes == 1 or not address:
        return given
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    endpoint = f"{host}:{environ.get('PET_MASTER_PORT') or MASTER_PORT}"
    logger.info("the nodes meet at %s (PET_MASTER_ADDR; there is no --rdzv-endpoint)", endpoint)
    return endpoint


def own_address(local_addr: str | None, endpoint_host: str, max_nodes: int, setting: str | None = None) -> str:
    """Return the address by which the nodes of the job reach this one: the loopback address if the whole job is on this machine.

    Args:
        local_addr: torchrun's `--local-addr`.
        endpoint_host: the host of the rendezvous endpoint.
        setting: the setting `address`.

    Raises UsageError: this machine has no address as the setting wants it.
    """
    if local_addr and local_addr not in LOOPBACK_NAMES:
        return local_addr
    if local_addr or max_nodes == 1:
        return loopback()
    if (address := chosen(setting)) is not None:
        logger.info("the other nodes reach this one at %s (address=%s)", address, setting)
        return address
    address = address_towards(endpoint_host)
    return loopback() if address in LOOPBACK_NAMES else address


def chosen(setting: str | None) -> str | None:
    """Return the address of this machine that the setting `address` names; None without one.

    setting: an interface, or a network as `10.1.0.0/16`.

    Raises UsageError: this machine has no such address.
    """
    if setting is None:
        return None
    own = addresses()
    try:
        network = ipaddress.ip_network(setting, strict=False)
    except ValueError:
        fits = [each.address for each in own if each.interface == setting]
    else:
        fits = [each.address for each in own if ipaddress.ip_address(each.address) in network]
    if fits:
        return fits[0]
    seen = ", ".join(f"{each.interface} {each.address}" for each in own)
    raise UsageError(
        f"address={printable(setting)}: this machine has no such address; expected an interface or a network of one of: {seen}"
    )


def loopback() -> str:
    """Return 127.0.0.1, or ::1 on a machine without IPv4. It is numeric because "localhost" may resolve to either."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether this address or name means the local machine on every machine."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.lower() in LOOPBACK_NAMES


def host_of(endpoint: str) -> str:
    """Return the host of "host:port", "[v6]:port", "host" or "https://host:port"."""
    endpoint = endpoint.strip().rpartition("://")[2]
    host, _, port = endpoint.rpartition(":")
    return (host if host and port.isdigit() else endpoint).strip("[]")


def address_towards(host: str) -> str:
    """Return the source address of the route to `host`.

    On that host itself the route is the loopback; the answer is then `host`, which all nodes can resolve.
    """
    if host in LOOPBACK_NAMES:
        return "localhost"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            source = str(probe.getsockname()[0])
    except OSError:
        return socket.getfqdn()
    return host if source.startswith("127.") or source == "::1" else source


def checked_address(address: str) -> str:
    """Return the address that this node gives to the others. Raises UsageError if they could not read it."""
    if is_name(address):
        return address
    raise UsageError(f"--local-addr='{printable(address)[:MAX_NAME]}': expected an address or the name of a host")


def check_own(local_addr: str | None, default: str) -> None:
    """Check that this host reaches itself by the address that it is about to give to the other nodes.

    The interfaces cannot show this: behind NAT an address may be this host's and yet be on no interface.

    Args:
        local_addr: the user's --local-addr.
        default: the address if the user gave none.

    Raises UsageError: no connection comes back within REACH_S; torch's store would retry silently for minutes.
    """
    address = local_addr or default
    trouble = "it resolves to no address"
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        found, trouble = [], str(error.strerror or error)
    deadline = time.monotonic() + REACH_S
    for family, _, _, _, (host, *_) in found:
        try:
            return _reach(family, str(host), deadline)
        except OSError as error:
            trouble = str(error.strerror or error)
    loopback = "" if _loopback_is_up() else "; the interface lo is not up: `ip link set lo up`"
    raise UsageError(
        f"{'--local-addr=' if local_addr else ''}{address}: this host cannot reach itself at this address ({trouble})"
        f"{loopback}; expected an address or name of this host that the other nodes can use too; nothing was started"
    )


def _reach(family: int, host: str, deadline: float) -> None:
    """Connect to a port of this process and send a token. Raises OSError if it does not arrive."""
    token = os.urandom(16)
    with (
        socket.create_server(("::" if family == socket.AF_INET6 else "", 0), family=family) as server,
        socket.create_connection((host, server.getsockname()[1]), timeout=_left_s(deadline)) as client,
    ):
        client.sendall(token)
        while True:
            server.settimeout(_left_s(deadline))
            accepted = server.accept()[0]
            with accepted:
                accepted.settimeout(_left_s(deadline))
                if accepted.recv(len(token), socket.MSG_WAITALL) == token:
                    return  # else it is a stranger's connection


def _left_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def _loopback_is_up() -> bool:
    """Return whether the loopback interface is up. Ask the kernel: /sys may show another network namespace."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
    except OSError:
        return False
    flags: int = struct.unpack("16sh14x", answer)[1]
    return bool(flags & 1)  # IFF_UP
