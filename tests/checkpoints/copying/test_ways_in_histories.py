"""Random histories over more ways to save: one file renamed into place, a file per rank, a link to the last one."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.agreement.test_script_saves import Tiers
from tests.checkpoints.copying.test_random_histories import HISTORIES
from tests.checkpoints.copying.test_script_saves import Counted, Killed, copier, torch_file
from tests.checkpoints.record.recording import Script

KEPT = 2


class History:
    def __init__(self, folder: Path, style: str, seed: int) -> None:
        self.tiers, self.random, self.style = Tiers(folder), random.Random(seed), style
        self.step, self.proved, self.arrived = 0, 0, 0
        self.kept: list[list[str]] = []
        self.bytes: dict[int, dict[str, bytes]] = {}

    def names(self) -> list[str]:
        return {
            "file": [f"model_{self.step}.pt"],
            "rename": ["last.pt"],
            "ranks": [f"step_{self.step}_rank_{rank}.pt" for rank in range(2)],
            "link": [f"epoch={self.step}.ckpt"],
        }[self.style]

    def save(self) -> None:
        self.step += 10
        local, names = self.tiers.local, self.names()
        whole = self.style == "rename" or not self.proved or self.random.random() < 0.8
        written = names if whole else names[:1]
        for name in written:
            torch_file(local / f".{name}.tmp", step=self.step)
            os.replace(local / f".{name}.tmp", local / name)
        script = Script(local, world=len(names))
        for rank, name in enumerate(written):
            script.saves(self.step, name, rank=rank)
        (script.steps(self.step + 1) if whole else script).record(least=self.step)
        self.bytes[self.step] = {name: (local / name).read_bytes() for name in written}
        if whole:
            self.proved = self.step
            if self.style == "link":
                (local / "last.ckpt").unlink(missing_ok=True)
                (local / "last.ckpt").symlink_to(names[0])
        if self.style != "rename":
            self.kept.append(written)
        for old in self.kept[:-KEPT] if whole else ():
            for name in old:
                (local / name).unlink(missing_ok=True)
                notes.note_removed(LocalStorage(str(local)), name, recorded=True)
            self.kept.remove(old)

    def copy(self, patched: pytest.MonkeyPatch, last: int, finish: bool) -> None:
        counted = Counted(last)
        for name in ("put", "remove", "remove_tree"):
            patched.setattr(LocalStorage, name, counted.before(getattr(LocalStorage, name)))
        patched.setattr(os, "link", counted.before(os.link))
        report = copier(self.tiers.local, self.tiers.remote, counted).turn(finish=finish)
        assert not report.failures, report.reason
        if report.arrived and not report.waiting:
            self.arrived = self.proved

    def lose_disk(self) -> None:
        shutil.rmtree(self.tiers.local)
        self.tiers.local.mkdir()
        self.kept, self.proved = [], self.arrived

    def check(self) -> None:
        found = self.tiers.resumed()
        if not found:
            assert not self.proved, f"{self.proved} was proved"
            return
        place, name = found.split("/")
        folder = self.tiers.remote.parent / place
        steps = []
        for step, files in self.bytes.items():
            if all((folder / each).exists() and (folder / each).read_bytes() == data for each, data in files.items()):
                fits = name in files or name.replace("*", "0") in files or (folder / name).resolve().name in files
                steps += [step] if fits and (self.style != "ranks" or len(files) == 2) else []
        assert steps, f"{found} is no whole save"
        assert max(steps) >= self.proved, f"{found} is of {steps}, and {self.proved} was proved"


@pytest.mark.parametrize("style", ["file", "rename", "ranks", "link"])
@pytest.mark.parametrize("seed", range(HISTORIES // 4))
def test_random_histories(tmp_path: Path, style: str, seed: int) -> None:
    history = History(tmp_path, style, seed)
    for _ in range(12):
        act = history.random.choices(("save", "copy", "finish", "lose"), (5, 6, 1, 1))[0]
        if act == "save":
            history.save()
        elif act == "lose":
            history.lose_disk()
        else:
            with pytest.MonkeyPatch.context() as patched:
                try:
                    history.copy(patched, history.random.choice((99, *range(14))), act == "finish")
                except Killed:
                    pass
        history.check()
