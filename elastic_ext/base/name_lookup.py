"""The names of addresses. Torch looks one up for each connection, and a name server that does not answer costs it 10 s.

torch's sockets ask for the name of the address to which they connect, for their log (`formatSockAddr` in c10d/socket.cpp), and
have no switch for that. They are IPv6 sockets: for 10.0.0.1 they ask for ::ffff:10.0.0.1, which a line for 10.0.0.1 in
/etc/hosts does not answer. glibc waits 5 s for each name server, twice (resolv.conf(5)). So connections of an agent do not ask
(`connecting`). A name server that answers one agent may still drop the questions of hundreds that begin a round at the same
moment. Workers, in whose main thread the script may need name servers, wait for a shorter time (`variables`) where a look-up
beside the agent's other work (`ask`) was not answered at once.

Invariant: no round waits for a name server, where glibc itself asks them (not nscd or nss-resolve) and nodes give each other
addresses, not names. Standard library only.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

LATE_S = 0.5  # a later answer counts as no answer: torch would wait for each
OPTIONS = "RES_OPTIONS"
BRIEFLY = "timeout:1 attempts:2"  # 1 s is glibc's least; a lost packet is sent again


class _Resolver(ctypes.Structure):
    """The beginning of struct __res_state (resolv.h), of which each thread has its own."""

    _fields_ = [("seconds", ctypes.c_int), ("attempts", ctypes.c_int), ("options", ctypes.c_ulong)]


_INITIALIZED = 1  # RES_INIT


def _resolver() -> _Resolver | None:
    """Return the calling thread's; None where the C library is not glibc."""
    libc = ctypes.CDLL(None)
    try:
        state, initialize = libc.__res_state, libc.__res_init
    except AttributeError:
        return None
    state.restype = ctypes.POINTER(_Resolver)
    found: _Resolver = state().contents
    if not found.options & _INITIALIZED and initialize() != 0:
        return None
    return found


@contextmanager
def _limited(attempts: int) -> Iterator[None]:
    """Within, the calling thread asks each name server this many times, for 1 s each."""
    resolver = _resolver()
    if resolver is None:
        yield
        return
    before = resolver.seconds, resolver.attempts
    try:
        resolver.seconds, resolver.attempts = 1, attempts
        yield
    finally:
        resolver.seconds, resolver.attempts = before


_LEVEL, _WARNING, _ERROR = "FLAGS_caffe2_log_level", 1, 2  # c10/util/Logging.cpp; what TORCH_CPP_LOG_LEVEL sets


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within, torch's C++ code logs errors only, unless the user has changed that: it warns that the name cannot be retrieved.

    A connection that fails raises an error, which says why. A torch without this variable logs the warning.
    """
    level = _log_level()
    if level is None or level.value != _WARNING:
        yield
        return
    level.value = _ERROR
    try:
        yield
    finally:
        level.value = _WARNING


def _log_level() -> ctypes.c_int | None:
    library = Path(getattr(sys.modules.get("torch"), "__file__", None) or "", "../lib/libc10.so")
    with suppress(OSError, ValueError):  # torch is not there, or a build of another kind
        return ctypes.c_int.in_dll(ctypes.CDLL(os.path.normpath(library)), _LEVEL)
    return None


class _Asked:
    """What this process knows of its name server. answers: None while the first answer is awaited; since: when it was asked."""

    def __init__(self) -> None:
        self.answers: bool | None = None
        self.since = 0.0
        self.thread: threading.Thread | None = None


_asked = _Asked()


def ask(address: str) -> None:
    """Look the name of an address up, in a thread, unless one does so already. Any thread may call this."""
    if _asked.thread is None or not _asked.thread.is_alive():
        _asked.since = time.monotonic()
        thread = threading.Thread(target=_ask, args=(address,), name="elastic_ext-names", daemon=True)
        thread.start()
        _asked.thread = thread


def _ask(address: str) -> None:
    with _limited(attempts=1):
        took = seconds_for_name(address)
    answers = took < LATE_S
    if answers is False and _asked.answers is not False:
        logger.warning(
            "no name server answers for the name of %s within %g s: torch asks for the name of each host to which it connects, "
            "so workers get %s=%r if it is not set; better add PTR records, or lines `::ffff:ADDRESS NAME` to /etc/hosts",
            *(address, LATE_S, OPTIONS, BRIEFLY),
        )
    _asked.answers = answers


def seconds_for_name(address: str) -> float:
    """Return how long torch's look-up of the name of an address takes, with any result. address: may be a host's name."""
    began = time.monotonic()
    with suppress(OSError):  # no name server has answered, or can be reached
        found = socket.getaddrinfo(address, 0, socket.AF_INET6, socket.SOCK_STREAM, flags=socket.AI_V4MAPPED)  # as torch does
        began = time.monotonic()
        socket.getnameinfo(found[0][4], 0)
    return time.monotonic() - began


@contextmanager
def connecting(address: str) -> Iterator[None]:
    """Let torch connect to an address within: in a process that has called `ask`, no name server is asked for its name.

    A name in place of an address must be resolved anyway, for which name servers get their usual time.
    """
    if _asked.thread is None or not _is_numeric(address):
        yield
        return
    with _limited(attempts=0), _without_warnings():
        yield


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what workers need in their environment while no name server answers, unless the user has set it."""
    late = _asked.thread is not None and time.monotonic() > _asked.since + LATE_S
    answers = not late if _asked.answers is None else _asked.answers
    return {} if answers or OPTIONS in environ else {OPTIONS: BRIEFLY}
