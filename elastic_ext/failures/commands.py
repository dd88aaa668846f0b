"""Runs programs that may hang in a driver or on a network, with a hard deadline."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

MAX_BYTES = 1 << 20
KILL_S = 0.2


def output(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> str | None:
    """Run a command; return its standard output, or None if it does not exist, fails, prints more than MAX_BYTES or times out.

    A process that times out is killed. One that sleeps in the kernel is left behind, since waiting for it might never end.
    """
    try:
        process = subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    try:
        data = _read(process.stdout.fileno(), deadline)
        if data is None:
            return None
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    else:
        return data.decode(errors="replace") if code == 0 else None
    finally:
        process.stdout.close()
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(KILL_S)
            except (OSError, subprocess.TimeoutExpired):
                pass


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Return everything up to the end; None if the end comes too late or beyond MAX_BYTES."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    data = b""
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return data
        data += chunk
        if len(data) > MAX_BYTES:
            return None
    return None
