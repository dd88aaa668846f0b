"""What belongs to no node: the job's settings and header. Read, first written, and forgotten when a job has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_ext.base import records
from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Count, OtherSchema, RecordError
from elastic_ext.etcd import Compare, Delete, EtcdClient, Get, LeaseLost, Put, absent, unchanged
from elastic_ext.etcd.values import KeyValue, Op, TxnResult
from elastic_ext.failures.ledger import decode_verdict
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.rounds import Header, Limits, State

JOB_LEASE_FACTOR = 3  # what belongs to nobody outlives the last node by this many lease times


class LostRace(ElasticExtError):
    """Somebody else wrote first: what was about to be done must be looked at again."""


class Refused(ElasticExtError):
    """This host was told to leave the job."""


@dataclass(frozen=True)
class Agreed:
    """What all nodes of a job must agree on; besides, all must know its schema."""

    min_nodes: Count
    max_nodes: Count

    def __str__(self) -> str:
        return f"--nnodes={self.min_nodes}:{self.max_nodes}"


@dataclass(frozen=True)
class Found:
    """A job as a node finds it. lease_id: of what belongs to nobody. revision: of the header; 0: there is none yet."""

    lease_id: int
    header: Header = field(default_factory=Header)
    revision: int = 0

    @property
    def over(self) -> bool:
        return self.header.state in (State.DONE, State.CLOSED)


class JobRecords:
    """Of one run id, for one node. Its methods raise EtcdError and what they say besides."""

    def __init__(self, client: EtcdClient, prefix: str, limits: Limits, ttl_s: int, host: str, reader: RecordReader) -> None:
        self._client = client
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._job, self._round, self._refused = prefix + "job", prefix + "round", f"{prefix}refused/{host}"
        self._reader = reader
        self._mine = Agreed(limits.min_nodes, limits.max_nodes)
        self._record = json.dumps({"schema": rounds.SCHEMA, **vars(self._mine)})

    def enter_new(self, key: str, registration: Sequence[Op]) -> tuple[Found, TxnResult, KeyValue | None] | None:
        """Enter a job with our settings whose first round is not sealed yet, in one transaction; None: nothing is done.

        When a job starts that is the case of all nodes but a few. key, registration: of the node; the first operation reads.
        Returns what it read, too.
        """
        same = Compare(self._job, "value", "=", self._record)
        compares = [same, absent(self._round), absent(key), absent(self._refused)]
        entered = self._client.txn(compares, [Get(self._job), *registration])
        if not entered.succeeded:
            return None
        job, first = (reading.kv for reading in entered.readings)
        assert job is not None  # compared
        return Found(job.lease_id), entered, first

    def agree(self) -> Found:
        """Read, or be the first to write, what all nodes must agree on. What an ended job has left is forgotten.

        Raises:
            Refused: this host may not come back yet.
            UsageError: another job runs under this run id, with other settings or of another version.
        """
        while True:
            found = self._read()
            if found is not None and not (found.over and self._forget(found)):
                return found

    def _read(self) -> Found | None:
        """One try; None: somebody else was faster, or an ended job was in the way."""
        read = self._client.txn([], [Get(self._job), Get(self._round), Get(self._refused)])
        job, header, refused = (reading.kv for reading in read.readings)
        if refused is not None:
            why = printable(refused.value.decode(errors="replace"))
            raise Refused(f"this host was told to leave the job and may not come back yet: {why}")
        theirs = self._agreed(job)
        if theirs is None or (theirs == self._mine and job is not None and not job.lease_id):
            # Nothing, or nothing that can be read or would ever go: it becomes ours.
            lease_id = self._put_job(job.mod_revision if job is not None else 0, header.lease_id if header is not None else 0)
            if lease_id is None:
                return None
        else:
            assert job is not None
            lease_id = job.lease_id
        found = Found(lease_id)
        if header is not None:  # of one that cannot be read the revision alone counts: it is written over
            found = Found(lease_id, self._reader.header(header) or Header(), header.mod_revision)
        if theirs not in (None, self._mine):
            if not self._forget(found):
                seen = theirs if isinstance(theirs, str) else f"{theirs} there, {self._mine} here"
                raise UsageError(
                    f"another job runs under this --rdzv-id with other settings: {seen}; "
                    "use another --rdzv-id, or the same settings on all nodes"
                )
            return None
        return found

    def _agreed(self, job: KeyValue | None) -> Agreed | str | None:
        """What the nodes of the job agree on, or how it is of another version; None: nothing that can be read."""
        if job is None:
            return None
        try:
            return records.read(Agreed, job.value, self._job, rounds.SCHEMA)
        except OtherSchema as error:
            return str(error)
        except RecordError as error:
            self._reader.cannot(str(error), job)
            return None

    def _put_job(self, revision: int, lease_id: int) -> int | None:
        """Be the first to write what all must agree on, over what was written at this revision (0: nothing). Returns the lease
        of what belongs to nobody; None: somebody else was faster. lease_id: of such a lease, if there is one; else 0.
        """
        lease_id = lease_id or self._client.lease_grant(self._ttl_s * JOB_LEASE_FACTOR).lease_id
        try:
            written = self._client.txn([unchanged(self._job, revision)], [Put(self._job, self._record, lease_id=lease_id)])
        except LeaseLost:
            return None
        return lease_id if written.succeeded else None

    def bring_back(self, lease_id: int, name: str) -> int:
        """Return the lease of what belongs to nobody; where the job's record is lost or written over, write it again.

        lease_id: as last known. A lease that is alive is kept, for other records may be under it. name: of the job. Where its
        header is in etcd, other settings than ours are not of the job: who begins another one removes that header.

        Raises:
            LostRace: somebody else writes at the same time.
            UsageError: another job, with other settings, has taken the run id meanwhile.
        """
        job, header = (reading.kv for reading in self._client.txn([], [Get(self._job), Get(self._round)]).readings)
        theirs = self._agreed(job)
        if theirs not in (None, self._mine) and not self._is_of(header, name):
            raise UsageError(
                "another job, with other settings, has taken this --rdzv-id while this node was cut off; use another --rdzv-id"
            )
        if job is None or theirs != self._mine or not job.lease_id:  # without a lease others have written it, and it never goes
            alive = self._client.lease_keep_alive([lease_id]).ttl_s.get(lease_id, 0) > 0 if lease_id else False
            written = self._put_job(job.mod_revision if job is not None else 0, lease_id if alive else 0)
            if written is None:
                raise LostRace("the job's record was written by another node at the same time")
            return written
        return job.lease_id

    def _is_of(self, header: KeyValue | None, name: str) -> bool:
        found = self._reader.header(header) if header is not None else None
        return found is not None and found.job == name != ""

    def _forget(self, found: Found) -> bool:
        """Remove what a job left that no node is in any more; False where one still is.

        The ledger stays where a scheduler is to start the job again: its budget holds on.
        """
        folder = self._prefix + "nodes/"
        left = self._client.get_prefix(folder).kvs
        if any(self._reader.id_of(folder, kv.key) is not None and self._reader.node(kv) is not None for kv in left):
            return False
        # Written by its last node; if somebody begins the next job in this moment, that one's header differs.
        compares = [unchanged(self._round, found.revision)] if found.revision else [absent(self._round)]
        deletes = [Delete(self._prefix + "assign/", prefix=True), Delete(self._round), Delete(self._job)]
        verdict = found.header.verdict
        if found.header.state is State.DONE or (verdict and not decode_verdict(verdict).keeps_ledger):
            deletes += [Delete(self._prefix + folder, prefix=True) for folder in ("ledger", "charges/", "refused/")]
        return self._client.txn(compares, deletes).succeeded
