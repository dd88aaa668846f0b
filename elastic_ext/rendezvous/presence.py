"""Shows the others that this node lives: it answers their links and their doubts.

Strangers may connect, too. What they do counts for nothing, makes no request grow, and takes no room from the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from elastic_ext.etcd import EtcdError
from elastic_ext.rendezvous import handshake
from elastic_ext.rendezvous.link_places import LinkPlaces

logger = logging.getLogger(__name__)

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))  # seconds, seconds, probes


def keep_alive(connection: socket.socket) -> None:
    """Keep what forwards packets between the hosts from forgetting a connection on which nothing is sent for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Return what a blocking call returns. Its thread is a daemon: asyncio's own would hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_: Callable[[Any], None], value: object) -> None:
        if not future.done():
            set_(value)

    def run() -> None:
        try:
            done: tuple[Callable[[Any], None], object] = future.set_result, call()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(finish, *done)

    threading.Thread(target=run, name="elastic_ext-link-call", daemon=True).start()
    return await future


async def within(seconds: float, task: asyncio.Task[T]) -> T:
    """Return the result of a task; cancel it if it takes longer. Raises TimeoutError.

    Not asyncio.wait_for, which before Python 3.12 can lose a cancellation that comes as the task ends.
    """
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError(f"no answer within {seconds:g} s")
        return task.result()
    finally:
        task.cancel()


HELLO_TIMEOUT_S = 5.0  # for a connection to prove that it is a link
MAX_LINKS = 64  # from other nodes; a node has one or two
MAX_UNPROVED = 64  # connections that are no links yet; a node needs milliseconds for its proof
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER
BACKLOG = 128
CONFIRM_S = 0.3  # for an answer to a doubt; a node that lives needs milliseconds
DECIDE_S = 2.0  # after the end of its link, a node is declared dead within this time or not at all
DOUBTED_S = DECIDE_S + 1.0  # for how long this node looks whether it was: the two sides may see the end at different times
REACH_S = 0.45  # for an answer of etcd in that time


@dataclass(frozen=True)
class Standing:
    """What etcd says of this node. dead: it was declared dead. in_job: those of the other nodes asked for that are in the job."""

    dead: bool
    in_job: frozenset[str]


def _seat(writer: asyncio.StreamWriter, places: LinkPlaces[asyncio.StreamWriter]) -> None:
    """Give a connection a place. One that makes room is reset: a node at its other end then suspects this one of nothing."""
    peer = writer.get_extra_info("peername")
    loser = places.take(writer, peer[0] if peer else "")  # it may have ended
    if loser is not None:
        with contextlib.suppress(OSError):
            loser.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        loser.transport.abort()


class Presence:
    """This node's side of the links from other nodes. For the thread of the links."""

    def __init__(
        self,
        job: str,
        node_id: str,
        key: str,
        ask: Callable[[Collection[str]], Standing],
        on_given_up: Callable[[str, bool], None],
    ) -> None:
        """
        Args:
            key: of this node; see `handshake`.
            ask: removes the doubt about this node from etcd, and looks for others; see `links.Peers.answer`. It blocks.
            on_given_up: called when the others may have declared this node dead: the reason, and whether that is certain; it must
                return at once.
        """
        self._job, self._node_id, self._key, self._ask, self._on_given_up = job, node_id, key, ask, on_given_up
        self._unproved = LinkPlaces[asyncio.StreamWriter](MAX_UNPROVED)  # connections that are no links yet
        self._links = LinkPlaces[asyncio.StreamWriter](MAX_LINKS)
        self._open = Counter[str]()  # links from each node
        self._lost: dict[str, float] = {}  # nodes whose link to this one has ended, and until when they may declare it dead
        self._looking = self._answering = self._asked_again = False

    @property
    def incoming(self) -> int:
        """The number of links from others."""
        return len(self._links)

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        """Begin to accept links."""
        return await asyncio.start_server(self._accept, sock=listening, limit=handshake.MAX_LINE, backlog=BACKLOG)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linked, goodbye = "", False
        _seat(writer, self._unproved)
        silent = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, writer.transport.abort)
        try:
            keep_alive(writer.get_extra_info("socket"))
            node_id, welcome = await handshake.admit(reader, writer, self._job, self._node_id, self._key)
            silent.cancel()
            if writer.is_closing():
                raise ValueError(f"node {node_id} came too late, or has made room for another")
            self._unproved.leave(writer)
            _seat(writer, self._links)
            linked = node_id
            self._open[linked] += 1
            self._lost.pop(linked, None)
            writer.write(welcome)
            goodbye = await reader.readline() == handshake.BYE
            logger.debug("node %s has %s", linked, "ended its link" if goodbye else "lost its link")
        except handshake.ENDS as error:
            logger.debug("a connection from outside ended: %s", error)
        except asyncio.CancelledError:
            writer.write(handshake.BYE)
            raise
        finally:
            silent.cancel()
            self._unproved.leave(writer)
            kept = self._links.leave(writer)
            writer.close()
        if not linked:
            return
        self._open[linked] -= 1
        if self._open[linked]:  # the end of an earlier link may be seen after a new one is there
            return
        del self._open[linked]  # one that reads the records may come under any number of names
        if kept and not goodbye:
            self._lost[linked] = time.monotonic() + DOUBTED_S
            await self._look()

    async def _look(self) -> None:
        """While a node that has lost its link may declare this one dead, look whether it has. Give up if etcd does not answer.

        A node that is linked again, or is out of the job itself, declares no node dead.
        """
        if self._looking:
            return
        self._looking = True
        try:
            while self._lost:
                await self._look_once(tuple(self._lost))
                if self._lost:
                    await asyncio.sleep(CONFIRM_S)
        finally:
            self._looking = False

    async def _look_once(self, lost: tuple[str, ...]) -> None:
        """lost: the nodes that may have declared this one dead."""
        began, in_job, failed = time.monotonic(), frozenset(lost), ""
        try:
            in_job = await within(REACH_S, asyncio.ensure_future(in_thread(partial(self._answered, lost))))
        except (EtcdError, TimeoutError):
            failed = "etcd does not answer"
        except Exception as error:  # top of a task
            logger.exception("cannot look whether another node has declared this one dead")
            failed = f"etcd cannot be asked: {error}"
        if failed and not self._lost.keys().isdisjoint(lost):  # otherwise all are linked again
            self._on_given_up(f"a link from another node has ended, and {failed}", False)
        # The last look at each begins after the end of its time.
        for node_id in [each for each in lost if each not in in_job or self._lost.get(each, began) <= began]:
            self._lost.pop(node_id, None)

    def _answered(self, others: tuple[str, ...] = ()) -> frozenset[str]:
        """Answer a doubt; return those of the others that are in the job.

        In a thread of its own, which may go on when no task waits for it any more: what it reads is reported all the same.
        """
        standing = self._ask(others)
        if standing.dead:
            self._on_given_up("another node has declared this one dead", True)
        return standing.in_job

    async def answer(self) -> None:
        """Answer a doubt about this node, and those that come meanwhile."""
        self._asked_again = True
        if self._answering:
            return
        self._answering = True
        try:
            while self._asked_again:
                self._asked_again = False
                await in_thread(self._answered)
        except Exception as error:  # top of a task
            if not isinstance(error, EtcdError):
                logger.exception("cannot answer the doubt about this node")
            self._on_given_up(f"another node may doubt that this one lives, and etcd takes no answer: {error}", False)
        finally:
            self._answering = False
