"""The messages of a link.

Wire protocol, version 1: lines of text. The connecting agent sends a `Hello` as JSON, the other one answers with one. After that
nothing is sent, except BYE by an agent that ends the link on purpose.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.base.records import Name, RecordError

SCHEMA = 1
BYE = b"bye\n"
MAX_LINE = 2048  # bytes
ENDS = (OSError, ValueError, EOFError, RecordError)  # how reading from a link can fail
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))  # seconds, seconds, probes


@dataclass(frozen=True)
class Hello:
    """The first line of each side. job: the run id. node: the sender. to: the other node, as the sender knows it."""

    job: str
    node: Name
    to: Name


def encode(hello: Hello) -> bytes:
    """Return the line."""
    return json.dumps({"schema": SCHEMA, **vars(hello)}).encode() + b"\n"


def decode(line: bytes) -> Hello:
    """Decode a line. Raises EOFError: the connection was closed. Raises RecordError: it is no such line."""
    if not line:
        raise EOFError("the connection was closed")
    return records.read(Hello, line, "the first line of a link", SCHEMA)


def keep_alive(connection: socket.socket) -> None:
    """Keep what forwards packets between the hosts from forgetting a connection on which nothing is sent for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
