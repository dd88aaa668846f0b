"""The store of a round, which the node of rank 0 serves: the server, connections to it, and the states of nodes in it."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.base import errors, name_lookup, threads
from elastic_ext.base.round_store import PREFIX, trouble
from elastic_ext.rendezvous.address import is_loopback
from elastic_ext.rendezvous.round_records import Header

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
    with name_lookup.connecting(address):  # the server's own client
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
            raise errors.UsageError(
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


TRIES = 3  # of consecutive rounds
MAX_SILENT = 32
ROUNDS_SILENT = 5  # for how many rounds a host counts as one whose store does not answer: the network may have been mended
CONNECT, STORE = timedelta(seconds=10), timedelta(seconds=300)  # to connect; for later calls, torch's default
# For that and the first answer, for which torch has no limit: what is between the hosts may accept, and say nothing.
GREET_S = threads.LONGEST_CALL_S


class StoreConnector:
    """One agent's connector; it knows the consecutive stores that did not answer."""

    def __init__(self, changed: threading.Condition, host: str) -> None:
        """changed: notified when the result of `over` may have changed. host: this one, for messages."""
        self._changed, self._host = changed, host
        self._unreached: list[str] = []
        self._silent: dict[str, int] = {}  # round of the last store that did not answer, by its host's address

    def silent(self, round_: int) -> tuple[str, ...]:
        """Return the addresses of hosts whose store did not answer when this node last tried. round_: the last one."""
        return recently_silent(self._silent, round_)

    def connect(self, header: Header, over: Callable[[], object | None], break_round: Callable[[str], None]) -> TCPStore | None:
        """Connect to the store of this round; return None if it does not answer or the round is over.

        Its host may just have died, and torch tries for minutes: a thread does that; this call returns once the round is over.

        Args:
            over: returns None while the round runs.
            break_round: called with the reason if the store does not answer.

        Raises RendezvousConnectionError: this is the last of TRIES consecutive stores that did not answer.
        """
        answer: Future[TCPStore] = Future()
        threads.StoreCall(target=self._try, args=(header, answer), name="elastic_ext-connect", daemon=True).start()
        deadline = time.monotonic() + GREET_S
        with self._changed:
            while not answer.done() and (left_s := deadline - time.monotonic()) > 0:
                if over() is not None:
                    return None
                self._changed.wait(left_s)
        error = answer.exception() if answer.done() else TimeoutError(f"it says nothing for {GREET_S:g} s")
        self._silent.pop(header.address, None)
        if error is None:
            self._unreached = []
            return answer.result()
        self._silent[header.address] = header.round
        self._unreached.append(f"{header.address}:{header.port}")
        if len(self._unreached) == TRIES:  # the other nodes are better off without this one
            raise RendezvousConnectionError(unreachable(self._host, self._unreached)) from error
        logger.warning("the store of round %s does not answer: %s", header.round, error)
        break_round("the store of rank 0 does not answer")
        return None

    def _try(self, header: Header, answer: Future[TCPStore]) -> None:
        try:
            with name_lookup.connecting(header.address):
                store = TCPStore(header.address, header.port, is_master=False, wait_for_workers=False, timeout=CONNECT)
            store.set_timeout(STORE)
            answer.set_result(store)
        except (RuntimeError, ValueError) as error:  # torch raises these for a store that does not answer
            answer.set_exception(error)
        with self._changed:
            self._changed.notify_all()


def unreachable(host: str, stores: Sequence[str]) -> str:
    """Return the message of a host that cannot reach the stores of some rounds, at these addresses and ports."""
    return (
        f"{host} cannot reach {', '.join(stores)}, the stores of {len(stores)} rounds in a row, though it learns of the rounds "
        "from the job's store: a firewall, or a route, lets no other port through; open all TCP ports between the hosts of the "
        "job, as each round's store, the agents and the workers listen on ports that vary"
    )


def recently_silent(silent: Mapping[str, int], round_: int) -> tuple[str, ...]:
    """Return which addresses were silent in one of the last ROUNDS_SILENT rounds, the latest ones last.

    Args:
        silent: the round in which each was silent, in the order of the rounds.
        round_: the last round.
    """
    return tuple(address for address, at in silent.items() if at > round_ - ROUNDS_SILENT)[-MAX_SILENT:]


WELL, TROUBLE, BACK = "0", "1", "2"
_STATES = {state.encode(): state for state in (WELL, TROUBLE, BACK)}  # anything else counts as WELL, which excuses no node
_MOST_CALLS = 3  # that give no answer: a frozen host accepts connections, and each further call would hang as well


@dataclass(frozen=True)
class RoundStore:
    """The store through which the nodes of a round exchange their states. rank: this node's. nodes: number in the round."""

    host: str
    port: int
    rank: int
    nodes: int


class NodeStates:
    """The states in the store of one round after another. One thread uses it."""

    def __init__(self, connect_s: float) -> None:
        """connect_s: limit for a new connection."""
        self._connect_s = connect_s
        self._round: RoundStore | None = None  # of the last call
        self._store: TCPStore | None = None  # of that round: after the first call, until one fails
        self._calls: list[threading.Thread] = []  # of that round

    @property
    def settled(self) -> bool:
        """Whether no call of the last round is under way."""
        self._calls = [call for call in self._calls if call.is_alive()]
        return not self._calls

    def swap(self, round_: RoundStore, state: str, timeout_s: float) -> Sequence[str] | None:
        """Write this node's state; return the others' states. None: the store has not answered in time."""
        if round_ != self._round:
            self._round, self._store, self._calls = round_, None, []  # what hangs in another store does no harm here
        if not self.settled and len(self._calls) >= _MOST_CALLS:
            return None
        known, self._store = self._store, None
        answer: Future[tuple[TCPStore, list[str]]] = Future()

        def call() -> None:
            try:
                store = known if known is not None else self._connect(round_)
                answer.set_result((store, _swap(store, round_, state)))
            except Exception as error:  # noqa: BLE001 - top of the thread; the caller of result() gets it
                answer.set_exception(error)

        thread = threads.StoreCall(target=call, name="elastic_ext-node-states", daemon=True)
        try:
            thread.start()  # RuntimeError, too: no more threads
            self._calls.append(thread)
            self._store, others = answer.result(timeout_s)
        except (RuntimeError, ValueError, NotInTime) as error:  # torch raises the first two for a store that does not answer
            logger.debug("the store of the round at %s:%s does not answer: %s", round_.host, round_.port, error or "in time")
            return None
        self._calls.pop().join()
        return others

    def _connect(self, round_: RoundStore) -> TCPStore:
        timeout = timedelta(seconds=self._connect_s)
        with name_lookup.connecting(round_.host):
            return TCPStore(round_.host, round_.port, is_master=False, wait_for_workers=False, timeout=timeout)


def _swap(store: TCPStore, round_: RoundStore, state: str) -> list[str]:
    store.set(_key(round_.rank), state)
    keys = [_key(other) for other in range(round_.nodes) if other != round_.rank]
    return [_STATES.get(store.get(key), WELL) if store.check([key]) else WELL for key in keys]


def _key(rank: int) -> str:
    return f"{PREFIX}/{trouble(rank)}"
