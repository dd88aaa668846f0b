"""An S3 API server on a port of its own: moto's, in a process of its own, so that its CPU time and its end are not ours."""

from __future__ import annotations

import os
import subprocess
import sys

SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the one who started it is gone
server.stop()
"""

# What a client needs to find it; the same for s3fs here, in a worker and in an agent.
SECRETS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Server:
    """`environ` for clients; `bucket()` for a new, empty bucket. Ends with the process that started it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, "moto's server did not start"
        self.environ = {**SECRETS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        self._buckets = 0

    def bucket(self) -> str:
        """The URL of a new bucket. `environ` must be in this process's environment."""
        import s3fs

        self._buckets += 1
        name = f"bucket-{os.getpid()}-{self._buckets}"
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
        return f"s3://{name}"

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
