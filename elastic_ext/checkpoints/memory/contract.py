"""Between an agent and its workers: the directory for copies in memory that it gives them (`base.checkpoint_variables` has the
variables), and what they ask of it: send my part to the other node, by one connection to a Unix socket in its private directory.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.base.checkpoint_variables import MEMORY_DIR, MEMORY_EVERY, MEMORY_LIMIT, MEMORY_PEER
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.records import Name, NameOrEmpty, RecordError, Seconds
from elastic_ext.checkpoints.memory.wire import MAX_LINE


@dataclass(frozen=True)
class Room:
    """The room of one node, or of one of its workers.

    Attributes:
        directory: the tier's directory.
        limit: bytes for all copies together.
        every: the setting memory_every: copy after this many steps, 0: never, None: as often as costs little.
        peer: the socket of the agent, which sends a worker's part to another node; "": it does not.
    """

    directory: str
    limit: int
    every: int | None = None
    peer: str = ""

    def variables(self, workers: int) -> dict[str, str]:
        """Return the environment variables for each worker of the node. workers: how many there are."""
        return {
            MEMORY_DIR: self.directory,
            MEMORY_LIMIT: str(self.limit // max(1, workers)),
            MEMORY_PEER: self.peer,
            **({} if self.every is None else {MEMORY_EVERY: str(self.every)}),
        }


def given(environ: Mapping[str, str] = os.environ) -> Room | None:
    """Return the room of this worker; None if its agent gave it none."""
    directory, every = environ.get(MEMORY_DIR, ""), environ.get(MEMORY_EVERY, "")
    if not directory:
        return None
    limit, peer = int(environ.get(MEMORY_LIMIT) or 0), environ.get(MEMORY_PEER, "")
    return Room(directory, limit, int(every) if every else None, peer)


SCHEMA = 1
MARGIN_S = 2.0  # for the agent's answer


class AgentGone(ElasticExtError):
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
        raise AgentGone(f"the agent does not answer: {error}") from error


def encode(message: Send | Sent) -> bytes:
    """Return a message as a JSON line."""
    return json.dumps({"schema": SCHEMA, **records.plain(message)}).encode() + b"\n"


def read_send(line: bytes) -> Send:
    """Parse what a worker sends. Raises RecordError."""
    return records.read(Send, line, "the request of a worker", SCHEMA)
