"""The goodput of a job without etcd: a file beside `ledger_file`, which the agents of the next launch add to."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_ext.base import goodput, user_files
from elastic_ext.base.files import write_whole
from elastic_ext.base.goodput import HostRecord, Shared, Spent
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError

logger = logging.getLogger(__name__)

SUFFIX = ".goodput"
MOST_BYTES = 16 << 20
FORGET_S = 1.0


class GoodputFile:
    """The record of each host, by name, in one file; in memory if no path is given. Agents of one host take turns by a lock."""

    def __init__(self, ledger_file: str | None, run_id: str, host: str) -> None:
        self._path = Path(ledger_file + SUFFIX) if ledger_file else None
        self._run_id, self._host = run_id, host
        self._hosts: dict[str, HostRecord] = {}
        self._shared = False
        self._lock = threading.Lock()  # `share` has a thread of its own

    def share(self, spent: Spent) -> Shared:
        """Add what this agent has spent since its last call; return the sum. Raises OSError, and then nothing was added."""
        with self._lock, _locked(self._path):
            path = self._path  # now: `forget` may have taken it away while this waited
            hosts = self._read(path) if path is not None else self._hosts
            record = hosts.get(self._host, HostRecord()).with_more(spent, time.time(), first=not self._shared)
            hosts = {**hosts, self._host: record}
            if path is not None:
                texts = {host: goodput.encode(each) for host, each in hosts.items()}
                write_whole(path, json.dumps({"run_id": self._run_id, "hosts": texts}))
            self._hosts, self._shared = hosts, True
        return Shared(goodput.total(hosts), len(hosts))

    def forget(self) -> None:
        """Delete the file: the job has ended well. This agent goes on in memory."""
        path, self._path = self._path, None
        # The file system may hang, and whoever has locked the directory; the job has ended, and must not wait for them.
        if path is None or not self._lock.acquire(timeout=FORGET_S):
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s stays, though the job has ended: %s", path, error)
        finally:
            self._lock.release()

    def _read(self, path: Path) -> dict[str, HostRecord]:
        """Read the file. Ignore one of another run."""
        if not path.is_file():
            return {}
        try:
            found = json.loads(user_files.read_text(str(path), MOST_BYTES))
            if found["run_id"] != self._run_id:
                return {}
            return {str(host): goodput.decode(text, str(path)) for host, text in found["hosts"].items()}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, RecordError) as error:
            logger.warning("%s cannot be used; counting goodput from now on: %s", path, printable(str(error)))
            return {}


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)  # a lock file would be left behind
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # NFS may refuse this for a directory; without it hosts would overwrite each other
        yield
    finally:
        os.close(descriptor)
