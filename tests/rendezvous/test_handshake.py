"""How a link begins, line by line: who proves what, and what a stranger is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from elastic_ext.rendezvous import handshake
from elastic_ext.rendezvous.handshake import ELSEWHERE, ENDS, Hello, admit, greet, new_key

KEY = new_key()


class End:
    """One end of a connection: what is written here is read at the other."""

    def __init__(self) -> None:
        self.reader, self.lines = asyncio.StreamReader(limit=handshake.MAX_LINE), list[bytes]()
        self.other = self

    def write(self, line: bytes) -> None:
        self.lines.append(line)
        self.other.reader.feed_data(line)

    async def until(self, does: Awaitable[object]) -> object:
        """What it returns, or the error with which it closes the connection."""
        try:
            return await does
        except ENDS as error:
            return error
        finally:
            self.other.reader.feed_eof()


def says(*lines: bytes) -> Callable[[End], Coroutine]:
    """Somebody who sends this, whatever the other side says."""

    async def say(end: End) -> None:
        for line in lines:
            end.write(line)

    return say


def connecting(key: str = KEY, to: str = "b", job: str = "job") -> Callable[[End], Coroutine]:
    return lambda end: greet(end.reader, end, Hello(job, "a", to, new_key()), key)


async def accepting(end: End) -> str:
    node_id, welcome = await admit(end.reader, end, "job", "b", KEY)
    end.write(welcome)
    return node_id


def talk(one: Callable[[End], Coroutine], other: Callable[[End], Coroutine]) -> tuple[object, object, list[bytes], list[bytes]]:
    """What both come to, and what each has said."""

    async def both() -> tuple[object, object, list[bytes], list[bytes]]:
        ends = End(), End()
        ends[0].other, ends[1].other = ends[1], ends[0]
        found = await asyncio.gather(ends[0].until(one(ends[0])), ends[1].until(other(ends[1])))
        return found[0], found[1], ends[0].lines, ends[1].lines

    return asyncio.run(both())


def test_who_knows_the_key_is_linked():
    linked, node_id, one, other = talk(connecting(), accepting)
    assert (linked, node_id) == (True, "a")
    assert KEY.encode() not in b"".join(one + other)


def test_who_does_not_is_sent_away():
    linked, node_id, _, other = talk(connecting(new_key()), accepting)
    assert isinstance(linked, EOFError)
    assert str(node_id) == "what claims to be node a does not know the key of the link"
    assert len(other) == 1, "it has shown no proof of its own"


def test_a_proof_is_good_for_one_connection():
    _, _, one, other = talk(connecting(), accepting)
    assert "does not know the key" in str(talk(says(*one), accepting)[1])
    assert "does not know the key" in str(talk(connecting(), says(*other))[0])


def test_ones_own_proof_sent_back_is_none():
    async def mirror(end: End) -> None:
        end.write(b'{"schema": 2, "nonce": "n"}\n')
        end.write(handshake.records.read(Hello, await end.reader.readline(), "it", 2).proof.encode() + b"\n")

    assert "does not know the key" in str(talk(connecting(), mirror)[0])


@pytest.mark.parametrize("of", [{"to": "c"}, {"job": "other"}])
def test_another_agent_at_the_port_says_so(of):
    linked, _, _, other = talk(connecting(**of), accepting)
    assert linked is False
    assert other[1:] == [ELSEWHERE]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"x" * 100_000,
        b"[" * 1500 + b"\n",
        b'{"schema": 1, "job": "job", "node": "a", "to": "b"}\n',
        b'{"schema": 2, "job": "job", "node": "a", "to": "b", "nonce": "n"}\n',
        b'{"schema": 2, "job": "job", "node": "a", "to": "b", "nonce": "n", "proof": "\\ud800"}\n',
        b'{"schema": 2, "job": "job", "node": "a", "to": "b", "nonce": "n\\n", "proof": ""}\n',
    ],
    ids=["nothing", "http", "much", "deep", "earlier-version", "no-proof", "no-text", "line-break"],
)
def test_a_stranger_learns_no_name(line):
    _, node_id, _, (challenge, *more) = talk(says(line), accepting)
    assert isinstance(node_id, ENDS)
    assert more == []
    assert b"job" not in challenge
    assert b'"b"' not in challenge


@pytest.mark.parametrize(
    "lines", [[b""], [b'{"schema": 1, "job": "job", "node": "b", "to": "a"}\n'], [b'{"schema": 2, "nonce": "n"}\n', b"\xff\n"]]
)
def test_a_stranger_at_the_port_is_no_node(lines):
    """Nor is it said that nothing listens there."""
    assert isinstance(talk(connecting(), says(*lines))[0], ENDS)
