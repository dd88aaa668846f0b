"""Blocking calls and limits for the thread of the links."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
