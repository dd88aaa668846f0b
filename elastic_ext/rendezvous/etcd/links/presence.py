"""Shows the others that this node lives: it answers their links, and writes a sign of life when one of them may doubt it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from elastic_ext.rendezvous.etcd.links.messages import BYE, ENDS, MAX_LINE, Message, decode, encode

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0  # for a stranger who connects and says nothing
MAX_INCOMING = 64  # a node has one or two; more are strangers


class Presence:
    """This node's side of the links from other nodes. For the thread of the links, except `signs`.

    Attributes:
        signs: number of signs of life so far.
        incoming: number of connections from others.
    """

    def __init__(self, job: str, node_id: str, on_doubt: Callable[[int], None]) -> None:
        """on_doubt: called with the new number of signs, which must go to etcd; it must return at once."""
        self.signs = self.incoming = 0
        self._job, self._node_id, self._on_doubt = job, node_id, on_doubt
        self._linked: dict[asyncio.StreamWriter, str] = {}  # the others' ids

    async def listen(self, listening: socket.socket) -> None:
        """Begin to accept links."""
        await asyncio.start_server(self._accept, sock=listening, limit=MAX_LINE)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.incoming >= MAX_INCOMING:
            writer.close()
            return
        self.incoming += 1
        try:
            message = decode(await asyncio.wait_for(reader.readline(), HELLO_TIMEOUT_S))
            if (message.job, message.to) != (self._job, self._node_id):
                raise ValueError(f"it is for node {message.to} of job {message.job}")
            self._linked[writer] = message.node
            writer.write(self._message(message.node))
            if await reader.readline() == BYE:
                logger.debug("node %s has ended its link", self._linked.pop(writer))
        except (*ENDS, asyncio.TimeoutError) as error:
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
        return encode(Message(self._job, self._node_id, to, self.signs))
