"""What happens in a run, as it happens: the workers' words and the suite's own, in memory and in history.jsonl."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

Told = dict[str, Any]


class History:
    """`wait` returns at each change."""

    def __init__(self, folder: Path) -> None:
        self.pipe = folder / "events"
        os.mkfifo(self.pipe)
        self._fd = os.open(self.pipe, os.O_RDWR)  # for writing, too: it has no end while workers come and go
        self._file = (folder / "history.jsonl").open("w")
        self.changed = threading.Condition()
        self.events: list[Told] = []
        self.step = 0  # the furthest
        self.heard = time.monotonic()  # when a worker last told something, or an agent started
        self.workers: dict[str, Told] = {}  # what the worker of each host told last
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def group(self) -> dict[str, Told]:
        """What each host of the newest group told last. Empty if only some of its ranks have told something."""
        with self.changed:
            last = max(self.workers.values(), key=lambda each: each["restart"], default=None)
            if last is None:
                return {}
            found = {host: each for host, each in self.workers.items() if _group(each) == _group(last)}
        return found if len(found) == last["world"] else {}

    def record(self, what: str, **more: Any) -> None:
        self._take({"what": what, "t": time.monotonic(), **more})

    def _read(self) -> None:
        pending = b""
        while True:
            *lines, pending = (pending + os.read(self._fd, 1 << 16)).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, told: Told) -> None:
        with self.changed:
            if "rank" in told or told["what"] == "started":
                self.heard = time.monotonic()
            if "rank" in told:
                self.step = max(self.step, told["step"])
                self.workers[told["host"]] = told
            self.events.append(told)
            self._file.write(json.dumps(told) + "\n")
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        with self.changed:
            self.changed.wait(seconds)

    def close(self) -> list[Told]:
        """Rewrite the file in the order of time; return it all."""
        with self.changed:
            self._file.close()
            ordered = sorted(self.events, key=lambda each: (each["what"] == "end", each["t"]))
            Path(self._file.name).write_text("".join(json.dumps(each) + "\n" for each in ordered))
            return ordered


def _group(told: Told) -> tuple[str, int]:
    return told["group"], told["restart"]
