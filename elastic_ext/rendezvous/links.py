"""Links between agents: TCP connections that end when a node dies as a whole, so that the others know at once.

If an agent is killed, alone (its reaper then kills what it has started, and ends), or with its reaper and its workers at one
instant (`kubectl delete --force`, a container out of memory, SIGKILL to a job step), only the lease would show it. But the kernel
of that host lives on and closes its connections. So each agent keeps a link to one or two other nodes of its round
(`rounds.neighbors`), and suspects a node that closes its link without a goodbye. A connection is a link once both sides have
proved that they are of the job (`handshake`). The agent then connects again:

    the node answers              it has not died: nothing happens
    accepted, but no answer       the reaper still runs, or the agent is frozen: the end of this connection is the next event,
                                  and counts as the end of the link
    refused                       probably dead: the agent writes its doubt to etcd, where a living node removes it at once. If
                                  it is still there after CONFIRM_S, the record of the node is deleted and its lease revoked
    anything else                 the network may be cut: only the lease can show that

Nodes may die together, as those of one rack: then some die with all that kept links to them. So an agent that has declared a
node dead looks at the nodes that this one kept links to: one that refuses a connection is doubted as above, and so on. From there
it waits for no answer before it looks further: each node has its own doubt to answer, and the last of a long row must be reached
within DECIDE_S. Before the first is declared dead it looks no further: if something refuses all connections of a job for a
moment, each agent doubts two nodes, not all.

A link that is reset or times out makes no node suspect: a dead process closes its connections, something on the way resets them.
The record is deleted in a transaction that compares the doubt. So a node either removes the doubt or is removed, and learns
which.

Invariants:
    The listening socket is open as long as the agent or its reaper lives: the reaper inherits it. No node links to an agent that
    has no reaper, because its workers could outlive it.
    A node that reaches etcd within CONFIRM_S is not declared dead, even if something between the hosts closes or refuses a link.
    A node is declared dead within DECIDE_S after the end of its link (to it, or from it to one that died with it) or not at all,
    and only by a node that is in the job itself.
    A node that is declared dead though it lives learns that from its next event from etcd, and kills its workers without grace.
    A node that has lost a link from another one, which does not link again, and that etcd does not answer, does the same, because
    it may have been declared dead (unless all others are in trouble, too: see `fence`). It looks for longer than DECIDE_S. Only
    a link of the job counts for that, not what strangers open and close.
    One node declares another dead once at most; after that, only its lease counts.

Only the lease shows the end of a host that loses its power, which closes nothing, and of a node that dies before any other has
linked to it. Not covered: something closes the link to a node on one side only (a proxy may), refuses connections to it, and cuts
it from etcd at the same time. Its workers then run until its lease ends, next to a round of the others. So do those of a node
whose only fault is the last two, just after one that kept a link to it has died and is out of the job: it no longer looks then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elastic_ext.etcd import FROM_NOW, Batch, Compare, Delete, EtcdClient, EtcdError, Get, LeaseLost, Put, Watch, unchanged
from elastic_ext.etcd.errors import AuthError, ClientClosed, UnsupportedVersion
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous import handshake, presence
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.presence import CONFIRM_S, DECIDE_S
from elastic_ext.rendezvous.round_records import RecordReader

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
RETRY_S = 5.0  # between attempts to reach a node
HURRIED_TRIES = 5  # after a link that has lasted longer than RETRY_S
HURRY_S = 0.2  # between those, but before the first
SUSPECT_S = 1.0  # after the end of its link, for how long a node is suspected; see `presence.DECIDE_S`


class LinkEnd(Enum):
    """How an attempt to keep a link ended."""

    LEFT = "the other agent said goodbye"
    LOST = "the connection was a link, and the other side closed it without a goodbye"
    RESET = "the connection was a link, and something on the way reset it, or it timed out"
    UNANSWERED = "the connection ended before the other agent answered"
    REFUSED = "nothing listens there, or another agent does"
    UNREACHABLE = "no connection came about"


class Watcher:
    """This node's links to other nodes. For the thread of the links."""

    def __init__(self, job: str, node_id: str, peers: Peers) -> None:
        # Nodes that this one has declared dead. If one is seen again, that was wrong: from then on only its lease counts.
        self.accused: set[str] = set()
        self._job, self._node_id, self._peers = job, node_id, peers
        self._looked_at: set[str] = set()  # now, as what died may have kept a link to them

    async def watch(self, node_id: str) -> None:
        """Keep a link to this node until it has left or is dead; if it is, take it out of the job."""
        peer: Peer | None = None
        lost_at, hurried, hurry_until = -math.inf, HURRIED_TRIES, -math.inf
        while True:
            end, began = LinkEnd.UNREACHABLE, time.monotonic()
            try:
                peer = peer or await presence.in_thread(lambda: self._peers.find(node_id))
                if peer is not None:
                    end = await self._keep(peer)
                    suspected = time.monotonic() < lost_at + SUSPECT_S
                    if end is LinkEnd.LEFT:
                        logger.debug("node %s left on purpose", node_id)
                        return
                    if end is LinkEnd.REFUSED and suspected:
                        if await self._confirm(peer, lost_at + DECIDE_S, "its link has ended"):
                            with contextlib.suppress(EtcdError):  # it is out; what died with it has its lease
                                await self._look_around(node_id, lost_at)
                            return
                        peer = None  # it may have registered again
            except EtcdError as error:
                logger.debug("no link to node %s now: %s", node_id, error)
            except Exception:  # top of a task: the others go on, and the lease of this node still counts
                logger.exception("the link to node %s has failed", node_id)
            now = time.monotonic()
            # After the end of a link, what accepts and never answers is the reaper: it has ended as well, after its work.
            reaped = end is LinkEnd.UNANSWERED and began < lost_at + SUSPECT_S
            if reaped or end in (LinkEnd.LOST, LinkEnd.RESET):
                lost_at = -math.inf if end is LinkEnd.RESET else now  # it was linked again, so it lives
                hurry_until = now + SUSPECT_S
                hurried = HURRIED_TRIES if now - began > RETRY_S else hurried
            if hurried and now < hurry_until:
                hurried -= 1  # at the same address: etcd may be as slow as the network
                await asyncio.sleep(0 if end in (LinkEnd.LOST, LinkEnd.RESET) else HURRY_S)
            else:
                peer = None
                await asyncio.sleep(RETRY_S)

    async def _look_around(self, dead: str, lost_at: float) -> None:
        """Take the nodes out of the job that a dead one kept links to, if they died with it: it can no longer report them.

        lost_at: when the first link to one of them ended, monotonic.
        """
        neighbors = await presence.in_thread(lambda: self._peers.neighbors(dead))
        others = set(neighbors) - self._looked_at - self.accused - {self._node_id}
        self._looked_at |= others  # two that died may have kept a link to one
        try:
            await asyncio.gather(*(self._look_at(each, dead, lost_at) for each in others))
        finally:
            self._looked_at -= others

    async def _look_at(self, node_id: str, dead: str, lost_at: float) -> None:
        try:
            peer = await presence.in_thread(lambda: self._peers.find(node_id))
            if peer is None or not peer.port:
                return
            connected = await _connect(peer)
            if not isinstance(connected, LinkEnd):
                connected[1].close()  # it lives, or its reaper does
            elif connected is LinkEnd.REFUSED:
                confirming = self._confirm(peer, lost_at + DECIDE_S, f"node {dead}, which kept a link to it, has ended")
                await asyncio.gather(confirming, self._look_around(node_id, lost_at))
        except EtcdError as error:
            logger.debug("whether node %s has died, too, is unknown: %s", node_id, error)

    async def _keep(self, peer: Peer) -> LinkEnd:
        """Keep a link to a node until it ends."""
        if not peer.port or not peer.key:
            return LinkEnd.UNREACHABLE
        connected = await _connect(peer)
        if isinstance(connected, LinkEnd):
            return connected
        reader, writer = connected
        answered = False
        try:
            hello = handshake.Hello(self._job, self._node_id, peer.node_id, handshake.new_key())
            answered = await handshake.greet(reader, writer, hello, peer.key)
            if not answered:
                return LinkEnd.REFUSED  # another agent has taken over the port
            logger.debug("linked to node %s", peer.node_id)
            line = await reader.readline()
            # The kernel of a dead process closes its connections: nothing is unread on them, so it does not reset them.
            return LinkEnd.LEFT if line == handshake.BYE else LinkEnd.RESET if line else LinkEnd.LOST
        except handshake.ENDS as error:
            logger.debug("the link to node %s ended: %s", peer.node_id, error)
            return LinkEnd.RESET if answered else LinkEnd.UNANSWERED
        except asyncio.CancelledError:
            writer.write(handshake.BYE)
            raise
        finally:
            writer.close()

    async def _confirm(self, suspect: Peer, by: float, why: str) -> bool:
        """Take a node out of the job unless it answers. Return whether it is out. by: a monotonic time; do nothing after it."""
        removed, where = False, f"{why}, and {suspect.address}:{suspect.port} refuses connections"
        doubted = await presence.in_thread(lambda: self._peers.doubt(suspect, by - time.monotonic()))
        if doubted is not None:
            await asyncio.sleep(CONFIRM_S)  # no event shows that no answer will come
            left_s = by - time.monotonic()
            try:
                removed = left_s > 0 and await presence.in_thread(lambda: self._peers.remove(suspect, doubted, left_s))
            except EtcdError:
                self.accused.add(suspect.node_id)  # it may be done
                raise
        if removed:
            self.accused.add(suspect.node_id)
            logger.warning("elastic_ext: node %s counts as dead and is out of the job: %s", suspect.node_id, where)
        else:
            logger.info("node %s stays in the job: %s, but it has answered in etcd, or etcd is too slow", suspect.node_id, where)
        return removed


async def _open(family: int, address: tuple[Any, ...]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection, loop = socket.socket(family, socket.SOCK_STREAM), asyncio.get_running_loop()
    try:
        connection.setblocking(False)
        presence.keep_alive(connection)
        await presence.within(CONNECT_TIMEOUT_S, loop.create_task(loop.sock_connect(connection, address)))
        return await asyncio.open_connection(sock=connection, limit=handshake.MAX_LINE)
    except BaseException:
        connection.close()
        raise


async def _connect(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | LinkEnd:
    """Connect to a node. REFUSED only if each of its addresses refuses.

    A reset is no refusal: there is one only after the other host has taken the connection, so who held the port has ended.
    """
    refused = 0
    try:
        found = await presence.in_thread(lambda: socket.getaddrinfo(peer.address, peer.port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return LinkEnd.UNREACHABLE
    for family, _, _, _, address in found:
        try:
            return await _open(family, address)
        except ConnectionRefusedError:
            refused += 1
        except ConnectionResetError:
            return LinkEnd.UNANSWERED
        except (OSError, TimeoutError) as error:
            logger.debug("no link to node %s at %s: %s", peer.node_id, address[0], error)
    return LinkEnd.REFUSED if refused == len(found) else LinkEnd.UNREACHABLE


DOUBT, DEAD = "doubt", "dead"  # values of the key; "dead" is followed by the create revision of the record that was deleted
MOST_ASKED = 64  # nodes in one request, which etcd and the embedded store must take; two links end at a time, not more
CALL_TIMEOUT_S = 2.0  # of a call to etcd; the lease counts, too, so nothing depends on an answer


@dataclass(frozen=True)
class Peer:
    """Another node, as its record in etcd describes it."""

    node_id: str
    # address, port: of its listening socket for links; port 0: no node may link to it.
    address: str
    port: int
    key: str  # see `handshake`; "": none is published, so that no node may link to it
    created: int  # create revision of its record
    lease_id: int  # of its record


class Peers:
    """The calls to etcd that links need. They block; any thread may make them. They raise EtcdError."""

    def __init__(
        self, client: EtcdClient, keys: JobKeys, reader: RecordReader, node_id: str, lease_id: Callable[[], int | None]
    ) -> None:
        """node_id: this node. lease_id: returns that of this node; None: it has left."""
        self._client, self._keys, self._reader = client, keys, reader
        self._node_id, self._lease_id = node_id, lease_id
        # Create revision of this node's record when it entered the current round; what was said of earlier ones is over.
        self.since = 0

    def find(self, node_id: str) -> Peer | None:
        """Return this node; None if etcd has no readable record of it."""
        kv = self._client.get(self._keys.node(node_id), timeout_s=CALL_TIMEOUT_S).kv
        node = self._reader.node(kv) if kv is not None else None
        if kv is None or node is None:
            return None
        return Peer(node_id, node.address, node.link.port, node.link.key, kv.create_revision, kv.lease_id)

    def neighbors(self, node_id: str) -> Collection[str]:
        """Return the ids of the nodes that a node keeps links to; none if its assignment is gone or cannot be read."""
        kv = self._client.get(self._keys.assignment(node_id), timeout_s=CALL_TIMEOUT_S).kv
        assignment = self._reader.assignment(kv) if kv is not None else None
        return assignment.neighbors if assignment is not None else ()

    def watch_doubts(self, on_item: Callable[[Item], None]) -> Watch:
        """Watch the doubts about this node. on_item: called on the thread of the client's watches; it must return at once."""
        return Watch(self._client, self._keys.doubt(self._node_id), start_revision=FROM_NOW, callback=on_item)

    def answer(self, others: Collection[str] = ()) -> presence.Standing:
        """Remove the doubt about this node, if any. others: nodes to look for at the same time; of many, the last are not."""
        key, asked, unasked = self._keys.doubt(self._node_id), tuple(others)[:MOST_ASKED], frozenset(tuple(others)[MOST_ASKED:])
        gets = [Get(key), *(Get(self._keys.node(each)) for each in asked)]
        while True:
            doubt, *nodes = (each.kv for each in self._client.txn([], gets, timeout_s=CALL_TIMEOUT_S).readings)
            in_job = unasked.union(node_id for node_id, kv in zip(asked, nodes, strict=True) if kv is not None)
            if doubt is None:
                return presence.Standing(False, in_job)
            as_read = [unchanged(key, doubt.mod_revision)]
            if self._is_dead(doubt.value):
                with contextlib.suppress(EtcdError):  # what matters is known
                    self._client.txn(as_read, [Delete(key)], timeout_s=CALL_TIMEOUT_S)
                return presence.Standing(True, in_job)
            if self._client.txn(as_read, [Delete(key)], timeout_s=CALL_TIMEOUT_S).succeeded:
                return presence.Standing(False, in_job)

    def doubt(self, peer: Peer, timeout_s: float) -> int | None:
        """Write the doubt whether a node lives, unless another node has; return its revision. None: the node is gone.

        A second doubt never replaces the first: two nodes that watch the same one would each undo the other's.

        Raises LeaseLost: this node itself has left.
        """
        key, put = self._keys.doubt(peer.node_id), self._put_doubt(peer, DOUBT)
        both = self._both_in_job(peer)
        written = self._client.txn([unchanged(key, 0), *both], [put], [Get(key)], timeout_s=timeout_s)
        if written.succeeded:
            return written.revision
        found = written.readings[0].kv
        if found is None or found.value == DOUBT.encode():
            return None if found is None else found.mod_revision
        # "dead" is from an earlier time: the node has registered again.
        written = self._client.txn([unchanged(key, found.mod_revision), *both], [put], timeout_s=timeout_s)
        return written.revision if written.succeeded else None

    def remove(self, peer: Peer, doubted: int, timeout_s: float) -> bool:
        """Take a node out of the job if it has not answered the doubt. Return whether that was done."""
        node, doubt = self._keys.node(peer.node_id), self._keys.doubt(peer.node_id)
        silent = [unchanged(doubt, doubted), *self._both_in_job(peer)]
        put = self._put_doubt(peer, f"{DEAD} {peer.created}")
        if not self._client.txn(silent, [Delete(node), put], timeout_s=timeout_s).succeeded:
            return False
        with contextlib.suppress(EtcdError):  # what else it has written goes when the lease ends
            self._client.lease_revoke(peer.lease_id, timeout_s=CALL_TIMEOUT_S)
        return True

    def _both_in_job(self, peer: Peer) -> list[Compare]:
        """The condition that the other node has not registered again, and that no node has taken this one out of the job."""
        return [
            Compare(self._keys.node(peer.node_id), "create", "=", peer.created),
            Compare(self._keys.node(self._node_id), "create", ">", 0),
        ]

    def _put_doubt(self, peer: Peer, value: str) -> Put:
        lease_id = self._lease_id()
        if lease_id is None:
            raise LeaseLost("this node has left the job")
        return Put(self._keys.doubt(peer.node_id), value, lease_id=lease_id)

    def _is_dead(self, value: bytes) -> bool:
        """Return whether a key of doubts says that this node was declared dead in the current round."""
        word, _, created = value.decode(errors="replace").partition(" ")
        return word == DEAD and (not created.isdecimal() or int(created) >= self.since)


CLOSE_TIMEOUT_S = 1.0
REOPEN_S = 1.0


class Links:
    """This agent's links, from its start until it leaves the job. One thread runs all of them."""

    def __init__(
        self, job: str, node_id: str, server: socket.socket, records: Peers, on_given_up: Callable[[str, bool], None]
    ) -> None:
        """Accept links.

        Args:
            server: a listening socket; closed at the end.
            on_given_up: called on the thread of the links when the others may have declared this node dead; see Presence.
        """
        self.port: int = server.getsockname()[1]  # of the listening socket; 0: no node may link to this one
        self.key = handshake.new_key()
        self.presence = presence.Presence(job, node_id, self.key, records.answer, on_given_up)  # the links from other nodes
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
        except Exception:  # top of the thread. The socket stays open, so that no node takes this one for dead
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
        self._doubts = self._records.watch_doubts(lambda item: self._call(lambda: self._on_doubt(item)))

    def _on_doubt(self, item: Item) -> None:
        """Answer. Also when the watch has begun, since a doubt may have been missed before; when it has ended, open another."""
        if isinstance(item, (AuthError, UnsupportedVersion)):  # another watch would end the same way
            logger.warning("no links to other nodes from the next round on: the watch of their doubts has ended: %s", item)
            self.port = 0
            return
        if isinstance(item, EtcdError):
            if not isinstance(item, ClientClosed):
                logger.info("the watch for doubts about this node has ended: %s; opening another", item)
                self._loop.call_later(REOPEN_S, self._watch_doubts)
            return
        if isinstance(item, Batch) and item.events[-1].kind == "delete":
            return  # answered
        self._answers = self._loop.create_task(self.presence.answer())

    def _follow(self, wanted: frozenset[str]) -> None:
        for node_id in self._watches.keys() - wanted:
            self._watches.pop(node_id).cancel()
        kept = {node_id for node_id, task in self._watches.items() if not task.done()}
        for node_id in wanted - kept - self._watcher.accused:
            self._watches[node_id] = self._loop.create_task(self._watcher.watch(node_id))


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    logger.debug("a link: %s: %s", context.get("message"), context.get("exception"))
