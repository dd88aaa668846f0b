"""How much memory this process may still have, and what processes use: from /proc and the memory cgroups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 says so by a number near 2**63


def available() -> int:
    """Bytes that can be had without swapping, by the host and by each limit of a cgroup that this process is in."""
    return min([_host(), *_groups()])


def _host() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _groups() -> list[int]:
    """What each cgroup with a limit has left. What a container does not see of the tree does not count."""
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
        return None  # no limit at this level, or not for us to see


def proportional(pids: Iterable[int]) -> int:
    """Bytes of these processes, a page that several share counted once over all of them (PSS)."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
                total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
        except OSError:
            pass  # it has ended, or another user's
    return total
