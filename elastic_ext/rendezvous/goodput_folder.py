"""The goodput of a job without etcd: a folder beside `ledger_file`, to whose files the agents of the next launch add.

Each agent has a file of its own, replaces it whole, and reads all. So no file needs a lock, which a network file system may lack.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from elastic_ext.base import goodput, user_files
from elastic_ext.base.files import write_whole
from elastic_ext.base.goodput import HostRecord, Shared, Spent
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError

logger = logging.getLogger(__name__)

SUFFIX = ".goodput"
RECORD, PART = ".json", ".part"  # ends of file names; a killed agent may leave a part
MOST_BYTES = 1 << 20
FORGET_S = 1.0
READ_S = 10.0  # between two looks at the other files, at least; and a second more for each of them: a server has them all to read


class GoodputFolder:
    """The records of the agents that the hosts have had at a time, a file for each; in memory if no path is given.

    Invariant: what is written goes to the folder that the first `share` has found or made. If somebody deletes it, for the job is
    over, a late agent cannot bring its record back, not even into the folder that the next job has made in its place.
    """

    def __init__(self, ledger_file: str | None, run_id: str, host: str) -> None:
        self._path = Path(ledger_file + SUFFIX) if ledger_file else None
        self._run_id, self._host = run_id, host
        self._opened: Path | None = None
        self._held: socket.socket | None = None
        self._name = ""  # of this agent's file
        self._records: dict[str, HostRecord] = {}  # by file name
        self._read_at = 0.0  # monotonic time of the next look at the other files
        self._shared = False
        self._unreadable: set[str] = set()
        self._lock = threading.Lock()  # `share` has a thread of its own

    def share(self, spent: Spent) -> Shared:
        """Add what this agent has spent since its last call; return the sum. Raises OSError, and then nothing was added."""
        with self._lock:
            path = self._path  # now: `forget` may have taken it away while this waited
            folder = self._open(path) if path is not None else None
            if folder is not None and time.monotonic() >= self._read_at:
                self._read_all(folder)
            record = self._records.get(self._name, HostRecord()).with_more(spent, time.time(), first=not self._shared)
            if folder is not None:
                text = json.dumps({"run_id": self._run_id, "host": self._host, "record": goodput.encode(record)})
                write_whole(folder / self._name, text)
            self._records[self._name], self._shared = record, True
            return Shared(goodput.total(self._records), len(self._records))

    def forget(self) -> None:
        """Delete the folder: the job has ended well. This agent goes on in memory."""
        path, self._path = self._path, None
        # The file system may hang in a write; the job has ended, and must not wait for it.
        if path is None or not self._lock.acquire(timeout=FORGET_S):
            return
        try:
            _delete(path)
        finally:
            self._lock.release()

    def drop(self) -> None:
        """Delete what an earlier job has left under this run id. Call this before the first `share`."""
        if self._path is not None:
            _delete(self._path)

    def _open(self, path: Path) -> Path:
        """Return the folder, by a path that stays with it when it is deleted or replaced. Make it if need be. Raises OSError."""
        if self._opened is None:
            path.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            self._name, self._held = _claim(path, self._host)
            weakref.finalize(self, self._held.close)
            self._opened = Path(f"/proc/self/fd/{descriptor}")
        return self._opened

    def _read_all(self, folder: Path) -> None:
        """Read the files that have another writer, and at first this agent's own. Keep what was known of those that are gone."""
        names = [name for name in os.listdir(folder) if name.endswith(RECORD) and (name != self._name or not self._shared)]
        for name in names:
            try:
                record = self._read(folder / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                if name == self._name:  # it may come back: nothing must be written over it
                    raise
                self._warn_once(name, error)
                continue
            if record is not None:
                self._records[name] = record
        self._read_at = time.monotonic() + READ_S + len(names)

    def _read(self, path: Path) -> HostRecord | None:
        """Read a file. Ignore one of another run, and rubbish. Raises OSError."""
        try:
            found = json.loads(user_files.read_text(str(path), MOST_BYTES))
            return goodput.decode(found["record"], path.name) if found["run_id"] == self._run_id else None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, RecordError) as error:
            self._warn_once(path.name, error)
            return None

    def _warn_once(self, name: str, error: Exception) -> None:
        if name not in self._unreadable:
            logger.warning("goodput in %s/%s counts as none, for it cannot be read: %s", self._path, name, printable(str(error)))
        self._unreadable.add(name)


def _delete(path: Path) -> None:
    """Delete the folder with the files that agents have made in it. If that fails, log it."""
    try:
        for each in path.iterdir():
            if each.name.endswith((RECORD, PART)):
                each.unlink(missing_ok=True)
        path.rmdir()
    except FileNotFoundError:
        pass  # another agent was faster
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # else another agent has written meanwhile, and deletes it when it ends
            logger.warning("%s stays, though it is of a job that has ended: %s", path, error)


def _claim(folder: Path, host: str) -> tuple[str, socket.socket]:
    """Return a file name that no other agent of this host has, and what holds it.

    That is an abstract socket: it needs no file, and the kernel gives it back when the process ends. The first agent of a host
    always gets the same name, so it adds to what the last one has left.
    """
    number = 0
    while True:
        name = f"{hashlib.sha256(host.encode()).hexdigest()[:20]}.{number}{RECORD}"
        address = hashlib.sha256(f"{folder.resolve()}/{name}".encode(errors="surrogateescape")).hexdigest()
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0elastic_ext.{address}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
            number += 1
        else:
            return name, held
