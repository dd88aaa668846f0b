"""The records that belong to no node: the job's settings and its header, when a node enters the job, and how often hosts join.

The first node writes the settings; they hold for every other node. This module deletes what an ended job left.

Invariant: a job's `--nnodes` never changes while it has nodes, whichever of them leads. Before the first round it is that of
the job's record. From the first seal on the header says it: each node of a round knows that, and the record follows it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from elastic_ext.base import errors, records
from elastic_ext.base.printable import printable
from elastic_ext.etcd import Compare, Delete, EtcdClient, Get, LeaseLost, Put, absent, unchanged
from elastic_ext.etcd.values import KeyValue, Op, TxnResult
from elastic_ext.failures.ledger import decode_verdict
from elastic_ext.rendezvous import configuration, drains
from elastic_ext.rendezvous.configuration import TO_DO
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import SCHEMA, Header, Node, RecordReader, State
from elastic_ext.rendezvous.rounds import JOIN_WINDOW_S, MAX_JOINS, JoinAnswer, Limits, after_join, is_late
from elastic_ext.rendezvous.tasks import HostRefused, LostRace, NodeContext, TaskRunner

logger = logging.getLogger(__name__)

OUTWAIT_MARGIN_S = 2.0  # etcd looks for expired leases twice a second
JOB_LEASE_FACTOR = 3  # the records that belong to no node outlive the last node by this many lease times


@dataclass(frozen=True)
class SharedSettings:
    """The settings that hold for all nodes of a job. loopback: see `NodeConfig`; of the node that wrote them."""

    min_nodes: records.Count
    max_nodes: records.Count
    loopback: str = ""

    def __str__(self) -> str:
        return f"--nnodes={self.min_nodes}:{self.max_nodes}"

    def same_nodes(self, theirs: SharedSettings | str | None) -> bool:
        """theirs: a text says why they are of another version."""
        return isinstance(theirs, SharedSettings) and str(theirs) == str(self)

    def held(self, header: Header) -> SharedSettings:
        """Return these settings with the `--nnodes` of the job that has this header; before its first round any holds."""
        if header.ended or not header.max_nodes:
            return self
        return dataclasses.replace(self, min_nodes=header.min_nodes, max_nodes=header.max_nodes)

    def is_elsewhere(self, theirs: SharedSettings) -> bool:
        """Return whether nodes with those settings are reached at the loopback of another network, and ours at this one's.

        One that is reached at another address may be on the same machine nevertheless.
        """
        return bool(theirs.loopback and self.loopback and theirs.loopback != self.loopback)


@dataclass(frozen=True)
class JobSnapshot:
    """A job as a node finds it.

    lease_id: of the records that belong to no node. revision: of the header; job_revision: of the settings; 0 if there are none.
    """

    lease_id: int
    header: Header = field(default_factory=Header)
    revision: int = 0
    job_revision: int = 0


class JobRecords:
    """One node's access to these records. All methods raise EtcdError, besides the errors in their docstrings."""

    def __init__(self, context: NodeContext) -> None:
        limits = self._limits = context.config.limits
        self._client = context.client
        self._keys = context.keys
        self._reader = context.reader
        self._host = context.config.host
        self._refusal = context.keys.refusal(self._host)
        self._own_store = context.config.own_store
        self._mine = self._shared = SharedSettings(limits.min_nodes, limits.max_nodes, context.config.loopback)
        self._lease_s = context.config.lease_ttl_s
        self._now = context.tasks.now
        self._others_since: float | None = None  # monotonic: nodes were seen that may be killed ones

    def limits(self, header: Header) -> Limits:
        """Return the job's, once this node has entered it."""
        held = self._shared.held(header)
        return dataclasses.replace(self._limits, min_nodes=held.min_nodes, max_nodes=held.max_nodes)

    @property
    def _record(self) -> str:
        return records.encode(self._shared, SCHEMA)

    def enter_new(self, key: str, registration: Sequence[Op]) -> tuple[JobSnapshot, TxnResult, KeyValue | None] | None:
        """Enter a job with our settings before its first round is sealed, in one transaction; return None if nothing was done.

        Most nodes enter a starting job this way. key, registration: of the node; the first operation is a read, whose result is
        returned as well.
        """
        same = Compare(self._keys.job, "value", "=", self._record)
        compares = [same, absent(self._keys.header), absent(key), absent(self._refusal)]
        entered = self._client.txn(compares, [Get(self._keys.job), *registration])
        if not entered.succeeded:
            return None
        job, first = (reading.kv for reading in entered.readings)
        assert job is not None  # compared
        return JobSnapshot(job.lease_id), entered, first

    def read_or_create(self) -> JobSnapshot:
        """Read the job's settings, or be the first to write them. Delete what an ended job has left.

        A job that is done in a store of its own is not followed by another: a node that comes then is a spare that is late.

        Raises:
            HostRefused: this host may not come back yet.
            UsageError: a job of another version runs under this run id, or it is reached at another host's loopback.
            LostRace: nodes of other settings are there, perhaps killed ones, whose leases soon end.
        """
        while True:
            found = self._read()
            if found is None:
                continue
            late = self._own_store and found.header.state is State.DONE
            if late or not (found.header.ended and self._delete_abandoned(found)):
                return found

    def _read(self) -> JobSnapshot | None:
        """Try once; return None if another node was faster or an ended job was in the way."""
        read = self._client.txn([], [Get(self._keys.job), Get(self._keys.header), Get(self._refusal)])
        job, header, refused = (reading.kv for reading in read.readings)
        if refused is not None:
            why = printable(refused.text)
            raise HostRefused(f"this host was asked to leave the job and may not come back yet: {why}")
        known = self._reader.header(header) if header is not None else None
        theirs = self._held(job, known or Header())
        same = self._mine.same_nodes(theirs)
        self._shared = self._mine
        if theirs is None or (same and job is not None and not job.lease_id):
            # Nothing is there, or it is unreadable, or would never expire: the job becomes ours.
            revision, old_lease_id = job.mod_revision if job is not None else 0, header.lease_id if header is not None else 0
            lease_id = self._put_job(revision, old_lease_id, begins=job is None and header is None)
            if lease_id is None:
                return None
        else:
            lease_id = next(each.lease_id for each in (job, header) if each is not None)
        found = JobSnapshot(lease_id, job_revision=job.mod_revision if job is not None else 0)
        if header is not None:  # if it is unreadable, only its revision counts: it is overwritten
            found = dataclasses.replace(found, header=known or Header(), revision=header.mod_revision)
        if theirs is not None and not same and self._delete_abandoned(found):
            return None
        if isinstance(theirs, str):
            raise errors.UsageError(f"a job of another version is running under this --rdzv-id: {theirs}; use another --rdzv-id")
        if theirs is not None and not found.header.ended:
            if job is not None and self._mine.is_elsewhere(theirs):
                self._come_from_elsewhere(job)
                return None
            if not same:
                self._outwait(f"nodes with another {theirs} are there")
                self._adopt(theirs)
        drain = drains.of_host(found.header, self._host)
        if drain is not None and not found.header.ended:  # the node that was to leave is gone or going; this one replaces it
            raise HostRefused(f"this host was asked to leave the job: {printable(drain.reason)}")
        return found

    def _come_from_elsewhere(self, job: KeyValue) -> None:
        """Take the job over from where it was: a container that was started again has another network, and is the same host.

        Raises:
            LostRace: nodes are there, perhaps killed ones, whose leases soon end.
            UsageError: living nodes are there.
        """
        if self._has_nodes():
            self._outwait("the nodes of the job are reached at the loopback of another host or container")
            raise errors.UsageError(
                "another host or container has nodes of this job, and all would be reached at the loopback, as --rdzv-endpoint "
                "is there: set --rdzv-conf=address=INTERFACE or --local-addr on each node"
            )
        self._put_job(job.mod_revision, job.lease_id)

    def _adopt(self, theirs: SharedSettings) -> None:
        """Take another --nnodes for the job's.

        Raises UsageError: one of the two is for one node alone, as without --nnodes, which has the loopback for its address.
        """
        if 1 in (theirs.max_nodes, self._mine.max_nodes):
            raise errors.UsageError(
                f"the job under this --rdzv-id runs with {theirs}, this node was started with {self._mine}: give all nodes of a "
                "job the same --nnodes, and each job an --rdzv-id of its own"
            )
        self._shared = dataclasses.replace(self._mine, min_nodes=theirs.min_nodes, max_nodes=theirs.max_nodes)
        logger.warning("the job runs with %s, this node was started with %s: the job's holds", theirs, self._mine)

    def _outwait(self, seen: str) -> None:
        """Return once the nodes that are there are certainly not killed ones. Raises LostRace: their leases may end yet."""
        now, limit_s = self._now(), self._lease_s + OUTWAIT_MARGIN_S
        if self._others_since is None:
            self._others_since = now
            logger.info("%s: in %.0f s it is known whether they live", seen, limit_s)
        if now < self._others_since + limit_s:
            raise LostRace(seen)

    def _has_nodes(self) -> bool:
        return bool(nodes_in(self._client.get_prefix(self._keys.nodes).kvs, self._keys, self._reader))

    def _held(self, job: KeyValue | None, header: Header) -> SharedSettings | str | None:
        """Return `_settings_in`, as far as the header does not say otherwise; None: ours may be written."""
        theirs = self._settings_in(job)
        held = theirs if isinstance(theirs, str) else (theirs or self._mine).held(header)
        return None if theirs is None and self._mine.same_nodes(held) else held

    def _settings_in(self, job: KeyValue | None) -> SharedSettings | str | None:
        """Return the settings of the job, or why they are of another version; None if nothing readable is there."""
        if job is None:
            return None
        try:
            return records.read(SharedSettings, job.value, self._keys.job, SCHEMA)
        except records.OtherSchema as error:
            return str(error)
        except records.RecordError as error:
            self._reader.note_fault(str(error), job)
            return None

    def _put_job(self, revision: int, lease_id: int, begins: bool = False) -> int | None:
        """Be the first to write the settings, over what was written at this revision (0: nothing).

        Return the lease of the records that belong to no node; None if another node was faster. lease_id: that lease, or 0 if
        no lease exists yet. begins: a job begins; what outlives one that has ended for good is deleted.
        """
        lease_id = lease_id or self._client.lease_grant(self._lease_s * JOB_LEASE_FACTOR).lease_id
        compares, ops = [unchanged(self._keys.job, revision)], list[Op]([Put(self._keys.job, self._record, lease_id=lease_id)])
        found = self._client.get(self._keys.ledger).kv if begins else None
        if found is not None and (ledger := self._reader.ledger(found)) is not None and ledger.ended:
            compares.append(unchanged(self._keys.ledger, found.mod_revision))
            ops += [Delete(each, prefix=True) for each in self._keys.outliving]
        try:
            written = self._client.txn(compares, ops)
        except LeaseLost:
            return None
        return lease_id if written.succeeded else None

    def restore(self, lease_id: int, known: Header, name: str) -> int:
        """Return the lease of the records that belong to no node. If the job's record is lost or overwritten, write it again.

        lease_id: the last known one. A lease that is alive is kept, since other records may be under it. known, name: the header
        that this node knows, and the job's name. A node that begins another job removes its header.

        Raises:
            LostRace: another node has written at the same time.
            UsageError: another job, with other settings, has taken the run id meanwhile.
        """
        job, header = (reading.kv for reading in self._client.txn([], [Get(self._keys.job), Get(self._keys.header)]).readings)
        theirs, found = self._settings_in(job), self._reader.header(header) if header is not None else None
        newest = known if known.round else found or known
        held = self._shared.held(newest)
        if theirs is not None and not held.same_nodes(theirs):
            if _is_another(theirs, found, known, name):
                raise errors.UsageError(
                    "another job with other settings has taken this --rdzv-id while this node was cut off; use another --rdzv-id"
                )
            if isinstance(theirs, SharedSettings) and not name and not newest.max_nodes:
                held = theirs  # it was written after ours was lost
        if not self._shared.same_nodes(held):
            self._adopt(held)
        same = self._shared.same_nodes(theirs)
        if job is None or not same or not job.lease_id:  # without a lease it is not ours, and never expires
            alive = self._client.lease_keep_alive([lease_id]).ttl_s.get(lease_id, 0) > 0 if lease_id else False
            written = self._put_job(job.mod_revision if job is not None else 0, lease_id if alive else 0)
            if written is None:
                raise LostRace("another node wrote the job's record at the same time")
            return written
        return job.lease_id

    def compare(self, mine: str, found: JobSnapshot | None = None) -> bool:
        """Compare what this node runs with to what the job does. Return False if that is unknown: its record may be lost.

        mine: a `Configuration`, encoded; "": unknown. found: the job that this node is about to enter; None: it is in it.

        Raises:
            LostRace: this node differs, and that job has no nodes any more, or perhaps only killed ones, whose leases soon end.
            UsageError: this node does not belong to the job, or its settings must be mended first.
        """
        record = self._client.get(self._keys.configuration).kv if mine else None
        job = self._reader.configuration(record) if record is not None else None
        if job is None:
            return not mine
        differs = configuration.with_job(job, configuration.decode(mine, "this node's own"))
        if differs.wrong:
            if found is not None and not (self._own_store and found.header.state is State.DONE):
                if self._delete_abandoned(found):
                    raise LostRace("a job that differed has no nodes any more, and was deleted")
                self._outwait(f"nodes that differ are there: {differs.wrong}")
            raise errors.UsageError(f"this node cannot take part in the job under this --rdzv-id: {differs.wrong}; {TO_DO}")
        if differs.noted:
            logger.warning("this node differs from the job that it joins: %s", differs.noted)
        return True

    def _delete_abandoned(self, found: JobSnapshot) -> bool:
        """Delete what a job left that has no nodes any more. Return False if it has one; else the records are to be read again.

        The ledger stays if a scheduler is to start the job again: its budget still holds.

        Invariant: only the job that was found is judged here, and only it is deleted. Several nodes may begin the next job at
        the same time: the records and the nodes of that one are not those of the job before.
        """
        as_found = [unchanged(self._keys.job, found.job_revision), unchanged(self._keys.header, found.revision)]
        if self._has_nodes():
            return not self._client.txn(as_found).succeeded  # what did not change until now was so when the nodes were read
        folders = [Delete(each, prefix=True) for each in (self._keys.assignments, self._keys.reports)]
        deletes = [*folders, *map(Delete, (self._keys.header, self._keys.job, self._keys.configuration))]
        verdict = found.header.verdict
        if found.header.state is State.DONE or (verdict and not decode_verdict(verdict).keeps_ledger):
            deletes += [Delete(each, prefix=True) for each in self._keys.outliving]
        self._client.txn(as_found, deletes)
        return True


def _is_another(theirs: SharedSettings | str, found: Header | None, known: Header, name: str) -> bool:
    """Return whether other settings than ours are those of another job. found: the header in the store, if any.

    known, name: see `JobRecords.restore`.
    """
    if found is not None and name:
        return found.job != name
    return isinstance(theirs, str) or known.ended


def nodes_in(kvs: Iterable[KeyValue], keys: JobKeys, reader: RecordReader) -> dict[str, Node]:
    """Return the nodes among these keys, by id; what is not the record of a node is left out."""
    found = {id_: reader.node(kv) for id_, kv in reader.named(keys.nodes, kvs).items()}
    return {id_: node for id_, node in found.items() if node is not None}


class LateJoins:
    """Counts those of this host. Where other machines of the job have its name these are counted as well, and none is refused."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str, refused_s: int, limit: int = MAX_JOINS) -> None:
        """refused_s: the setting `refuse_node`. limit: see `rounds.after_join`."""
        self._client, self._keys, self._host = client, keys, host
        self._limit, self._refused_s = limit, refused_s
        self._last = 0  # the last round of this node

    def entered(self, round_: int, tasks: TaskRunner) -> None:
        """This node is in a new round. It is counted in the background if this node was not in the round before."""
        late, self._last = is_late(round_, self._last), round_
        if late:
            count: Callable[[], None] = functools.partial(self._count, round_)
            tasks.post(lambda: tasks.run(count))

    def _count(self, round_: int) -> None:
        """Raises HostRefused, EtcdError."""
        lease = self._client.lease_grant(JOIN_WINDOW_S)
        self._client.txn([], [Put(self._keys.join(self._host, round_), "", lease_id=lease.lease_id)])
        joins = len(self._client.get_prefix(self._keys.joins(self._host), keys_only=True).kvs)
        decided = after_join(joins, self._limit)
        if decided.answer is not JoinAnswer.NOTHING:  # else it need not read them all
            nodes = nodes_in(self._client.get_prefix(self._keys.nodes).kvs, self._keys, RecordReader())
            decided = after_join(joins, self._limit, self._host in drains.ambiguous_hosts(nodes))
        line = decided.line(self._refused_s)
        if decided.answer is not JoinAnswer.NOTHING:
            lease = self._client.lease_grant(self._refused_s)
            self._client.txn([], [Put(self._keys.refusal(self._host), decided.reason, lease_id=lease.lease_id)])
        if decided.answer is JoinAnswer.LEAVE:
            raise HostRefused(line)
        logger.log(decided.level, "%s", line)
