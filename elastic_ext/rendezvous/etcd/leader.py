"""The leader's part: it alone reads all nodes, asks `rounds` what to do, and writes it.

Invariant: each of its writes compares the header that it acted on and its own key, so a leader that has been cut off, or that is
late, changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_ext.etcd import FROM_NOW, Batch, Began, Compare, Delete, LeaseLost, Put, Snapshot, Watch, absent, unchanged
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.etcd.watch import Item
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.rounds import End, Header, Node, Seal, State, View, Wait

if TYPE_CHECKING:
    from elastic_ext.rendezvous.etcd.participant import Participant

logger = logging.getLogger(__name__)

REST_FACTOR = 3  # a look costs as much as there are nodes; among thousands that come at once the leader has more to do than look
MOST_REST_S = 0.05
AGAIN_S = 0.5  # after a write that failed for a reason which is not seen yet; its news bring the next look at once
LEDGER_TTL_S = 7 * 24 * 3600  # after the last failure
OPS_PER_TXN = 120  # etcd's default limit is 128 (--max-txn-ops)


@dataclass(frozen=True)
class Judged:
    """What the agent of the leader makes of the reports; records of `job`.

    Attributes:
        state: of the job after it: BROKEN if it goes on, else CLOSED.
        charged: the restart counts against the budget, for `window_s` seconds (0: without end).
        refunded: none of those before counts any more.
        refused: host that may not come back for `refused_s` seconds; "": none.
    """

    state: State
    reason: str
    verdict: str
    ledger: str
    charged: bool = False
    refunded: bool = False
    window_s: int = 0
    refused: str = ""
    refused_s: int = 0


@dataclass(frozen=True)
class Reports:
    """What nodes have reported on the end of a round.

    Attributes:
        texts: records of `job`, by id of the node.
        orders: etcd's revision of each, by id.
        lost: members of the round that are gone.
        nodes: how many there are now.
        charges: restarts that count against the budget and whose time (see Judged) is not over.
    """

    round: int
    texts: Mapping[str, str]
    orders: Mapping[str, int]
    lost: tuple[str, ...]
    nodes: int
    charges: int


Judge = Callable[[Reports, str], Judged]  # the reports and the ledger, "" for a new one


class Leader:
    """Made when this node becomes the leader; belongs to the thread of the node's loop.

    Invariant: it writes only while the key by which this node came to lead is there. A node that had to register again may be
    behind others by then; between that and its next look at who leads, this one is still there.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._created = participant.created
        self._nodes: dict[str, Node] = {}
        self._joined: dict[str, int] = {}
        self._told: dict[str, int] = {}  # revision of what it said last
        self._members: dict[str, int] = {}
        self._members_of: tuple[int, str] = (0, "")  # round and seal
        self._load_at = 0.0
        self._last_arrival = time.monotonic()
        self._reported: tuple[int, float] | None = None  # a round, and when the first report on it was seen
        self._renew_job_at = 0.0
        self._prefix = participant.prefix + "nodes/"
        self._rests_until = 0.0
        self._called = False  # a look at the news waits on the loop already: one for many events
        self._written_over: dict[str, KeyValue] = {}  # what cannot be read, of nodes that this leader has not known
        self._known: dict[str, tuple[Node, int]] = {}  # what each node said last that could be read, and its lease
        self._load_members()  # first: where it fails this is made again, and nothing would close the watch
        self._watch = participant.client.watch_with_snapshot(self._prefix, on_news=self._call)
        self._closed = False
        self._watch_job()

    def _watch_job(self) -> None:
        participant = self._participant
        self._job_watch = Watch(
            participant.client,
            participant.prefix + "job",
            start_revision=FROM_NOW,
            callback=lambda item: participant.post(lambda: self._on_job(item)),
        )

    def _on_job(self, item: Item) -> None:
        """The watch begins or ends, or somebody has written or deleted the record: see that it is there, and ours."""
        if self._closed:
            return
        self._participant.restore()
        if not isinstance(item, Batch | Began):
            self._watch_job()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._participant.post(self._participant.on_time)

    def close(self) -> None:
        self._closed = True
        self._watch.close()
        self._job_watch.close()

    def act(self, now: float) -> float:
        """Do all that there is to do; return the monotonic time of the next look."""
        if now < self._rests_until:
            return self._rests_until
        self._called = False  # before the news are read: what comes later is another call
        participant = self._participant
        if now >= self._renew_job_at:
            self._renew_job(now)
        self._read_nodes(now)
        if participant.header_lost:
            self._write_header(participant.header)
        while True:
            if participant.header_revision == 0 and rounds.brings_back(None, participant.header):
                participant.restore()
            self._know_members(now)
            self._clear_written_over()
            view = self._view()
            action = rounds.next_action(view, self._participant.limits, now)
            if isinstance(action, Wait):
                looked = time.monotonic()
                self._rests_until = looked + min(REST_FACTOR * (looked - now), MOST_REST_S)
                return min(action.until or self._renew_job_at, self._renew_job_at)
            logger.info("rendezvous: %s", action.reason)
            before = participant.header_revision
            if isinstance(action, Seal):
                self._seal(view, action)
            elif isinstance(action, rounds.Conclude):
                self._judge(view, action)
            else:
                self._end(action)
            if participant.header_revision == before:
                # Nothing was written and nothing is new: this node's own key is gone, say, and it leads no more.
                return now + AGAIN_S

    def _view(self) -> View:
        header = self._participant.header
        returning = self._participant.returning_until
        view = View(header, self._nodes, self._joined, self._members, self._last_arrival, returning_until=returning)
        if rounds.reports(view):
            if self._reported is None or self._reported[0] != header.round:
                self._reported = (header.round, time.monotonic())
            return dataclasses.replace(view, reported_at=self._reported[1])
        if header.state is State.RUNNING and rounds.waiting(view) and not self._participant.may_grow():
            return dataclasses.replace(view, may_grow=False)
        return view

    def _read_nodes(self, now: float) -> None:
        reader = self._participant.reader
        while (item := self._watch.get(timeout_s=0)) is not None:
            if isinstance(item, Snapshot):
                self._nodes, self._joined = {}, {}
                for kv in item.kvs:
                    self._put(kv, now)
            elif isinstance(item, Batch):
                for event in item.events:
                    if event.kind == "put":
                        self._put(event.kv, now)
                    elif (id_ := reader.id_of(self._prefix, event.kv.key)) is not None:
                        self._nodes.pop(id_, None)
                        self._known.pop(id_, None)

    def _put(self, kv: KeyValue, now: float) -> None:
        """A node's record, or what somebody else has put there: that is no node."""
        id_ = self._participant.reader.id_of(self._prefix, kv.key)
        if id_ is None:
            return None
        node = self._participant.reader.node(kv)
        if node is None:
            return self._put_back(id_, kv)
        if id_ not in self._nodes:
            self._last_arrival = now
        self._known[id_] = node, kv.lease_id
        self._nodes[id_] = node
        self._joined[id_] = kv.create_revision
        self._told[id_] = kv.mod_revision
        if self._participant.header.round == 0 < node.round:
            self._participant.expect_back()
        return None

    def _put_back(self, id_: str, kv: KeyValue) -> None:
        """A node's record was written over: put back what it had said, under its lease, so that its end will be seen.

        The node counts as it was meanwhile. Whoever was none before is none.
        """
        participant = self._participant
        if id_ not in self._known:
            self._written_over[id_] = kv
            return
        node, lease_id = self._known[id_]
        same = unchanged(kv.key, kv.mod_revision)
        try:
            participant.client.txn([same], [Put(kv.key, rounds.encode(node), lease_id=lease_id)])
            self._nodes[id_] = node
            self._joined.setdefault(id_, kv.create_revision)
        except LeaseLost:  # it has ended since, and nothing would take away what lies in its place
            participant.client.txn([same], [Delete(kv.key)])

    def _clear_written_over(self) -> None:
        """A member's record that was written over before this leader had read it: its node writes it again once it is gone."""
        for id_ in self._written_over.keys() & self._members.keys():
            kv = self._written_over.pop(id_)
            self._participant.client.txn([unchanged(kv.key, kv.mod_revision)], [Delete(kv.key)])

    def _know_members(self, now: float) -> None:
        """Of a round that this leader has not sealed, and while parts of the round are missing."""
        header = self._participant.header
        missing = len(self._members) < header.nodes
        if self._members_of != (header.round, header.seal) or (missing and now >= self._load_at):
            self._load_members()
            self._load_at = now + rounds.PARTS_LOOK_S

    def _load_members(self) -> None:
        prefix, header, reader = self._participant.prefix + "assign/", self._participant.header, self._participant.reader
        known, self._members = self._members_of, {}
        for kv in self._participant.client.get_prefix(prefix).kvs:
            id_, part = reader.id_of(prefix, kv.key), reader.assignment(kv)
            if id_ is not None and part is not None and part.of(header):
                self._members[id_] = part.rank
        self._members_of = (header.round, header.seal)
        if known != self._members_of and len(self._members) < header.nodes:
            self._participant.expect_back()  # some parts are lost; each node writes its own again

    def _write_header(self, header: Header) -> bool:
        participant = self._participant
        done = participant.client.txn(
            self._compares(), [Put(participant.prefix + "round", rounds.encode(header), lease_id=participant.job_lease)]
        )
        if done.succeeded:
            participant.saw_header(header, done.revision)
        else:
            self._look_again()
        return done.succeeded

    def _seal(self, view: View, action: Seal) -> None:
        participant = self._participant
        header, parts = rounds.seal(view, action, secrets.token_hex(4))
        puts = [
            Put(f"{participant.prefix}assign/{id_}", rounds.encode(part), lease_id=participant.job_lease)
            for id_, part in parts.items()
        ]
        for at in range(0, len(puts), OPS_PER_TXN):
            if not participant.client.txn(self._compares(), puts[at : at + OPS_PER_TXN]).succeeded:
                return self._look_again()
        # Before the header: the header's arrival makes this very node take its part.
        members, self._members = self._members, {id_: part.rank for id_, part in parts.items()}
        self._members_of = (header.round, header.seal)
        if not self._write_header(header):
            return None
        left = [Delete(f"{participant.prefix}assign/{id_}") for id_ in members if id_ not in parts and id_ not in self._nodes]
        for at in range(0, len(left), OPS_PER_TXN):
            participant.client.txn(self._compares(), left[at : at + OPS_PER_TXN])
        return None

    def _end(self, action: End) -> None:
        self._write_header(dataclasses.replace(self._participant.header, state=action.state, reason=action.reason))

    def _judge(self, view: View, action: rounds.Conclude) -> None:
        """One verdict for all, and the ledger that it rests on, in one transaction."""
        participant = self._participant
        key, charges = participant.prefix + "ledger", participant.prefix + "charges/"
        ledger = participant.client.get(key).kv
        spent = [kv for kv in participant.client.get_prefix(charges, keys_only=True).kvs if kv.key[len(charges) :].isdigit()]
        reports = Reports(
            view.header.round,
            {id_: view.nodes[id_].report for id_ in action.nodes},
            {id_: self._told[id_] for id_ in action.nodes},
            rounds.lost(view),
            len(view.nodes),
            len(spent),
        )
        assert participant.judge is not None, "only agents report, and they judge"
        judged = participant.judge(reports, ledger.value.decode(errors="replace") if ledger is not None else "")
        if ledger is not None and ledger.lease_id:  # it outlives the job, for a scheduler that starts it again
            lease_id = ledger.lease_id
            participant.client.lease_keep_alive([lease_id])
        else:
            lease_id = participant.client.lease_grant(LEDGER_TTL_S).lease_id
        header = dataclasses.replace(view.header, state=judged.state, reason=judged.reason, verdict=judged.verdict)
        compares = [*self._compares(), unchanged(key, ledger.mod_revision) if ledger is not None else absent(key)]
        puts: list[Op] = [
            Put(participant.prefix + "round", rounds.encode(header), lease_id=participant.job_lease),
            Put(key, judged.ledger, lease_id=lease_id),
        ]
        if judged.refunded:  # before, for a transaction may not delete and write in one range
            participant.client.txn(self._compares(), [Delete(charges, prefix=True)])
        if judged.charged and judged.window_s:
            # No clock is compared: etcd itself takes the charge away when its time is over.
            counts = participant.client.lease_grant(judged.window_s).lease_id
            puts.append(Put(f"{charges}{view.header.round}", "", lease_id=counts))
        if judged.refused:
            refused = participant.client.lease_grant(judged.refused_s).lease_id
            puts.append(Put(f"{participant.prefix}refused/{judged.refused}", judged.reason, lease_id=refused))
        done = participant.client.txn(compares, puts)
        if done.succeeded:
            participant.saw_header(header, done.revision)
        else:
            self._look_again()

    def _compares(self) -> list[Compare]:
        participant = self._participant
        return [
            unchanged(participant.prefix + "round", participant.header_revision),
            Compare(f"{self._prefix}{participant.id}", "create", "=", self._created),
        ]

    def _look_again(self) -> None:
        """Somebody else wrote first, or an answer was lost and it was this node."""
        self._participant.read_header()
        self._load_members()

    def _renew_job(self, now: float) -> None:
        """Keep alive what belongs to nobody. It outlives the last node for a while, and the leaders in between."""
        participant = self._participant
        ttl_s = participant.client.lease_keep_alive([participant.job_lease]).ttl_s.get(participant.job_lease, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {participant.job_lease:x} of the job's records is gone")
        self._renew_job_at = now + ttl_s / 3
