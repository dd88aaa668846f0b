"""What a worker asks of its agent: send my part to the peer. One connection to a Unix socket in the agent's private directory."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.records import Name, NameOrEmpty, RecordError, Seconds
from elastic_ext.checkpoints.memory.peers.wire import MAX_LINE

SCHEMA = 1
MARGIN_S = 2.0  # for the agent's answer


class NoAgent(ElasticExtError):
    """The worker's own agent does not answer: as a rule it has been killed, and the node is about to go."""


@dataclass(frozen=True)
class Send:
    """Send this part. kept: name of the copy before it, which stays. limit_s: how long it may take."""

    name: Name
    file: Name
    size: int
    checksum: Name
    kept: NameOrEmpty
    limit_s: Seconds


@dataclass(frozen=True)
class Sent:
    """The answer. reason: why the peer does not have the part; "" if it has."""

    reason: str = ""


def send(path: str, wanted: Send) -> str:
    """Have the agent send a part to the peer; return why the peer does not have it, or "".

    path: of the agent's socket.

    Raises NoAgent.
    """
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(wanted.limit_s + MARGIN_S)
            sock.connect(path)
            sock.sendall(encode(wanted))
            with sock.makefile("rb") as reader:
                return records.read(Sent, reader.readline(MAX_LINE), "the answer of the agent", SCHEMA).reason
    except (OSError, RecordError) as error:
        raise NoAgent(f"the agent does not answer: {error}") from error


def encode(message: Send | Sent) -> bytes:
    """Return a message as a JSON line."""
    return json.dumps({"schema": SCHEMA, **records.plain(message)}).encode() + b"\n"


def read_send(line: bytes) -> Send:
    """Parse what a worker sends. Raises RecordError."""
    return records.read(Send, line, "the request of a worker", SCHEMA)
