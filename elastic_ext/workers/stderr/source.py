"""The agent's ends of one worker's stderr: the pipe that the worker writes to, and the ring that holds its last bytes."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass

from elastic_ext.workers.stderr import relay
from elastic_ext.workers.wake_pipe import named_pipe


@dataclass
class Source:
    """One worker's stderr for one round. While the agent holds the pipe open, a dying relay cannot harm the worker.

    Attributes:
        path: the name by which the worker opens the pipe.
        pipe, ring_fd: the descriptors that the relay gets.
        shown: whether its bytes go to the console.
    """

    path: str
    pipe: int
    ring_fd: int
    ring: relay.Ring
    shown: bool
    _writer: int | None  # keeps the pipe open until a worker has opened it; see `named_pipe`

    def close_writer(self) -> None:
        """Let the pipe end when the worker does, from now on."""
        writer, self._writer = self._writer, None
        if writer is not None:
            os.close(writer)

    def close(self) -> None:
        self.close_writer()
        os.close(self.pipe)
        os.close(self.ring_fd)


def make_source(path: str, shown: bool) -> Source:
    """Make one worker's pipe. path: the requested name; if named pipes are refused, it gets another. Raises OSError."""
    path, pipe, writer = named_pipe(path)  # the relay gets the descriptor, so it need not find the path
    ring_fd = -1
    try:
        ring_fd = _shared_memory()
        # Not ftruncate: touching a hole that cannot be filled raises SIGBUS.
        os.posix_fallocate(ring_fd, 0, relay.HEADER_BYTES + relay.RING_BYTES)
        return Source(path, pipe, ring_fd, relay.Ring(ring_fd), shown, writer)
    except OSError:
        for descriptor in (pipe, ring_fd, writer):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        raise


def _shared_memory() -> int:
    """Create a file without a name: in memory if the kernel and this Python have memfd_create, else on disk."""
    try:
        return os.memfd_create("elastic_ext_stderr", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
