"""The thread that runs the links of one agent."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Collection

from elastic_ext.rendezvous.etcd.links.presence import Presence
from elastic_ext.rendezvous.etcd.links.watcher import PeerRecords, Watcher
from elastic_ext.rendezvous.round_server import listening_on

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0


def listening(address: str) -> socket.socket:
    """Return a listening socket that the other nodes reach by `address`."""
    found = listening_on(address, 0)
    return found if found is not None else socket.create_server(("", 0))


class Links:
    """This agent's links, from its start until it leaves the job. One thread runs all of them.

    Attributes:
        port: of the listening socket.
        presence: the links from other nodes.
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
        self.presence = Presence(job, node_id, on_doubt)
        self._listening = listening
        self._watcher = Watcher(job, node_id, peers)
        self._watches: dict[str, asyncio.Task[None]] = {}  # by node id
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
            self._loop.run_until_complete(self.presence.listen(self._listening))
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
        for node_id in wanted - kept - self._watcher.accused:
            self._watches[node_id] = self._loop.create_task(self._watcher.watch(node_id))


async def _cancel_others() -> None:
    """Cancel all other tasks: each says goodbye."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
