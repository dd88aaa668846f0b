"""What outlives an embedded store: the ledger, charges, refused hosts and goodput of its job, in `ledger_file` of its host.

The format is that of `own_etcd.saved_keys`, and so is the rule when it is removed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import time
from pathlib import Path
from typing import Any

from elastic_ext.base import records
from elastic_ext.base.files import write_whole
from elastic_ext.base.records import RecordError
from elastic_ext.embedded.keyspace import Keyspace, Message
from elastic_ext.etcd.messages import etcdrpc
from elastic_ext.etcd.values import range_of_prefix
from elastic_ext.own_etcd.saved_keys import GOODPUT_EVERY_S, LEAST_LEASE_S, MAX_BYTES, SCHEMA, SavedFile, SavedKey, is_for_good
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, decode

logger = logging.getLogger(__name__)


class Snapshot:
    """Keeps the file up to date. For the event loop of the store."""

    def __init__(self, keyspace: Keyspace, run_id: str, path: str) -> None:
        self._keyspace, self._path = keyspace, Path(path)
        self._job = JobKeys(run_id)
        self._prefixes = tuple(prefix.encode() for prefix in self._job.outliving)
        self._rpc: Any = etcdrpc()
        self._seen = keyspace.revision
        self._before = SavedFile(secrets.token_hex(8), 0, 0, 0, ())
        self._changed = asyncio.Event()
        self._soon = False  # something but the goodput has changed

    def restore(self, now: float) -> None:
        """Put back what the file holds, if it is this job's and can be read. now: monotonic."""
        try:
            with self._path.open("rb") as file:
                self._before = records.read(SavedFile, file.read(MAX_BYTES), str(self._path), SCHEMA)
        except FileNotFoundError:
            return
        except (OSError, RecordError) as error:
            logger.warning("%s cannot be used: %s", self._path, error)
            return
        gone_s = max(0, int(time.time()) - self._before.at)
        for saved in self._before.keys:
            if not saved.left_s or saved.left_s - gone_s >= LEAST_LEASE_S:
                self._put(saved, saved.left_s and saved.left_s - gone_s, now)
        self._seen = self._keyspace.revision

    def _put(self, saved: SavedKey, left_s: int, now: float) -> None:
        lease = self._keyspace.grant(self._rpc.LeaseGrantRequest(TTL=left_s), now).ID if left_s else 0
        key, value = (self._job.prefix + saved.key).encode(), base64.b64decode(saved.value)
        put = self._rpc.PutRequest(key=key, value=value, lease=lease)
        self._keyspace.txn(self._rpc.TxnRequest(success=[self._rpc.RequestOp(request_put=put)]))

    def look(self) -> None:
        """Note what has changed since the last look; call it after each change."""
        goodput = self._job.goodput.rstrip("/").encode()
        for change in self._keyspace.since(self._seen + 1):
            key = change.event.kv.key
            if key.startswith(self._prefixes):
                self._soon = self._soon or not key.startswith(goodput)
                self._changed.set()
        self._seen = self._keyspace.revision

    async def keep(self) -> None:
        """Write the file after changes, for as long as the store runs: goodput at most once in GOODPUT_EVERY_S."""
        while True:
            await self._changed.wait()
            if not self._soon:
                await asyncio.sleep(GOODPUT_EVERY_S)
            self._soon = False
            self._changed.clear()
            text = self._text(time.monotonic())
            await asyncio.get_running_loop().run_in_executor(None, self._write, text)

    def end(self) -> None:
        """Write the last state; or remove the file if the job needs none: it is done, or not to be started again."""
        header = self._header()
        if header is not None and is_for_good(header):
            self._path.unlink(missing_ok=True)
        elif self._changed.is_set():
            self._write(self._text(time.monotonic()))

    def _header(self) -> Header | None:
        kvs = self._range(self._job.header.encode(), b"")
        try:
            return decode(Header, kvs[0].value, self._job.header) if kvs else None
        except RecordError:
            return None

    def _range(self, start: bytes, end: bytes) -> list[Message]:
        return list(self._keyspace.range(self._rpc.RangeRequest(key=start, range_end=end)).kvs)

    def _text(self, now: float) -> str:
        kvs = [kv for prefix in self._prefixes for kv in self._range(*range_of_prefix(prefix))]
        saved = tuple(self._saved(kv, now) for kv in {kv.key: kv for kv in kvs}.values())
        before = self._before
        file = SavedFile(before.launch, before.starts + 1, self._keyspace.revision, int(time.time()), saved)
        return json.dumps({"schema": SCHEMA, **records.plain(file)})

    def _saved(self, kv: Message, now: float) -> SavedKey:
        left_s = 0
        if kv.lease:
            left_s = max(1, self._keyspace.time_to_live(self._rpc.LeaseTimeToLiveRequest(ID=kv.lease), now).TTL)
        key = kv.key.decode(errors="replace").removeprefix(self._job.prefix)
        return SavedKey(key, base64.b64encode(kv.value).decode(), left_s)

    def _write(self, text: str) -> None:
        try:
            write_whole(self._path, text)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
