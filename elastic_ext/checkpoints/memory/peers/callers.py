"""Callers from other nodes: anybody, until they have proved that they are of this round, so there are only a few."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Callers:
    """Those who have not proved it yet. When one too many calls, the one that has been there longest goes.

    Attributes:
        changed: notified when one is made to go.
    """

    def __init__(self, most: int, changed: threading.Condition) -> None:
        self._most, self.changed = most, changed
        self._here: dict[socket.socket, None] = {}  # the oldest first

    @contextmanager
    def entered(self, sock: socket.socket) -> Iterator[None]:
        """While the caller proves itself."""
        with self.changed:
            self._here[sock] = None
            if len(self._here) > self._most:
                self._send_away(next(iter(self._here)))
        try:
            yield
        finally:
            with self.changed:
                self._here.pop(sock, None)

    def may_wait(self, sock: socket.socket) -> bool:
        """Return whether the caller is still to prove itself. Only with `changed` held."""
        return sock in self._here

    def _send_away(self, sock: socket.socket) -> None:
        del self._here[sock]
        with suppress(OSError):  # it has gone by itself
            sock.shutdown(socket.SHUT_RDWR)  # wakes its thread
        self.changed.notify_all()
