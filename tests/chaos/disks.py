"""Which checkpoint a group of workers can begin with at best, worked out from the disks alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

from elastic_ext.checkpoints import detect
from elastic_ext.checkpoints.manifest import MANIFEST, Manifest, ManifestError, decode, order_of
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.tiers import part_of


def newest_whole(local_dirs: Mapping[str, Path], remote: Path) -> str:
    """Name of the newest one that is whole on the disks of these nodes together, or in the remote directory; "": none is.

    local_dirs: by node; each node holds the part of one place in the round.
    """
    names = {path.name for folder in (*local_dirs.values(), remote) if folder.is_dir() for path in folder.iterdir()}
    ours = sorted((name for name in names if order_of(name)), key=order_of_own, reverse=True)
    for name in ours:
        if whole_locally(name, list(local_dirs.values())) or whole_remotely(name, remote):
            return name
    return ""


def order_of_own(name: str) -> tuple[int, int]:
    """Of nothing: before all."""
    return order_of(name) or (0, 0)


def whole_locally(name: str, folders: list[Path]) -> bool:
    found = [_manifest(folder / name) for folder in folders]
    if not found or None in found or len({digest for _, digest in filter(None, found)}) != 1:
        return False
    manifest = next(iter(filter(None, found)))[0]
    if len(manifest.nodes) != len(folders):
        return False
    return any(
        all(_has_part(folder / name, manifest, place) for place, folder in enumerate(order)) for order in permutations(folders)
    )


def _manifest(folder: Path) -> tuple[Manifest, str] | None:
    try:
        data = (folder / MANIFEST).read_bytes()
        return decode(data), hashlib.sha256(data).hexdigest()
    except (FileNotFoundError, NotADirectoryError, ManifestError):
        return None


def _has_part(folder: Path, manifest: Manifest, place: int) -> bool:
    try:
        return all((folder / file.name).stat().st_size == file.size for file in part_of(manifest, place))
    except FileNotFoundError:
        return False


def whole_remotely(name: str, remote: Path) -> bool:
    storage = open_storage(str(remote))
    entry = storage.stat(name)
    return entry is not None and detect.check(storage, entry).complete
