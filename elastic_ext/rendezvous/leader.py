"""The leader: its election, and its work. It alone reads all nodes, asks `rounds` for the next action, and carries it out.

The node whose key was created first leads. Every other node watches only the node created before it.

Invariant: each of its writes compares its own key and the header that it acted on, so a leader that was cut off or is late
changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from elastic_ext.base.diagnosis import Response
from elastic_ext.etcd import Batch, Compare, Delete, EtcdClient, Get, LeaseLost, Put, Snapshot, Watch, unchanged
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.etcd.watch import Item
from elastic_ext.failures.ledger import decode_verdict, encode_ledger
from elastic_ext.rendezvous import configuration, drains, rounds
from elastic_ext.rendezvous.configuration import Configuration
from elastic_ext.rendezvous.header_record import HeaderRecord
from elastic_ext.rendezvous.judging import AgentPolicy, RoundReports, ledger_of
from elastic_ext.rendezvous.own_records import OwnWatches, Registration
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, State, encode
from elastic_ext.rendezvous.tasks import NodeContext, Outage

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
        limits: Callable[[Header], rounds.Limits],
        outage: Outage,
        policy: AgentPolicy,
        restore: Callable[[], None],
    ) -> None:
        """created: see NodeRecords. limits: of the job with a header. restore: writes lost records of the job again."""
        self._context = context
        self._limits = limits
        self._header = header
        self._outage = outage
        self._policy = policy
        self._still_leading = Compare(context.own_key, "create", "=", created)
        self._seen = FirstSeen(context.tasks.now)
        self._rests_until = 0.0
        self._look_posted = False  # a look at the events is already queued: one for many events
        self._members = Members(context, header, outage)
        self._members.load()  # first: if it fails, this object is created again, and nothing would close the watches
        self._records = NodeRecords(context, created, self._post_look, self._on_member_of_lost_round)
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

    def act(self, now: float) -> float | None:
        """Do all that there is to do; return the monotonic time of the next look, or None: another node came before this one."""
        if now < self._rests_until:
            return self._rests_until
        self._look_posted = False  # before the events are read: later events post another look
        self._upkeep.renew(now)
        self._records.read(now)
        if self._records.any_before:
            return None
        header = self._header
        while True:
            if header.revision == 0 and rounds.needs_restoring(None, header.value):
                self._upkeep.restore()
            self._members.refresh(now)
            view = self._view(now)
            action = rounds.next_action(view, self._limits(view.header), now)
            if view.header.state is State.FORMING:
                action = rounds.before_first(view.header, action, self._records.configurations.differ)
            if isinstance(action, rounds.Wait):
                looked = self._context.tasks.now()
                self._rests_until = looked + min(REST_FACTOR * (looked - now), MAX_REST_S)
                return min(action.until or self._upkeep.renew_at, self._upkeep.renew_at)
            logger.info("rendezvous: %s", action.reason)
            before = header.revision
            self._carry_out(action, view)
            if header.revision == before:
                # Nothing was written or has changed: for example, this node's own key is gone, and it no longer leads.
                return now + AGAIN_S

    def _view(self, now: float) -> rounds.View:
        header, records = self._header.value, self._records
        members = self._members.known(records.nodes)
        strangers: Collection[str] = ()
        if header.round and (others := records.nodes.keys() - members.keys()):
            in_order = sorted(others, key=records.joined.__getitem__)
            there = [id_ for id_ in members if id_ in records.nodes]  # what the others run with is not there either
            strangers = records.configurations.strangers(in_order, header.round, there)
        done = rounds.done(header.round, members, records.nodes)
        view = rounds.View(
            header,
            {id_: node for id_, node in records.nodes.items() if id_ not in strangers},
            records.joined,
            members,
            done,
            records.last_arrival,
            finished_at=self._seen.at(header.round, f"{len(done)} finished") if done else None,
            returning_until=self._outage.returning_until,
        )
        if header.state is State.RUNNING:
            among = rounds.members(view)
            boards = {id_: view.nodes[id_].board for id_ in among.ids}
            view = dataclasses.replace(view, rulings=self._policy.rules.rulings(boards, header.round, among, now))
            for each in view.rulings:
                if each.warns:
                    _warn_of_ruling(header.round, each.reason)
        if header.state is State.BROKEN:
            few = self._seen.at(header.round, f"{len(rounds.waiting(view))} of {len(view.nodes)} wait")
            leaves, moves = _of_verdict(header.verdict) if header.verdict else ("", "")
            moves = moves if moves not in self._members.promised else ""  # it has another one's ranks there
            view = dataclasses.replace(view, few_since=few, leaves=leaves, moves=moves)
        if rounds.reports(view):
            return dataclasses.replace(view, reported_at=self._seen.at(header.round, "a report"))
        if header.state is State.RUNNING and rounds.waiting(view) and not self._policy.may_grow(header.round):
            return dataclasses.replace(view, may_grow=False)
        return view

    def _carry_out(self, action: rounds.Action, view: rounds.View) -> None:
        if isinstance(action, rounds.Seal):
            self._seal(view, action)
        elif isinstance(action, rounds.Conclude):
            self._conclude(view, action)
        elif isinstance(action, rounds.Release):
            self._release(view, action)
        elif isinstance(action, rounds.Amend):
            self.write_header(action.header)
        elif isinstance(action, rounds.End):
            ended = dataclasses.replace(view.header, state=action.state, reason=action.reason, end=action.kind, lost=action.lost)
            if action.state is State.DONE:
                self._write_done(ended)
            else:
                self.write_header(ended)

    def write_header(self, header: Header, *compares: Compare) -> bool:
        """Write the header. Return False if this node no longer leads, or etcd holds a header other than the known one."""
        written = self._header.write(header, [self._still_leading, *compares])
        if not written:
            self._reload()
        return written

    def _write_done(self, header: Header) -> None:
        """Write the header, and into the ledger, which outlives it, that the next job under this run id is another one."""
        client, key = self._context.client, self._context.keys.ledger
        found = client.get(key).kv
        ledger = dataclasses.replace(ledger_of(found.text if found is not None else ""), done=header.round)
        lease_id = outliving_lease(client, found.lease_id if found is not None else 0)
        same = unchanged(key, found.mod_revision if found is not None else 0)
        if not self._header.write(header, [self._still_leading, same], [Put(key, encode_ledger(ledger), lease_id=lease_id)]):
            self._reload()

    def _seal(self, view: rounds.View, action: rounds.Seal) -> None:
        client, keys, lease_id = self._context.client, self._context.keys, self._header.lease_id
        header, assignments = rounds.seal(view, action, self._limits(view.header), secrets.token_hex(4))
        for host in sorted(drains.ambiguous_hosts(view.nodes)):
            _warn_of_name(host)
        puts = [Put(keys.assignment(id_), encode(assignment), lease_id=lease_id) for id_, assignment in assignments.items()]
        if known := self._records.configurations.of_round(header.round, action.order):
            puts = [Put(keys.configuration, configuration.encode(known), lease_id=lease_id), *puts]
        for at in range(0, len(puts), OPS_PER_TXN):
            written = client.txn([self._header.unchanged, self._still_leading], puts[at : at + OPS_PER_TXN])
            if not written.succeeded:
                return self._reload()
        # Two nodes may take themselves for the leader for a moment: the header must not go with the other's assignments.
        same = unchanged(puts[-1].key, written.revision)
        # Before the header: its arrival makes this very node join.
        before = {**self._members.promised, **self._members.ranks}
        self._members.sealed(header, assignments)
        if not self.write_header(header, same):
            return None
        left = [Delete(keys.assignment(id_)) for id_ in before if id_ not in assignments and id_ not in self._records.nodes]
        for at in range(0, len(left), OPS_PER_TXN):
            client.txn([self._header.unchanged, self._still_leading], left[at : at + OPS_PER_TXN])
        return None

    def _conclude(self, view: rounds.View, action: rounds.Conclude) -> None:
        hosts = frozenset(id_ for id_, node in view.nodes.items() if node.host.has_store)
        reports = RoundReports(
            view.header.round,
            {id_: view.nodes[id_].report.failure for id_ in action.nodes},
            {id_: self._records.written[id_] for id_ in action.nodes},
            rounds.lost(view),
            len(set(view.nodes) - drains.released(view.header)),
            rounds.addressed(view),
            hosts if len(hosts) == 1 else frozenset(),  # of several agents on that host another one keeps the store
            drains.ambiguous_hosts(view.nodes),
            members=view.header.nodes,
            min_nodes=self._limits(view.header).min_nodes,
        )
        if not self._write_verdict(reports):
            self._reload()

    def _write_verdict(self, reports: RoundReports) -> bool:
        """Judge, and write the verdict and its ledger in one transaction. Return False if the header or the ledger has changed or
        this node no longer leads: then nothing is decided.

        reports: without their charges, which are read here.
        """
        client, keys, header = self._context.client, self._context.keys, self._header
        ledger = client.get(keys.ledger).kv
        charges = keys.charge_numbers(
            kv.key.decode(errors="replace") for kv in client.get_prefix(keys.charges, keys_only=True).kvs
        )
        reports = dataclasses.replace(reports, charges=len(charges))
        judgement = self._policy.judge(reports, ledger.text if ledger is not None else "")
        lease_id = outliving_lease(client, ledger.lease_id if ledger is not None else 0)
        puts: list[Op] = [Put(keys.ledger, judgement.ledger, lease_id=lease_id)]
        if judgement.refunded:  # before, since a transaction may not delete and write in one range
            client.txn([header.unchanged, self._still_leading], [Delete(keys.charges, prefix=True)])
        if judgement.charged and judgement.window_s:
            # No clock is compared: etcd itself deletes the charge when its time is over.
            lease = client.lease_grant(judgement.window_s)
            puts.append(Put(keys.charge(max(charges, default=0) + 1), "", lease_id=lease.lease_id))
        if judgement.refused:
            lease = client.lease_grant(judgement.refused_s)
            puts.append(Put(keys.refusal(judgement.refused), judgement.reason, lease_id=lease.lease_id))
        same_ledger = unchanged(keys.ledger, ledger.mod_revision if ledger is not None else 0)
        judged = dataclasses.replace(
            header.value, state=judgement.state, reason=judgement.reason, verdict=judgement.verdict, end=None
        )
        return header.write(judged, [self._still_leading, same_ledger], puts)

    def _release(self, view: rounds.View, action: rounds.Release) -> None:
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


@functools.lru_cache(maxsize=1)  # a leader looks often at one verdict
def _of_verdict(text: str) -> tuple[str, str]:
    """Return the node that leaves, and the one whose ranks move."""
    verdict = decode_verdict(text)
    leaves = verdict.decision.response is Response.REPLACE_NODE
    return verdict.node if leaves else "", verdict.node if verdict.decision.moves_ranks else ""


@functools.cache
def _warn_of_name(host: str) -> None:
    """Log it once."""
    logger.warning(
        "several machines of this job are called %s: if one of them is bad, it cannot be kept out of the job by its name; "
        "give each a name of its own (ELASTIC_EXT_NODE_NAME)",
        host,
    )


@functools.cache
def _warn_of_settings(differ: str) -> None:
    """Log it once."""
    logger.warning("the nodes of this job differ: %s", differ)


@functools.cache
def _warn_of_ruling(round_: int, text: str) -> None:
    """Log it once in a round."""
    logger.warning("elastic_ext: %s", text)


LEDGER_TTL_S = 7 * 24 * 3600  # after the last failure


def outliving_lease(client: EtcdClient, lease_id: int) -> int:
    """Return the lease of a record that outlives the job, for the next launch: a new one if it has none. lease_id: 0 for none."""
    if lease_id:
        client.lease_keep_alive([lease_id])
        return lease_id
    return client.lease_grant(LEDGER_TTL_S).lease_id


class Members:
    """Ranks of the current round. For the rendezvous thread.

    Invariant: that leader compared the header, and saw that all living members wait. So none of those is lost, or runs workers.
    """

    def __init__(self, context: NodeContext, header: HeaderRecord, outage: Outage) -> None:
        self.ranks: dict[str, int] = {}  # rank of each node in the round, by id; includes lost nodes
        # rank of each node in the round after it, of which a leader that was lost has written assignments, but no header. These
        # have replaced the ones to this round
        self.promised: dict[str, int] = {}
        self._context = context
        self._header = header
        self._outage = outage
        self._round: tuple[int, str] = (0, "")  # number and seal of their round
        self._load_at = 0.0

    def refresh(self, now: float) -> None:
        """Load the ranks of a round that this leader has not sealed, and load them again while assignments are missing."""
        header = self._header.value
        missing = len(self.ranks) + len(self.promised) < header.nodes
        if self._round != (header.round, header.seal) or (missing and now >= self._load_at):
            self.load()
            self._load_at = now + rounds.ASSIGNMENTS_POLL_S

    def load(self) -> None:
        """Read the assignments."""
        folder, header, reader = self._context.keys.assignments, self._header.value, self._context.reader
        before, self.ranks, self.promised, known = self._round, {}, {}, 0
        for id_, assignment in reader.assignments(folder, self._context.client.get_prefix(folder).kvs).items():
            if header.state is State.BROKEN and assignment.round > header.round:
                self.promised[id_] = assignment.rank
            if assignment.of(header):
                known += 1
                # A node that was lost with its assignment, as the store was, is known by its neighbors'.
                near = rounds.neighbors(assignment.rank, range(header.nodes))
                self.ranks |= {id_: assignment.rank, **dict(zip(assignment.neighbors, near, strict=False))}
        self._round = (header.round, header.seal)
        if before != self._round and known + len(self.promised) < header.nodes:
            self._outage.expect_members()  # some assignments are lost; each node writes its own again

    def sealed(self, header: Header, assignments: Mapping[str, Assignment]) -> None:
        """Take the ranks from the assignments that this leader has written."""
        self.ranks, self.promised = {id_: assignment.rank for id_, assignment in assignments.items()}, {}
        self._round = (header.round, header.seal)

    def known(self, nodes: Mapping[str, Node]) -> dict[str, int]:
        """Return the ranks, also of members by their promised ones. A node that does not wait after this round was not in it."""
        after = self._header.value.round
        waiting = {id_: rank for id_, rank in self.promised.items() if id_ not in nodes or nodes[id_].after >= after}
        return {**waiting, **self.ranks}


class NodeRecords:
    """The records, kept up to date by a watch. For the rendezvous thread."""

    def __init__(
        self,
        context: NodeContext,
        created: int,
        on_event: Callable[[], None],
        on_member_of_lost_round: Callable[[], None],
    ) -> None:
        """
        Args:
            created: create revision of the leader's key.
            on_event: called from any thread when `read` has something to read.
            on_member_of_lost_round: called when a node comes whose record says that it is in a round.
        """
        self.nodes: dict[str, Node] = {}  # by id
        self.joined: dict[str, int] = {}  # create revision of each node's key, by id
        self.written: dict[str, int] = {}  # revision of each node's record, by id
        self.last_arrival = context.tasks.now()  # when the last new node came, in monotonic seconds
        self.configurations = NodeConfigurations(context)
        self._context, self._created = context, created
        self._on_member_of_lost_round = on_member_of_lost_round
        self._watch = context.client.watch_with_snapshot(context.keys.nodes, on_item=on_event)

    def close(self) -> None:
        self._watch.close()

    def read(self, now: float) -> None:
        """Take in what has happened since the last call."""
        reader, folder = self._context.reader, self._context.keys.nodes
        while (item := self._watch.get(timeout_s=0)) is not None:
            if isinstance(item, Snapshot):
                self.nodes, self.joined = {}, {}
            for event in item.events:
                if event.kind == "put":
                    self._put(event.kv, now)
                elif (id_ := reader.id_of(folder, event.kv.key)) is not None:
                    self.nodes.pop(id_, None)
                    self.configurations.forget(id_)

    @property
    def any_before(self) -> bool:
        """Whether another node has an older key than the leader: one of a backup, or that a stranger wrote first."""
        return any(self.joined[id_] < self._created for id_ in self.nodes)

    def _put(self, kv: KeyValue, now: float) -> None:
        """Take in a node's record, or what somebody else has put there: that is no node.

        Over a node's record it is deleted, so that a node that lives writes its record again.
        """
        id_ = self._context.reader.id_of(self._context.keys.nodes, kv.key)
        if id_ is None:
            return
        node = self._context.reader.node(kv)
        if node is None:
            self.nodes.pop(id_, None)
            if kv.version > 1:
                self._context.client.txn([unchanged(kv.key, kv.mod_revision)], [Delete(kv.key)])
            return
        if id_ not in self.nodes:
            self.last_arrival = now
        self.nodes[id_] = node
        self.joined[id_] = kv.create_revision
        self.written[id_] = kv.mod_revision
        if node.round:
            self._on_member_of_lost_round()


class NodeConfigurations:
    """What the nodes run with. Each is read once while its node is there. For the rendezvous thread."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._read: dict[str, Configuration | None] = {}  # by id; None: of a version that does not write it
        self._of_round: tuple[int, Configuration | None] = (0, None)  # what that round runs with

    def differ(self, nodes: Collection[str]) -> str:
        """Return in what these nodes differ that must be alike. Log what else they differ in."""
        found = configuration.among(list(self._known(nodes).values()))
        if found.noted:
            _warn_of_settings(found.noted)
        return found.wrong

    def of_round(self, round_: int, members: Collection[str]) -> Configuration | None:
        """Return what the members of this round run with; None: no one says."""
        if self._of_round[0] != round_ or self._of_round[1] is None:
            known = list(self._known(members).values())
            self._of_round = round_, configuration.merged(known) if known else None
        return self._of_round[1]

    def strangers(self, nodes: Collection[str], round_: int, members: Collection[str]) -> Collection[str]:
        """Return which of these nodes differ in what must be alike from the members of this round, or from one that came before
        them: no round grows by them, and they leave.
        """
        found, job = list[str](), self.of_round(round_, members)
        for id_, known in self._known(nodes).items():
            if job is not None and configuration.with_job(job, known).wrong:
                found.append(id_)
            else:
                job = configuration.merged([job, known] if job is not None else [known])
        return found

    def forget(self, id_: str) -> None:
        """A node has left, or writes its records again."""
        self._read.pop(id_, None)

    def _known(self, nodes: Collection[str]) -> Mapping[str, Configuration]:
        keys, reader, new = self._context.keys, self._context.reader, [id_ for id_ in nodes if id_ not in self._read]
        for at in range(0, len(new), OPS_PER_TXN):
            ids = new[at : at + OPS_PER_TXN]
            found = self._context.client.txn([], [Get(keys.configuration_of(id_)) for id_ in ids]).readings
            kvs = {id_: reading.kv for id_, reading in zip(ids, found, strict=True)}
            self._read |= {id_: reader.configuration(kv) if kv is not None else None for id_, kv in kvs.items()}
        return {id_: known for id_ in nodes if (known := self._read[id_]) is not None}


class JobUpkeep:
    """Watches what holds for the whole job, and renews the lease of those records. For the rendezvous thread.

    That lease outlives the last node for a while, and lasts between two leaders.
    """

    def __init__(self, context: NodeContext, header: HeaderRecord, restore: Callable[[], None]) -> None:
        """restore: writes lost records again."""
        self.restore = restore
        self.renew_at = 0.0  # monotonic time of the next renewal
        self._context = context
        self._header = header
        self._watches = OwnWatches(context, restore, restore)
        self._watches.add(context.keys.job, lambda _: restore())
        self._watches.add(context.keys.configuration, lambda _: restore(), deletes_only=True)

    def renew(self, now: float) -> None:
        """Renew the lease if it is due. Raises LeaseLost."""
        if now < self.renew_at:
            return
        lease_id = self._header.lease_id
        ttl_s = self._context.client.lease_keep_alive([lease_id]).ttl_s.get(lease_id, 0)
        if ttl_s <= 0:
            raise LeaseLost(f"lease {lease_id:x} of the job's records is gone")
        self.renew_at = now + ttl_s / 3

    def close(self) -> None:
        self._watches.close()


FOLLOW_S = 1.0  # a node that waits for a round watches its predecessor only after this time; it misses nothing


class Election:
    """One node's part in the election. For the rendezvous thread."""

    def __init__(self, context: NodeContext, registration: Registration, lead: Callable[[], Leader]) -> None:
        """lead: called when this node becomes the leader."""
        self._context = context
        self._registration = registration
        self._lead = lead
        self.leader: Leader | None = None
        self._leads_by = 0  # create revision of the key by which this node leads; 0: it does not
        self._predecessor: Watch | None = None
        self._to_follow: str | None = None  # key of the predecessor, until it is watched

    def find_predecessor(self, last: KeyValue | None = None) -> None:
        """Lead if no node came before this one; otherwise watch the last one that did (as in etcd's client/v3/concurrency).

        Asking etcd for it makes etcd sort all nodes. `last` names it for free: a node that lived when this one was created,
        since that key is under the lease of the node that it names. A node whose own key is gone does neither, until the key is
        written again, or is back with the store.
        """
        created = self._registration.created
        if self._registration.node is None or self._leads_by == created:
            return None  # it has left meanwhile, or a task before this one has found that it leads
        self._forget()
        if last is not None and last.lease_id:  # without a lease, somebody else has written it
            key = self._context.keys.node(last.text)
            if key != self._context.own_key and self._names_node(key.encode()):
                self._to_follow = key
                # Later, or once this node is in a round: forming the round comes first.
                return self._context.tasks.wake_at(self._context.tasks.now() + FOLLOW_S)
        newest = self._nodes_until_own()
        if not any(kv.create_revision == created and kv.key.decode() == self._context.own_key for kv in newest):
            return self._context.tasks.retry(self._find_again)
        before = [kv for kv in newest if kv.create_revision < created and self._is_node(kv)]
        if before:
            self._to_follow = max(before, key=lambda kv: kv.create_revision).key.decode()
            return self._context.tasks.run(self.follow)
        self.leader, self._leads_by = self._lead(), created
        logger.info("node %s leads the rendezvous", self._context.config.node_id)
        return self._context.tasks.run(self._context.tasks.on_timer)  # retried on its own: what leads once leads on

    def _find_again(self) -> None:
        """Find the predecessor, unless that has been done meanwhile: this node's key was created again."""
        if self.leader is None and self._predecessor is None and self._to_follow is None:
            self.find_predecessor()

    def _forget(self) -> None:
        self.close()
        self._to_follow = None

    def on_timer(self) -> None:
        """Take the leader's look; on any other node, begin to watch the predecessor, or look for another one."""
        tasks = self._context.tasks
        if self.leader is not None:
            at = self.leader.act(tasks.now())
            if at is not None:
                tasks.wake_at(at)
            else:
                self._look_again()
        else:
            self.follow()

    def _look_again(self) -> None:
        self._forget()
        self._context.tasks.run(self._find_again)

    def follow(self) -> None:
        """Begin to watch the predecessor, unless that has been done."""
        key, tasks = self._to_follow, self._context.tasks
        if key is None or self._registration.node is None:
            return
        # Of a node that is dead, somebody may have deleted or overwritten the key before this node was created.
        found = self._context.client.get(key)
        self._to_follow = None
        watch = self._predecessor = Watch(
            self._context.client,
            key,
            start_revision=found.revision + 1,
            callback=lambda item: tasks.post(lambda: self._on_predecessor(item) if watch is self._predecessor else None),
        )
        self._heed([found.kv])

    def _on_predecessor(self, item: Item) -> None:
        events = item.events if isinstance(item, Batch) else ()
        self._heed([event.kv if event.kind == "put" else None for event in events] or [None])

    def _heed(self, records: Sequence[KeyValue | None]) -> None:
        """Handle the end of the predecessor: it is gone (None), or has registered again and is no longer the predecessor.

        One whose record somebody has written over is no node until it has written it again.
        """
        created = self._registration.created
        if any(kv is None or kv.create_revision > created or not self._is_node(kv) for kv in records):
            self._look_again()

    def _nodes_until_own(self) -> Sequence[KeyValue]:
        """Read this node's key and the one created last before it.

        A key that holds no node leads to no node: then read all keys to find one that does.
        """
        folder, client = self._context.keys.nodes, self._context.client
        found = client.last_created(folder, self._registration.created, limit=2).kvs
        return found if all(self._is_node(kv) for kv in found) else client.get_prefix(folder).kvs

    def _is_node(self, kv: KeyValue) -> bool:
        return self._names_node(kv.key) and self._context.reader.node(kv) is not None

    def _names_node(self, key: bytes) -> bool:
        return self._context.reader.id_of(self._context.keys.nodes, key) is not None

    def close(self) -> None:
        """Stop following and leading."""
        if self._predecessor is not None:
            self._predecessor.close()
            self._predecessor = None
        if self.leader is not None:
            self.leader.close()
            self.leader, self._leads_by = None, 0
