"""Shows the others that this node lives: it answers their links and their doubts."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from typing import Protocol

from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous.etcd.links.calls import in_thread, within
from elastic_ext.rendezvous.etcd.links.messages import BYE, ENDS, MAX_LINE, Hello, decode, encode, keep_alive

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0  # for a stranger who connects and says nothing
MAX_INCOMING = 64  # a node has one or two; more are strangers
BACKLOG = 16
CONFIRM_S = 0.3  # for an answer to a doubt; a node that lives needs milliseconds
DOUBTED_S = 1.5  # after the end of a link, for how long this node may be declared dead: watcher.SUSPECT_S, CONFIRM_S, some more
REACH_S = 0.45  # for an answer of etcd in that time


class OwnRecords(Protocol):
    """What this node needs from etcd to show that it lives; see `peers.Peers`. The calls block."""

    def reach(self) -> None:
        """Return when etcd has answered. Raises EtcdError."""

    def answer(self) -> bool:
        """Remove the doubt about this node; return False if it was declared dead. Raises EtcdError."""


class Presence:
    """This node's side of the links from other nodes. For the thread of the links.

    Attributes:
        incoming: number of connections from others.
    """

    def __init__(self, job: str, node_id: str, records: OwnRecords, on_given_up: Callable[[str, bool], None]) -> None:
        """on_given_up: called when the others may have declared this node dead: the reason, and whether that is certain; it must
        return at once.
        """
        self.incoming = 0
        self._job, self._node_id, self._records, self._on_given_up = job, node_id, records, on_given_up
        self._doubted_until = -math.inf
        self._checking = self._answering = self._asked_again = False

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
            if hello.job != self._job:
                raise ValueError(f"it is for job {hello.job}")
            writer.write(encode(Hello(self._job, self._node_id, hello.node)))
            if hello.to != self._node_id:
                raise ValueError(f"it is for node {hello.to}, whose port this was")
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
        """After a link from another node has ended: give up if this one does not reach etcd either while it may be doubted."""
        self._doubted_until = time.monotonic() + DOUBTED_S
        if self._checking:
            return
        self._checking = True
        try:
            while time.monotonic() < self._doubted_until:
                try:
                    await within(REACH_S, asyncio.ensure_future(in_thread(self._records.reach)))
                except (EtcdError, TimeoutError):
                    self._on_given_up("a link from another node has ended, and etcd does not answer", False)
                    return
                await asyncio.sleep(CONFIRM_S)
        finally:
            self._checking = False

    async def answer(self) -> None:
        """Answer a doubt about this node, and those that come meanwhile."""
        self._asked_again = True
        if self._answering:
            return
        self._answering = True
        try:
            while self._asked_again:
                self._asked_again = False
                if not await in_thread(self._records.answer):
                    self._on_given_up("another node has declared this one dead", True)
        except EtcdError as error:
            self._on_given_up(f"another node may doubt that this one lives, and etcd takes no answer: {error}", False)
        finally:
            self._answering = False
