"""The thread that runs the links of one agent."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Protocol

from elastic_ext.etcd import AuthError, Batch, ClientClosed, EtcdError, UnsupportedVersion, Watch
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous.etcd.links.presence import OwnRecords, Presence
from elastic_ext.rendezvous.etcd.links.watcher import PeerRecords, Watcher

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
REOPEN_S = 1.0


class Records(OwnRecords, PeerRecords, Protocol):
    """What links need from etcd; see `peers.Peers`."""

    since: int

    def watch_doubts(self, on_item: Callable[[Item], None]) -> Watch:
        """Watch the doubts about this node."""


class Links:
    """This agent's links, from its start until it leaves the job. One thread runs all of them.

    Attributes:
        port: of the listening socket; 0: nobody must link to this node.
        presence: the links from other nodes.
    """

    def __init__(
        self, job: str, node_id: str, server: socket.socket, records: Records, on_given_up: Callable[[str, bool], None]
    ) -> None:
        """Accept links.

        Args:
            server: a listening socket; closed at the end.
            on_given_up: called on the thread of the links when the others may have declared this node dead; see Presence.
        """
        self.port: int = server.getsockname()[1]
        self.presence = Presence(job, node_id, records, on_given_up)
        self._server, self._records = server, records
        self._doubts: Watch | None = None
        self._answers: asyncio.Task[None] | None = None  # keeps the task alive
        self._watcher = Watcher(job, node_id, records)
        self._watches: dict[str, asyncio.Task[None]] = {}  # by node id
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_error)
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="elastic_ext-links", daemon=True)
        self._thread.start()

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor of the listening socket, for the reaper to inherit; none once it is closed."""
        fd = self._server.fileno()
        return (fd,) if fd >= 0 else ()

    def follow(self, node_ids: Collection[str], created: int = 0) -> None:
        """Keep links to these nodes and to no others. Any thread may call this; it returns at once.

        created: create revision of this node's record in the round that it has entered.
        """
        self._records.since = created
        wanted = frozenset(node_ids)
        self._call(lambda: self._follow(wanted))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Say goodbye to all and end. A second call does nothing."""
        self._call(self._closing.set)
        self._thread.join(timeout_s)

    def _call(self, work: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            logger.debug("the links are closed")

    # Everything below runs on the thread of the links.

    def _run(self) -> None:
        try:
            self._server.setblocking(False)
            self._loop.run_until_complete(self._serve())
            self._server.close()
        except Exception:  # top of the thread. The socket stays open, so that nobody takes this node for dead
            logger.exception("the links to other agents have failed")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await self.presence.listen(self._server)
        self._watch_doubts()
        await self._closing.wait()
        if self._doubts is not None:
            self._doubts.close()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()  # each says goodbye
        await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S) if others else None

    def _watch_doubts(self) -> None:
        def take(item: Item) -> None:  # on the thread of the client's watches
            self._call(lambda: self._on_doubt(item))

        self._doubts = self._records.watch_doubts(take)

    def _on_doubt(self, item: Item) -> None:
        """Answer. Also when the watch has begun, since a doubt may have been missed before; when it has ended, open another."""
        if isinstance(item, (AuthError, UnsupportedVersion)):  # another watch would end the same way
            logger.warning("no links from the next round on: the doubts about this node cannot be watched: %s", item)
            self.port = 0
            return
        if isinstance(item, EtcdError):
            if not isinstance(item, ClientClosed):
                logger.info("the watch for doubts about this node has ended: %s; opening another", item)
                self._loop.call_later(REOPEN_S, self._watch_doubts)
            return
        if isinstance(item, Batch) and item.events[-1].kind == "delete":
            return  # answered
        self._answers = self._spawn(self.presence.answer())

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        return self._loop.create_task(work)

    def _follow(self, wanted: frozenset[str]) -> None:
        for node_id in self._watches.keys() - wanted:
            self._watches.pop(node_id).cancel()
        kept = {node_id for node_id, task in self._watches.items() if not task.done()}
        for node_id in wanted - kept - self._watcher.accused:
            self._watches[node_id] = self._spawn(self._watcher.watch(node_id))


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    logger.debug("a link: %s: %s", context.get("message"), context.get("exception"))
