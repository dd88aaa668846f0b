"""A worker's way to wake its agent: a named pipe, one byte for "look at my progress words"; and how named pipes are made."""

from __future__ import annotations

import errno
import logging
import os

logger = logging.getLogger(__name__)

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_said: set[str] = set()  # why names are not made


def named_pipe(path: str) -> tuple[str, int, int | None]:
    """Make a pipe that other processes of this user open by its name; return the name and a descriptor to read it by.

    The name is `path`, or, where named pipes are refused (a seccomp profile, a file system), that of the descriptor in /proc.
    Such a pipe has ended when it has no writer, be it that nobody has come yet: the third is one that keeps it from that, or
    None. Raises OSError.
    """
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        if str(error.strerror) not in _said:
            _said.add(str(error.strerror))
            logger.info("named pipes cannot be made here (%s): pipes without a name take their place", error)
    else:
        return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), None
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return f"/proc/{os.getpid()}/fd/{reader}", reader, writer


class WakePipe:
    """The agent's end. The words say what the news is, so a byte lost with a full pipe costs nothing."""

    def __init__(self, path: str) -> None:
        """path: of the pipe to create; `path` says where workers find it. Raises OSError."""
        self.path, self._descriptor, writer = named_pipe(path)
        # A pipe that nobody else holds open would be readable at all times.
        self._writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC) if writer is None else writer

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
        os.close(self._writer)


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
