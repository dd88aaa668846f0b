"""Many agents of one job in a few processes, driven by JSON lines. For rendezvous.py and steady_state.py.

The programs are workers/etcd_agents.py, workers/etcd_sketch.py and workers/stock_agents.py. Each gets one argument, a JSON object
that its docstring describes, and prints one line once it is up: {"up": true, ...}. From then on each line on its stdin is a
command, {"do": ...}, and it prints one answer to each:

    at       when the last agent of this process had finished the command: monotonic time, comparable on one host
    cpu_s    CPU seconds that this process has used since it started
    error    only if an agent failed or was late: why
    ...      what the program's docstring adds

{"do": "cpu"} does nothing, and every program knows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
WORKERS = Path(__file__).with_name("workers")
UP_S = 120.0  # to import torch and connect, several at once on few cores


class AgentsFailed(Exception):
    """A process ended or was late, or reports that one of its agents failed."""


class AgentProcesses:
    """Some processes of one program. Use it in a `with` block, which ends them.

    Attributes:
        up: the first line of each process.
    """

    def __init__(self, script: str, jobs: Sequence[dict[str, Any]]) -> None:
        """script: in workers/. jobs: the argument of each process. Raises AgentsFailed."""
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        if os.environ.get("PYTHONPATH"):
            paths.reverse()  # somebody wants to measure another copy of the package
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for job in jobs:
                command = [sys.executable, str(WORKERS / script), json.dumps(job)]
                self._processes.append(
                    subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
                )
            self.up = self._answers(UP_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> AgentProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def ask(self, timeout_s: float, **command: Any) -> list[dict[str, Any]]:
        """Send a command to all processes and return their answers. Raises AgentsFailed."""
        line = json.dumps(command).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended; the missing answer shows that
                process.stdin.write(line)
        return self._answers(timeout_s)

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        answers = [json.loads(_line(process, deadline)) for process in self._processes]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise AgentsFailed(errors[0])
        return answers


def _line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise AgentsFailed(f"process {process.pid} did not answer in time")
    line = process.stdout.readline()
    if not line:
        raise AgentsFailed(f"process {process.pid} ended with exit code {process.wait()}, expected an answer")
    return line


def split_agents(total: int, processes: int) -> list[tuple[int, int]]:
    """Split `total` agents over the processes: each one's first number, and how many it has."""
    processes = min(total, processes)
    borders = [total * index // processes for index in range(processes + 1)]
    return [(borders[index], borders[index + 1] - borders[index]) for index in range(processes)]
