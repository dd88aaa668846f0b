"""A stranger on the network, with the rights of user 65533: attacks ports until its stdin ends. Needs to be started as root.

    stranger.py KIND COUNT TARGETS

TARGETS: a JSON list of [address, port, node]; node: the id of the node whose links are there, "" for a store.

names     opens connections and closes them: at once, and after a line that has a made-up name, or that of a real node
flood     the same in bursts of COUNT, as fast as it can
idle      holds COUNT connections to each target, and says nothing
tls       the same, but each begins TLS and does not go on with it
garbage   opens connections and sends what is none of their protocol

It prints "attacks" once each target has had a connection (for `idle` and `tls`: once it holds all), and at the end how many
connections it has made. No pace but that of `flood` is greater than PER_S.
"""

import contextlib
import encodings.idna  # noqa: F401 - for names of hosts: that user may not read the library's files
import itertools
import json
import os
import random
import resource
import selectors
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterator

USER = 65533
PER_S = 1000  # connections
LONG_S = 5.0  # for a connection; a full backlog answers nothing
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Target = tuple[str, int, str]


def hello() -> bytes:
    """The first message of a TLS client."""
    out, context = ssl.MemoryBIO(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def names(nodes: list[str]) -> Iterator[tuple[str, str]]:
    """Which node it says it is, and what it does: "closes" or a version of the protocol."""
    for number in itertools.count():
        for node in (f"made-up-{number}", *nodes):
            yield from ((node, "closes"), (node, "1"), (node, "2"))


def line(node: str, to: str, version: str) -> bytes:
    said = {"schema": int(version), "job": "job", "node": node, "to": to}
    return json.dumps(said if version == "1" else {**said, "nonce": "n", "proof": "0" * 64}).encode() + b"\n"


def garbage() -> Iterator[bytes]:
    made = random.Random(0)
    yield from itertools.cycle(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            hello(),
            PREFACE + made.randbytes(400),
            PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\xff\xff\xff\1\5\0\0\0\1" + made.randbytes(4000),
            b"x" * 100_000,
            b"[" * 1500 + b"\n",
            *(made.randbytes(size) for size in (1, 9, 300, 70_000)),
            b"\0" * 1000,
        ]
    )


class Stranger:
    def __init__(self, count: int, targets: list[Target]) -> None:
        self._count, self._targets, self._made = count, targets, 0
        self._poll = selectors.DefaultSelector()
        self._poll.register(sys.stdin, selectors.EVENT_READ)
        self._due = time.monotonic()

    def _connect(self, target: Target) -> socket.socket | None:
        """None: refused, or closed at once."""
        self._made += 1
        with contextlib.suppress(OSError):
            return socket.create_connection(target[:2], LONG_S)
        return None

    def _goes_on(self, busy: bool = True) -> list[socket.socket] | None:
        """After its pause: those of the held connections that say something, or have ended. None: it is to end.

        busy: there is more to do; else wait for them.
        """
        self._due = max(self._due + 1 / PER_S, time.monotonic() - 1)
        pause_s = max(0.0, self._due - time.monotonic()) if busy else None
        ready = [key.fileobj for key, _ in self._poll.select(pause_s)]
        return None if sys.stdin in ready else [each for each in ready if isinstance(each, socket.socket)]

    def say(self, lines: Iterator[tuple[Target, bytes]]) -> int:
        """Connect for each line, send it, and close."""
        for number, (target, text) in enumerate(lines, 1):
            connection = self._connect(target)
            if connection is not None:
                with connection, contextlib.suppress(OSError):
                    connection.sendall(text)
            if number == len(self._targets):
                print("attacks", flush=True)
            if self._goes_on() is None:
                break
        return self._made

    def flood(self) -> int:
        for number, target in enumerate(itertools.cycle(self._targets), 1):
            burst = [self._connect(target) for _ in range(self._count)]
            for each in filter(None, burst):
                each.close()
            if number == len(self._targets):
                print("attacks", flush=True)
            self._due = time.monotonic()
            if self._goes_on() is None:
                break
        return self._made

    def hold(self, text: bytes) -> int:
        """A connection that is ended or refused is made again."""
        missing = deque(self._targets * self._count)
        for _ in range(len(missing)):
            self._make(missing, text)
        print("attacks", flush=True)
        while (ready := self._goes_on(bool(missing))) is not None:
            for each in ready:
                try:
                    ended = not each.recv(10_000)
                except OSError:
                    ended = True
                if ended:
                    missing.append(self._poll.get_key(each).data)
                    self._poll.unregister(each)
                    each.close()
            if missing:
                self._make(missing, text)
        return self._made

    def _make(self, missing: deque[Target], text: bytes) -> None:
        """One of those that are missing."""
        target = missing.popleft()
        if (connection := self._connect(target)) is None:
            missing.append(target)
            return
        with contextlib.suppress(OSError):
            connection.sendall(text)
        self._poll.register(connection, selectors.EVENT_READ, target)


def main(kind: str, count: int, targets: list[Target]) -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    stranger = Stranger(count, targets)
    to = itertools.cycle(targets)
    if kind == "names":
        said = names([target[2] for target in targets])
        return stranger.say(
            (target, b"" if how == "closes" else line(node, target[2], how)) for node, how in said for target in targets
        )
    if kind == "garbage":
        return stranger.say(zip(to, garbage(), strict=False))
    if kind == "flood":
        return stranger.flood()
    return stranger.hold(hello() if kind == "tls" else b"")


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), [tuple(each) for each in json.loads(sys.argv[3])]), flush=True)
