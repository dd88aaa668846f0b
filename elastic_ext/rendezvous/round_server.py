"""The store server of a round. Torch's TCPStore takes writes from anybody who reaches it, so it listens no wider than it must."""

from __future__ import annotations

import ipaddress
import logging
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from elastic_ext.base.errors import UsageError
from elastic_ext.rendezvous.address import is_loopback

logger = logging.getLogger(__name__)

BACKLOG = 2048  # torch's own (torch/csrc/distributed/c10d/TCPStoreBackend.hpp)
TIMEOUT = timedelta(seconds=300)  # torch's default


def serve(address: str) -> TCPStore:
    """Start a server that the other nodes reach by `address`, on any port.

    It listens on that address only. It listens on all addresses if `address` is not one of this host's: a name, which other
    hosts may resolve differently, or an address translated on the way (NAT).

    Raises:
        UsageError: this machine has no loopback interface.
        RuntimeError, ValueError: torch could not start the server.
    """
    listening = listening_socket(address)
    if listening is None:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listening.detach(),  # torch closes it with the server
    )


def listening_socket(address: str) -> socket.socket | None:
    """Return a socket that listens on any port; None if the address is not numeric or not this host's. Raises UsageError."""
    number = "127.0.0.1" if address == "localhost" else address
    try:
        version = ipaddress.ip_address(number).version
    except ValueError:
        return None
    listening = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
    try:
        listening.bind(socket.getaddrinfo(number, 0, listening.family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4])
        listening.listen(BACKLOG)
        return listening
    except OSError as error:
        listening.close()
        if is_loopback(address):
            raise UsageError(
                f"cannot listen on {address}: {error.strerror}; bring up the loopback interface: `ip link set lo up`"
            ) from error
        logger.info("listening on all addresses: %s is not an address of this host (%s)", address, error.strerror)
        return None


def listen_at(address: str) -> socket.socket:
    """Return a listening socket that the other nodes reach by `address`."""
    found = listening_socket(address)
    if found is not None:
        return found
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
