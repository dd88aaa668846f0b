"""Watches other nodes: keeps a link to each, and takes those that die as a whole out of the job."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from enum import Enum
from typing import Any, Protocol

from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous.etcd.links.messages import BYE, ENDS, MAX_LINE, Hello, decode, encode, in_thread, keep_alive, within
from elastic_ext.rendezvous.etcd.links.peers import Peer
from elastic_ext.rendezvous.etcd.links.presence import CONFIRM_S, DECIDE_S

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
RETRY_S = 5.0  # between attempts to reach a node
HURRIED_TRIES = 5  # after a link that has lasted longer than RETRY_S
HURRY_S = 0.2  # between those, but before the first
SUSPECT_S = 1.0  # after the end of its link, for how long a node is suspected; see `presence.DECIDE_S`


class PeerRecords(Protocol):
    """What links need from etcd; see `peers.Peers`. The calls block, and raise EtcdError."""

    def find(self, node_id: str) -> Peer | None:
        """Return a node's record."""

    def doubt(self, peer: Peer, timeout_s: float) -> int | None:
        """Write the doubt whether a node lives; return its revision; None: it is gone."""

    def remove(self, peer: Peer, doubted: int, timeout_s: float) -> bool:
        """Take a node out of the job unless it has answered; return whether that was done."""


class End(Enum):
    """How an attempt to keep a link ended."""

    LEFT = "the other agent said goodbye"
    LOST = "the connection was a link, and the other side closed it without a goodbye"
    RESET = "the connection was a link, and something on the way reset it, or it timed out"
    UNANSWERED = "the connection ended before the other agent answered"
    REFUSED = "nothing listens there, or another agent does"
    UNREACHABLE = "no connection came about"


class Watcher:
    """This node's links to other nodes. For the thread of the links.

    Attributes:
        accused: nodes that this one has declared dead. If one is seen again, that was wrong: from then on only its lease counts.
    """

    def __init__(self, job: str, node_id: str, peers: PeerRecords) -> None:
        self.accused: set[str] = set()
        self._job, self._node_id, self._peers = job, node_id, peers

    async def watch(self, node_id: str) -> None:
        """Keep a link to this node until it has left or is dead; if it is, take it out of the job."""
        peer: Peer | None = None
        lost_at, hurried, hurry_until = -math.inf, HURRIED_TRIES, -math.inf
        while True:
            end, began = End.UNREACHABLE, time.monotonic()
            try:
                peer = peer or await in_thread(lambda: self._peers.find(node_id))
                if peer is not None:
                    end = await self._keep(peer)
                    suspected = time.monotonic() < lost_at + SUSPECT_S
                    if end is End.LEFT:
                        logger.debug("node %s left on purpose", node_id)
                        return
                    if end is End.REFUSED and suspected:
                        if await self._confirm(peer, lost_at + DECIDE_S):
                            return
                        peer = None  # it may have registered again
            except EtcdError as error:
                logger.debug("no link to node %s now: %s", node_id, error)
            except Exception:  # top of a task: the others go on, and the lease of this node still tells
                logger.exception("the link to node %s has failed", node_id)
            now = time.monotonic()
            if end in (End.LOST, End.RESET):
                lost_at = now if end is End.LOST else -math.inf  # it was linked again, so it lives
                hurry_until = now + SUSPECT_S
                hurried = HURRIED_TRIES if now - began > RETRY_S else hurried
            if hurried and now < hurry_until:
                hurried -= 1  # at the same address: etcd may be as slow as the network
                await asyncio.sleep(0 if end in (End.LOST, End.RESET) else HURRY_S)
            else:
                peer = None
                await asyncio.sleep(RETRY_S)

    async def _keep(self, peer: Peer) -> End:
        """Keep a link to a node until it ends."""
        if not peer.port:
            return End.UNREACHABLE
        connected = await _connect(peer)
        if isinstance(connected, End):
            return connected
        reader, writer = connected
        answered = False
        try:
            writer.write(encode(Hello(self._job, self._node_id, peer.node_id)))
            hello = decode(await reader.readline())
            answered = (hello.job, hello.node, hello.to) == (self._job, peer.node_id, self._node_id)
            if not answered:
                return End.REFUSED  # another agent has taken over the port
            logger.debug("linked to node %s", peer.node_id)
            line = await reader.readline()
            # The kernel of a dead process closes its connections: nothing is unread on them, so it does not reset them.
            return End.LEFT if line == BYE else End.RESET if line else End.LOST
        except ENDS as error:
            logger.debug("the link to node %s ended: %s", peer.node_id, error)
            return End.RESET if answered else End.UNANSWERED
        except asyncio.CancelledError:
            writer.write(BYE)
            raise
        finally:
            writer.close()

    async def _confirm(self, suspect: Peer, by: float) -> bool:
        """Take a node out of the job unless it answers. Return whether it is out. by: a monotonic time; do nothing after it."""
        removed, where = False, f"its link has ended, and {suspect.address}:{suspect.port} refuses connections"
        doubted = await in_thread(lambda: self._peers.doubt(suspect, by - time.monotonic()))
        if doubted is not None:
            await asyncio.sleep(CONFIRM_S)  # no event tells that no answer will come
            left_s = by - time.monotonic()
            try:
                removed = left_s > 0 and await in_thread(lambda: self._peers.remove(suspect, doubted, left_s))
            except EtcdError:
                self.accused.add(suspect.node_id)  # it may be done
                raise
        if removed:
            self.accused.add(suspect.node_id)
            logger.warning("elastic_ext: node %s is taken for dead and out of the job: %s", suspect.node_id, where)
        else:
            logger.info("node %s stays in the job: %s, but it has answered in etcd, or etcd is too slow", suspect.node_id, where)
        return removed


async def _open(family: int, address: tuple[Any, ...]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection, loop = socket.socket(family, socket.SOCK_STREAM), asyncio.get_running_loop()
    try:
        connection.setblocking(False)
        keep_alive(connection)
        await within(CONNECT_TIMEOUT_S, loop.create_task(loop.sock_connect(connection, address)))
        return await asyncio.open_connection(sock=connection, limit=MAX_LINE)
    except BaseException:
        connection.close()
        raise


async def _connect(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | End:
    """Connect to a node. REFUSED only if each of its addresses refuses."""
    refused = 0
    try:
        found = await in_thread(lambda: socket.getaddrinfo(peer.address, peer.port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return End.UNREACHABLE
    for family, _, _, _, address in found:
        try:
            return await _open(family, address)
        except ConnectionRefusedError:
            refused += 1
        except (OSError, TimeoutError) as error:
            logger.debug("no link to node %s at %s: %s", peer.node_id, address[0], error)
    return End.REFUSED if refused == len(found) else End.UNREACHABLE
