"""How a link begins: both agents prove that they can read the job's records. Before that, a connection counts for nothing.

Each agent makes a key and publishes it in its record (`Node.link`), where the connecting agent reads it. Both prove that they
know it by an HMAC of what was said. The key never crosses the wire, and each connection has nonces of both sides, so no proof is
good for another one.

Wire protocol, version 2: lines of text.

    the accepting agent     a Challenge as JSON: it says who is here to no stranger
    the connecting agent    a Hello as JSON
    the accepting agent     its own proof; ELSEWHERE if the Hello is for another node

After that nothing is sent, except BYE by an agent that ends the link on purpose.

Invariant: the accepting agent counts the link before it sends its proof, the connecting agent after it has come. So no node is
suspected for the end of a link that it does not miss itself (`links`).
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, replace
from typing import TypeVar

from elastic_ext.base import records

SCHEMA = 2
BYE, ELSEWHERE = b"bye\n", b"elsewhere\n"
MAX_LINE = 2048  # bytes
ENDS = (OSError, ValueError, EOFError, records.RecordError)  # how reading from a link can fail
_CONNECTING, _ACCEPTING = "connecting", "accepting"  # whose proof it is


def new_key() -> str:
    """Return what no stranger guesses; also for nonces."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Challenge:
    nonce: records.Name


@dataclass(frozen=True)
class Hello:
    """job: the run id. node: the sender. to: the other node, as the sender knows it. proof: see `_proof`."""

    job: records.Name
    node: records.Name
    to: records.Name
    nonce: records.Name
    proof: records.NameOrEmpty = ""


def _line(record: Challenge | Hello) -> bytes:
    return records.encode(record, SCHEMA).encode() + b"\n"


Said = TypeVar("Said", Challenge, Hello)


async def _read(kind: type[Said], reader: asyncio.StreamReader) -> Said:
    return records.read(kind, await _some_line(reader), "a line of a link", SCHEMA)


async def _some_line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line:
        raise EOFError("the connection was closed")
    return line


def _proof(key: str, side: str, challenge: Challenge, hello: Hello) -> str:
    said = (side, challenge.nonce, hello.job, hello.node, hello.to, hello.nonce)  # none holds a line break
    return hmac.new(key.encode(), "\n".join(said).encode(), "sha256").hexdigest()


def _check(given: str, expected: str, who: str) -> None:
    if not hmac.compare_digest(given.encode(), expected.encode()):  # always takes the same time
        raise ValueError(f"{who} does not know the key of the link")


async def admit(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, job: str, node_id: str, key: str
) -> tuple[str, bytes]:
    """Have the other side prove itself; return its node id, and the line that this side must send once it counts the link.

    key: of this node. Raises one of ENDS: it is a stranger, or has ended.
    """
    challenge = Challenge(new_key())
    writer.write(_line(challenge))
    hello = await _read(Hello, reader)
    if (hello.job, hello.to) != (job, node_id):
        writer.write(ELSEWHERE)
        raise ValueError(f"it is for node {hello.to} of job {hello.job}, whose port this was")
    _check(hello.proof, _proof(key, _CONNECTING, challenge, hello), f"what claims to be node {hello.node}")
    return hello.node, _proof(key, _ACCEPTING, challenge, hello).encode() + b"\n"


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello, key: str) -> bool:
    """Prove this side to the node that `hello` is for, and have that prove itself. Return False: another agent has its port.

    key: of that node. Raises one of ENDS: something else answers there, or the connection has ended.
    """
    challenge = await _read(Challenge, reader)
    writer.write(_line(replace(hello, proof=_proof(key, _CONNECTING, challenge, hello))))
    answer = await _some_line(reader)
    if answer == ELSEWHERE:
        return False
    given = answer.decode(errors="replace").rstrip("\n")
    _check(given, _proof(key, _ACCEPTING, challenge, hello), f"what has the port of node {hello.to}")
    return True
