"""Directories of torch.distributed.checkpoint, our own among them, and those of Lightning's FSDP strategy.

Their tensors are in shards (`*.distcp`), and `.metadata` says where each tensor lies in them.

`.metadata` is renamed into place after every rank has written its shards, so its presence marks the end of the save
(`FileSystemWriter.finish` in torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.formats import single_files
from elastic_ext.checkpoints.formats.inspection import DCP, LIGHTNING, NO_OPTIMIZER, OWN, Inspection, summary
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, decode, order_of
from elastic_ext.checkpoints.formats.single_files import MAX_BYTES, PeekError, StandIn, is_count, peek
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
        parsed = read_metadata(storage, entry.name, metadata)
    except PeekError as error:
        return Inspection(False, DCP, f"{METADATA} is damaged: {error}")
    needed: dict[str, int] = {}  # bytes of each file
    for item in parsed.items:
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    faults = [f"{file} has {shards.get(file, 0)} bytes of {size}" for file, size in needed.items() if shards.get(file, 0) < size]
    if faults:
        return Inspection(False, DCP, summary(faults))
    training = any(_OPTIMIZER.search(key) for key in parsed.keys) if parsed.keys else None
    reason = f"{METADATA} present, {len(shards)} shard files" + f", {NO_OPTIMIZER}" * (training is False)
    size = sum(item.size for item in content if not item.is_dir)
    return Inspection(True, DCP, reason, metadata.mtime, size=size, training=training)


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


def read_metadata(storage: Storage, folder: str, metadata: Entry) -> Metadata:
    """Return what the `.metadata` of a folder says; nothing if it is too large to read. Raises PeekError, OSError."""
    if metadata.size > MAX_BYTES:
        return Metadata()
    return parse_metadata(storage.read(f"{folder.rstrip('/')}/{METADATA}"))


# Our own directories: those of torch, and a manifest (`manifest.py`), written last.


def is_own(name: str, names: Sequence[str]) -> bool:
    """Return whether a directory is ours, complete or not.

    `manifest.json` is a common name. If it lies beside shards it is ours, even in a renamed directory.
    """
    return order_of(name) is not None or (MANIFEST in names and _has_shards(names))


def check_own(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check that every file in the manifest exists with the right size. Raises OSError."""
    found = {item.name: item for item in content}
    if MANIFEST not in found:
        return Inspection(False, OWN, f"no {MANIFEST}, the save did not finish")
    try:
        manifest = decode(storage.read(f"{entry.name}/{MANIFEST}"))
    except ManifestError as error:
        return Inspection(False, OWN, str(error))
    for folder in sorted({file.name.rpartition("/")[0] for file in manifest.files} - {""}):
        try:
            found.update({f"{folder}/{item.name}": item for item in storage.entries(f"{entry.name}/{folder}")})
        except (FileNotFoundError, NotADirectoryError):
            continue  # `size_faults` reports its files as missing
    faults = [f"{file} {fault}" for file, fault in size_faults(manifest, found).items()]
    if faults:
        return Inspection(False, OWN, summary(faults))
    reason = f"manifest intact, {len(manifest.files)} files of the right size"
    return Inspection(True, OWN, reason, found[MANIFEST].mtime, manifest.step, manifest.epoch, manifest.size)


def size_faults(manifest: Manifest, found: Mapping[str, Entry]) -> dict[str, str]:
    """Return the faults of a manifest's files by name: "is missing" or "has ... bytes". Pure."""
    faults = {}
    for file in manifest.files:
        there = found.get(file.name)
        if there is None:
            faults[file.name] = "is missing"
        elif there.is_dir or there.size != file.size:
            faults[file.name] = f"has {there.size} bytes, expected {file.size}"
    return faults


def read_manifest(storage: Storage, name: str, files: Collection[str]) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if it is not ours. Other programs also write a manifest.json.

    files: names of the checkpoint's files.

    Raises ManifestError if the manifest is ours and damaged, OSError.
    """
    if MANIFEST not in files:
        return None
    data = storage.read(f"{name}/{MANIFEST}")
    return decode(data) if b'"generation"' in data or _has_shards(files) else None


def _has_shards(names: Iterable[str]) -> bool:
    return any(each.endswith(SHARD_SUFFIX) for each in names)


# Those of Lightning's FSDP strategy: those of torch, and `meta.pt`, the unsharded values.

META = "meta.pt"  # lightning/fabric/strategies/fsdp.py, _METADATA_FILENAME


def is_lightning(name: str, names: Sequence[str]) -> bool:
    """Return whether Lightning wrote a directory with these names, complete or not."""
    return (META in names or ("=" in name and name.endswith(".ckpt"))) and matches(name, names)


def check_lightning(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check the shards and `meta.pt`. Raises OSError."""
    shards = check(storage, entry, content)
    if not shards.complete:
        return replace(shards, format=LIGHTNING)
    meta = next((item for item in content if item.name == META), None)
    if meta is None:
        return replace(shards, complete=False, format=LIGHTNING, reason=f"no {META}, the save did not finish")
    with storage.open(f"{entry.name}/{META}") as file:
        rest = single_files.check(meta, file)
    if not rest.complete:
        return replace(rest, format=LIGHTNING, reason=f"{META}: {rest.reason}")
    return replace(shards, format=LIGHTNING, step=rest.step, epoch=rest.epoch)
