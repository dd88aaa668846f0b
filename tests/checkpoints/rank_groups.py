"""A process that forks groups of ranks on request; tests/scripts/checkpoint_ranks.py is its other half."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_ext.checkpoints.directory.own_files import MANIFEST
from elastic_ext.checkpoints.directory.tiers import own_checkpoints
from elastic_ext.checkpoints.storage import open_storage

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
        self._at_work = True
        self._process.stdin.write(json.dumps({"task": task, "world": world, "args": args, **request}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
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


def complete(directory: str) -> list[str]:
    """Names of checkpoints with a manifest, newest first."""
    storage = open_storage(directory)
    return [name for name in own_checkpoints(storage) if storage.stat(f"{name}/{MANIFEST}")]


def drawn_kill(draw: random.Random, turn: int, writes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """How to kill some of two ranks: at a write that is drawn, if it comes to it, or at any moment.

    Return arguments of the task, and what the request says besides.
    """
    victims = draw.choice([[0], [1], [0, 1]])
    if turn % 2:
        args = {"signal": signal.SIGKILL, "signal_at": draw.randrange(1, writes), "signal_ranks": victims}
        return args, {"kill_s": 5.0, "kill": [0, 1], "kill_from": "load"}
    return {}, {"kill_s": draw.uniform(0.0, 0.7), "kill": victims, "kill_from": "load" if draw.random() < 0.9 else "start"}


def last_told(told: Path) -> int:
    """The last step that either of two ranks has written to its file; 0: none."""
    files = [Path(f"{told}.{rank}") for rank in range(2)]
    return max((int(line) for file in files if file.exists() for line in file.read_text().split()), default=0)
