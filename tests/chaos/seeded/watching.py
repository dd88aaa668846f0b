"""Which checkpoints are whole where, as the store and the disks show it while a job runs."""

from __future__ import annotations

import zlib
from pathlib import Path

from elastic_ext.checkpoints.directory.own_files import MANIFEST, ManifestError, decode
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from tests.chaos.seeded.history import History
from tests.chaos.seeded.hosts import Hosts


class Watching:
    """Records "published" of the store and "held" of the hosts' disks, see `checks`."""

    def __init__(self, hosts: Hosts, history: History) -> None:
        self._hosts, self._history = hosts, history
        self._published: set[str] = set()
        self._held: dict[tuple[str, str], tuple[int, list[str]] | None] = {}  # by host and name

    def look(self) -> None:
        for name in sorted(_names(self._hosts.store), key=order_or_oldest):
            if name not in self._published and (self._hosts.store / name / MANIFEST).exists():
                self._published.add(name)
                self._history.record("published", name=name, step=_step(name))
        if self._hosts.plan.local:
            for host, disk in self._hosts.disks.items():
                self._look_at_a_disk(host, disk)

    def _look_at_a_disk(self, host: str, disk: Path) -> None:
        for name in {*_names(disk), *(name for of, name in self._held if of == host)}:
            found = _lacking(disk / name)
            if found != self._held.get((host, name)):
                self._held[host, name] = found
                manifest, missing = found or (0, [])
                self._history.record("held", host=host, name=name, step=_step(name), manifest=manifest, missing=missing)


def _lacking(part: Path) -> tuple[int, list[str]] | None:
    """A number for the manifest of a checkpoint on one disk, and the files that this disk lacks; None: it has no manifest."""
    try:
        data = (part / MANIFEST).read_bytes()
        files = decode(data).files
    except (FileNotFoundError, NotADirectoryError, ManifestError):
        return None
    return zlib.crc32(data), [file.name for file in files if _size(part / file.name) != file.size]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if order_of(path.name)]


def _step(name: str) -> int:
    return (order_of(name) or (0, 0))[1]
