"""The goodput of a job in etcd: one small record per host, which outlives its agents as the ledger does."""

from __future__ import annotations

import logging
import random
import time

from elastic_ext.base import goodput
from elastic_ext.base.goodput import HostRecord, Shared, Spent
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.etcd import EtcdClient, LeaseLost, Put, absent, unchanged
from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.verdict import LEDGER_TTL_S

logger = logging.getLogger(__name__)

MIN_READ_S = 30.0


class EtcdGoodput:
    """One agent's access to these records. For one thread at a time."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str) -> None:
        self._client, self._prefix, self._host = client, keys.goodput, host
        self._shared = False
        self._found: dict[str, HostRecord] = {}  # by key
        self._read_at = 0.0  # monotonic time of the next look at the other hosts

    def share(self, spent: Spent) -> Shared:
        """Add what this agent has spent since its last call; return the sum over hosts.

        The other hosts' records are read at the first call, and then as many seconds after the last time as there are hosts, at
        least, and not by all agents at once: etcd then sends one record a second to each. Raises EtcdError. If the answer of a
        write was lost, the same seconds may be added twice.
        """
        key = self._prefix + self._host
        while True:
            before = self._client.get(key).kv
            record = _record(before).with_more(spent, time.time(), first=not self._shared)
            same = unchanged(key, before.mod_revision) if before is not None else absent(key)
            try:
                if self._client.txn([same], [Put(key, goodput.encode(record), lease_id=self._lease(before))]).succeeded:
                    break
            except LeaseLost:
                continue  # it expired with the record
        self._shared = True
        if (now := time.monotonic()) >= self._read_at:
            kvs = self._client.get_prefix(self._prefix).kvs
            self._found = {kv.key.decode(errors="replace"): _record(kv) for kv in kvs}
            self._read_at = now + max(MIN_READ_S, len(kvs)) * random.uniform(1.0, 2.0)
        self._found[key] = record
        return Shared(goodput.total(self._found), len(self._found))

    def _lease(self, before: KeyValue | None) -> int:
        if before is not None and before.lease_id:
            self._client.lease_keep_alive([before.lease_id])
            return before.lease_id
        return self._client.lease_grant(LEDGER_TTL_S).lease_id


def _record(kv: KeyValue | None) -> HostRecord:
    """Return the record; a new one if it is missing or unreadable."""
    if kv is None:
        return HostRecord()
    try:
        return goodput.decode(kv.value, kv.key.decode(errors="replace"))
    except RecordError as error:
        logger.warning("a host's goodput cannot be read and counts as none: %s", printable(str(error)))
        return HostRecord()
