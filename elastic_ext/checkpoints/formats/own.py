"""The format that `elastic_ext.Checkpointer` writes: a directory of shards, and a manifest (`manifest.py`), written last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from elastic_ext.checkpoints.formats.dcp import SHARD_SUFFIX
from elastic_ext.checkpoints.formats.inspection import OWN, Inspection, summary
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, decode, order_of
from elastic_ext.checkpoints.storage import Entry, Storage


def matches(name: str, names: Sequence[str]) -> bool:
    """Return whether a directory is ours, complete or not.

    `manifest.json` is a common name. If it lies beside shards it is ours, even in a renamed directory.
    """
    return order_of(name) is not None or (MANIFEST in names and _has_shards(names))


def check(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
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

    Args:
        files: names of the checkpoint's files.

    Raises ManifestError if the manifest is ours and damaged, OSError.
    """
    if MANIFEST not in files:
        return None
    data = storage.read(f"{name}/{MANIFEST}")
    return decode(data) if b'"generation"' in data or _has_shards(files) else None


def _has_shards(names: Iterable[str]) -> bool:
    return any(each.endswith(SHARD_SUFFIX) for each in names)
