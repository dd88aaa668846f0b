"""The messages of a link, and the calls of its thread.

Wire protocol, version 1: lines of text. The connecting agent sends a `Hello` as JSON, the other one answers with one. After that
nothing is sent, except BYE by an agent that ends the link on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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


T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Return what a blocking call returns. Its thread is a daemon: asyncio's own would hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_: Callable[[Any], None], value: object) -> None:
        if not future.done():
            set_(value)

    def run() -> None:
        try:
            done: tuple[Callable[[Any], None], object] = future.set_result, call()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, *done)

    threading.Thread(target=run, name="elastic_ext-link-call", daemon=True).start()
    return await future


async def within(seconds: float, task: asyncio.Task[T]) -> T:
    """Return the result of a task; cancel it if it takes longer. Raises TimeoutError.

    Not asyncio.wait_for, which before Python 3.12 can lose a cancellation that comes as the task ends.
    """
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError(f"no answer within {seconds:g} s")
        return task.result()
    finally:
        task.cancel()
