"""Watches other nodes: keeps a link to each, and takes those that die as a whole out of the job."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from enum import Enum
from typing import Protocol

from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous.etcd.links.calls import in_thread, within
from elastic_ext.rendezvous.etcd.links.messages import BYE, ENDS, MAX_LINE, Hello, decode, encode, keep_alive
from elastic_ext.rendezvous.etcd.links.peers import Peer
from elastic_ext.rendezvous.etcd.links.presence import CONFIRM_S

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
RETRY_S = 5.0  # between attempts to reach a node
HURRIED_TRIES = 5  # after a link has ended, before the next pause: a reaper may accept connections for a moment


class PeerRecords(Protocol):
    """What links need from etcd; see `peers.Peers`. The calls block, and raise EtcdError."""

    def find(self, node_id: str) -> Peer | None:
        """Return a node's record."""

    def doubt(self, peer: Peer) -> int:
        """Write the doubt whether a node lives; return its revision."""

    def remove(self, peer: Peer, doubted: int) -> bool:
        """Take a node out of the job unless it has answered; return whether that was done."""


class End(Enum):
    """How an attempt to keep a link ended."""

    LEFT = "the other agent said goodbye"
    LOST = "the connection was a link, and ended without a goodbye"
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
        suspected, hurried = False, 0
        while True:
            try:
                peer = await in_thread(lambda: self._peers.find(node_id))
                if peer is not None:
                    began = time.monotonic()
                    end = await self._keep(peer, suspected)
                    if end is End.LEFT:
                        logger.debug("node %s left on purpose", node_id)
                        return
                    if end is End.REFUSED and suspected:
                        if await self._confirm(peer):
                            return
                        suspected = False
                    if end is End.LOST:
                        suspected = True
                        lasted = time.monotonic() - began > RETRY_S  # else something ends each link soon, and hurry is no use
                        hurried = HURRIED_TRIES if lasted else max(1, hurried)
            except EtcdError as error:
                logger.debug("no link to node %s now: %s", node_id, error)
            if hurried:
                hurried -= 1
            else:
                await asyncio.sleep(RETRY_S)

    async def _keep(self, peer: Peer, suspected: bool) -> End:
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
            logger.log(logging.INFO if suspected else logging.DEBUG, "linked to node %s", peer.node_id)
            return End.LEFT if await reader.readline() == BYE else End.LOST
        except ENDS as error:
            logger.debug("the link to node %s ended: %s", peer.node_id, error)
            return End.LOST if answered else End.UNANSWERED
        except asyncio.CancelledError:
            writer.write(BYE)
            raise
        finally:
            writer.close()

    async def _confirm(self, suspect: Peer) -> bool:
        """Take a node out of the job unless it answers. Return whether it is out."""
        doubted = await in_thread(lambda: self._peers.doubt(suspect))
        await asyncio.sleep(CONFIRM_S)  # no event tells that no answer will come
        removed = await in_thread(lambda: self._peers.remove(suspect, doubted))
        where = f"its link has ended, and {suspect.address}:{suspect.port} refuses connections"
        if removed:
            self.accused.add(suspect.node_id)
            logger.warning("elastic_ext: node %s is taken for dead and out of the job: %s", suspect.node_id, where)
        else:
            logger.info("node %s lives or has left: %s, but etcd has heard of it since", suspect.node_id, where)
        return removed


async def _connect(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | End:
    """Connect to a node. REFUSED only if each of its addresses refuses."""
    refused = 0
    try:
        found = await in_thread(lambda: socket.getaddrinfo(peer.address, peer.port, type=socket.SOCK_STREAM))
    except OSError:
        return End.UNREACHABLE
    for family, _, _, _, address in found:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            keep_alive(connection)
            loop = asyncio.get_running_loop()
            await within(CONNECT_TIMEOUT_S, loop.create_task(loop.sock_connect(connection, address)))
            return await asyncio.open_connection(sock=connection, limit=MAX_LINE)
        except ConnectionRefusedError:
            refused += 1
            connection.close()
        except (OSError, TimeoutError) as error:
            logger.debug("no link to node %s at %s: %s", peer.node_id, address[0], error)
            connection.close()
        except BaseException:
            connection.close()
            raise
    return End.REFUSED if refused == len(found) else End.UNREACHABLE
