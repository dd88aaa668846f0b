"""The agent's end of the pipe by which workers wake it, and the creation of named pipes.

A worker writes one byte (`worker_env.wake`) when it has changed a part of the progress table that the agent waits for.
"""

from __future__ import annotations

import errno
import logging
import os

logger = logging.getLogger(__name__)

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_logged: set[str] = set()  # reasons why named pipes cannot be made


def named_pipe(path: str) -> tuple[str, int, int | None]:
    """Make a pipe that other processes of this user can open by name.

    Returns:
        The name, a non-blocking descriptor to read from, and the descriptor of a writer or None. The name is `path`, or the
        reader's name in /proc if named pipes are refused (a seccomp profile, a file system). Such an unnamed pipe reads as ended
        while it has no writer, even before the first one opens it. The returned writer prevents that.

    Raises:
        OSError: no pipe can be made.
    """
    try:
        os.mkfifo(path, 0o600)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        if str(error.strerror) not in _logged:
            _logged.add(str(error.strerror))
            logger.info("cannot create named pipes (%s); using unnamed pipes instead", error)
    else:
        return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), None
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return f"/proc/{os.getpid()}/fd/{reader}", reader, writer


class WakePipe:
    """A pipe that is readable after a worker calls `worker_env.wake`. The progress table says why: a lost byte does no harm."""

    def __init__(self, path: str) -> None:
        """Create the pipe at `path`. Workers open the attribute `path`, which may differ. Raises OSError."""
        self.path, self._descriptor, writer = named_pipe(path)
        # A pipe that nobody else holds open would always be readable.
        self._writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC) if writer is None else writer

    def fileno(self) -> int:
        return self._descriptor

    def clear(self) -> None:
        """Forget the wake-ups so far. Read the progress table after this call, not before."""
        try:
            while os.read(self._descriptor, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends. The pipe's name is removed with its directory."""
        os.close(self._descriptor)
        os.close(self._writer)
