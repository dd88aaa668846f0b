"""The wire between an agent and the keeper of its host, version 1: JSON objects, one a line, on a Unix socket.

agent    {"say": "hello", "version": 1}
keeper   {"say": "info" | "warning", "text": ...}       for the agent's log, any number
keeper   {"say": "ready", "endpoints": ..., "ca": ..., "cert": ..., "key": ...}  again after each change of the members
keeper   {"say": "silent", "text": ...}                 the hosts for which all wait
keeper   {"say": "failed", "text": ...}                 and ends
agent    {"say": "leaves"}                              its last word
keeper   {"say": "stays", "text": ...}                  it goes on without the agent; else it closes the socket when all is gone
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

VERSION = 1
UP, BUSY = b"up\n", b"another keeper is up\n"  # what a keeper writes to its standard output as it starts
MAX_LINE = 1 << 16

Message = dict[str, str | int]


def send(connection: socket.socket, message: Message) -> bool:
    """Send; return False if the other side is gone."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


class Lines:
    """The messages that arrive on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.ended = False

    def read(self) -> list[Message]:
        """Read once; return what is complete. Sets `ended` at the end of the stream, and where it is no stream of ours."""
        try:
            data = self._connection.recv(MAX_LINE)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.ended = not data or len(self._rest) > MAX_LINE
        return list(self._parsed(lines))

    def _parsed(self, lines: list[bytes]) -> Iterator[Message]:
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.ended = True
                return
            yield message


def text_of(message: Message, key: str) -> str:
    """Return a text of a message; "" if it has none."""
    found = message.get(key, "")
    return found if isinstance(found, str) else ""
