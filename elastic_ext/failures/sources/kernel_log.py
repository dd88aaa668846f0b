"""Xids, the NVIDIA driver's own error codes, from the kernel log since the agent started."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

DEVICE = "/dev/kmsg"
RECORD_BYTES = 8192  # the kernel's own limit; a shorter read is refused
READ_S = 0.05
MAX_XIDS = 1000  # a broken GPU repeats its errors

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."; older drivers omit "PCI:" and the
# process, and some write pid='<unknown>'.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-9A-Fa-f])?)\): "
    r"(\d{1,5})(?:, pid='?(\d{1,10})\b)?"
)


@dataclass(frozen=True)
class Xid:
    """One Xid. pci: the GPU's address in lower case. pid: in the host's pid namespace; None if the driver gives none."""

    number: int
    pci: str
    pid: int | None = None


def parse_xid(line: str) -> Xid | None:
    """Return the Xid of a line of the kernel log; None for any other line."""
    found = _XID.search(line)
    if found is None:
        return None
    pci, number, pid = found.groups()
    return Xid(int(number), pci.lower(), int(pid) if pid else None)


class KernelLog:
    """Reads the kernel log since begin(). This needs permission to read /dev/kmsg: root, or dmesg_restrict=0."""

    def __init__(self, device: str = DEVICE) -> None:
        self._xids: list[Xid] = []
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        self.begin()

    def begin(self) -> None:
        """Skip all records so far."""
        self._xids = []
        if self._descriptor is not None:
            try:
                os.lseek(self._descriptor, 0, os.SEEK_END)  # after the last record
            except OSError:
                self.close()

    def xids(self) -> list[Xid] | None:
        """Return all Xids since begin(); None if the log is unreadable. Takes READ_S at most; the next call reads the rest."""
        if self._descriptor is None:
            return None
        deadline = time.monotonic() + READ_S
        while time.monotonic() < deadline:
            try:
                record = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the kernel has overwritten the next record; the next read gets the oldest one left
            except OSError:
                self.close()
                return None
            if not record:
                break
            xid = parse_xid(record.decode(errors="replace"))
            if xid is not None and len(self._xids) < MAX_XIDS:
                self._xids.append(xid)
        return list(self._xids)

    def close(self) -> None:
        """Release the log."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
