"""What the processes of a host run in: its clock, its memory, and the devices below the file systems."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.seeded.schedule import Plan

CGROUPS = Path("/sys/fs/cgroup")
OOM_KILL_FIRST = 1000  # oom_score_adj
HOG_MB, LEFT_MB = 160, 32
NO_LIMIT = -1
SECONDS = struct.Struct("@q")  # as clock.c reads them


def unavailable(kind: str) -> str:
    """Why a fault of this kind cannot be done here; "": it can."""
    if kind == "clock step" and shutil.which("cc") is None:
        return "cc: not found on PATH; another clock is a library that is built for the run"
    if kind == "memory pressure" and not os.access(CGROUPS / "memory/memory.limit_in_bytes", os.R_OK):
        return f"{CGROUPS}/memory: no memory cgroups of version 1"
    if kind in ("disk slow", "store slow") and not os.access(_throttle("bps"), os.W_OK):
        return f"{CGROUPS}/blkio: no throttling of devices"
    if kind in ("disk slow", "store slow") and shutil.which("mkfs.ext4") is None:
        return "mkfs.ext4: not found on PATH; what is slow is a device with a file system of its own"
    return ""


class Surroundings:
    """Of the hosts of a run, made ready for the faults of its plan. Memory groups end with the run."""

    def __init__(self, plan: Plan, folder: Path, stack: ExitStack) -> None:
        kinds = {fault.kind for fault in plan.faults if not unavailable(fault.kind)}
        self._clocks = clocks(folder, plan.hosts) if "clock step" in kinds else {}
        self._groups = {
            host: Memory(CGROUPS / f"memory/elastic_ext_chaos_{os.getpid()}_{host}", stack)
            for host in plan.hosts
            if "memory pressure" in kinds
        }

    def inside(self, host: str) -> list[str]:
        """The start of a command line that runs in them."""
        return self._groups[host].inside if host in self._groups else []

    def environ(self, host: str) -> dict[str, str]:
        return self._clocks[host].environ if host in self._clocks else {}

    def memory(self, host: str) -> Memory:
        return self._groups[host]

    def clock(self, host: str) -> Clock:
        return self._clocks[host]


class Clock:
    """The time of day of the processes that get its `environ`; their monotonic clock is the machine's."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        file.write_bytes(bytes(SECONDS.size))
        self.environ = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(file)}

    @property
    def ahead_s(self) -> int:
        """By which it is ahead of that of the machine."""
        return int(SECONDS.unpack(self._file.read_bytes())[0])

    def step(self, ahead_s: int) -> None:
        with self._file.open("r+b") as file:  # the same file: it is mapped
            file.write(SECONDS.pack(ahead_s))


def clocks(folder: Path, hosts: Iterable[str]) -> dict[str, Clock]:
    """One for each host, with files in this folder."""
    library, source = folder / "clock.so", Path(__file__).with_name("clock.c")
    command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return {host: Clock(folder / f"clock-{host}", library) for host in hosts}


class Memory:
    """A memory cgroup of version 1."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        path.mkdir()
        stack.callback(self._remove)
        self.inside = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(path / "cgroup.procs")]

    @property
    def kills(self) -> int:
        """By the kernel, because memory ran out."""
        return int((self._path / "memory.oom_control").read_text().split()[-1])

    def press(self) -> bool:
        """Leave less memory than a process asks for that comes now. Return whether the kernel has killed somebody for it."""
        before = self.kills
        (self._path / "memory.force_empty").write_text("0")
        used = int((self._path / "memory.usage_in_bytes").read_text())
        self._limit(used + (LEFT_MB << 20))
        # The worker goes first, and then the hog: the agent may have more memory than it.
        hog = f"echo {OOM_KILL_FIRST - 1} >/proc/self/oom_score_adj; head -c {HOG_MB}M /dev/zero | tail -c {HOG_MB}M >/dev/null"
        subprocess.run([*self.inside, "sh", "-c", hog], check=False, capture_output=True, timeout=60)
        return self.kills > before

    def release(self) -> None:
        self._limit(NO_LIMIT)

    def _limit(self, value: int) -> None:
        (self._path / "memory.limit_in_bytes").write_text(str(value))

    def _remove(self) -> None:
        self.release()
        self._path.rmdir()


# File systems on devices that can be slow.


def slow_device(path: Path, image: Path, size_mb: int) -> None:
    """Mount a file system whose device can be slowed. With the last mount namespace that has it, the device goes too."""
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    for command in (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(path)]):
        subprocess.run(command, check=True, capture_output=True)


def slow(path: Path, bytes_per_s: int, writes_per_s: int) -> None:
    """What is written to the device of this file system takes long. 0: no limit."""
    device = os.stat(path).st_dev
    for what, value in (("bps", bytes_per_s), ("iops", writes_per_s)):
        _throttle(what).write_text(f"{os.major(device)}:{os.minor(device)} {value}")


def is_slow(path: Path) -> bool:
    """Return whether the device of this file system is slowed."""
    device = os.stat(path).st_dev
    rules = _throttle("bps").read_text().splitlines() if _throttle("bps").exists() else []
    return any(rule.split()[0] == f"{os.major(device)}:{os.minor(device)}" for rule in rules)


def _throttle(what: str) -> Path:
    """Of the whole machine: writes of the page cache are by no process. A rule holds for one device, ours."""
    return CGROUPS / f"blkio/blkio.throttle.write_{what}_device"
