"""Shows the others that this node lives: it answers their links and their doubts."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous.etcd.links.calls import in_thread
from elastic_ext.rendezvous.etcd.links.messages import BYE, ENDS, MAX_LINE, Hello, decode, encode, keep_alive

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0  # for a stranger who connects and says nothing
MAX_INCOMING = 64  # a node has one or two; more are strangers
BACKLOG = 16
CONFIRM_S = 0.3  # for an answer to a doubt; a node that lives needs milliseconds
ANSWERS = 5  # attempts; a node whose last one fails may have been declared dead


class OwnRecords(Protocol):
    """What this node needs from etcd to show that it lives; see `peers.Peers`. The calls block."""

    def reachable(self, timeout_s: float) -> bool:
        """Return whether etcd answers and has a record of this node."""

    def answer(self) -> bool:
        """Remove the doubt about this node; return False if it was declared dead. Raises EtcdError."""


class Presence:
    """This node's side of the links from other nodes. For the thread of the links.

    Attributes:
        incoming: number of connections from others.
    """

    def __init__(self, job: str, node_id: str, records: OwnRecords, on_given_up: Callable[[str], None]) -> None:
        """on_given_up: called with the reason when the others may have declared this node dead; it must return at once."""
        self.incoming = 0
        self._job, self._node_id, self._records, self._on_given_up = job, node_id, records, on_given_up
        self._checking = self._answering = False

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        """Begin to accept links."""
        return await asyncio.start_server(self._accept, sock=listening, limit=MAX_LINE, backlog=BACKLOG)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.incoming >= MAX_INCOMING:
            writer.close()
            return
        self.incoming += 1
        linked = False
        silent = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, writer.transport.abort)
        try:
            keep_alive(writer.get_extra_info("socket"))
            hello = decode(await reader.readline())
            silent.cancel()
            if (hello.job, hello.to) != (self._job, self._node_id):
                raise ValueError(f"it is for node {hello.to} of job {hello.job}")
            writer.write(encode(Hello(self._job, self._node_id, hello.node)))
            linked = True
            if await reader.readline() == BYE:
                logger.debug("node %s has ended its link", hello.node)
                linked = False
        except ENDS as error:
            logger.debug("a connection from outside ended: %s", error)
        except asyncio.CancelledError:
            writer.write(BYE)
            raise
        finally:
            silent.cancel()
            self.incoming -= 1
            writer.close()
        if linked:
            await self._check_etcd()

    async def _check_etcd(self) -> None:
        """After a link from another node has ended: if this one does not reach etcd either, it may be declared dead."""
        if self._checking:
            return
        self._checking = True
        try:
            if not await in_thread(lambda: self._records.reachable(CONFIRM_S)):
                self._on_given_up("a link from another node has ended, and etcd does not answer")
        finally:
            self._checking = False

    async def answer(self) -> None:
        """Answer a doubt about this node."""
        if self._answering:
            return
        self._answering = True
        try:
            for _ in range(ANSWERS):
                try:
                    if not await in_thread(self._records.answer):
                        self._on_given_up("another node has declared this one dead")
                    return
                except EtcdError as error:
                    logger.debug("cannot answer a doubt now: %s", error)
            self._on_given_up("another node doubts that this one lives, and etcd takes no answer")
        finally:
            self._answering = False
