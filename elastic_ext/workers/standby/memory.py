"""Reads how much memory this process may still use, and how much processes use, from /proc and the memory cgroups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_UNLIMITED = 1 << 60  # "no limit" in cgroup v1 is a number near 2**63


def available() -> int:
    """Return how many bytes can be allocated without swapping, within the limits of the host and of this process's cgroups."""
    return min([_host(), *_groups()])


def _host() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _groups() -> list[int]:
    """Return the bytes left in each cgroup that has a limit, as far as a container sees the tree."""
    left = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if (found := _left(folder, *names)) is not None:
                left.append(found)
            if folder == root:
                break
    return left


def _left(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> int | None:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_file, used_file))
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(used) + int(statistics.get(reclaimable, 0)))
    except (OSError, ValueError):
        return None  # no limit at this level, or it is not readable


def proportional_set_size(pids: Iterable[int]) -> int:
    """Return how many bytes these processes use; a page that several of them share counts once (PSS)."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
                total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
        except OSError:
            pass  # the process has ended, or runs as another user
    return total
