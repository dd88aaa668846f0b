"""An S3 API server on a port of its own: that of the chaos suite, which nobody makes ill here."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.seeded.object_store import ObjectStore


class S3Server:
    """`environ` for clients, here, in a worker and in an agent; `bucket()` for a new, empty bucket. Ends with this process."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.environ = ObjectStore([], "127.0.0.1", Path(os.devnull), lambda path: None, self._stack).environ
        self._buckets = 0

    def bucket(self) -> str:
        """The URL of a new bucket. `environ` must be in this process's environment."""
        import s3fs

        self._buckets += 1
        name = f"bucket-{os.getpid()}-{self._buckets}"
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
        return f"s3://{name}"

    def stop(self) -> None:
        self._stack.close()
