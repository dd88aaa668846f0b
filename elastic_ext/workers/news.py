"""A worker's way to wake its agent: a named pipe, one byte for "look at my progress words"."""

from __future__ import annotations

import os


class WorkerNews:
    """The agent's end. The words say what the news is, so a byte lost with a full pipe costs nothing."""

    def __init__(self, path: str) -> None:
        """path: of the pipe to create. Raises OSError."""
        self.path = path
        os.mkfifo(path, 0o600)
        # For writing too: a pipe that nobody else holds open would be readable at all times.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def clear(self) -> None:
        """Forget the news so far. Look at the words after this call, not before."""
        try:
            while os.read(self._descriptor, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """The pipe's name goes with the directory that it is in."""
        os.close(self._descriptor)


def tell(path: str) -> None:
    """In the worker. Never raises, never waits: where there is no agent any more nobody misses it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, b"\0")
        finally:
            os.close(pipe)
    except OSError:
        pass
