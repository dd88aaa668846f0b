"""The agent's end of the pipe by which workers wake it, and how named pipes are made.

A worker writes one byte (`worker_env.wake`) when it has changed something in the progress table that the agent waits for.
"""

from __future__ import annotations

import errno
import logging
import os

logger = logging.getLogger(__name__)

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_logged: set[str] = set()  # reasons why named pipes cannot be made


def named_pipe(path: str) -> tuple[str, int, int | None]:
    """Make a pipe that other processes of this user open by name.

    Returns:
        The name, a non-blocking descriptor to read from, and the descriptor of a writer or None. The name is `path`; where named
        pipes are refused (a seccomp profile, a file system), it is that of the descriptor in /proc. Such a pipe is at its end
        while it has no writer, even before the first one has come, and the writer returned here prevents that.

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
            logger.info("named pipes cannot be made here (%s); pipes without a name are used instead", error)
    else:
        return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), None
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    return f"/proc/{os.getpid()}/fd/{reader}", reader, writer


class WakePipe:
    """Readable after a worker has called `worker_env.wake`. The progress table says why, so a lost byte does no harm."""

    def __init__(self, path: str) -> None:
        """path: of the pipe to create; the attribute `path` is the one that workers open. Raises OSError."""
        self.path, self._descriptor, writer = named_pipe(path)
        # A pipe that nobody else holds open would be readable at all times.
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
        """Close both ends. The pipe's name goes with the directory that it is in."""
        os.close(self._descriptor)
        os.close(self._writer)
