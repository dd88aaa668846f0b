"""What outlives a job that brings its own etcd: its ledger, charges, refused hosts and goodput, in a file for the next start.

The etcd of the next start is a new one, perhaps on other hosts. Each keeper with a member writes a file beside `ledger_file` at
each change; the first members of the next etcd put the newest file back before any agent comes in.

Which file is newest is found by counting, not by clocks: a file holds how many starts there were before, and etcd's revision. The
time that a record has left is another matter: that is measured by the clock, and a wrong one only shortens or prolongs it.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base import files, records
from elastic_ext.etcd import Delete, EtcdClient, EtcdError, Get, Put, SnapshotWatch, absent, unchanged, values
from elastic_ext.failures.ledger import decode_verdict
from elastic_ext.own_etcd import cluster
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, State

logger = logging.getLogger(__name__)

SCHEMA = 1
MAX_BYTES = 16 << 20
LEAST_LEASE_S = 2
MAX_OPS = 100  # of etcd's 128 in a transaction
GOODPUT_EVERY_S = 5.0  # between two files, where only the goodput has changed


@dataclass(frozen=True)
class SavedKey:
    """key: without the job's prefix. value: base64. left_s: until it expires; 0: it does not."""

    key: str
    value: str
    left_s: int


@dataclass(frozen=True)
class SavedFile:
    """launch: name of the etcd, `starts`: how many the job has had, with this one. revision: of etcd. at: Unix time."""

    launch: str
    starts: int
    revision: int
    at: int
    keys: tuple[SavedKey, ...]
    run_id: str = ""  # where the file's name does not say it

    @property
    def age(self) -> tuple[int, int]:
        """Larger in a newer file."""
        return self.starts, self.revision


@dataclass(frozen=True)
class Beginning:
    """What this etcd began with. launch: its name. starts, revision: of the file that was put back."""

    launch: str
    starts: int
    revision: int

    @property
    def age(self) -> tuple[int, int]:
        return self.starts, self.revision


def newest(ledger_file: str, run_id: str) -> SavedFile | None:
    """Return the newest readable file of any host; None if there is none."""
    found = []
    for path in _paths(ledger_file, run_id):
        try:
            with path.open("rb") as file:
                found.append(records.read(SavedFile, file.read(MAX_BYTES), str(path), SCHEMA))
        except (OSError, records.RecordError) as error:
            logger.warning("%s cannot be used: %s", path, error)
    return max(found, key=lambda each: each.age, default=None)


def _paths(ledger_file: str, run_id: str) -> list[Path]:
    return [Path(path) for path in glob.glob(glob.escape(f"{ledger_file}.{_job(run_id)}.") + "*.json")]


def _job(run_id: str) -> str:
    """Return what distinguishes the files of one job from those of another with the same `ledger_file`."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:12]


class SavedKeys:
    """Keeps the file of one host up to date. For one thread."""

    def __init__(self, client: EtcdClient, run_id: str, host: str, ledger_file: str, wake: Callable[[], None]) -> None:
        self._client, self._run_id, self._ledger_file = client, run_id, ledger_file
        self._job = JobKeys(run_id)
        self._path = Path(f"{ledger_file}.{_job(run_id)}.{host.replace('/', '-')}.json")
        self._wake = wake
        self._watches: dict[str, SnapshotWatch] = {}
        self._due: float | None = None

    def restore(self) -> str:
        """Put the newest file back, if none of this age is back already and no round was formed. Return a line for the log.

        Raises EtcdError.
        """
        found = newest(self._ledger_file, self._run_id)
        while True:
            kv = self._client.get(cluster.SAVED).kv
            before = _beginning(kv)
            if kv is not None and (found is None or found.launch == before.launch or found.age <= before.age):
                return ""
            began = Beginning(before.launch or secrets.token_hex(8), *(found.age if found is not None else (0, 0)))
            guards = [unchanged(cluster.SAVED, kv.mod_revision if kv is not None else 0), absent(self._job.header)]
            if self._client.txn(guards, [Put(cluster.SAVED, records.encode(began, SCHEMA))]).succeeded:
                return self._put_back(found) if found is not None else ""
            if self._client.get(self._job.header).kv is not None:  # the job trains already
                return ""

    def _put_back(self, found: SavedFile) -> str:
        gone_s = max(0, int(time.time()) - found.at)
        left = [each for each in found.keys if not each.left_s or each.left_s - gone_s >= LEAST_LEASE_S]
        for prefix in self._job.outliving:
            self._client.txn([], [Delete(prefix, prefix=True)])
        for first in range(0, len(left), MAX_OPS):
            self._client.txn([], [self._put(each, gone_s) for each in left[first : first + MAX_OPS]])
        return f"what outlived the last run of the job is back: {len(left)} records of {self._ledger_file}"

    def _put(self, saved: SavedKey, gone_s: int) -> values.Op:
        lease = self._client.lease_grant(saved.left_s - gone_s).lease_id if saved.left_s else 0
        return Put(self._job.prefix + saved.key, base64.b64decode(saved.value), lease_id=lease)

    def watch(self) -> None:
        """Begin to keep the file up to date."""
        for prefix in self._job.outliving:
            self._watches[prefix] = self._client.watch_with_snapshot(prefix, self._wake)
        self._wake()

    def update(self, now: float) -> float | None:
        """Write the file if something has changed. Return when to call again though nothing has changed; monotonic."""
        try:
            for prefix, watch in self._watches.items():
                while (watch.get(0)) is not None:
                    waits = GOODPUT_EVERY_S if prefix == self._job.goodput else 0.0
                    self._due = min(self._due if self._due is not None else now + waits, now + waits)
            if self._due is not None and self._due <= now:
                self.write()
        except EtcdError as error:
            logger.debug("not saved now: %s", error)
            self._due = now + 1.0
        return self._due

    def write(self) -> None:
        """Write the file. Raises EtcdError."""
        read = self._client.txn([], [Get(cluster.SAVED), *(Get(prefix, prefix=True) for prefix in self._job.outliving)])
        began = _beginning(read.readings[0].kv)
        found = [kv for reading in read.readings[1:] for kv in reading.kvs]
        left = {lease: self._client.lease_left_s(lease) for lease in {kv.lease_id for kv in found} - {0}}
        saved = tuple(self._saved(kv, left) for kv in found if not kv.lease_id or left[kv.lease_id] > 0)
        file = SavedFile(began.launch, began.starts + 1, read.revision, int(time.time()), saved)
        try:
            files.write_whole(self._path, records.encode(file, SCHEMA))
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
        self._due = None

    def _saved(self, kv: values.KeyValue, left: dict[int, int]) -> SavedKey:
        key = kv.key.decode(errors="replace").removeprefix(self._job.prefix)
        return SavedKey(key, base64.b64encode(kv.value).decode(), left[kv.lease_id] if kv.lease_id else 0)

    def stop(self) -> None:
        """Leave the file as it is."""
        for watch in self._watches.values():
            watch.close()

    def end(self, header: Header | None) -> None:
        """Write the last state; or remove all files if the job needs none: it is done, or not to be started again."""
        self.stop()
        if header is not None and is_for_good(header):
            for path in _paths(self._ledger_file, self._run_id):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("%s cannot be removed: %s", path, error.strerror)
            return
        try:
            self.write()
        except EtcdError as error:
            logger.warning("the last state of the job is not saved: %s", error)


def is_for_good(header: Header) -> bool:
    """Return whether the job needs no file any more: it is done, or not to be started again."""
    if header.state is State.DONE:
        return True
    try:
        return header.state is State.CLOSED and bool(header.verdict) and not decode_verdict(header.verdict).keeps_ledger
    except records.RecordError:
        return False


def _beginning(kv: values.KeyValue | None) -> Beginning:
    try:
        return records.read(Beginning, kv.value, cluster.SAVED, SCHEMA) if kv is not None else Beginning("", 0, 0)
    except records.RecordError:
        return Beginning("", 0, 0)
