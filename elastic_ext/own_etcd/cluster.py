"""What the keeper of a host knows of the cluster and of the other hosts, and what it reports to them. For one thread.

Every key that the keepers of a job have in its etcd, which belongs to that job alone.

hosts/HOST      a KeeperRecord of `decisions`. Lease: of that host's keeper.
                Written by that keeper; watched by the keepers that run a member.
seen/MEMBER     "": the member of this id (in hex) has served. Written by its keeper, read by the others.
shared/call/HOST  JSON: the host is to run a member of this `name`, in this `cluster` (as --initial-cluster).
                Written by the keeper that replaces a member; deleted by the one of that host once it serves.
shared/endpoints  the members' client URLs, separated by commas; none: those of the start.
                Written by the keeper of a new member. All keepers watch what is shared.
saved           a Beginning of `saved_keys`. Written and read by the keepers of the first members.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.etcd import Batch, Delete, EtcdClient, EtcdError, LeaseLost, LeaseSession, Put, Snapshot, SnapshotWatch, Tls
from elastic_ext.etcd.client import Member
from elastic_ext.own_etcd.certificates import CertificateFiles
from elastic_ext.own_etcd.decisions import KeeperRecord
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, decode

logger = logging.getLogger(__name__)

LEASE_S = 5  # a host that is silent for this long is lost; twice, if the leader of etcd was lost with it
CALL_S = 3.0
SCHEMA = 1

ROOT = "/elastic_ext_keepers/"
HOSTS = ROOT + "hosts/"
SEEN = ROOT + "seen/"
SHARED = ROOT + "shared/"
CALLS = SHARED + "call/"
ENDPOINTS = SHARED + "endpoints"
SAVED = ROOT + "saved"


@dataclass(frozen=True)
class Call:
    """This host is to run a member. cluster: as for --initial-cluster."""

    name: str
    cluster: str


class Cluster:
    """The client of one keeper."""

    def __init__(self, endpoints: str, run_id: str, own: str, files: CertificateFiles, wake: Callable[[], None]) -> None:
        """own: name of this host. wake: called on another thread when `update` has something to do."""
        self.client = EtcdClient(endpoints, tls=Tls(files.ca, files.cert, files.key), timeout_s=CALL_S)
        self.hosts: dict[str, KeeperRecord] = {}  # by name; empty unless HOSTS is watched (`watch`)
        self.header: Header | None = None  # of the job; None: there is no job
        self.call: Call | None = None  # to this host
        self.endpoints = endpoints
        self.silent: float | None = None  # since when etcd has not served our watches, monotonic; None if it does
        self.job_keys = JobKeys(run_id)
        self._own = own
        self._wake = wake
        self._lease: LeaseSession | None = None
        self._watches: dict[str, SnapshotWatch] = {}

    def watch(self, *prefixes: str) -> None:
        """Keep up with these: the job's header, SHARED, HOSTS."""
        for prefix in prefixes:
            if prefix not in self._watches:
                self._watches[prefix] = self.client.watch_with_snapshot(prefix, self._wake)
                self._wake()

    def update(self) -> None:
        try:
            for prefix, watch in self._watches.items():
                while (item := watch.get(0)) is not None:
                    self._take(prefix, item)
        except EtcdError as error:
            logger.debug("the keys cannot be read now: %s", error)
        live = all(watch.live for watch in self._watches.values())
        self.silent = None if live else self.silent or time.monotonic()

    def _take(self, prefix: str, item: Snapshot | Batch) -> None:
        if isinstance(item, Snapshot):
            self._forget(prefix)
        for event in item.events:
            self._note(event.kv.key.decode(errors="replace"), event.kv.value if event.kind == "put" else None)

    def _forget(self, prefix: str) -> None:
        if prefix == HOSTS:
            self.hosts.clear()
        elif prefix == SHARED:
            self.call = None
        else:
            self.header = None

    def _note(self, key: str, value: bytes | None) -> None:
        """value: None: the key was deleted."""
        try:
            if key == self.job_keys.header:
                self.header = decode(Header, value, key) if value is not None else None
            elif key.startswith(HOSTS):
                self.hosts.pop(key.removeprefix(HOSTS), None)
                if value is not None:
                    self.hosts[key.removeprefix(HOSTS)] = records.read(KeeperRecord, value, key, SCHEMA)
            elif key == CALLS + self._own:
                self.call = records.read(Call, value, key, SCHEMA) if value is not None else None
            elif key == ENDPOINTS and value is not None:
                self.endpoints = value.decode()
                self.client.follow(self.endpoints)
        except (records.RecordError, EtcdError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be used: %s", key, error)

    @property
    def job_over(self) -> bool:
        """Whether there is no job, or it has ended."""
        return self.header is None or self.header.ended

    def read_hosts(self) -> dict[str, KeeperRecord]:
        """Return the hosts as they are now; the watch may lag. Raises EtcdError."""
        found = {}
        for kv in self.client.get_prefix(HOSTS).kvs:
            key = kv.key.decode(errors="replace")
            try:
                found[key.removeprefix(HOSTS)] = records.read(KeeperRecord, kv.value, key, SCHEMA)
            except records.RecordError as error:
                logger.warning("%s cannot be used: %s", key, error)
        return found

    def write(self, record: KeeperRecord, *beside: Put | Delete) -> None:
        """Report this host to the other keepers, and write the rest at the same moment. Raises EtcdError."""
        if self._lease is None or self._lease.lost.is_set():
            self._lease = LeaseSession(self.client, LEASE_S, on_lost=lambda _: self._wake())
        text = records.encode(record, SCHEMA)
        try:
            self.client.txn([], [Put(HOSTS + self._own, text, lease_id=self._lease.lease_id), *beside])
        except LeaseLost:
            self._lease = None
            raise

    @property
    def holds(self) -> bool:
        """Whether the last report still holds."""
        return self._lease is not None and not self._lease.lost.is_set()

    def member_of(self, peer: str) -> Member | None:
        """Return the member with this peer URL. Raises EtcdError."""
        return next((each for each in self.client.membership.members() if peer in each.peers), None)

    def is_seen(self, member: Member) -> bool:
        """Return whether a keeper has said that this member serves. Raises EtcdError."""
        return self.client.get(f"{SEEN}{member.member_id:x}").kv is not None

    def await_change(self, deadline: float) -> bool:
        """Wait for a change of the hosts, and take all in; return False at the deadline, monotonic."""
        try:
            item = self._watches[HOSTS].get(max(0.0, deadline - time.monotonic()))
        except EtcdError:
            return False
        if item is not None:
            self._take(HOSTS, item)
        return item is not None

    def withdraw(self) -> None:
        """Report to the others that this keeper ends."""
        if self._lease is not None:
            try:
                self._lease.revoke(timeout_s=CALL_S)
            except EtcdError as error:
                logger.debug("%s", error)
            self._lease = None

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self.client.close()
