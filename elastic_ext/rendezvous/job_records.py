"""What belongs to no node: the job's settings and header. Read, first written, and forgotten when a job has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ext.errors import ElasticExtError, UsageError
from elastic_ext.etcd import Compare, Delete, EtcdClient, Get, Put, absent, unchanged
from elastic_ext.etcd.records import KeyValue, Op, TxnResult
from elastic_ext.job import decode_verdict
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.rounds import Header, Limits, State

JOB_LEASE_FACTOR = 3  # what belongs to nobody outlives the last node by this many lease times


class LostRace(ElasticExtError):
    """Somebody else wrote first: what was about to be done must be looked at again."""


class Refused(ElasticExtError):
    """This host was told to leave the job."""


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

    def __init__(self, client: EtcdClient, prefix: str, limits: Limits, ttl_s: int, host: str) -> None:
        self._client = client
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._job, self._round, self._refused = prefix + "job", prefix + "round", f"{prefix}refused/{host}"
        self._mine = {"schema": rounds.SCHEMA, "min_nodes": limits.min_nodes, "max_nodes": limits.max_nodes}

    def enter_new(self, key: str, registration: Sequence[Op]) -> tuple[Found, TxnResult, KeyValue | None] | None:
        """Enter a job with our settings whose first round is not sealed yet, in one transaction; None: nothing is done.

        When a job starts that is the case of all nodes but a few. key, registration: of the node; the first operation reads.
        Returns what it read, too.
        """
        same = Compare(self._job, "value", "=", json.dumps(self._mine))
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
            UsageError: another job runs under this run id, with other settings.
            RecordError: what is there is of another version.
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
            raise Refused(
                f"this host was told to leave the job and may not come back yet: {refused.value.decode(errors='replace')}"
            )
        if job is None:
            lease_id = header.lease_id if header is not None else self._grant()  # somebody has deleted the one, not the other
            put = Put(self._job, json.dumps(self._mine), lease_id=lease_id)
            if not self._client.txn([absent(self._job)], [put]).succeeded:
                return None
        else:
            lease_id = job.lease_id
        found = Found(lease_id)
        if header is not None:
            found = Found(lease_id, rounds.decode(Header, header.value, header.key.decode()), header.mod_revision)
        if job is not None and (theirs := json.loads(job.value)) != self._mine:
            if not self._forget(found):
                seen = f"{_shown(theirs)} there, {_shown(self._mine)} here"
                raise UsageError(
                    f"another job runs under this --rdzv-id with other settings: {seen}; "
                    "use another --rdzv-id, or the same settings on all nodes"
                )
            return None
        return found

    def bring_back(self, lease_id: int) -> int:
        """Return the lease of what belongs to nobody; where the job's record is lost, write it again.

        lease_id: as last known. A lease that is alive is kept, for other records may be under it.

        Raises:
            LostRace: somebody else writes at the same time.
            UsageError: another job, with other settings, has taken the run id meanwhile.
        """
        job = self._client.get(self._job).kv
        if job is None:
            alive = self._client.lease_keep_alive([lease_id]).ttl_s.get(lease_id, 0) > 0 if lease_id else False
            lease_id = lease_id if alive else self._grant()
            put = Put(self._job, json.dumps(self._mine), lease_id=lease_id)
            if not self._client.txn([absent(self._job)], [put]).succeeded:
                raise LostRace("the job's record was written by another node at the same time")
            return lease_id
        if job.value != json.dumps(self._mine).encode():
            raise UsageError(
                "another job, with other settings, has taken this --rdzv-id while this node was cut off; use another --rdzv-id"
            )
        return job.lease_id

    def _grant(self) -> int:
        return self._client.lease_grant(self._ttl_s * JOB_LEASE_FACTOR).lease_id

    def _forget(self, found: Found) -> bool:
        """Remove what a job left that no node is in any more; False where one still is.

        The ledger stays where a scheduler is to start the job again: its budget holds on.
        """
        if self._client.get_prefix(self._prefix + "nodes/", keys_only=True).kvs:
            return False
        # Written by its last node; if somebody begins the next job in this moment, that one's header differs.
        compares = [unchanged(self._round, found.revision)] if found.revision else [absent(self._round)]
        deletes = [Delete(self._prefix + "assign/", prefix=True), Delete(self._round), Delete(self._job)]
        verdict = found.header.verdict
        if found.header.state is State.DONE or (verdict and not decode_verdict(verdict).keeps_ledger):
            deletes += [Delete(self._prefix + folder, prefix=True) for folder in ("ledger", "charges/", "refused/")]
        return self._client.txn(compares, deletes).succeeded


def _shown(job: dict[str, Any]) -> str:
    return f"--nnodes={job.get('min_nodes')}:{job.get('max_nodes')}"
