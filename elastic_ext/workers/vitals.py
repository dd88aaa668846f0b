"""What the kernel says of a worker that makes no progress: does it work, sleep, wait for a processor, or is it stopped?

I/O beside `hang`. Everything is read from /proc (see proc(5)); what cannot be read is not known.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

_TICKS = os.sysconf("SC_CLK_TCK")

# Numbers of the system calls by which an interactive debugger waits for its user (Linux, asm/unistd_64.h, asm-generic/unistd.h).
_READ = {"x86_64": 0, "aarch64": 63}.get(platform.machine())
_SELECT = {"x86_64": (23, 270), "aarch64": (72,)}.get(platform.machine(), ())  # readline's wait: on its stdin only


@dataclass(frozen=True)
class Vitals:
    """A worker at one moment. Those of its group are of all processes that it has started, too.

    Attributes:
        state: of the main thread, a letter of proc(5).
        cpu_s: processor time that the group has used.
        waited_s: that the worker's threads were ready to run and had no processor.
        io_bytes: read and written by the group, by read(2) and write(2).
        wchan: where in the kernel the main thread sleeps; "": not known.
        debugged: a debugger holds it, or waits for its user at a terminal.
    """

    state: str
    cpu_s: float = 0.0
    waited_s: float = 0.0
    io_bytes: int = 0
    wchan: str = ""
    debugged: bool = False


def read(pids: Iterable[int]) -> dict[int, Vitals]:
    """The vitals of these workers, each the leader of a process group; without those that cannot be read."""
    wanted = set(pids)
    cpu_s, io_bytes = _groups(wanted)
    found = {}
    for pid in wanted:
        try:
            own = _own(pid)
        except (OSError, ValueError, IndexError):  # it has just ended, or /proc is not what proc(5) says
            continue
        found[pid] = replace(own, cpu_s=cpu_s.get(pid, 0.0), io_bytes=io_bytes.get(pid, 0))
    return found


def _own(pid: int) -> Vitals:
    status = dict(line.split(":", 1) for line in _text(pid, "status").splitlines() if ":" in line)
    tracer = int(status.get("TracerPid", "0")) != 0
    wchan = _optional(pid, "wchan").strip("\0\n ")
    return Vitals(
        state=_stat(pid)[0],
        waited_s=_waited_s(pid),
        wchan="" if wchan == "0" else wchan,
        debugged=tracer or _reads_terminal(pid),
    )


def _stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second is a name that may hold anything."""
    return _text(pid, "stat").rpartition(")")[2].split()


def _groups(wanted: set[int]) -> tuple[Mapping[int, float], Mapping[int, int]]:
    """Processor seconds and bytes by process group."""
    cpu_s: dict[int, float] = {}
    io_bytes: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            fields = _stat(entry)
            group = int(fields[2])
            if group in wanted:
                cpu_s[group] = cpu_s.get(group, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
                counts = dict(line.split(":") for line in _optional(entry, "io").splitlines())
                io_bytes[group] = io_bytes.get(group, 0) + int(counts.get("rchar", 0)) + int(counts.get("wchar", 0))
        except (OSError, ValueError, IndexError):
            continue
    return cpu_s, io_bytes


def _waited_s(pid: int) -> float:
    waited_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        fields = _optional(pid, f"task/{thread}/schedstat").split()
        waited_ns += int(fields[1]) if len(fields) > 1 else 0
    return waited_ns / 1e9


def _reads_terminal(pid: int) -> bool:
    """Whether the main thread waits for what somebody types: pdb does, at a breakpoint."""
    call = _optional(pid, "syscall").split()
    if len(call) < 2 or not call[0].isdecimal():
        return False
    number, first = int(call[0]), int(call[1], 16)
    descriptor = first if number == _READ else first - 1 if number in _SELECT else -1
    try:
        return descriptor >= 0 and os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def _text(pid: int | str, name: str) -> str:
    with open(f"/proc/{pid}/{name}", errors="replace") as file:
        return file.read()


def _optional(pid: int | str, name: str) -> str:
    try:
        return _text(pid, name)
    except OSError:
        return ""
