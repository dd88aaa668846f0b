"""Agreement of the nodes of a job, through the remote directory, on the checkpoint that they all copy now.

Saves may come faster than they can be copied, and all nodes must work on the same one. The leader, the node that has rank 0's
files, picks it; the others follow. Files below `.elastic_ext/` in the remote directory:

    copying              the name of that checkpoint, written by the leader
    copying_from/NODE    "BYTES SECONDS": total bytes that a node has sent, and its monotonic clock; written every HEARTBEAT_S
                         while it sends or compares a large file. NODE is the lowest rank whose files it has. Others only check
                         whether the text changes.

These are UTF-8 text without a version: if their meaning changes, their names must change.
"""

from __future__ import annotations

from elastic_ext.checkpoints.directory.layout import MARKERS
from elastic_ext.checkpoints.storage import Storage

TARGET = f"{MARKERS}/copying"
HEARTBEATS = f"{MARKERS}/copying_from"
HEARTBEAT_S = 20.0


class Coordination:
    """One node's view of the agreement. All methods raise OSError.

    Attributes:
        node: NODE of this node; "" before it sends anything.
    """

    def __init__(self, remote: Storage) -> None:
        self._remote = remote
        self.node = ""

    def target(self) -> str:
        """Return the checkpoint that all nodes copy now; "": none yet."""
        try:
            return self._remote.read(TARGET).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def set_target(self, name: str) -> None:
        """Make all nodes copy this checkpoint. Only the leader calls this."""
        self._remote.put(TARGET, name.encode())

    def beat(self, sent: int, now: float) -> None:
        """Show that this node is at work. sent: total bytes."""
        self._remote.put(f"{HEARTBEATS}/{self.node}", f"{sent} {now:.0f}".encode())

    def heartbeats(self) -> list[str]:
        """Return the last heartbeat texts of the other nodes."""
        try:
            names = sorted(entry.name for entry in self._remote.entries(HEARTBEATS) if entry.name != self.node)
            return [self._remote.read(f"{HEARTBEATS}/{name}").decode(errors="replace") for name in names]
        except FileNotFoundError:
            return []
