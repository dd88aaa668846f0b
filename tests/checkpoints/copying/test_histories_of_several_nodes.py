"""Random histories of three nodes, whose copiers are killed anywhere, and whose disks may be lost.

What is chosen in the remote directory is always one save, all of it; and while all nodes are there, the last one arrives.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from elastic_ext.checkpoints.copying.script_saves import OLDER_S
from elastic_ext.checkpoints.copying.targets import STALLED_S
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.copying.several import MOST_TURNS, Nodes
from tests.checkpoints.copying.test_script_saves import Counted, Killed

KEPT = 2  # by the script
HISTORIES = int(os.environ.get("ELASTIC_EXT_TEST_HISTORIES", "24"))
ACTS = {"save": 4, "turn": 10, "killed": 5, "wait": 1, "lose": 1, "rewrite": 1, "finish": 1}


class History:
    def __init__(self, folder: Path, seed: int) -> None:
        self.nodes, self.random, self.step = Nodes(folder, 3), random.Random(seed), 0
        self.style = self.random.choice(("directory", "in place", "ranks"))
        self.kept: list[list[str]] = []

    def save(self) -> None:
        self.step += 10
        if self.style == "ranks":
            self.nodes.save_files(self.step, ranks=1)
            self.kept.append([f"step_{self.step}_rank_{rank}.pt" for rank in range(3)])
        else:
            recorded = (0, 1, 2) if self.random.random() < 0.9 else self.random.sample(range(3), 2)
            self.kept.append([self.nodes.save(self.step, "last" if self.style == "in place" else "", recorded=recorded)])
        for names in self.kept[:-KEPT] if self.style != "in place" else ():
            for name in names:
                self.nodes.removes(name, [node for node in range(3) if (self.nodes.local[node] / name).exists()])
            self.kept.remove(names)

    def turn(self, killed: bool) -> None:
        node = self.random.randrange(3)
        if not killed:
            self.nodes.turn(node)
            return
        counted = Counted(self.random.randrange(14))
        self.nodes.restart(node, counted)
        with pytest.MonkeyPatch.context() as patched, contextlib.suppress(Killed):
            for name in ("put", "remove", "remove_tree"):
                patched.setattr(LocalStorage, name, counted.before(getattr(LocalStorage, name)))
            patched.setattr(os, "link", counted.before(os.link))
            self.nodes.turn(node)
        self.nodes.restart(node)

    def finish(self) -> None:
        """The job ends, after a few turns of each node in any order; it is started again later."""
        for _ in range(6):
            self.nodes.turn(self.random.randrange(3), finish=True)
            self.nodes.now += OLDER_S / 2
            self.nodes.check()
        for node in range(3):
            self.nodes.restart(node)

    def rewrite(self) -> None:
        """A part is no longer as it was recorded."""
        local = self.nodes.local[self.random.randrange(3)]
        for path in sorted(local.glob("*/part_*"))[:1]:
            path.write_bytes(b"x" * path.stat().st_size)

    def act(self, act: str) -> None:
        if act == "save":
            self.save()
        elif act in ("turn", "killed"):
            self.turn(act == "killed")
        elif act == "wait":
            self.nodes.now += STALLED_S + 1
        elif act == "finish":
            self.finish()
        elif act == "lose":
            self.nodes.lose(self.random.randrange(3))
        else:
            self.rewrite()
        self.nodes.check()

    def goes_on(self) -> None:
        """All nodes are there, and save once more."""
        self.step += 10
        name = (
            self.nodes.save_files(self.step, ranks=1)
            if self.style == "ranks"
            else self.nodes.save(self.step, "last" if self.style == "in place" else "")
        )
        for _ in range(3 * MOST_TURNS):
            self.nodes.turn(self.random.randrange(3))
            self.nodes.now += STALLED_S / 4
            self.nodes.check()
        self.nodes.until(name)
        assert self.nodes.check() == name


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_random_histories(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    for _ in range(25):
        history.act(*history.random.choices(list(ACTS), list(ACTS.values())))
    history.goes_on()
