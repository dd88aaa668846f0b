"""The goodput of a job in etcd: one small record per host, which outlives its agents as the ledger does, and one of their sum.

The agent of rank 0 adds the records up, and the others read its sum: else each of n agents would have n records to read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.base import goodput
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.goodput import HostRecord, Shared, Spent
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.etcd import Compare, EtcdClient, Get, LeaseLost, Put, unchanged
from elastic_ext.etcd.values import KeyValue, Op, TxnResult
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.leader import outliving_lease
from elastic_ext.rendezvous.round_records import RecordReader

logger = logging.getLogger(__name__)


class OtherJob(ElasticExtError):
    """The run id is another job's by now, or nobody's."""


@dataclass(frozen=True)
class AgentPosition:
    """This agent in its job. job: see `Header.job`. rank: of the node, in this round, the last one that began."""

    job: str
    rank: int
    round: int = 1


@dataclass(frozen=True)
class _Own:
    """This host's record as it was read or written last, at this revision; 0: there is none. lease_id: its lease."""

    record: HostRecord
    revision: int = 0
    lease_id: int = 0


class EtcdGoodput:
    """One agent's access to these records. For one thread at a time.

    Invariant: a write compares the host's record with the one that it adds to; if that has changed, the run id must still be that
    of the agent's own job. So what an agent writes late does not count for the next job.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str, position: Callable[[], AgentPosition]) -> None:
        self._client, self._keys, self._key, self._position = client, keys, keys.goodput + host, position
        self._reader = RecordReader(lambda fault: logger.warning("%s", fault))
        self._own: _Own | None = None  # None: to be read
        self._shared = False

    def share(self, spent: Spent) -> Shared:
        """Add what this agent has spent since its last call; return the sum over hosts, as rank 0 has made it last.

        Raises EtcdError, and OtherJob. If the answer of a write was lost, the same seconds may be added twice.
        """
        position, guard = self._position(), list[Compare]()
        while True:
            if self._own is None:
                self._own, guard = self._read_own(position.job)
            record = self._own.record.with_more(spent, time.time(), first=not self._shared)
            # An agent that is new in a running job reads all records, too: the sum may be older than the steps to repeat.
            new = not self._shared and position.round > 1
            shared = self._sum(record) if position.rank == 0 or new else None
            lease_id = outliving_lease(self._client, self._own.lease_id)
            puts: list[Op] = [Put(self._key, goodput.encode(record), lease_id=lease_id)]
            if position.rank == 0 and shared is not None:
                puts.append(Put(self._keys.goodput_sum, goodput.encode(shared), lease_id=lease_id))
            else:
                puts.append(Get(self._keys.goodput_sum))
            try:
                written = self._client.txn([unchanged(self._key, self._own.revision), *guard], puts)
            except LeaseLost:  # it expired with the record
                written = None
            if written is not None and written.succeeded:
                break
            self._own = None
        self._own, self._shared = _Own(record, written.revision, lease_id), True
        return shared or self._as_written(written, record)

    def _read_own(self, job: str) -> tuple[_Own, list[Compare]]:
        """Return this host's record, and what must hold as long as the run id is this job's. Raises OtherJob."""
        own, header = (reading.kv for reading in self._client.txn([], [Get(self._key), Get(self._keys.header)]).readings)
        found = self._reader.header(header) if header is not None else None
        if header is None or found is None or found.job != job:
            seen = "no job" if found is None else f"job {printable(found.job)}"
            raise OtherJob(f"goodput of {self._key}: {seen} runs under this --rdzv-id by now, expected {job}")
        guard = [unchanged(self._keys.header, header.mod_revision)]
        return (_Own(self._record(own), own.mod_revision, own.lease_id) if own is not None else _Own(HostRecord())), guard

    def _sum(self, mine: HostRecord) -> Shared:
        found = {kv.key.decode(errors="replace"): self._record(kv) for kv in self._client.get_prefix(self._keys.goodput).kvs}
        found[self._key] = mine
        return Shared(goodput.total(found), len(found))

    def _as_written(self, written: TxnResult, mine: HostRecord) -> Shared:
        """Return the sum as rank 0 has written it; before that, what this host knows."""
        if (kv := written.readings[0].kv) is not None:
            try:
                return goodput.decode_sum(kv.value, self._keys.goodput_sum)
            except RecordError as error:
                self._reader.note_fault(str(error), kv)
        return Shared(mine.spent, 1)

    def _record(self, kv: KeyValue) -> HostRecord:
        """Return the record; a new one if it is unreadable, which is logged once."""
        try:
            return goodput.decode(kv.value, kv.key.decode(errors="replace"))
        except RecordError as error:
            self._reader.note_fault(f"{error}; it counts as no goodput", kv)
            return HostRecord()
