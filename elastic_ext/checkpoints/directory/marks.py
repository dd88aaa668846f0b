"""Marks on checkpoints: quarantined (never resume from it) and pinned (never prune it).

A mark is a small file beside the checkpoints, `.elastic_ext/quarantine/NAME.json` or `.elastic_ext/pin/NAME.json`, so every
process that can read the checkpoints sees it, in any run. It holds the JSON of a `Mark`. A mark never removes data.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from elastic_ext.base import records
from elastic_ext.base.records import RecordError
from elastic_ext.checkpoints.directory import MARKERS
from elastic_ext.checkpoints.storage import Storage

QUARANTINE = f"{MARKERS}/quarantine"
PIN = f"{MARKERS}/pin"


@dataclass(frozen=True)
class Mark:
    """The reason and origin of a quarantine or pin."""

    reason: str  # for people
    by: str = ""  # the user or process that set the mark
    at: float = 0.0  # when it was set, in seconds since the epoch by that process's clock, for people
    # When the marked checkpoint was written, by the clock of the storage. One written later under the same name is another
    # checkpoint. 0: the mark holds for any checkpoint of that name.
    written_at: float = 0.0
    # Where no other checkpoint may be used, a run may begin from nothing: so did the one that has saved it.
    from_nothing: bool = False


def quarantine(
    storage: Storage, name: str, reason: str, by: str = "", written_at: float | None = None, from_nothing: bool = False
) -> None:
    """Quarantine a checkpoint, so that no job resumes from it. Overwrites an earlier mark.

    written_at, from_nothing: see Mark; None if unknown. Raises OSError.
    """
    _set(storage, QUARANTINE, name, Mark(reason, by, time.time(), written_at or 0.0, from_nothing))


def lift_quarantine(storage: Storage, name: str) -> None:
    """Trust a checkpoint again. Raises FileNotFoundError if it is not quarantined, OSError."""
    storage.remove(_path(QUARANTINE, name))


def quarantine_of(storage: Storage, name: str) -> Mark | None:
    """Return the mark of a quarantined checkpoint, or None. A mark that cannot be parsed still counts. Raises OSError."""
    path = _path(QUARANTINE, name)
    data = storage.read_if_there(path)
    if data is None:
        return None
    try:
        return records.build(Mark, json.loads(data), path)
    except (ValueError, RecursionError, RecordError):
        return Mark(f"its mark {storage.path(path)} cannot be parsed")


def quarantined_names(storage: Storage) -> frozenset[str]:
    """Return the names of all quarantined checkpoints. One listing. Raises OSError."""
    return _names(storage, QUARANTINE)


def pin(storage: Storage, name: str, reason: str = "", by: str = "") -> None:
    """Pin a checkpoint, so that it is not pruned. Overwrites an earlier mark. Raises OSError."""
    _set(storage, PIN, name, Mark(reason, by, time.time()))


def unpin(storage: Storage, name: str) -> None:
    """Allow pruning of a checkpoint again. Raises FileNotFoundError if it is not pinned, OSError."""
    storage.remove(_path(PIN, name))


def pinned_names(storage: Storage) -> frozenset[str]:
    """Return the names of all pinned checkpoints. One listing. Raises OSError."""
    return _names(storage, PIN)


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name}.json"


def _set(storage: Storage, folder: str, name: str, mark: Mark) -> None:
    storage.put(_path(folder, name), json.dumps(asdict(mark)).encode())


def _names(storage: Storage, folder: str) -> frozenset[str]:
    return frozenset(each.name.removesuffix(".json") for each in storage.listed(folder) if each.name.endswith(".json"))
