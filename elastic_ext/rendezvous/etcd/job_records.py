"""The records that belong to no node: the job's settings and its header, as a node enters the job.

The first node writes the settings, every other one compares them with its own. What a job has left that ended is deleted here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_ext.base import records
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Count, OtherSchema, RecordError
from elastic_ext.etcd import Compare, Delete, Get, LeaseLost, Put, absent, unchanged
from elastic_ext.etcd.values import KeyValue, Op, TxnResult
from elastic_ext.failures.ledger import decode_verdict
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.tasks import LostRace, Refused
from elastic_ext.rendezvous.round_records import SCHEMA, Header, State

JOB_LEASE_FACTOR = 3  # the records that belong to no node outlive the last node by this many lease times


@dataclass(frozen=True)
class SharedSettings:
    """What must be the same on all nodes of a job."""

    min_nodes: Count
    max_nodes: Count

    def __str__(self) -> str:
        return f"--nnodes={self.min_nodes}:{self.max_nodes}"


@dataclass(frozen=True)
class JobSnapshot:
    """A job as a node finds it. lease_id: of the records that belong to no node. revision: of the header; 0: there is none."""

    lease_id: int
    header: Header = field(default_factory=Header)
    revision: int = 0

    @property
    def over(self) -> bool:
        """The job has ended; its records are in the way of the next one."""
        return self.header.state in (State.DONE, State.CLOSED)


class JobRecords:
    """One node's access to them. Its methods raise EtcdError, besides what their docstrings list."""

    def __init__(self, context: NodeContext) -> None:
        limits = context.config.limits
        self._client = context.client
        self._keys = context.keys
        self._reader = context.reader
        self._refusal = context.keys.refusal(context.config.host)
        self._ttl_s = context.config.lease_ttl_s * JOB_LEASE_FACTOR
        self._mine = SharedSettings(limits.min_nodes, limits.max_nodes)
        self._record = json.dumps({"schema": SCHEMA, **vars(self._mine)})

    def enter_new(self, key: str, registration: Sequence[Op]) -> tuple[JobSnapshot, TxnResult, KeyValue | None] | None:
        """Enter a job with our settings whose first round is not sealed yet, in one transaction; None: nothing is done.

        When a job starts, all nodes but a few enter so. key, registration: of the node; the first operation reads, and what it
        found is returned, too.
        """
        same = Compare(self._keys.job, "value", "=", self._record)
        compares = [same, absent(self._keys.header), absent(key), absent(self._refusal)]
        entered = self._client.txn(compares, [Get(self._keys.job), *registration])
        if not entered.succeeded:
            return None
        job, first = (reading.kv for reading in entered.readings)
        assert job is not None  # compared
        return JobSnapshot(job.lease_id), entered, first

    def agree(self) -> JobSnapshot:
        """Read the settings that all nodes must agree on, or be the first to write them. Deletes what an ended job has left.

        Raises:
            Refused: this host may not come back yet.
            UsageError: another job runs under this run id, with other settings or of another version.
        """
        while True:
            found = self._read()
            if found is not None and not (found.over and self._forget(found)):
                return found

    def _read(self) -> JobSnapshot | None:
        """One try; None: another node was faster, or an ended job was in the way."""
        read = self._client.txn([], [Get(self._keys.job), Get(self._keys.header), Get(self._refusal)])
        job, header, refused = (reading.kv for reading in read.readings)
        if refused is not None:
            why = printable(refused.value.decode(errors="replace"))
            raise Refused(f"this host was told to leave the job and may not come back yet: {why}")
        theirs = self._settings_in(job)
        if theirs is None or (theirs == self._mine and job is not None and not job.lease_id):
            # There is nothing, or nothing that can be read, or that would ever go: the job becomes ours.
            lease_id = self._put_job(job.mod_revision if job is not None else 0, header.lease_id if header is not None else 0)
            if lease_id is None:
                return None
        else:
            assert job is not None
            lease_id = job.lease_id
        found = JobSnapshot(lease_id)
        if header is not None:  # if it cannot be read, only its revision counts: it is written over
            found = JobSnapshot(lease_id, self._reader.header(header) or Header(), header.mod_revision)
        if theirs not in (None, self._mine):
            if not self._forget(found):
                seen = theirs if isinstance(theirs, str) else f"{theirs} there, {self._mine} here"
                raise UsageError(
                    f"another job runs under this --rdzv-id with other settings: {seen}; "
                    "use another --rdzv-id, or the same settings on all nodes"
                )
            return None
        return found

    def _settings_in(self, job: KeyValue | None) -> SharedSettings | str | None:
        """The settings that the nodes of the job agree on, or why they are of another version; None: nothing that can be read."""
        if job is None:
            return None
        try:
            return records.read(SharedSettings, job.value, self._keys.job, SCHEMA)
        except OtherSchema as error:
            return str(error)
        except RecordError as error:
            self._reader.note_fault(str(error), job)
            return None

    def _put_job(self, revision: int, lease_id: int) -> int | None:
        """Be the first to write the settings, over what was written at this revision (0: nothing).

        Returns the lease of the records that belong to no node; None: another node was faster. lease_id: that lease if there is
        one, else 0.
        """
        lease_id = lease_id or self._client.lease_grant(self._ttl_s).lease_id
        try:
            written = self._client.txn(
                [unchanged(self._keys.job, revision)], [Put(self._keys.job, self._record, lease_id=lease_id)]
            )
        except LeaseLost:
            return None
        return lease_id if written.succeeded else None

    def bring_back(self, lease_id: int, name: str) -> int:
        """Return the lease of the records that belong to no node. If the job's record is lost or written over, write it again.

        lease_id: as last known. A lease that is alive is kept, since other records may be under it. name: of the job. While its
        header is in etcd, settings other than ours are not of this job: whoever begins another one removes that header.

        Raises:
            LostRace: another node writes at the same time.
            UsageError: another job, with other settings, has taken the run id meanwhile.
        """
        job, header = (reading.kv for reading in self._client.txn([], [Get(self._keys.job), Get(self._keys.header)]).readings)
        theirs = self._settings_in(job)
        if theirs not in (None, self._mine) and not self._is_of(header, name):
            raise UsageError(
                "another job, with other settings, has taken this --rdzv-id while this node was cut off; use another --rdzv-id"
            )
        if job is None or theirs != self._mine or not job.lease_id:  # without a lease it is not ours, and never goes
            alive = self._client.lease_keep_alive([lease_id]).ttl_s.get(lease_id, 0) > 0 if lease_id else False
            written = self._put_job(job.mod_revision if job is not None else 0, lease_id if alive else 0)
            if written is None:
                raise LostRace("the job's record was written by another node at the same time")
            return written
        return job.lease_id

    def _is_of(self, header: KeyValue | None, name: str) -> bool:
        found = self._reader.header(header) if header is not None else None
        return found is not None and found.job == name != ""

    def _forget(self, found: JobSnapshot) -> bool:
        """Delete what a job left that no node is in any more. Returns False if one still is.

        The ledger stays if a scheduler is to start the job again: its budget still holds.
        """
        nodes = self._keys.nodes
        left = self._client.get_prefix(nodes).kvs
        if any(self._reader.id_of(nodes, kv.key) is not None and self._reader.node(kv) is not None for kv in left):
            return False
        # The header is as its last node wrote it; if another node begins the next job right now, that one's header differs.
        compares = [unchanged(self._keys.header, found.revision)] if found.revision else [absent(self._keys.header)]
        deletes = [Delete(self._keys.assignments, prefix=True), Delete(self._keys.header), Delete(self._keys.job)]
        verdict = found.header.verdict
        if found.header.state is State.DONE or (verdict and not decode_verdict(verdict).keeps_ledger):
            deletes += [Delete(each, prefix=True) for each in (self._keys.ledger, self._keys.charges, self._keys.refusals)]
        return self._client.txn(compares, deletes).succeeded
