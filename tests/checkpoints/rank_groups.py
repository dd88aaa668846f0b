"""A process that forks groups of ranks on request; tests/scripts/checkpoint_ranks.py is its other half."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "scripts" / "checkpoint_ranks.py"


class RankGroups:
    """Use as a context; `stderr` is the file with what the ranks log."""

    def __init__(self, stderr: Path) -> None:
        self.stderr = stderr
        self._at_work = False  # results are to come
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        with open(self.stderr, "ab") as file:
            return subprocess.Popen(
                [sys.executable, "-u", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )

    def __enter__(self) -> RankGroups:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.communicate()

    @contextmanager
    def lent(self) -> Iterator[RankGroups]:
        """For one test, with an empty log. Ranks that it leaves, as it failed, would answer the next one: they are killed."""
        self.stderr.write_text("")
        try:
            yield self
        finally:
            if self._at_work:
                self.__exit__()
                self._process, self._at_work = self._begin(), False

    def start(self, task: str, world: int, args: dict[str, Any], **request: Any) -> None:
        assert self._process.stdin is not None
        self._at_work = True
        self._process.stdin.write(json.dumps({"task": task, "world": world, "args": args, **request}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process that forks ranks has ended; see {self.stderr}: {self.stderr.read_text()[-3000:]}"
        found: dict[str, Any] = json.loads(line)
        return found

    def results(self) -> list[Any]:
        """What each rank returned, None for one that died."""
        while "results" not in (found := self.answer()):
            pass
        self._at_work = False
        return list(found["results"])

    def run(self, task: str, world: int, args: dict[str, Any], **request: Any) -> list[Any]:
        self.start(task, world, args, **request)
        return self.results()
