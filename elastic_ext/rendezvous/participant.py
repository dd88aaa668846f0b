"""One node's part in a job on etcd: it carries out what `rounds` decides. Knows nothing of torch.

Keys under /elastic_ext/<run id>/:

    job             what all nodes must agree on; the lease of what belongs to nobody
    round           the header of the rounds, watched by every node
    nodes/<id>      a node, under its own lease: gone when the node is
    assign/<id>     a node's part in the last round, watched by that node

The leader is the node whose key was created first; every other one watches only the node that was created before it. A node
costs a fixed number of operations a round; only the leader reads all nodes. Whatever the leader writes compares the header's
revision and the leader's own key, so that a leader that has been cut off writes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_ext.errors import UsageError
from elastic_ext.etcd import (
    Batch,
    Delete,
    EtcdClient,
    EtcdError,
    Get,
    LeaseLost,
    LeaseSession,
    Put,
    Unavailable,
    Watch,
    absent,
    unchanged,
)
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.leader import Leader
from elastic_ext.rendezvous.rounds import Assignment, Header, Limits, Node, State

logger = logging.getLogger(__name__)

ROOT = "/elastic_ext"
JOB_LEASE_FACTOR = 3  # what belongs to nobody outlives the last node by this many lease times
RETRY_S = 0.5  # after a call that no endpoint answered; its own deadline has passed by then


class Loop:
    """One thread that runs what happens to its participants, in order. A job's agent has one participant; a simulation many."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Participant, Callable[[], None]] | None] = queue.SimpleQueue()
        self._due: dict[Participant, float] = {}
        self._thread = threading.Thread(target=self._run, name="elastic_ext-rendezvous", daemon=True)
        self._thread.start()

    def post(self, participant: Participant, work: Callable[[], None]) -> None:
        self._queue.put((participant, work))

    def wake_at(self, participant: Participant, at: float | None) -> None:
        """Call its `on_time` at this monotonic time; only from the loop's thread."""
        if at is None:
            self._due.pop(participant, None)
        else:
            self._due[participant] = at

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            at = min(self._due.values(), default=None)
            try:
                item = self._queue.get(timeout=None if at is None else max(0.0, at - time.monotonic()))
            except queue.Empty:
                now = time.monotonic()
                for participant in [due for due, at in self._due.items() if at <= now]:
                    self._due.pop(participant, None)
                    participant.run(participant.on_time)
                continue
            if item is None:
                return
            participant, work = item
            participant.run(work)


class Participant:
    """A node in a job. Its methods return at once; `on_change` tells that one of the attributes is another.

    `may_grow`, set by the agent, is asked on the leader while nodes wait to join a round that runs.

    Attributes (replaced, never changed in place; read them from any thread):
        header: of the job's rounds, as last seen.
        joined: the round that this node has taken its part in since it was last ready, and that part; None while it waits.
        failure: why this node can take no further part; None while it can.
        alive_until: monotonic time until which the others hold this node for alive, whatever happens to the network.
    """

    def __init__(
        self,
        client: EtcdClient,
        loop: Loop,
        run_id: str,
        node_id: str,
        limits: Limits,
        lease_ttl_s: int,
        on_change: Callable[[], None],
    ) -> None:
        self.client = client
        self.id = node_id
        self.limits = limits
        self.prefix = f"{ROOT}/{run_id}/"
        self.header = Header()
        self.assignment: Assignment | None = None
        self.joined: tuple[Header, Assignment] | None = None
        self.may_grow: Callable[[], bool] = lambda: True
        self.failure: Exception | None = None
        self.created = 0  # create revision of this node's key
        self.header_revision = 0
        self.job_lease = 0
        self.ttl_s = lease_ttl_s
        self._loop = loop
        self._on_change = on_change
        self._node: Node | None = None
        self._session: LeaseSession | None = None
        self._watches: list[Watch] = []
        self._predecessor: Watch | None = None
        self._leader: Leader | None = None

    # What the node's agent says.

    def ready(self, node: Node) -> None:
        """Wait for the next round as `node`."""
        self.post(lambda: self._ready(node))

    def done(self) -> None:
        """The workers of this node have finished the round well."""
        self.post(self._done)

    def end_round(self, round_: int, state: State, reason: str) -> None:
        """Break round `round_`, or close the job, for all nodes."""
        self.post(lambda: self._end_round(round_, state, reason))

    def leave(self, timeout_s: float) -> None:
        """Take this node out: its lease is revoked, so that the others know at once. Returns when that is done, or too late."""
        if self.failure is not None:  # the loop does nothing more for this node
            return self._leave(timeout_s)
        left = threading.Event()

        def work() -> None:
            try:
                self._leave(timeout_s)
            finally:
                left.set()

        self.post(work)
        if not left.wait(timeout_s + 1):
            logger.warning("etcd did not answer within %g s: the node's lease will expire by itself", timeout_s)
        return None

    @property
    def alive_until(self) -> float:
        session = self._session
        return session.alive_until if session is not None else float("inf")

    @property
    def lease_id(self) -> int | None:
        session = self._session
        return session.lease_id if session is not None else None

    # For the loop: everything below runs on its thread.

    def post(self, work: Callable[[], None]) -> None:
        self._loop.post(self, work)

    def run(self, work: Callable[[], None]) -> None:
        """Run one piece of work; what etcd cannot do now is done again, what can never be done ends this node's part."""
        if self.failure is not None:
            return
        try:
            work()
        except LeaseLost:
            self.post(self._register_again)
        except (EtcdError, rounds.RecordError, UsageError) as error:
            if isinstance(error, Unavailable):
                logger.debug("rendezvous: %s", error)
                self._retry(work)
            else:
                self._fail(error)
        except Exception as error:  # the top of the rendezvous thread: the agent must be told
            logger.exception("the rendezvous of node %s failed", self.id)
            self._fail(error)

    def _retry(self, work: Callable[[], None]) -> None:
        timer = threading.Timer(RETRY_S, self._loop.post, (self, work))
        timer.daemon = True
        timer.start()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._on_change()

    def on_time(self) -> None:
        if self._leader is not None:
            self._loop.wake_at(self, self._leader.act(time.monotonic()))

    # Entering.

    def _ready(self, node: Node) -> None:
        self._node = node
        self.joined = None
        if self._session is None:
            self._enter()
        else:
            self._renew(self._session)
        self._write_node()
        self._consider()

    def _renew(self, session: LeaseSession) -> None:
        """After an outage a round may be there before the next renewal is due: the fence would take this node for cut off."""
        kept = self.client.lease_keep_alive([session.lease_id])
        ttl_s = kept.ttl_s.get(session.lease_id, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {session.lease_id:x} is gone")
        session.renewed(kept.sent_at, ttl_s)

    def _enter(self) -> None:
        found = self._agree()
        while self.header.state in (State.DONE, State.CLOSED) and self._forget_ended_job():
            found = self._agree()
        # After what can fail and is tried again: each session is kept alive until it is ended.
        self._session = LeaseSession(self.client, self.ttl_s, patient=True, on_lost=lambda _: self.post(self._register_again))
        self._watch("round", self._on_header, found)
        self._watch(f"assign/{self.id}", self._on_assignment, found)

    def _agree(self) -> int:
        """Read, or be the first to write, what all nodes must agree on; return the revision of what has been read."""
        mine = {"schema": rounds.SCHEMA, "min_nodes": self.limits.min_nodes, "max_nodes": self.limits.max_nodes}
        key = self.prefix + "job"
        found = self.client.txn([], [Get(key), Get(self.prefix + "round")])
        job, header = (response.kv for response in found.responses)  # type: ignore[union-attr]
        if job is None:
            lease_id = self.client.lease_grant(self.ttl_s * JOB_LEASE_FACTOR).lease_id
            value = json.dumps({**mine, "lease": lease_id})
            if not self.client.txn([absent(key)], [Put(key, value, lease_id=lease_id)]).succeeded:
                return self._agree()
            self.job_lease = lease_id
        else:
            theirs = json.loads(job.value)
            self.job_lease = theirs.pop("lease")
            if theirs != mine and not self._forget_ended_job():
                raise UsageError(
                    f"another job runs under this --rdzv-id with other settings: {_shown(theirs)} there, {_shown(mine)} here; "
                    "use another --rdzv-id, or the same settings on all nodes"
                )
            if theirs != mine:
                return self._agree()
        self.header, self.header_revision = Header(), 0
        if header is not None:
            self.header = rounds.decode(Header, header.value, header.key.decode())
            self.header_revision = header.mod_revision
        return found.revision

    def _forget_ended_job(self) -> bool:
        """Remove what a job left that no node is in any more; False where one still is."""
        if self.client.get_prefix(self.prefix + "nodes/", keys_only=True).kvs:
            return False
        # Written by its last node; if somebody begins the next job in this moment, that one's header differs.
        compares = [unchanged(self.prefix + "round", self.header_revision)] if self.header_revision else []
        return self.client.txn(
            compares, [Delete(self.prefix + "assign/", prefix=True), Delete(self.prefix + "round"), Delete(self.prefix + "job")]
        ).succeeded

    def _write_node(self) -> None:
        assert self._node is not None
        assert self._session is not None
        key = f"{self.prefix}nodes/{self.id}"
        put = Put(key, rounds.encode(self._node), lease_id=self._session.lease_id)
        created = self.client.txn([absent(key)], [put], [put])
        if not created.succeeded and self.created:
            return
        if created.succeeded:
            self.created = created.revision
        else:  # an earlier try has created it, and its answer was lost
            kv = self.client.get(key).kv
            self.created = kv.create_revision if kv is not None else 0
        self._find_predecessor()

    def _register_again(self) -> None:
        """The lease is lost, this process is not: the same node with a new lease."""
        if self._session is None or self._node is None:
            return
        self._session.orphan()
        self._session = LeaseSession(self.client, self.ttl_s, patient=True, on_lost=lambda _: self.post(self._register_again))
        self._write_node()
        self.read_header()

    # The election.

    def _find_predecessor(self) -> None:
        """Lead if no node was here before this one, else watch the last one that was (etcd's client/v3/concurrency does so)."""
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor = None
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        found = self.client.last_created_before(self.prefix + "nodes/", self.created)
        if found.kv is None:
            logger.info("node %s leads the rendezvous", self.id)
            self.read_header()
            self._leader = Leader(self)
            self.on_time()
            return
        self._predecessor = Watch(
            self.client,
            found.kv.key,
            start_revision=found.revision + 1,
            callback=lambda item: self.post(lambda: self._on_predecessor(item)),
        )

    def _on_predecessor(self, item: Item) -> None:
        if not isinstance(item, Batch) or any(event.kind == "delete" for event in item.events):
            self._find_predecessor()

    # The round.

    def read_header(self) -> None:
        found = self.client.txn([], [Get(self.prefix + "round"), Get(f"{self.prefix}assign/{self.id}")])
        header, part = (response.kv for response in found.responses)  # type: ignore[union-attr]
        if part is not None:
            self.assignment = rounds.decode(Assignment, part.value, part.key.decode())
        if header is not None:
            self.saw_header(rounds.decode(Header, header.value, header.key.decode()), header.mod_revision)

    def saw_header(self, header: Header, revision: int) -> None:
        if revision > self.header_revision:
            self.header, self.header_revision = header, revision
            self._consider()
            self._on_change()

    def _on_header(self, item: Item) -> None:
        if not isinstance(item, Batch):
            return self._watch_again("round", self._on_header)
        event = item.events[-1]
        if event.kind == "put":
            self.saw_header(rounds.decode(Header, event.kv.value, event.kv.key.decode()), event.kv.mod_revision)
        if self._leader is not None:
            self.on_time()
        return None

    def _on_assignment(self, item: Item) -> None:
        if not isinstance(item, Batch):
            return self._watch_again(f"assign/{self.id}", self._on_assignment)
        event = item.events[-1]
        if event.kind == "put":
            self.assignment = rounds.decode(Assignment, event.kv.value, event.kv.key.decode())
            self._consider()
        return None

    def _watch_again(self, key: str, take: Callable[[Item], None]) -> None:
        """The watch has ended, its history was compacted away perhaps: read, then watch from there."""
        revision = self.client.revision(self.prefix + key)
        self.read_header()
        self._watch(key, take, revision)

    def _watch(self, key: str, take: Callable[[Item], None], revision: int) -> None:
        """Have `take` called on this thread with what happens to the key after `revision`."""
        key = self.prefix + key
        watch = Watch(self.client, key, start_revision=revision + 1, callback=lambda item: self.post(lambda: take(item)))
        self._watches.append(watch)

    def _consider(self) -> None:
        """If this node waits and has a part in the round that runs, take it. If that round is over already, say so.

        Both on this thread: a node that has taken its part never claims to wait.
        """
        node, part, header = self._node, self.assignment, self.header
        if node is None or self.joined is not None or part is None or not part.of(header) or node.after >= header.round:
            return
        if header.state is State.RUNNING:
            self.joined = (header, part)
            self._on_change()
        elif header.state is State.BROKEN:
            self._node = dataclasses.replace(node, after=header.round)
            self._write_node()

    def _done(self) -> None:
        if self._node is not None:
            self._node = dataclasses.replace(self._node, done=self.header.round)
            self._write_node()

    def _end_round(self, round_: int, state: State, reason: str) -> None:
        while self.header.state is not State.CLOSED and (state is State.CLOSED or self._runs(round_)):
            header = dataclasses.replace(self.header, state=state, reason=reason)
            key = self.prefix + "round"
            put = Put(key, rounds.encode(header), lease_id=self.job_lease)
            written = self.client.txn([unchanged(key, self.header_revision)], [put])
            if written.succeeded:
                self.saw_header(header, written.revision)
                return
            self.read_header()

    def _runs(self, round_: int) -> bool:
        return self.header.state is State.RUNNING and self.header.round == round_

    def _leave(self, timeout_s: float) -> None:
        for watch in (*self._watches, self._predecessor):
            if watch is not None:
                watch.close()
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        session, self._session, self._node = self._session, None, None
        if session is not None:
            try:
                session.revoke(timeout_s=timeout_s)
            except EtcdError as error:
                logger.warning("%s; the node's lease will expire by itself", error)


def _shown(job: dict[str, Any]) -> str:
    return f"--nnodes={job.get('min_nodes')}:{job.get('max_nodes')}"
