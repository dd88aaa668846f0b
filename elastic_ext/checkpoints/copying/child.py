"""One process of the program that copies checkpoints, and its pipes."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping, Sequence

from elastic_ext.base.wakeup import milliseconds


class Child:
    """A running process. Call `close` after it has ended."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the process. Raises OSError."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # a signal to the agent's group must not reach it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._orders.fileno(), False)  # a stopped process must not block the agent
        self._poll = select.poll()
        self._poll.register(self._output.fileno(), select.POLLIN)
        self._rest = b""  # an incomplete line

    def send(self, order: str) -> None:
        """Send an order; drop it if the process has ended or the pipe is full."""
        try:
            self._orders.write(f"{order}\n".encode())
            self._orders.flush()
        except (OSError, ValueError):
            pass

    def lines(self, timeout_s: float) -> list[bytes] | None:
        """Wait for output; return the complete lines, or None if the process has closed its output."""
        if not self._poll.poll(milliseconds(timeout_s)):
            return []
        data = os.read(self._output.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines if data else None

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()

    def wait(self) -> int:
        """Wait until the process ends; return its exit code, negative for a signal."""
        return self._process.wait()

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        try:
            self._orders.close()
        except OSError:
            pass  # it left orders unread
        self._output.close()
