"""A torch.distributed.checkpoint directory: shards (`*.distcp`), and `.metadata`, which says where each tensor lies in them.

`.metadata` is renamed into place after every rank has written its shards, so its presence marks the end of the save
(`FileSystemWriter.finish` in torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.formats.inspection import DCP, NO_OPTIMIZER, Inspection, summary, total_size
from elastic_ext.checkpoints.formats.peek import MAX_BYTES, PeekError, StandIn, is_count, peek
from elastic_ext.checkpoints.storage import Entry, Storage

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"
_OPTIMIZER = re.compile(r"optim|exp_avg|momentum|param_groups", re.IGNORECASE)  # in keys of a state with an optimizer's


@dataclass(frozen=True)
class Item:
    """Location of an object or of a shard of a tensor: bytes `offset` to `offset + length` of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Metadata:
    """What a `.metadata` says. items: none if a storage writer other than torch's own wrote it. keys: of the saved state."""

    items: tuple[Item, ...] = ()
    keys: tuple[str, ...] = ()


def matches(name: str, names: Sequence[str]) -> bool:
    """Return whether torch.distributed.checkpoint wrote a directory with these names, complete or not."""
    return any(each.endswith((METADATA, f"{METADATA}.tmp", SHARD_SUFFIX)) for each in names)


def check(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check that `.metadata` and all the bytes that it refers to exist. Raises OSError."""
    metadata = next((item for item in content if item.name == METADATA), None)
    if metadata is None:
        return Inspection(False, DCP, f"no {METADATA}, the save did not finish")
    if metadata.size == 0:
        return Inspection(False, DCP, f"{METADATA} is empty, the save did not finish")
    shards = {item.name: item.size for item in content if item.name.endswith(SHARD_SUFFIX) and item.size > 0}
    if not shards:
        return Inspection(False, DCP, f"{METADATA} without any non-empty {SHARD_SUFFIX} file: the data is missing")
    try:
        parsed = _metadata(storage, entry.name, metadata)
    except PeekError as error:
        return Inspection(False, DCP, f"{METADATA} is damaged: {error}")
    needed = _least_sizes(parsed.items)
    faults = [
        f"{file} has {shards.get(file, 0)} bytes of {least}" for file, least in needed.items() if shards.get(file, 0) < least
    ]
    if faults:
        return Inspection(False, DCP, summary(faults))
    training = any(_OPTIMIZER.search(key) for key in parsed.keys) if parsed.keys else None
    reason = f"{METADATA} present, {len(shards)} shard files" + f", {NO_OPTIMIZER}" * (training is False)
    return Inspection(True, DCP, reason, metadata.mtime, size=total_size(content), training=training)


def items(storage: Storage, folder: str, metadata: Entry) -> tuple[Item, ...]:
    """Return the items in a folder's `.metadata`; none if it is too large to read. Raises PeekError, OSError."""
    return _metadata(storage, folder, metadata).items


def parse_metadata(data: bytes) -> Metadata:
    """Parse a `.metadata`. Raises PeekError."""
    value = peek(data)
    stored, keys = (value.field(name) if isinstance(value, StandIn) else None for name in ("storage_data", "state_dict_metadata"))
    found = []
    for info in stored.values() if isinstance(stored, dict) else ():
        if isinstance(info, StandIn):
            file, offset, length = (info.field(name) for name in ("relative_path", "offset", "length"))
            if type(file) is str and is_count(offset) and is_count(length):
                found.append(Item(file, offset, length))
    return Metadata(tuple(found), tuple(key for key in keys if isinstance(key, str)) if isinstance(keys, dict) else ())


def _metadata(storage: Storage, folder: str, metadata: Entry) -> Metadata:
    if metadata.size > MAX_BYTES:
        return Metadata()
    return parse_metadata(storage.read(f"{folder.rstrip('/')}/{METADATA}"))


def _least_sizes(found: Sequence[Item]) -> dict[str, int]:
    """Return the minimum size of each file in bytes."""
    sizes: dict[str, int] = {}
    for item in found:
        sizes[item.file] = max(sizes.get(item.file, 0), item.offset + item.length)
    return sizes
