"""A job that saves in `save_dir()`, which is its `local_dir`: ranks, the agent, the copier and the machine are killed.

A kill waits for a save to begin, for a copy to be under way, for the script to remove an old save, or for nothing. With the
machine all that is in local_dir goes, so what had arrived in checkpoint_dir is what a restart may not pass over. At the end the
job ends by itself: all that is in local_dir must then be in checkpoint_dir, and a restart on another machine goes on from there.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elastic_ext.checkpoints.copying.held import HELD
from elastic_ext.checkpoints.copying.notes import COPIED
from elastic_ext.checkpoints.directory.catalogue import list_checkpoints
from elastic_ext.checkpoints.storage import open_storage, poll
from tests.chaos.kills.campaign import MOST_KEPT, Agent, Campaign, Result, Scene, on_one_node
from tests.chaos.kills.judging import Start, Verdict
from tests.jobs import command_of, descendants

VICTIMS = {"rank": 0.45, "copier": 0.3, "agent": 0.13, "machine": 0.12}
MOMENTS = {"save": 0.25, "copy": 0.3, "rotation": 0.25, "any": 0.2}
MB_S = (0, 0.5, 0.1)  # that the copier sends: a save has some 50 KB, so its copy takes up to 0.5 s
MOMENT_S, PROGRESS_S, AFTER_S, APART_S = 1.5, 20.0, 0.05, 1.0
END_S = 120.0  # for a job that was told to end
COPIER = "replicate"  # in its command line


class LocalCampaign(Campaign):
    def __init__(self, kind: str, folder: Path, seed: int, local: Path) -> None:
        """local: where the directories of this campaign go that stand for local disks."""
        self._local_root, self._moment = local, "any"
        self._safe: dict[str, int] = {}  # by name, the step of what had arrived in checkpoint_dir when a machine was lost
        super().__init__(kind, folder, seed, {"KILLS_KEPT": "2"})

    def _agent_of(self, generation: int) -> Agent:
        local = Scene(str(self._local_root / f"local{generation}"))
        local.prepare()
        self._locals, self._safe = [local], {}
        conf = f",local_dir={local.directory},copy_mb_s={self._random.choice(MB_S)}"
        return Agent(on_one_node(self.kind, self._folder, self._scene.directory, conf), self._folder, self._environ)

    def _missing(self) -> list[str]:
        return [*self._scene.missing(), *(f"{name} in {each.directory}" for each in self._locals for name in each.missing())]

    @property
    def _copies(self) -> dict[str, str]:
        return {name: of for each in (self._scene, *self._locals) for name, of in each.copies.items()}

    def _copy(self) -> None:
        """Copy an older step, once in each directory."""
        older = sorted(self._ledger.whole, key=lambda name: self._ledger.whole[name])[:-2]
        for scene in (self._scene, *self._locals):
            there = [name for name in older if Path(scene.directory, name).exists()]
            if there and not scene.copies:
                name = self._random.choice(there)
                scene.copy(name, f"backup{self._number}_{name}")

    # The moment.

    def _await_moment(self) -> None:
        draw = self._random
        if not self._has_gone_on:  # a third failure without progress would end the job
            self._await(self._saved, PROGRESS_S)
        self._moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if self._moment == "save":
            self._await_save()
        elif self._moment != "any" and not self._await(self._copying if self._moment == "copy" else self._removing()):
            self._moment = "any"
        time.sleep(draw.uniform(0, AFTER_S))

    def _await(self, seen: Callable[[], bool], limit_s: float = MOMENT_S) -> bool:
        """Return whether this was seen before the time was up."""
        by = time.monotonic() + limit_s
        while time.monotonic() < by and self._agent.ended() is None:
            if seen():
                return True
            time.sleep(0.0005)
        return False

    def _saved(self) -> bool:
        self._ledger.take(self._lines.new())
        return self._ledger.expected > self._step

    def _copying(self) -> bool:
        held = [Path(each.directory, HELD) for each in self._locals]
        with suppress(FileNotFoundError):
            return any(Path(each, ".record").exists() for of in held if of.is_dir() for each in of.iterdir())
        return False

    def _removing(self) -> Callable[[], bool]:
        """Return what says whether an entry has lost a file, or has gone, since it was asked before."""
        before: dict[str, int] = {}

        def look() -> bool:
            nonlocal before
            now = {}
            for entry in (entry for each in self._locals for entry in Path(each.directory).iterdir()):
                with suppress(FileNotFoundError):
                    now[str(entry)] = len(os.listdir(entry)) if entry.is_dir() else 1
            loses = any(now.get(path, 0) < count for path, count in before.items() if "/." not in path)
            before = now
            return loses

        return look

    # The victim.

    def _strike(self, starts: list[Start]) -> None:
        victim = self._random.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if victim in ("agent", "machine"):
            self._kill_all()
        elif victim == "copier":
            self._kill_copier()
            time.sleep(self._random.uniform(0, APART_S))
        if victim == "machine":
            self._wipe()
        if victim in ("rank", "copier"):
            self._kill_ranks(starts)
        self._hit = f"{victim} {self._moment}"

    def _kill_copier(self) -> None:
        assert self._agent.process is not None
        for pid in descendants(self._agent.process.pid):
            if COPIER in command_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _wipe(self) -> None:
        """Another machine takes the place: nothing of local_dir is left. Of what had not arrived nothing is expected."""
        local = self._locals[0]
        noted = Path(local.directory, COPIED)
        arrived = {each.name for each in noted.iterdir()} if noted.is_dir() else set()
        once = {name: step for name, step in self._ledger.whole.items() if str(step) in name}  # never written again
        self._safe = {name: step for name, step in once.items() if name in arrived or self._safe.get(name) == step}
        self._ledger.whole = dict(self._safe)
        self._step = min(self._step, self._ledger.expected)
        empty(local)

    # What was found.

    def _add(self, result: Result) -> None:
        if result.verdict is not Verdict.RIGHT:
            for scene in (self._scene, *self._locals):
                rows = list_checkpoints(open_storage(scene.directory))
                listed = ", ".join(f"{row.name} {row.known.name.lower()} {row.state}" for row in rows)
                result = replace(result, why=f"{result.why}; {scene.directory}: {listed}")
        super()._add(result)
        bad = sum(each.verdict is not Verdict.RIGHT for each in self.results)
        if result.verdict is not Verdict.RIGHT and bad <= MOST_KEPT:
            for number, each in enumerate(self._locals):
                shutil.copytree(each.directory, self._folder / f"kept{len(self.results)}-local{number}", symlinks=True)

    def _finish(self, starts: list[Start]) -> None:
        """Let the job end; then start it again on another machine."""
        run, attempt = starts[0].key
        (self._folder / "notes" / f"go-{run}-{attempt}").touch()
        self._await_save()
        stop = self._folder / "notes" / "stop"
        stop.touch()
        self._killed_at, self._hit = time.monotonic(), "end"
        code = poll(self._code, lambda found: found is not None, time.monotonic() + END_S)
        self._ledger.take(self._lines.new())
        left, noted = self._left()
        wrong = f"not in checkpoint_dir: {left}" if left else ""
        if code != 0:
            wrong = f"the agent has ended with {code}: {self._last_words()}"
        took_s = time.monotonic() - self._killed_at
        verdict = Verdict.WRONG if wrong else Verdict.RIGHT
        self._add(Result(self._number, "end", (), verdict, wrong or f"all is in checkpoint_dir{noted}", restart_s=took_s))
        expected = dict(self._ledger.whole)
        self._lose_all()
        self._ledger.whole = expected
        stop.unlink()
        self._hit = "elsewhere"
        self._agent.start()
        self._judge(self._await_start())

    def _code(self) -> int | None:
        """Return with what the job has ended; None: it has not."""
        return self._agent.ended()

    def _left(self) -> tuple[list[str], str]:
        """Return what checkpoint_dir lacks, and what is to be said of that."""
        return different(Path(self._locals[0].directory), Path(self._scene.directory)), ""

    def _lose_all(self) -> None:
        self._wipe()

    def counts(self) -> Counter[str]:
        """And by victim, by moment, and both."""
        found = Counter(super().counts())
        for each in self.results:
            for part in each.kind.split():
                found[f"of {part}"] += 1
                found[f"of {part}, right"] += each.verdict is Verdict.RIGHT
        return found


def empty(scene: Scene) -> None:
    """As on another machine."""
    shutil.rmtree(scene.directory)
    scene.copies.clear()
    scene.prepare()


def different(local: Path, remote: Path) -> list[str]:
    """Return the files below one directory that the other has not, or not with the same content; not those of ours."""
    found = []
    for path in sorted(local.rglob("*")):
        name = path.relative_to(local)
        if path.is_file() and not name.parts[0].startswith("."):
            there = remote / name
            if not (there.is_file() and filecmp.cmp(path, there, shallow=False)):
                found.append(str(name))
    return found
