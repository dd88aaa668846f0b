"""The messages of a link.

Wire protocol, version 1: lines of text, each a `Message` as JSON. The connecting agent sends one, the other one answers with
one, and sends another after each sign of life. Either sends BYE before it ends the link on purpose.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.base.records import Count, Name, RecordError

SCHEMA = 1
BYE = b"bye\n"
MAX_LINE = 2048  # bytes
ENDS = (OSError, ValueError, EOFError, RecordError)  # how reading from a link can fail


@dataclass(frozen=True)
class Message:
    """A line. job: the run id. node: the sender. to: the other node, as the sender knows it. signs: the listener's count."""

    job: str
    node: Name
    to: Name
    signs: Count


def encode(message: Message) -> bytes:
    """Return the line."""
    return json.dumps({"schema": SCHEMA, **vars(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a line. Raises EOFError: the connection was closed. Raises RecordError: it is no such line."""
    if not line:
        raise EOFError("the connection was closed")
    return records.read(Message, line, "a line of a link", SCHEMA)
