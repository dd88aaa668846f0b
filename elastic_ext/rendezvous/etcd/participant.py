"""One node's part in a job on etcd: it carries out what `rounds` decides. Knows nothing of torch.

Keys under /elastic_ext/<run id>/:

    job             what all nodes must agree on; the lease of what belongs to nobody
    round           the header of the rounds, watched by every node
    nodes/<id>      a node, under its own lease: gone when the node is
    last            id of the node that was created last, under that node's lease: the next one need not look for it
    assign/<id>     a node's part in the last round, watched by that node
    offers/<seal>/<rank>  what the node of this rank could resume from on its own disk, under that node's lease
    ledger          the failures of the job (see `job`), under a lease of its own: it outlives the job
    charges/<round> a restart that counts against the budget, under a lease of the budget's window
    refused/<host>  a host that was told to leave, under a lease that lets it come back

The leader is the node whose key was created first; every other one watches only the node that was created before it. A node
costs a fixed number of operations a round; only the leader reads all nodes. Whatever the leader writes compares the header's
revision and the leader's own key, so that a leader that has been cut off writes nothing.

Records may be lost while the nodes live: leases end when etcd is out of reach for longer than they last, and anybody may delete a
key. A record that is not there is a state like any other:

    nodes/<id>      its node writes it again, under a new lease where the old one is gone; the election goes by the new key
    job             the leader writes it again, under the old lease or a new one; another node that misses it, somewhat later
    round           the same; what is written is what the node remembers. A header that `precedes` what a node remembers was
                    brought back by one that had missed the news: it is replaced. So the newest that a node knows comes back.
    assign/<id>     its node writes it again, while the round is that of the header
    last, ledger, charges, refused: what is lost is forgotten

Each of these writes compares that the record is still missing. A round that runs goes on meanwhile: a node acts on the header
that it remembers, and a leader that was in the outage gives the members time to come back (`returning_until`) before it breaks
the round.

Invariant: the header that a node acts on never becomes an older one of the same job, so a round that is over stays over.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.etcd import (
    FROM_NOW,
    Batch,
    Began,
    Delete,
    EtcdClient,
    EtcdError,
    Get,
    LeaseLost,
    LeaseSession,
    Put,
    QuotaExceeded,
    Unavailable,
    Watch,
    absent,
    unchanged,
)
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.etcd.dispatcher import Dispatcher
from elastic_ext.rendezvous.etcd.job_records import Found, JobRecords, LostRace, Refused
from elastic_ext.rendezvous.etcd.leader import Judge, Leader
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.rounds import Assignment, Header, Limits, Node, State

logger = logging.getLogger(__name__)

ROOT = "/elastic_ext"
FRESH_SHARE = 0.6  # of the lease time left: the last renewal was not missed (one is due every third)
FOLLOW_S = 1.0  # a node that waits for a round watches its predecessor after this time; nothing is missed by it
RETURN_S = 8.0  # gRPC takes up to 5 to find a server again (min_reconnect_backoff_ms and a pause); and the time to say so
RETRY_S = 0.5  # after a call that no endpoint answered (its own deadline has passed by then), or that a full etcd refused


def returning_s(ttl_s: float) -> float:
    """Seconds that a leader which was in an outage gives members to come back. More than the fence gives them to train on."""
    return max(ttl_s, RETURN_S)


def wanted(header: Header, reason: str) -> Header:
    """The header with one more save on demand."""
    return dataclasses.replace(header, save=header.save + 1, reason=f"a save was asked for: {reason}")


class Participant:
    """A node in a job. Its methods return at once; `on_change` tells that one of the attributes is another.

    Set by the agent, asked on the leader: `may_grow` while nodes wait to join a round that runs; `judge` when nodes have reported
    failures.

    Attributes (replaced, never changed in place; read them from any thread):
        header: of the job's rounds, as last seen.
        joined: the round that this node has taken its part in since it was last ready, and that part; None while it waits.
        failure: why this node can take no further part; None while it can.
        full: what etcd says that takes no writes now, and has made something of this node wait; None while it takes them.

    For the leader:
        header_revision: of the header in etcd; 0: there is none.
        returning_until: see `rounds.View`.
    """

    def __init__(
        self,
        client: EtcdClient,
        loop: Dispatcher,
        run_id: str,
        node_id: str,
        limits: Limits,
        lease_ttl_s: int,
        on_change: Callable[[], None],
        host: str = "",
    ) -> None:
        self.client = client
        self.id = node_id
        self.limits = limits
        self.prefix = f"{ROOT}/{run_id}/"
        self.header = Header()
        self.assignment: Assignment | None = None
        self.joined: tuple[Header, Assignment] | None = None
        self.may_grow: Callable[[], bool] = lambda: True
        self.judge: Judge | None = None
        self.failure: Exception | None = None
        self.full: QuotaExceeded | None = None
        self.created = 0  # create revision of this node's key
        self.header_revision = 0
        self._returning_until: float | None = None
        self.job_lease = 0
        self._job = ""  # name of the job that this node has entered; another may begin under its run id while it is cut off
        self.ttl_s = lease_ttl_s
        self.reader = RecordReader()
        self._header_lost = 0  # revision of a header that cannot be read
        self._part_lost = False  # what lies in the place of this node's assignment cannot be read
        self._loop = loop
        self._on_change = on_change
        self._retried: set[Callable[[], None]] = set()  # work whose next try waits for its time
        self._refused: set[Callable[[], None]] = set()  # work that etcd was too full for at its last try
        self._records = JobRecords(client, self.prefix, limits, lease_ttl_s, host, self.reader)
        self._node: Node | None = None
        self._written: Node | None = None  # as etcd has it
        self._heard = 0  # revision of the last news of the header; that it is gone is news too
        self._offered = ""  # key of what this node has offered last
        self._began = 0  # watches that the server has
        self._session: LeaseSession | None = None
        self._watches: list[Watch] = []
        self._predecessor: Watch | None = None
        self._to_follow: tuple[str, int] | None = None  # key of the predecessor, and a revision at which it was there
        self._leader: Leader | None = None

    # What the node's agent says.

    def ready(self, node: Node) -> None:
        """Wait for the next round as `node`."""
        self.post(lambda: self._ready(node))

    def done(self) -> None:
        """The workers of this node have finished the round well."""
        self.post(self._done)

    def report(self, round_: int, text: str, follows: bool = False) -> None:
        """The workers of this node have been stopped; text (see `job`) tells what had failed in this round. follows: see Node."""
        self.post(lambda: self._say(reported=round_, report=text, follows=follows))

    def stalled(self, round_: int, stalled: bool) -> None:
        """Whether all workers of this node stall in this round. When those of all nodes do, the round ends."""
        self.post(lambda: self._say(stalled=round_ if stalled else 0))

    def end_round(self, round_: int, state: State, reason: str) -> None:
        """Break round `round_`, or close the job, for all nodes."""
        self.post(lambda: self._end_round(round_, state, reason))

    def request_save(self, round_: int, reason: str) -> None:
        """Have all nodes of round `round_` save a checkpoint at one step boundary."""
        self.post(lambda: self._change_header(round_, lambda header: wanted(header, reason)))

    def offer(self, seal: str, rank: int, text: str) -> None:
        """Tell the node of rank 0 what this one could resume from on its own disk. seal: of the round."""
        self.post(lambda: self._offer(f"{self.offers_of(seal)}{rank}", text))

    def offers_of(self, seal: str) -> str:
        """Where the nodes of a round tell so: the keys' common beginning."""
        return f"{self.prefix}offers/{seal}/"

    def chosen(self, round_: int, text: str) -> None:
        """The node of rank 0 has looked: all nodes of round `round_` resume from this."""
        self.post(lambda: self._change_header(round_, lambda header: dataclasses.replace(header, resume=text)))

    def saved(self, number: int, step: int) -> None:
        """The save on demand with this number is complete."""
        self.post(lambda: self._say(saved=number, saved_step=step))

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
    def lease(self) -> tuple[int | None, float]:
        """Its id, and the monotonic time until which the others hold this node for alive, whatever happens; of one moment."""
        session = self._session
        return (session.lease_id, session.alive_until) if session is not None else (None, float("inf"))

    # For the loop: everything below runs on its thread.

    def post(self, work: Callable[[], None]) -> None:
        self._loop.post(self, work)

    def run(self, work: Callable[[], None]) -> None:
        """Run one piece of work; what etcd cannot do now is done again, what can never be done ends this node's part.

        A full etcd is the first for a node that is in the job (somebody will make room, and until then it must not be missing
        where it leads), and the second for one that comes.
        """
        if self.failure is not None:
            return
        try:
            work()
            self._note_done(work)
        except LeaseLost:
            self.post(self._recover)
            self._retry(work)
        except LostRace as error:
            logger.debug("rendezvous: %s", error)
            self._retry(work)
        except (EtcdError, RecordError, Refused, UsageError) as error:
            if isinstance(error, Unavailable):
                logger.debug("rendezvous: %s", error)
                self._retry(work)
            elif isinstance(error, QuotaExceeded) and self.created:
                self._note_full(error, work)
                self._retry(work)
            else:
                self._fail(error)
        except Exception as error:  # the top of the rendezvous thread: the agent must be told
            logger.exception("the rendezvous of node %s failed", self.id)
            self._fail(error)

    def _note_full(self, error: QuotaExceeded, work: Callable[[], None]) -> None:
        """One line when the trouble begins, one when it ends."""
        if self.full is None:
            logger.warning("%s; what runs goes on, but no new round can be formed until then", error)
        self.full = error
        self._refused.add(work)

    def _note_done(self, work: Callable[[], None]) -> None:
        self._refused.discard(work)
        if self.full is not None and not self._refused:
            logger.info("etcd takes writes again")
            self.full = None

    def _retry(self, work: Callable[[], None]) -> None:
        if work in self._retried:
            return  # the leader's look: each event asks for it
        self._retried.add(work)
        timer = threading.Timer(RETRY_S, self.post, (lambda: self._again(work),))
        timer.daemon = True
        timer.start()

    def _again(self, work: Callable[[], None]) -> None:
        self._retried.discard(work)
        self.run(work)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._on_change()

    def on_time(self) -> None:
        if self._leader is not None:
            self._loop.wake_at(self, self._leader.act(time.monotonic()))
        else:
            self._follow()

    # Entering.

    def _ready(self, node: Node) -> None:
        self._node = node
        self.joined = None
        self.run(self._go_on)  # tried again by itself: what this node says of itself by then stays said

    def _go_on(self) -> None:
        if self._node is None:
            return None  # it has left meanwhile
        if self.created == 0:
            return self._enter()
        if self._session is not None:
            self._renew(self._session)
        self._write_node()
        return self._consider()

    def _renew(self, session: LeaseSession) -> None:
        """After an outage a round may be there before the next renewal is due: the fence would take this node for cut off."""
        if session.alive_until - time.monotonic() > FRESH_SHARE * session.ttl_s:
            return
        kept = self.client.lease_keep_alive([session.lease_id])
        ttl_s = kept.ttl_s.get(session.lease_id, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {session.lease_id:x} is gone")
        session.renewed(kept.sent_at, ttl_s)

    def _enter(self) -> None:
        """Grant, watch, and only then read and write: what is written after a watch began is delivered."""
        if self._session is None:
            self._session = self._grant()
        if not self._watches:
            self._watch("round", self._on_header, FROM_NOW)
            self._watch(f"assign/{self.id}", self._on_assignment, FROM_NOW)
            self._watch(f"nodes/{self.id}", self._on_own_key, FROM_NOW, deletes_only=True)
        if self._began < len(self._watches):
            return  # _on_began goes on
        entered = self._records.enter_new(self._key, self._registration())
        if entered is not None:
            found, written, last = entered
            self._take(found)
            self._registered(written.revision, last)
        else:
            self._take(self._records.agree())
            self._write_node()
        self._consider()

    def _take(self, found: Found) -> None:
        self.job_lease, self.header, self.header_revision = found.lease_id, found.header, found.revision
        self._heard = max(self._heard, found.revision)
        self._job = found.header.job

    def _grant(self) -> LeaseSession:
        return LeaseSession(
            self.client, self.ttl_s, patient=True, on_lost=lambda lost: self.post(lambda: self._register_again(lost))
        )

    @property
    def _key(self) -> str:
        return f"{self.prefix}nodes/{self.id}"

    def _registration(self) -> list[Op]:
        """Create this node's key; learn who did so last, and be the one."""
        put, last = self._put_node(), self.prefix + "last"
        return [Get(last), put, Put(last, self.id, lease_id=put.lease_id)]

    def _put_node(self) -> Put:
        assert self._node is not None
        assert self._session is not None
        return Put(self._key, rounds.encode(self._node), lease_id=self._session.lease_id)

    def _write_node(self) -> None:
        if self._written is self._node:
            return
        if self._node is None or self._session is None:
            return  # it has left meanwhile
        written = self.client.txn([absent(self._key)], self._registration(), [Get(self._key), self._put_node()])
        found = written.readings[0].kv
        if written.succeeded:
            self._registered(written.revision, found)
        elif found is not None and found.create_revision != self.created:
            self._registered(found.create_revision, None)  # an earlier try has created it, and its answer was lost
        else:
            self._written = self._node

    def _registered(self, revision: int, last: KeyValue | None) -> None:
        """revision: at which this node's key was created. last: the key of that name, as it was before; None if not known."""
        self.created = revision
        self._written = self._node
        # As work of its own: tried again by itself until it is done. And after all that a starting job waits for.
        self.post(lambda: self._find_predecessor(last) if revision == self.created else None)

    def _register_again(self, lost: LeaseSession) -> None:
        """The lease is lost, this process is not: the same node with a new lease."""
        if self._session is not lost or self._node is None:
            return
        lost.orphan()
        session = self._grant()
        self._session = session
        if self.created == 0:  # it was about to enter; that is tried again
            return
        self.expect_back()
        self.run(self.write_again)  # each is tried again by itself: this lease is not lost again
        self.run(self.restore)

    def write_again(self) -> None:
        """This node's own key, which is gone or written over. It tells which round its workers are in: nothing else may know
        of that round.
        """
        if self._node is None or self._session is None:
            return
        self._node = dataclasses.replace(self._node, round=self.joined[0].round if self.joined is not None else 0)
        self._written = None
        self._write_node()

    # What is lost, and comes back.

    def expect_back(self) -> None:
        """Records are or were lost, or this node has been cut off for long: so may the others have been."""
        self._returning_until = time.monotonic() + returning_s(self.ttl_s)

    @property
    def returning_until(self) -> float | None:
        session = self._session
        if session is not None and session.late:
            self.expect_back()
        elif session is not None and session.late_at is not None:
            until = session.late_at + returning_s(self.ttl_s)
            return until if self._returning_until is None else max(until, self._returning_until)
        return self._returning_until

    def _recover(self) -> None:
        """Etcd says of a lease that it is gone: this node's own, or that of the job's records."""
        session = self._session
        if session is None or self._node is None:
            return
        if self.client.lease_keep_alive([session.lease_id]).ttl_s.get(session.lease_id, 0) <= 0:
            self._register_again(session)
        elif self.created:
            self.restore()

    def restore(self) -> None:
        """Write again what of the job's records and of this node's is missing and known here. Nothing happens where all is there.

        Raises:
            LostRace: somebody else writes at the same time; to be tried again.
        """
        if self._node is None or self.created == 0:
            return
        self.job_lease = self._records.bring_back(self.job_lease, self._job)
        key, mine = self.prefix + "round", f"{self.prefix}assign/{self.id}"
        read = self.client.txn([], [Get(key), Get(mine), Get(self._key)])
        header, part, me = (reading.kv for reading in read.readings)
        self._heard_of(header, read.revision)
        self._job = self.header.job  # it has the same settings
        found = self._readable(header) if header is not None else None
        if rounds.brings_back(found, self.header):
            put = Put(key, rounds.encode(self.header), lease_id=self.job_lease)
            written = self.client.txn([unchanged(key, self.header_revision)], [put])
            if not written.succeeded:
                raise LostRace("the header was written by another node at the same time")
            self._heard = self.header_revision = written.revision
            self.expect_back()
            logger.warning("the job's records in etcd were lost: round %s is written again", self.header.round)
        there = part is not None and self.reader.assignment(part) is not None
        if not there and self.assignment is not None and self.assignment.of(self.header):
            put = Put(mine, rounds.encode(self.assignment), lease_id=self.job_lease)
            same = unchanged(mine, part.mod_revision if part is not None else 0)
            if not self.client.txn([same, unchanged(key, self.header_revision)], [put]).succeeded:
                raise LostRace("the header changed while this node's part was written again")
        if me is None:
            self.write_again()

    def _restore_later(self) -> None:
        """The leader does so now; if it lives, there is nothing left to do for this node but its own keys."""
        if self._leader is not None:
            self.post(self.restore)
        else:
            self._retry(self.restore)

    def _heard_of(self, header: KeyValue | None, revision: int) -> None:
        """What etcd holds at this revision, or later, is news; what it held before is not. revision: of the reading."""
        if (header.mod_revision if header is not None else revision) < self._heard:
            # Readings are linearizable: this is another store, set up anew or from a backup, whatever was written there since.
            self._heard = 0
        if header is not None:
            self._saw(self._readable(header), header.mod_revision)
        elif revision > self._heard:
            self._heard, self.header_revision = revision, 0
            if rounds.brings_back(None, self.header):
                self.expect_back()

    def _on_own_key(self, item: Item) -> None:
        if isinstance(item, Began):
            return self._on_began()
        if not isinstance(item, Batch):
            self._watch_again(f"nodes/{self.id}", self._on_own_key, deletes_only=True)
            return self._restore_later()  # it may be gone, and the history that says so
        if item.revision > self.created and self._node is not None:
            self._restore_later()
        return None

    # The election.

    def _find_predecessor(self, last: KeyValue | None = None) -> None:
        """Lead if no node was here before this one, else watch the last one that was (etcd's client/v3/concurrency does so).

        To ask for it makes etcd sort all nodes. `last` tells it for nothing, of a node that was there when this one was created:
        that key is under the lease of the node that it names.
        """
        if self._node is None:
            return None  # it has left meanwhile
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor = None
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        self._to_follow = None
        if last is not None and last.lease_id:  # without a lease somebody else has written it
            key = self.prefix + "nodes/" + last.value.decode(errors="replace")
            if key != self._key and self.reader.id_of(self.prefix + "nodes/", key.encode()) is not None:
                self._to_follow = (key, self.created)
                return self._loop.wake_at(self, time.monotonic() + FOLLOW_S)  # or in the round: forming it comes first
        self._to_follow = self._node_before()
        if self._to_follow is not None:
            return self._follow()
        logger.info("node %s leads the rendezvous", self.id)
        self.read_header()
        self._leader = Leader(self)
        return self.on_time()

    def _node_before(self) -> tuple[str, int] | None:
        """Key of the node that was created last before this one, and a revision at which it was there.

        What is no node leads nobody: then all are looked at for one that is.
        """
        folder = self.prefix + "nodes/"
        found = self.client.last_created_before(folder, self.created)
        if found.kv is not None and not self._is_node(found.kv):
            found = self.client.get_prefix(folder)
        nodes = [kv for kv in found.kvs if kv.create_revision < self.created and self._is_node(kv)]
        before = max(nodes, key=lambda kv: kv.create_revision, default=None)
        return (before.key.decode(), found.revision) if before is not None else None

    def _is_node(self, kv: KeyValue) -> bool:
        named = self.reader.id_of(self.prefix + "nodes/", kv.key) is not None
        return named and self.reader.node(kv) is not None

    def _follow(self) -> None:
        if self._to_follow is None or self._node is None:
            return
        (key, revision), self._to_follow = self._to_follow, None
        self._predecessor = Watch(
            self.client, key, start_revision=revision + 1, callback=lambda item: self.post(lambda: self._on_predecessor(item))
        )

    def _on_predecessor(self, item: Item) -> None:
        """It is gone; or it has registered again, and is a predecessor no more."""
        if not isinstance(item, Batch) or any(
            event.kind == "delete" or event.kv.create_revision > self.created for event in item.events
        ):
            self._find_predecessor()

    # The round.

    def read_header(self) -> None:
        found = self.client.txn([], [Get(self.prefix + "round"), Get(f"{self.prefix}assign/{self.id}")])
        header, part = (reading.kv for reading in found.readings)
        if part is not None:
            self._take_part(part)
        self._heard_of(header, found.revision)
        if rounds.brings_back(self._readable(header) if header is not None else None, self.header):
            self._restore_later()

    def _take_part(self, kv: KeyValue) -> None:
        part = self.reader.assignment(kv)
        self._part_lost = part is None
        self.assignment = part if part is not None else self.assignment
        if part is None and self.assignment is not None and self.assignment.of(self.header) and self._node is not None:
            self._restore_later()

    def _readable(self, kv: KeyValue) -> Header:
        """One that cannot be read changes nothing: what was known holds, and the leader writes it again in its place."""
        header = self.reader.header(kv)
        if header is None and kv.mod_revision > self._heard:
            self._header_lost = kv.mod_revision
        return header if header is not None else self.header

    @property
    def header_lost(self) -> bool:
        """What lies in the header's place cannot be read; `header` is what was there before."""
        return 0 < self._header_lost == self.header_revision

    def saw_header(self, header: Header, revision: int) -> None:
        if self._saw(header, revision) and rounds.precedes(header, self.header):
            self._restore_later()

    def _saw(self, header: Header, revision: int) -> bool:
        """Whether this is news."""
        if revision <= self._heard:
            return False
        self._heard = self.header_revision = revision
        if not rounds.precedes(header, self.header):
            self.header = header
            self._job = self._job or header.job
            self._consider()
            self._on_change()
        return True

    def _on_header(self, item: Item) -> None:
        if isinstance(item, Began):
            return self._on_began()
        if not isinstance(item, Batch):
            return self._watch_again("round", self._on_header)
        event = item.events[-1]
        if event.kind == "put":
            self.saw_header(self._readable(event.kv), event.kv.mod_revision)
        elif event.kv.mod_revision > self._heard:
            self._heard_of(None, event.kv.mod_revision)
            if rounds.brings_back(None, self.header):
                self._restore_later()
        if self._leader is not None:
            self.on_time()
        return None

    def _on_assignment(self, item: Item) -> None:
        if isinstance(item, Began):
            return self._on_began()
        if not isinstance(item, Batch):
            return self._watch_again(f"assign/{self.id}", self._on_assignment)
        event = item.events[-1]
        if event.kind == "put":
            self._take_part(event.kv)
            self._consider()
        elif self.assignment is not None and self.assignment.of(self.header) and self._node is not None:
            self._restore_later()
        return None

    def _on_began(self) -> None:
        self._began += 1
        self.run(self._go_on)

    def _watch_again(self, key: str, take: Callable[[Item], None], deletes_only: bool = False) -> None:
        """The watch has ended, its history was compacted away perhaps: read, then watch from there."""
        revision = self.client.revision(self.prefix + key)
        self.read_header()
        self._watch(key, take, revision + 1, deletes_only)

    def _watch(self, key: str, take: Callable[[Item], None], start_revision: int, deletes_only: bool = False) -> None:
        """Have `take` called on this thread with what happens to the key."""
        key = self.prefix + key
        watch = Watch(
            self.client,
            key,
            start_revision=start_revision,
            callback=lambda item: self.post(lambda: take(item)),
            deletes_only=deletes_only,
        )
        self._watches.append(watch)

    def _consider(self) -> None:
        """If this node waits and has a part in the round that runs, take it. If that round is over already, say so.

        Both on this thread: a node that has taken its part never claims to wait.
        """
        node, part, header = self._node, self.assignment, self.header
        if node is None or self.joined is not None or node.after >= header.round:
            return
        if part is None or not part.of(header):
            if self._part_lost and header.state is State.RUNNING:  # it may be in this round, and can never learn how
                self._say(after=header.round)
            return
        if header.state is State.RUNNING:
            self.joined = (header, part)
            self._on_change()
            self.post(self._follow)
        elif header.state is State.BROKEN:
            self._say(after=header.round)

    def _done(self) -> None:
        if self.joined is not None:
            self._say(done=self.joined[0].round)

    def _say(self, **said: Any) -> None:
        """Said once; only the writing is tried again: nothing that this node has said since is taken back, whatever fails."""
        if self._node is not None and (node := dataclasses.replace(self._node, **said)) != self._node:
            self._node = node
            self.run(self._write_node)

    def _offer(self, key: str, text: str) -> None:
        """In place of what was offered in the round before."""
        if self._session is None or not key.startswith(self.offers_of(self.header.seal)):  # tried again, and too late
            return
        before = [Delete(self._offered)] if self._offered not in ("", key) else []
        self.client.txn([], [Put(key, text, lease_id=self._session.lease_id), *before])
        self._offered = key

    def _end_round(self, round_: int, state: State, reason: str) -> None:
        self._change_header(round_, lambda header: dataclasses.replace(header, state=state, reason=reason), state is State.CLOSED)

    def _change_header(self, round_: int, change: Callable[[Header], Header], in_any_round: bool = False) -> None:
        """Write what `change` makes of the header, if that round runs (or the job is not closed).

        Raises:
            LostRace: the header in etcd changes, but not to what this node would see; to be tried again.
        """
        while self.header.state is not State.CLOSED and (in_any_round or self._runs(round_)):
            header, before = change(self.header), self.header_revision
            key = self.prefix + "round"
            put = Put(key, rounds.encode(header), lease_id=self.job_lease)
            written = self.client.txn([unchanged(key, self.header_revision)], [put])
            if written.succeeded:
                self.saw_header(header, written.revision)
                return
            self.read_header()
            if self.header_revision == before:
                raise LostRace("the header was written by another node at the same time")

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
