"""The parts of other nodes that this node keeps, below `.elastic_ext/mirrored/` of its local directory.

    id              a name of this directory, random
    KEY/part/...    the files of a part, by their paths in the local directory of the other node
    KEY/record      a `catalogue.MirroredPart`: whose part it is, and that node's record of it

Invariant: a part counts if its record is there and all its files have the recorded sizes. The record is written last, once the
other node has said that it still vouches for what was fetched, and goes first.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from typing import IO

from elastic_ext.base import records
from elastic_ext.checkpoints.sharing.catalogue import MIRRORED, KeptParts, MirroredPart
from elastic_ext.checkpoints.sharing.merging import path_in
from elastic_ext.checkpoints.sharing.mirror_plan import files_of_part
from elastic_ext.checkpoints.storage import LocalStorage, remove_if_there

logger = logging.getLogger(__name__)

SCHEMA = 1
ID = f"{MIRRORED}/id"
RECORD = "record"

Copy = Callable[[str, int, IO[bytes]], None]
"""Writes all of a file of another node: its path there, its size in bytes, and where to. Raises OSError."""


def kept_in(local: LocalStorage) -> KeptParts:
    """Return what a directory keeps of other nodes, and its name. Raises OSError."""
    return KeptParts(name_of(local), mirrored_parts(local))


def name_of(local: LocalStorage) -> str:
    """Return the name of a directory, which it gets here if it has none; "": it cannot be written, so nobody mirrors it."""
    try:
        found = local.read_if_there(ID)
        if found is None:
            try:
                local.create(ID, secrets.token_hex(16).encode())
            except FileExistsError:
                logger.debug("%s has got its name meanwhile", local.address)
            found = local.read(ID)
        text = found.decode()
        return text if records.is_name(text) else ""
    except (OSError, UnicodeDecodeError) as error:
        logger.debug("%s has no name: %s", local.address, error)
        return ""


def mirrored_parts(local: LocalStorage) -> tuple[MirroredPart, ...]:
    """Return the parts that count. Raises OSError."""
    found = (_part_at(local, f"{MIRRORED}/{each.name}") for each in local.listed(MIRRORED) if each.is_dir)
    return tuple(each for each in found if each is not None and _is_there(local, each))


def _part_at(local: LocalStorage, folder: str) -> MirroredPart | None:
    data = local.read_if_there(f"{folder}/{RECORD}")
    if data is None:
        return None
    try:
        part = records.read(MirroredPart, data, local.path(f"{folder}/{RECORD}"), SCHEMA)
    except records.RecordError as error:
        logger.warning("a part of another node does not count: %s", error)
        return None
    return part if part.folder == folder else None


def _is_there(local: LocalStorage, part: MirroredPart) -> bool:
    files = files_of_part(part)
    found = (local.stat(f"{part.files}/{path_in(part.name, file.name)}") for file in files)
    same = [each is not None and not each.is_dir and each.size == file.size for each, file in zip(found, files, strict=True)]
    return bool(same) and all(same)


def fetch_part(local: LocalStorage, part: MirroredPart, copy: Copy) -> None:
    """Fetch the files of a part. They do not count yet. Raises OSError."""
    remove_if_there(local, part.folder)
    for file in sorted(files_of_part(part), key=lambda each: -each.size):
        path = path_in(part.name, file.name)
        with local.write(f"{part.files}/{path}") as to:
            copy(path, file.size, to)


def commit_part(local: LocalStorage, part: MirroredPart) -> None:
    """Let what was fetched count. Raises OSError."""
    text = records.encode(part, SCHEMA)
    if len(text) > records.MAX_BYTES:
        raise OSError(f"the record of {part.name} has {len(text)} bytes, expected {records.MAX_BYTES} at most")
    local.put(f"{part.folder}/{RECORD}", text.encode())


def revoke(local: LocalStorage, parts: Iterable[MirroredPart]) -> None:
    """Let parts no longer count, at once: `remove_leftovers` frees what they take. Raises OSError."""
    for each in parts:
        remove_if_there(local, f"{each.folder}/{RECORD}")


def remove_leftovers(local: LocalStorage) -> None:
    """Remove what does not count: of a fetch that was cut off, and of parts that were revoked. Raises OSError."""
    kept = {each.folder for each in mirrored_parts(local)}
    for each in local.listed(MIRRORED):
        if each.is_dir and f"{MIRRORED}/{each.name}" not in kept:
            local.remove_tree(f"{MIRRORED}/{each.name}", first=(RECORD,))
