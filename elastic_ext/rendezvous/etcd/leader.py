"""The leader's work: it alone reads all nodes, asks `rounds` for the next action, and carries it out.

Invariant: each of its writes compares its own key and the header that it acted on, so a leader that was cut off or is late
changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable

from elastic_ext.etcd import Compare, Delete, Put
from elastic_ext.rendezvous import drains, rounds
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord
from elastic_ext.rendezvous.etcd.job_upkeep import JobUpkeep
from elastic_ext.rendezvous.etcd.members import Members
from elastic_ext.rendezvous.etcd.node_records import NodeRecords
from elastic_ext.rendezvous.etcd.outage import Outage
from elastic_ext.rendezvous.etcd.verdict import LeaderPolicy, RoundReports, write_verdict
from elastic_ext.rendezvous.round_records import Header, State, encode
from elastic_ext.rendezvous.rounds import Action, Amend, Conclude, End, Release, Seal, View, Wait

logger = logging.getLogger(__name__)

REST_FACTOR = 3  # a look costs time in proportion to the nodes; when thousands come at once, the leader has other work too
MAX_REST_S = 0.05
AGAIN_S = 0.5  # after a write that failed for a reason not seen yet; its event brings the next look at once
OPS_PER_TXN = 120  # etcd's default limit is 128 (--max-txn-ops)


class FirstSeen:
    """When the leader has first seen each fact about the current round."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._round = 0
        self._at: dict[str, float] = {}

    def at(self, round_: int, fact: str) -> float:
        """Return the monotonic time; now, if it is new."""
        if round_ != self._round:
            self._round, self._at = round_, {}
        return self._at.setdefault(fact, self._now())


class Leader:
    """Created when this node becomes the leader, closed when it stops leading. For the rendezvous thread.

    Invariant: it writes only while the key by which this node came to lead exists. A node that had to register again may be
    behind others by then; until its next look at who leads, this object still exists.
    """

    def __init__(
        self,
        context: NodeContext,
        header: HeaderRecord,
        created: int,
        outage: Outage,
        policy: LeaderPolicy,
        restore: Callable[[], None],
    ) -> None:
        """
        Args:
            created: create revision of this node's key.
            restore: writes lost records of the job again.
        """
        self._context = context
        self._header = header
        self._outage = outage
        self._policy = policy
        self._restore = restore
        self._still_leading = Compare(context.own_key, "create", "=", created)
        self._seen = FirstSeen(context.tasks.now)
        self._rests_until = 0.0
        self._look_posted = False  # a look at the events is already queued: one for many events
        self._members = Members(context, header, outage)
        self._members.load()  # first: if it fails, this object is created again, and nothing would close the watches
        self._records = NodeRecords(context, self._post_look, self._on_member_of_lost_round)
        self._upkeep = JobUpkeep(context, header, restore)

    def close(self) -> None:
        self._upkeep.close()
        self._records.close()

    def _post_look(self) -> None:
        if not self._look_posted:
            self._look_posted = True
            self._context.tasks.post(self._context.tasks.on_timer)

    def _on_member_of_lost_round(self) -> None:
        if self._header.value.round == 0:
            self._outage.expect_members()

    def act(self, now: float) -> float:
        """Do all that there is to do; return the monotonic time of the next look."""
        if now < self._rests_until:
            return self._rests_until
        self._look_posted = False  # before the events are read: later events post another look
        self._upkeep.renew(now)
        self._records.read(now)
        header = self._header
        if header.unreadable:
            self.write_header(header.value)
        while True:
            if header.revision == 0 and rounds.needs_restoring(None, header.value):
                self._restore()
            self._members.refresh(now)
            self._records.clear_overwritten(self._members.ranks)
            view = self._view()
            action = rounds.next_action(view, self._context.config.limits, now)
            if isinstance(action, Wait):
                looked = self._context.tasks.now()
                self._rests_until = looked + min(REST_FACTOR * (looked - now), MAX_REST_S)
                return min(action.until or self._upkeep.renew_at, self._upkeep.renew_at)
            logger.info("rendezvous: %s", action.reason)
            before = header.revision
            self._carry_out(action, view)
            if header.revision == before:
                # Nothing was written or has changed: for example, this node's own key is gone, and it no longer leads.
                return now + AGAIN_S

    def _view(self) -> View:
        header, records = self._header.value, self._records
        view = View(
            header,
            records.nodes,
            records.joined,
            self._members.ranks,
            records.last_arrival,
            finished_at=self._finished_at(header.round),
            returning_until=self._outage.returning_until,
        )
        if rounds.reports(view):
            return dataclasses.replace(view, reported_at=self._seen.at(header.round, "a report"))
        if header.state is State.RUNNING and rounds.waiting(view) and not self._policy.may_grow(header.round):
            return dataclasses.replace(view, may_grow=False)
        return view

    def _finished_at(self, round_: int) -> float | None:
        number = sum(node.done >= round_ for id_, node in self._records.nodes.items() if id_ in self._members.ranks)
        return self._seen.at(round_, f"{number} finished") if number else None

    def _carry_out(self, action: Action, view: View) -> None:
        if isinstance(action, Seal):
            self._seal(view, action)
        elif isinstance(action, Conclude):
            self._conclude(view, action)
        elif isinstance(action, Release):
            self._release(view, action)
        elif isinstance(action, Amend):
            self.write_header(action.header)
        elif isinstance(action, End):
            ended = dataclasses.replace(view.header, state=action.state, reason=action.reason, end=action.kind, lost=action.lost)
            self.write_header(ended)

    def write_header(self, header: Header) -> bool:
        """Write the header. Return False if this node no longer leads, or etcd holds a header other than the known one."""
        written = self._header.write(header, [self._still_leading])
        if not written:
            self._reload()
        return written

    def _seal(self, view: View, action: Seal) -> None:
        client, keys, lease_id = self._context.client, self._context.keys, self._header.lease_id
        header, assignments = rounds.seal(view, action, secrets.token_hex(4))
        puts = [Put(keys.assignment(id_), encode(assignment), lease_id=lease_id) for id_, assignment in assignments.items()]
        for at in range(0, len(puts), OPS_PER_TXN):
            if not client.txn([self._header.unchanged, self._still_leading], puts[at : at + OPS_PER_TXN]).succeeded:
                return self._reload()
        # Before the header: its arrival makes this very node join.
        before = self._members.ranks
        self._members.sealed(header, assignments)
        if not self.write_header(header):
            return None
        left = [Delete(keys.assignment(id_)) for id_ in before if id_ not in assignments and id_ not in self._records.nodes]
        for at in range(0, len(left), OPS_PER_TXN):
            client.txn([self._header.unchanged, self._still_leading], left[at : at + OPS_PER_TXN])
        return None

    def _conclude(self, view: View, action: Conclude) -> None:
        hosts = frozenset(id_ for id_, node in view.nodes.items() if node.hosts_store)
        reports = RoundReports(
            view.header.round,
            {id_: view.nodes[id_].report for id_ in action.nodes},
            {id_: self._records.written[id_] for id_ in action.nodes},
            rounds.lost(view),
            len(set(view.nodes) - drains.released(view.header)),
            rounds.reaches(view),
            hosts if len(hosts) == 1 else frozenset(),  # of several agents on that host another one keeps the store
        )
        if not write_verdict(self._context, self._header, self._still_leading, self._policy, reports):
            self._reload()

    def _release(self, view: View, action: Release) -> None:
        """Let drained nodes leave, and refuse their hosts in the same transaction."""
        keys, hosts = self._context.keys, {each.host: each for each in view.header.drains if each.node in action.nodes}
        client = self._context.client
        leases = {host: client.lease_grant(drain.refused_s).lease_id for host, drain in hosts.items()}
        puts = [Put(keys.refusal(host), f"drained: {hosts[host].reason}", lease_id=lease) for host, lease in leases.items()]
        after = drains.release(view.header, action.nodes, view.nodes)
        if not self._header.write(after, [self._still_leading], puts):
            self._reload()
            for host, lease in leases.items():
                kv = client.get(keys.refusal(host)).kv
                if kv is None or kv.lease_id != lease:  # else it was written, and only the answer was lost
                    client.lease_revoke(lease)

    def _reload(self) -> None:
        """Read again after a refused write: another node wrote first, or this node did and the answer was lost."""
        self._header.read()
        self._members.load()
