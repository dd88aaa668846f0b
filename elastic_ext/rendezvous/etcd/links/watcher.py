"""Watches other nodes: keeps a link to each, and takes those that die as a whole out of the job."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from enum import Enum
from typing import Protocol

from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous.etcd.links.messages import BYE, ENDS, MAX_LINE, Message, decode, encode
from elastic_ext.rendezvous.etcd.links.suspects import Peer, judge

logger = logging.getLogger(__name__)

CONFIRM_S = 0.3  # for a sign of life from a node that lives; it needs milliseconds
CONNECT_TIMEOUT_S = 3.0
RETRY_S = 5.0  # between attempts to reach a node
HURRIED_TRIES = 5  # after a link has ended, before the next pause: a reaper may accept connections for a moment


class PeerRecords(Protocol):
    """What links need from etcd; see `suspects.Peers`. The calls block, and raise EtcdError."""

    def find(self, node_id: str) -> Peer | None:
        """Return a node's record."""

    def remove(self, peer: Peer) -> None:
        """Take a dead node out of the job."""


class End(Enum):
    """How an attempt to keep a link ended."""

    LEFT = "the other agent said goodbye"
    LOST = "the connection was a link, and ended without a goodbye"
    UNANSWERED = "the connection ended before the other agent answered"
    REFUSED = "nothing listens there, or somebody else does"
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
            writer.write(encode(Message(self._job, self._node_id, peer.node_id, 0)))
            while (line := await reader.readline()) != BYE:
                message = decode(line)
                if (message.job, message.node, message.to) != (self._job, peer.node_id, self._node_id):
                    return End.REFUSED, peer  # another agent has taken over the port
                if not answered:
                    logger.log(logging.INFO if suspected else logging.DEBUG, "linked to node %s", peer.node_id)
                answered, peer = True, replace(peer, signs=message.signs)
            return End.LEFT, peer
        except ENDS as error:
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
            self.accused.add(suspect.node_id)


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
