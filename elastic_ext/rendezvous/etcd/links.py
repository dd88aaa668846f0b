"""Links between agents: TCP connections that end when a node dies as a whole, so that the others know at once.

If only the agent is killed, its reaper takes the node out of the job. If the agent, its reaper and its workers die at one instant
(`kubectl delete --force`, a container out of memory, SIGKILL to a job step), only the lease would tell. But the kernel of that
host lives on and closes their connections. So each agent keeps a link to one or two other nodes of its round
(`rounds.neighbors`), and suspects a node whose link ends without a goodbye. It then connects again:

    the node answers              something reset the link: nothing happens
    accepted, but no answer       the agent is dead and its reaper still works: the end of this connection is the next event
    refused                       neither lives: unless the node has written a sign of life to etcd, its lease is revoked
    anything else                 the network may be cut: only the lease can tell

Invariants:
    The listening socket is open as long as the agent or its reaper lives: the reaper inherits it.
    A node whose incoming link ends without a goodbye writes a sign of life to etcd at once: it counts them in its record. So
    if something between two living hosts resets and then refuses connections, a node that reaches etcd within CONFIRM_S is
    not declared dead. If it is too late, it registers again, and the next round waits until it has stopped its workers, as
    after any record that was deleted. Through its other links a node tells the new count: an old sign must not hide its death.
    One node declares another dead once at most; after that, only its lease counts.

A host that loses its power closes nothing: there, only the lease tells.

Wire protocol, version 1: lines of text, each a `Message` as JSON. The connecting agent sends one, the other one answers with
one, and sends another after each sign of life. Either sends BYE before it ends the link on purpose.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from elastic_ext.base import records
from elastic_ext.base.records import Count, Name, RecordError
from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous.etcd.suspects import Peer, judge
from elastic_ext.rendezvous.round_server import listening_on

logger = logging.getLogger(__name__)

SCHEMA = 1
BYE = b"bye\n"
CONFIRM_S = 0.3  # for a sign of life from a node that lives; it needs milliseconds
CONNECT_TIMEOUT_S = 3.0
HELLO_TIMEOUT_S = 5.0  # for a stranger who connects and says nothing
RETRY_S = 5.0  # between attempts to reach a node
HURRIED_TRIES = 5  # after a link has ended, before the next pause: a reaper may accept connections for a moment
CLOSE_TIMEOUT_S = 1.0
MAX_LINE = 2048  # bytes
MAX_INCOMING = 64  # a node has one or two; more are strangers


class PeerRecords(Protocol):
    """What links need from etcd; see `suspects.Peers`. The calls block, and raise EtcdError."""

    def find(self, node_id: str) -> Peer | None:
        """Return a node's record."""

    def remove(self, peer: Peer) -> None:
        """Take a dead node out of the job."""


@dataclass(frozen=True)
class Message:
    """A line. job: the run id. node: the sender. to: the other node, as the sender knows it. signs: the sender's count."""

    job: str
    node: Name
    to: Name
    signs: Count


class End(Enum):
    """How an attempt to keep a link ended."""

    LEFT = "the other agent said goodbye"
    LOST = "the connection was a link, and ended without a goodbye"
    UNANSWERED = "the connection ended before the other agent answered"
    REFUSED = "nothing listens there, or somebody else does"
    UNREACHABLE = "no connection came about"


def listening(address: str) -> socket.socket:
    """Return a listening socket that the other nodes reach by `address`."""
    found = listening_on(address, 0)
    return found if found is not None else socket.create_server(("", 0))


class Links:
    """This agent's links, from its start until it leaves the job. One thread runs all of them.

    Attributes:
        port: of the listening socket.
        signs: number of signs of life that this node has written to etcd.
        incoming: number of connections from others.
    """

    def __init__(
        self, job: str, node_id: str, listening: socket.socket, peers: PeerRecords, on_doubt: Callable[[int], None]
    ) -> None:
        """Listen for other agents.

        Args:
            listening: a listening socket; closed by `close`.
            on_doubt: called on the thread of the links when another agent may suspect this one, with the new count of signs,
                which must go to etcd; it must return at once.
        """
        self.port: int = listening.getsockname()[1]
        self._job, self._node_id, self._listening = job, node_id, listening
        self._peers, self._on_doubt = peers, on_doubt
        self._watches: dict[str, asyncio.Task[None]] = {}  # by node id; one that is done ends nothing more
        self.signs = self.incoming = 0
        self._linked: dict[asyncio.StreamWriter, str] = {}  # links from other nodes, with their ids
        self._accused: set[str] = set()  # nodes that this one has declared dead; if one is seen again, that was wrong
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="elastic_ext-links", daemon=True)
        self._thread.start()

    @property
    def fd(self) -> int:
        """The descriptor of the listening socket, for the reaper to inherit."""
        return self._listening.fileno()

    def follow(self, node_ids: Collection[str]) -> None:
        """Keep links to these nodes and to no others. Any thread may call this; it returns at once."""
        wanted = frozenset(node_ids)
        self._call(lambda: self._follow(wanted))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Say goodbye to all and end. A second call does nothing."""
        self._call(self._loop.stop)
        self._thread.join(timeout_s)

    def _call(self, work: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            logger.debug("the links are closed")

    # Everything below runs on the thread of the links.

    def _run(self) -> None:
        try:
            self._listening.setblocking(False)
            self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listening, limit=MAX_LINE))
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_others())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except Exception:  # top of the thread: without links, the leases still tell
            logger.exception("the links to other agents have failed")
        finally:
            self._listening.close()
            self._loop.close()

    def _follow(self, wanted: frozenset[str]) -> None:
        for node_id in self._watches.keys() - wanted:
            self._watches.pop(node_id).cancel()
        kept = {node_id for node_id, task in self._watches.items() if not task.done()}
        for node_id in wanted - kept - self._accused:
            self._watches[node_id] = self._loop.create_task(self._watch(node_id))

    # Links to other nodes.

    async def _watch(self, node_id: str) -> None:
        """Keep a link to this node until it has left or is dead."""
        suspect: Peer | None = None  # the node as it was when its link ended
        hurried = 0
        while True:
            try:
                peer = await asyncio.to_thread(self._peers.find, node_id)
                if peer is None or not peer.port:
                    logger.debug("no record of node %s, or no links", node_id)
                    return
                end, seen = await self._keep(peer, suspect is not None)
                if end is End.LEFT:
                    logger.debug("node %s left on purpose", node_id)
                    return
                if end is End.LOST:
                    suspect, hurried = seen, HURRIED_TRIES
                elif end is End.REFUSED and suspect is not None:
                    await self._confirm(suspect)
                    return
            except EtcdError as error:
                logger.debug("no link to node %s now: %s", node_id, error)
            if hurried:
                hurried -= 1
            else:
                await asyncio.sleep(RETRY_S)

    async def _keep(self, peer: Peer, suspected: bool) -> tuple[End, Peer]:
        """Keep a link to a node until it ends. Return the node as it was then."""
        connected = await _connect(peer)
        if isinstance(connected, End):
            return connected, peer
        reader, writer = connected
        answered = False
        try:
            writer.write(self._message(peer.node_id))
            while (line := await reader.readline()) != BYE:
                message = _decode(line)
                if (message.job, message.node, message.to) != (self._job, peer.node_id, self._node_id):
                    return End.REFUSED, peer  # another agent has taken over the port
                if not answered:
                    logger.log(logging.INFO if suspected else logging.DEBUG, "linked to node %s", peer.node_id)
                answered, peer = True, replace(peer, signs=message.signs)
            return End.LEFT, peer
        except (OSError, ValueError, EOFError, RecordError) as error:
            logger.debug("the link to node %s ended: %s", peer.node_id, error)
            return End.LOST if answered else End.UNANSWERED, peer
        except asyncio.CancelledError:
            writer.write(BYE)
            raise
        finally:
            writer.close()

    async def _confirm(self, suspect: Peer) -> None:
        """Take a node out of the job unless it shows that it lives."""
        await asyncio.sleep(CONFIRM_S)  # no event tells that no sign will come
        finding = judge(suspect, await asyncio.to_thread(self._peers.find, suspect.node_id))
        logger.log(logging.WARNING if finding.dead else logging.INFO, "elastic_ext: %s", finding.reason)
        if finding.dead:
            await asyncio.to_thread(self._peers.remove, suspect)
            self._accused.add(suspect.node_id)

    # Links from other nodes.

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.incoming >= MAX_INCOMING:
            writer.close()
            return
        self.incoming += 1
        try:
            message = _decode(await asyncio.wait_for(reader.readline(), HELLO_TIMEOUT_S))
            if (message.job, message.to) != (self._job, self._node_id):
                raise ValueError(f"it is for node {message.to} of job {message.job}")
            self._linked[writer] = message.node
            writer.write(self._message(message.node))
            if await reader.readline() == BYE:
                logger.debug("node %s has ended its link", self._linked.pop(writer))
        except (OSError, ValueError, EOFError, RecordError, asyncio.TimeoutError) as error:
            logger.debug("a connection from outside ended: %s", error)
        except asyncio.CancelledError:
            self._linked.pop(writer, None)
            writer.write(BYE)
            raise
        finally:
            self.incoming -= 1
            writer.close()
            if self._linked.pop(writer, None) is not None:
                self._show_sign()

    def _show_sign(self) -> None:
        """Count a sign of life, and tell it to all who watch this node."""
        self.signs += 1
        self._on_doubt(self.signs)
        for writer, node_id in self._linked.items():
            writer.write(self._message(node_id))

    def _message(self, to: str) -> bytes:
        message = Message(self._job, self._node_id, to, self.signs)
        return json.dumps({"schema": SCHEMA, **vars(message)}).encode() + b"\n"


def _decode(line: bytes) -> Message:
    if not line:
        raise EOFError("the connection was closed")
    return records.read(Message, line, "a line of a link", SCHEMA)


async def _connect(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | End:
    """Connect to a node. REFUSED only if each of its addresses refuses."""
    loop = asyncio.get_running_loop()
    refused = 0
    try:
        found = await loop.getaddrinfo(peer.address, peer.port, type=socket.SOCK_STREAM)
    except OSError:
        return End.UNREACHABLE
    for family, _, _, _, (host, *_) in found:
        try:
            opening = asyncio.open_connection(str(host), peer.port, family=family, limit=MAX_LINE)
            return await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            refused += 1
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("no link to node %s at %s: %s", peer.node_id, host, error)
    return End.REFUSED if refused == len(found) else End.UNREACHABLE


async def _cancel_others() -> None:
    """Cancel all other tasks: each says goodbye."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
