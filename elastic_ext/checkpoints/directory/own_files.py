"""Our own files in a directory of checkpoints: the manifest of each checkpoint, which commits it, and marks on checkpoints.

On disk, `manifest.json` is one JSON object: `schema` (SCHEMA), the fields of `Manifest`, and `seal`, a CRC-32 of the rest. A
reader refuses any other schema and ignores unknown fields. `nodes` may be absent. It is written last.

A directory belongs to one step of one generation; its name gives both. Each group of workers that opens the directory of
checkpoints gets a generation (`generations`), and later groups get higher ones. If a paused group wakes up after its successor
has started, it writes to its own directories and damages nothing. Its checkpoints count as older than the successor's, at any
step.

A mark says that a checkpoint is quarantined (never resume from it) or pinned (never prune it). It is a small file beside the
checkpoints, `.elastic_ext/quarantine/NAME.json` or `.elastic_ext/pin/NAME.json`, so every process that can read the checkpoints
sees it, in any run. It holds the JSON of a `Mark`. A mark never removes data.
"""

from __future__ import annotations

import json
import operator
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from io import RawIOBase
from typing import IO, Any, SupportsIndex, cast

from elastic_ext.base import errors, printable, records
from elastic_ext.checkpoints.storage import Storage

MARKERS = ".elastic_ext"

UNFINISHED = "-unfinished"  # NAME-unfinished beside a checkpoint: it is being written, copied or removed; NeMo's own mark, too


SCHEMA = 1
MANIFEST = "manifest.json"
MOST_SHOWN = 80  # characters of a wrong value
CHECKSUM = "xxh3_64"  # hex, 16 digits; https://github.com/Cyan4973/xxHash
BLOCK = 512 << 10  # bytes per read of a file to hash; small enough to be still in the core's cache when hashed


class ManifestError(errors.ElasticExtError):
    """A manifest is damaged or has another schema. The checkpoint must not be used."""


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint. name: relative to the checkpoint. size: bytes. checksum: see CHECKSUM."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The content of a complete checkpoint. Raises ValueError for a number that `count` refuses: a reader would, too."""

    step: int  # optimizer steps done
    generation: int  # generation of the group of workers that wrote it, see the module
    files: tuple[StoredFile, ...]  # all files that a load reads, from all ranks
    world_size: int = 1  # number of ranks that wrote it
    epoch: int = 0  # epoch of the step, from 0
    accumulation: int = 0  # micro-steps done toward the next optimizer step
    # run_id, restart: the job and restart that wrote it, for people.
    run_id: str = ""
    restart: int = 0
    saved_at: float = 0.0  # seconds since the epoch by the writer's clock, for people. Clocks of two machines are never compared
    extra: Mapping[str, Any] = field(default_factory=dict)  # small JSON values from the user
    # Number of ranks on each node, in order, if each wrote to its own disk first (`directory/tiers.py`); else empty.
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for each in (self.step, self.generation, self.world_size, self.epoch, self.accumulation, self.restart, *self.nodes):
            count(each)

    @property
    def order(self) -> tuple[int, int]:
        """(generation, step). The checkpoint with the greater order is newer."""
        return self.generation, self.step

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def count(value: object, least: int = 0) -> int:
    """Return a count as a plain int. It may be anything that serves as an index, such as the whole numbers of NumPy and torch.

    The one rule for what is written and what is read. Raises ValueError for anything else, for a bool, and for less than `least`.
    """
    try:
        found = int(operator.index(cast(SupportsIndex, value)))
    except (TypeError, ValueError, RuntimeError):  # torch raises a RuntimeError for a tensor on the meta device
        found = None
    is_bool = type(value).__name__ in ("bool", "bool_")  # that of NumPy before 2, too, which was an index
    if found is None or is_bool or found < least:
        raise ValueError(f"{printable.literal(value, MOST_SHOWN)} is not a whole number, {least} or more")
    return found


def encode(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`. It carries its own checksum, because no other file holds one for it."""
    record = {"schema": SCHEMA, **asdict(manifest)}
    return json.dumps({**record, "seal": _seal(json.loads(json.dumps(record)))}, indent=1).encode()


def _seal(record: Mapping[str, object]) -> str:
    """Return a checksum of the values, not of their JSON layout. CRC-32 detects any single flipped bit."""
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def decode(data: bytes) -> Manifest:
    """Parse the content of `manifest.json`. Raises only ManifestError, for any content."""
    try:
        record = json.loads(data)
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}, expected an object")
        seal = record.pop("seal", None)
        if record.get("schema") != SCHEMA:
            schema = record.get("schema")
            raise ValueError(f"it has schema {schema!r}, this version reads {SCHEMA}: use the elastic_ext that wrote it")
        if seal != _seal(record):
            raise ValueError("it does not match its own checksum: damaged, or edited by hand")
        files = tuple(
            StoredFile(_file_name(file["name"]), count(file["size"]), str(file["checksum"])) for file in record["files"]
        )
        if len({file.name for file in files}) != len(files):
            raise ValueError("it lists a file twice")
        record |= {"files": files, "run_id": str(record["run_id"]), "saved_at": float(record["saved_at"])}
        record |= {"extra": dict(record["extra"]), "nodes": tuple(record.get("nodes", ()))}
        return Manifest(**{each.name: record[each.name] for each in fields(Manifest)})
    except KeyError as error:
        raise ManifestError(f"the manifest has no {error}") from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # decoding errors are ValueErrors
        raise ManifestError(f"the manifest cannot be read: {error}") from error


def _file_name(value: object) -> str:
    """Return a file name. Raises ValueError if it leads out of the directory."""
    if not isinstance(value, str) or not value or value.startswith("/") or ".." in value.split("/") or "\0" in value:
        raise ValueError(f"{value!r} is not the name of a file in the checkpoint")
    return value


def checksum(file: IO[bytes], progress: Callable[[int], None] | None = None) -> str:
    """Return the xxh3_64 of a newly opened file, in the form that manifests use. Releases the GIL to read and hash.

    progress: called with the size of each block in bytes.
    """
    from xxhash import xxh3_64

    digest = xxh3_64()
    view = memoryview(bytearray(BLOCK))
    unbuffered = cast(RawIOBase, getattr(file, "raw", file))  # a buffered read would only add a copy
    while count := unbuffered.readinto(view):
        digest.update(view[:count])
        if progress is not None:
            progress(count)
    return str(digest.hexdigest())


def checksum_of(data: bytes | memoryview) -> str:
    """Return the xxh3_64 of bytes in memory, in the form that manifests use.

    Releases the GIL, as xxh3_64_hexdigest does not before xxhash 4: other threads would stand still, a tenth of a second for each
    gigabyte.
    """
    from xxhash import xxh3_64

    return str(xxh3_64(data).hexdigest())


# Marks.

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
    save_number: int = 0  # of the marked save, where that is known: it holds for none with a greater one

    def holds(self, written_at: float | None) -> bool:
        """Return whether it holds for a checkpoint of its name that was written then; None: unknown."""
        return not (self.written_at and written_at and written_at > self.written_at)


def quarantine(
    storage: Storage,
    name: str,
    reason: str,
    by: str = "",
    written_at: float | None = None,
    from_nothing: bool = False,
    save_number: int = 0,
) -> None:
    """Quarantine a checkpoint, so that no job resumes from it. Overwrites an earlier mark.

    written_at, from_nothing, save_number: see Mark; None if unknown. Raises OSError.
    """
    _set(storage, QUARANTINE, name, Mark(reason, by, time.time(), written_at or 0.0, from_nothing, save_number))


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
    except (ValueError, RecursionError, records.RecordError):
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
