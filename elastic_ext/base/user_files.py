"""Reads text files that a user names, in bounded time and space, whatever kind of file it is."""

from __future__ import annotations

import errno
import os
import select
import time

MAX_BYTES = 64 << 20
LONGEST_S = 60.0
WAIT_S = 5.0  # time for the writer of a pipe, as in `explain <(program)`


def read_text(path: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the content of a file, or of a pipe or device up to its end.

    Raises:
        OSError: it cannot be read, is longer than max_bytes, sends nothing for WAIT_S (a pipe), or takes longer than LONGEST_S.
        ValueError: the path is not a valid file name, or the content is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # open() of a pipe without a writer would block
    try:
        return _content(descriptor, path, max_bytes).decode("utf-8")
    finally:
        os.close(descriptor)


def _content(descriptor: int, path: str, max_bytes: int) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    pieces: list[bytes] = []
    size = 0
    end = time.monotonic() + LONGEST_S
    while True:
        left_s = min(WAIT_S, end - time.monotonic())
        # poll() returns nothing for a pipe that has had no writer yet, and "ended" for one whose writers are gone.
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise OSError(errno.ETIMEDOUT, f"a pipe or device that sent nothing for {WAIT_S:g} s", path)
        try:
            piece = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            continue
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes >> 20} MB", path)
