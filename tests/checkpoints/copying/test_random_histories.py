"""Random histories of a script that saves in local_dir, with a copier that is killed anywhere and a disk that may be lost.

What a round resumes from is always one whole save, as it was written. While the disk is there, it is the last one that was
proved; else the last one whose copy was done, or a later one. A script that always saves under one name may have none.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.agreement.test_script_saves import Tiers
from tests.checkpoints.copying.test_script_saves import Counted, Killed, copier, torch_file
from tests.checkpoints.record.recording import Script

KEPT = 2  # by the script
HISTORIES = int(os.environ.get("ELASTIC_EXT_TEST_HISTORIES", "16"))


class History:
    def __init__(self, folder: Path, seed: int) -> None:
        self.tiers, self.random = Tiers(folder), random.Random(seed)
        self.in_place = self.random.random() < 0.3  # always the same name
        self.step, self.kept = 0, list[str]()
        self.written: dict[str, dict[int, bytes]] = {}  # by name: by step, what it was
        self.proved, self.arrived = 0, 0  # the last step of which that is known

    def save(self) -> None:
        """Recorded as proved or, as if the script had been killed within it, not; then the script removes an old one."""
        self.step += 10
        name = "last" if self.in_place else f"checkpoint-{self.step}"
        folder = self.tiers.local / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        whole = self.random.random() < 0.8
        for number in range(3 if whole else 2):
            torch_file(folder / f"part_{number}.pt", step=self.step)
        script = Script(self.tiers.local).saves(self.step, name)
        (script.steps(self.step + 1) if whole else script).record(least=self.step)  # each is of a round of its own
        if whole:
            self.proved = self.step
            self.written.setdefault(name, {})[self.step] = read(folder)
        if name not in self.kept:
            self.kept.append(name)
        for old in self.kept[:-KEPT] if whole else ():
            shutil.rmtree(self.tiers.local / old)
            notes.note_removed(LocalStorage(str(self.tiers.local)), old, recorded=True)
            self.kept.remove(old)

    def copy(self, patched: pytest.MonkeyPatch, last: int) -> None:
        """The process is killed before its step of this number."""
        counted = Counted(last)
        for name in ("put", "remove", "remove_tree"):
            patched.setattr(LocalStorage, name, counted.before(getattr(LocalStorage, name)))
        patched.setattr(os, "link", counted.before(os.link))
        report = copier(self.tiers.local, self.tiers.remote, counted).turn(finish=False)
        if report.arrived and not report.waiting:
            self.arrived = self.proved

    def lose_disk(self) -> None:
        shutil.rmtree(self.tiers.local)
        self.tiers.local.mkdir()
        self.kept = []
        self.proved = self.arrived

    def check(self) -> None:
        found = self.tiers.resumed()
        if not found:
            assert self.in_place or not self.proved
            return
        place, name = found.split("/")
        steps = [step for step, data in self.written[name].items() if data == read(self.tiers.remote.parent / place / name)]
        assert steps, f"{found} is no save"
        assert self.in_place or steps[0] >= self.proved, f"{found} is of {steps[0]}, and {self.proved} was proved"


def read(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(folder.iterdir()))


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_random_histories(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    for _ in range(12):
        act = history.random.choices(("save", "copy", "lose"), (5, 6, 1))[0]
        if act == "save":
            history.save()
        elif act == "lose":
            history.lose_disk()
        else:
            with pytest.MonkeyPatch.context() as patched:
                try:
                    history.copy(patched, history.random.choice((99, *range(14))))
                except Killed:
                    pass
        history.check()
