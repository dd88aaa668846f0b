"""Counts the kernel's out-of-memory kills in the control groups of the agent and its workers.

Version 2 counts in memory.events, including the groups below; version 1 in memory.oom_control, each group by itself (Linux 4.13).
A group counts if its file is visible in this mount namespace. Kills by a shortage of the whole host also count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_BYTES = 1 << 20  # mountinfo of a host with thousands of containers


@dataclass(frozen=True)
class _Hierarchy:
    """One version of control groups: its mount type, controller and file with the count."""

    fstype: str
    controller: str  # as in /proc/PID/cgroup; "" is version 2
    file: str


_HIERARCHIES = (_Hierarchy("cgroup2", "", "memory.events"), _Hierarchy("cgroup", "memory", "memory.oom_control"))


def oom_counts(pids: Iterable[int] = ()) -> dict[str, int]:
    """Return the kills so far, by the file that counts them; empty if no file is readable.

    Args:
        pids: workers that are not reaped yet; each may be in its own group. The agent's group always counts.
    """
    mounts = _read("/proc/self/mountinfo") or ""
    files = {file for pid in ("self", *pids) for file in counting_files(_read(f"/proc/{pid}/cgroup") or "", mounts)}
    return {file: count for file in sorted(files) if (count := _count(file)) is not None}


def oom_kills_since(before: Mapping[str, int]) -> int | None:
    """Return the kills since `before`, a result of oom_counts(); None if unknown.

    A removed group loses its count; then the answer is known only if another group counted a kill.
    """
    rises = [None if (now := _count(file)) is None else now - count for file, count in before.items()]
    known = [rise for rise in rises if rise is not None]
    most = max(known, default=0)  # not the sum: version 2 also counts a kill in every group above it
    return most if most > 0 or (known and len(known) == len(rises)) else None


def counting_files(cgroup: str, mountinfo: str) -> list[str]:
    """Return the files that count the kills of a process, from the texts of its /proc/PID/cgroup and our /proc/self/mountinfo."""
    paths = {}  # by controller
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if number.isdigit() and separator:
            paths.update(dict.fromkeys(controllers.split(","), path))
    found = []
    for line in mountinfo.splitlines():
        fields, separator, source = line.partition(" - ")
        words, (fstype, *options) = fields.split(" "), source.split(" ") or [""]
        if not separator or len(words) < 5 or len(options) < 2:
            continue
        root, mount = _unescape(words[3]), _unescape(words[4])
        for hierarchy in _HIERARCHIES:
            if fstype != hierarchy.fstype or hierarchy.controller not in (*options[1].split(","), ""):
                continue
            below = _below(root, paths.get(hierarchy.controller))
            if below is not None:
                found.append(os.path.normpath(f"{mount}/{below}/{hierarchy.file}"))
    return found


def _below(root: str, path: str | None) -> str | None:
    """Return `path` relative to a mount of `root`; None if `path` is not under `root`."""
    if path is None or "/.." in path:  # outside of our own cgroup namespace
        return None
    if root == "/":
        return path
    return path[len(root) :] if f"{path}/".startswith(f"{root}/") else None


def _unescape(path: str) -> str:
    """Undo the octal escapes of mountinfo: spaces, tabs, newlines and backslashes."""
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escaped, plain)
    return path


def _count(file: str) -> int | None:
    for line in (_read(file) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode(errors="surrogateescape")
    except OSError:
        return None
