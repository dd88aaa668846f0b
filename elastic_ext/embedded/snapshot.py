"""What outlives an embedded store: the ledger, charges, refused hosts and goodput of its job, in `ledger_file` of its host.

The format is that of `own_etcd.saved_keys`, and so is the rule when it is removed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic_ext.base import records
from elastic_ext.base.errors import UsageError
from elastic_ext.base.files import write_whole
from elastic_ext.base.printable import printable
from elastic_ext.embedded.keyspace import Keyspace, Refused
from elastic_ext.etcd.messages import Message, etcdrpc
from elastic_ext.own_etcd.saved_keys import GOODPUT_EVERY_S, LEAST_LEASE_S, MAX_BYTES, SCHEMA, SavedFile, SavedKey, is_for_good
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, decode

WRITE_AGAIN_S = 5.0  # after a failure: nothing reports that a disk has room again


def check_ledger_path(path: str) -> None:
    """Raise UsageError if `ledger_file` names something other than a file, which writing would replace."""
    if Path(path).exists() and not Path(path).is_file():
        raise UsageError(
            f"ledger_file={printable(path)}: expected a regular file or a new path; this is a directory, a pipe or a device"
        )


class SnapshotFile:
    """Keeps the file up to date. For the event loop of the store."""

    def __init__(self, keyspace: Keyspace, run_id: str, path: str, warn: Callable[[str], None]) -> None:
        """warn: gets one line for the user."""
        self._keyspace, self._run_id, self._path, self._warn = keyspace, run_id, Path(path), warn
        self._job = JobKeys(run_id)
        self._seen = keyspace.revision
        self._before = SavedFile(secrets.token_hex(8), 0, 0, 0, (), run_id)
        self._changed, self._soon = asyncio.Event(), asyncio.Event()  # soon: something but the goodput has changed
        self._writing: asyncio.Future[str] | None = None
        self._known = self._on_disk()
        self._trouble = ""

    def restore(self, now: float) -> None:
        """Put back what the file holds, if it is this job's and can be read. now: monotonic."""
        try:
            with self._path.open("rb") as file:
                found = records.read(SavedFile, file.read(MAX_BYTES), str(self._path), SCHEMA)
            if found.run_id != self._run_id:
                return
            gone_s = max(0, int(time.time()) - found.at)
            for saved in found.keys:
                if not saved.left_s or saved.left_s - gone_s >= LEAST_LEASE_S:
                    value = base64.b64decode(saved.value, validate=True)
                    self._keyspace.put(self._job.prefix + saved.key, value, saved.left_s and saved.left_s - gone_s, now)
            self._before = found
        except FileNotFoundError:
            return
        except (OSError, records.RecordError, ValueError, Refused) as error:  # ValueError: no base64
            self._warn(f"ledger_file {self._path} cannot be used; starting a new ledger: {error}")
        self._seen = self._keyspace.revision

    @property
    def is_foreign(self) -> bool:
        """Whether the file is not the one that was read or written here last: another process has replaced or removed it."""
        return self._on_disk() != self._known

    def _on_disk(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def look(self) -> None:
        """Note what has changed since the last look; call it after each change."""
        goodput = self._job.goodput.rstrip("/").encode()
        prefixes = tuple(prefix.encode() for prefix in self._job.outliving)
        for change in self._keyspace.since(self._seen + 1):
            key = change.event.kv.key
            if key.startswith(prefixes):
                self._changed.set()
                if not key.startswith(goodput):
                    self._soon.set()
        self._seen = self._keyspace.revision

    async def keep(self) -> None:
        """Write the file after changes, for as long as the store runs: goodput at most once in GOODPUT_EVERY_S.

        What cannot be written is written later, with what has changed since: no failure ends this, and with it the store.
        """
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))  # else it is imported at its first use: not without a free descriptor
        while True:
            await self._changed.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._soon.wait(), GOODPUT_EVERY_S)
            text = self._text()
            try:
                self._writing = loop.run_in_executor(None, self._write, text)
                trouble = await asyncio.shield(self._writing)
            except RuntimeError as error:  # no thread can be started
                trouble = str(error)
            self._report(trouble)
            if trouble:
                await asyncio.sleep(WRITE_AGAIN_S)

    def write_now(self) -> None:
        """Write what has changed, before this returns."""
        if self._changed.is_set():
            self._report(self._write(self._text()))

    async def end(self) -> None:
        """Write the last state; or remove the file if the job needs none: it is done, or not to be started again."""
        if self._writing is not None:
            await self._writing
        if (header := self._header()) is not None and is_for_good(header):
            self._path.unlink(missing_ok=True)
        else:
            self.write_now()

    def _header(self) -> Header | None:
        kvs = self._keyspace.under(self._job.header)
        try:
            return decode(Header, kvs[0].value, self._job.header) if kvs else None  # first: the key itself
        except records.RecordError:
            return None

    def _text(self) -> str:
        """Return the content of the file; what has changed until now is in it."""
        self._changed.clear()
        self._soon.clear()
        now = time.monotonic()
        kvs = [kv for prefix in self._job.outliving for kv in self._keyspace.under(prefix)]
        saved = tuple(self._saved(kv, now) for kv in {kv.key: kv for kv in kvs}.values())
        before, revision = self._before, self._keyspace.revision
        file = SavedFile(before.launch, before.starts + 1, revision, int(time.time()), saved, self._run_id)
        return records.encode(file, SCHEMA)

    def _saved(self, kv: Message, now: float) -> SavedKey:
        left_s = 0
        if kv.lease:
            left_s = max(1, self._keyspace.time_to_live(etcdrpc().LeaseTimeToLiveRequest(ID=kv.lease), now).TTL)
        key = kv.key.decode(errors="replace").removeprefix(self._job.prefix)
        return SavedKey(key, base64.b64encode(kv.value).decode(), left_s)

    def _write(self, text: str) -> str:
        """Return what went wrong; "": nothing. On any thread, and `warn` belongs to that of the event loop."""
        try:
            write_whole(self._path, text)
        except OSError as error:
            return error.strerror or str(error)
        self._known = self._on_disk()
        return ""

    def _report(self, trouble: str) -> None:
        """Note what is still to be written. Warn when the trouble begins, changes or ends."""
        if trouble:
            self._changed.set()
            self._soon.set()
        if trouble and trouble != self._trouble:
            self._warn(f"ledger_file {self._path} cannot be written; until it can, the budget outlives no launch: {trouble}")
        elif self._trouble and not trouble:
            self._warn(f"ledger_file {self._path} is written again")
        self._trouble = trouble
