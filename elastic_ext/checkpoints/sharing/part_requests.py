"""How one agent asks another one for its part of a save, and how both prove that they may.

What is fetched is unpickled, so a server proves itself before the client takes a byte. Each server makes a key. The agreement's
messages carry it with the server's address, a `PartPlace`. Where the job has a secret, the key that counts is the HMAC of both,
so a stranger who reads or writes these messages can neither read a file nor serve one. Proofs cover the address as each side
knows it: so a stranger who has put his own address there gains nothing if he passes everything on.

Wire protocol, version 1, over TCP: JSON objects, one a line, of at most MAX_LINE bytes; and the bytes that were asked for. A
connection serves one request.

    server    a PartGreeting
    client    a PartRequest
    server    a PartAnswer, and `size` bytes

A server that does not trust its client closes the connection without a word. The bytes themselves are neither encrypted nor
signed: whoever controls the network between two nodes can read and change them.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from elastic_ext.base import records
from elastic_ext.checkpoints.sharing.catalogue import FilePathOrEmpty, Size

SCHEMA = 1
MAX_LINE = 32 << 10  # bytes: the longest path in JSON, and proofs
MAX_TEXT = 300  # characters of an error
TO_END = -1  # as a length
CLIENT, SERVER = "client", "server"  # whose proof it is


def new_key() -> str:
    """Return what no stranger guesses; also for nonces."""
    return secrets.token_hex(16)


def counting_key(key: str, secret: str) -> str:
    """Return the key that proofs are made with. secret: of the job; "": it has none."""
    return hmac.new(secret.encode(), key.encode(), "sha256").hexdigest() if secret else key


@dataclass(frozen=True)
class PartPlace:
    """Where a node serves its part. Messages carry it."""

    host: records.Name
    port: records.Port
    key: records.Name


class Asked(str, Enum):
    """What a request is for."""

    CATALOGUE = "catalogue"
    FILE = "file"


@dataclass(frozen=True)
class PartGreeting:
    nonce: records.Name


@dataclass(frozen=True)
class PartRequest:
    """name: of a file, relative to the directory. length: in bytes; TO_END: all that follows."""

    nonce: records.Name
    asked: Asked
    name: FilePathOrEmpty = ""
    offset: Size = 0
    length: Annotated[int, records.Within(TO_END, 1 << 62)] = TO_END
    proof: records.NameOrEmpty = ""


@dataclass(frozen=True)
class PartAnswer:
    """size: bytes that follow. whole: of the file. number: an errno; 0: there is no error. text: of the error, for people."""

    size: Size = 0
    whole: Size = 0
    number: records.Count = 0
    text: str = ""
    proof: records.NameOrEmpty = ""


def line(record: PartGreeting | PartRequest | PartAnswer) -> bytes:
    return records.encode(record, SCHEMA).encode() + b"\n"


def proof_of_client(key: str, place: PartPlace, greeting: PartGreeting, request: PartRequest) -> str:
    return _proof(key, CLIENT, place, greeting, request)


def proof_of_server(key: str, place: PartPlace, greeting: PartGreeting, request: PartRequest, answer: PartAnswer) -> str:
    return _proof(key, SERVER, place, greeting, request, answer.size, answer.whole, answer.number, answer.text)


def _proof(key: str, side: str, place: PartPlace, greeting: PartGreeting, request: PartRequest, *more: object) -> str:
    """key: see `counting_key`."""
    asked = (request.nonce, request.asked.value, request.name, request.offset, request.length)
    said = json.dumps([side, place.host, place.port, greeting.nonce, *asked, *more]).encode()
    return hmac.new(key.encode(), said, "sha256").hexdigest()


def is_same(given: str, expected: str) -> bool:
    """Compare two proofs; always takes the same time."""
    return hmac.compare_digest(given.encode(), expected.encode())
