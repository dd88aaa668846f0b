"""Which checkpoint a group of workers can begin with at best, worked out from the disks alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.manifest import MANIFEST, ManifestError, decode, order_of, order_or_oldest
from elastic_ext.checkpoints.storage import open_storage


def newest_whole(local_dirs: Mapping[str, Path], remote: Path) -> str:
    """Name of the newest one that is whole on the disks of these nodes together, or in the remote directory; "": none is.

    local_dirs: by node; each holds the files of its own ranks.
    """
    names = {path.name for folder in (*local_dirs.values(), remote) if folder.is_dir() for path in folder.iterdir()}
    ours = sorted((name for name in names if order_of(name)), key=order_or_oldest, reverse=True)
    for name in ours:
        if whole_locally(name, list(local_dirs.values())) or whole_remotely(name, remote):
            return name
    return ""


def whole_locally(name: str, folders: list[Path]) -> bool:
    """Each file is on a disk that has the manifest, and all of these mean the same checkpoint.

    The manifest is written last: of files without one nobody has said yet that they are whole.
    """
    found = {folder / name: _manifest(folder / name) for folder in folders}
    parts = [part for part, manifest in found.items() if manifest is not None]
    if len({found[part] for part in parts}) != 1:
        return False
    manifest = decode(found[parts[0]] or b"")
    return all(any(_size(part / file.name) == file.size for part in parts) for file in manifest.files)


def lacking(part: Path) -> tuple[int, list[str]] | None:
    """A number for the manifest of a checkpoint on one disk, and the files that this disk lacks; None: it has no manifest."""
    data = _manifest(part)
    if data is None:
        return None
    return zlib.crc32(data), [file.name for file in decode(data).files if _size(part / file.name) != file.size]


def _manifest(folder: Path) -> bytes | None:
    try:
        data = (folder / MANIFEST).read_bytes()
        decode(data)
    except (FileNotFoundError, NotADirectoryError, ManifestError):
        return None
    return data


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def whole_remotely(name: str, remote: Path) -> bool:
    storage = open_storage(str(remote))
    entry = storage.stat(name)
    return entry is not None and detect.check(storage, entry).complete
