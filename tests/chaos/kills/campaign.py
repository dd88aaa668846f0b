"""Starts one job, kills its ranks or all of it at random moments, and judges each restart."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import fsspec

from elastic_ext.checkpoints.storage import poll
from tests.chaos.kills.judging import Ledger, Start, Verdict, judge
from tests.jobs import EXT, SCRIPTS, descendants, environment, wait_gone

JOB = str(SCRIPTS / "killed_job.py")
WORLD = 2
START_S = 90.0  # for a start of all ranks
COPY_AFTER = 3  # kills
USAGE, CODE = 78, 65  # exit codes of the agent
SAVE_DIR = "save_dir()"  # as the directory of a job: what that returns
NONE_LEFT = "may be used"  # what it says as it ends because all checkpoints are torn
EARLY = 0.05  # of the kills, the share that hits a rank before it trains
PROGRESS_S = 0.4  # to train after a start without progress: three failures in a row without any end a job
IN_SAVE = 0.7  # of the kills, the share that waits for a save to begin; the others may hit one by chance
SAVE_S = 0.02  # about as long as a save takes
NO_KILLS = ("none", "again", "end", "elsewhere")  # of the kinds of results
MOST_KEPT = 6  # directories in which something was wrong
FOREIGN = {"notes.txt": b"lr=3e-4\n", "config.json": b'{"hidden": 64}\n', "plots/loss.png": bytes(2000)}


@dataclass(frozen=True)
class Result:
    """Of one kill. kind: whom it hit. cut: the entries that some rank was writing then. done: the last step saved by then."""

    kill: int
    kind: str
    cut: tuple[str, ...]
    verdict: Verdict
    why: str
    resumes: str | None = None
    restart_s: float = 0.0
    done: int = 0


@dataclass
class Lines:
    """The new lines of a file that grows."""

    path: Path
    _read: int = 0

    def new(self) -> list[str]:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            return whole.decode().splitlines()
        return []


class Agent:
    """One agent after the other, of the same command."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        """folder: where it runs, and its log is."""
        self._command, self._folder, self._environ = command, folder, environ
        self.run = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.alive = False  # it was started, and not killed

    def start(self) -> None:
        self.run, self.alive = self.run + 1, True
        environ = environment(ELASTIC_EXT_STANDBY="on", KILLS_RUN=str(self.run), PYTHONDONTWRITEBYTECODE="1", **self._environ)
        with (self._folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, env=environ, cwd=self._folder, stdout=log, stderr=log)

    def ended(self) -> int | None:
        return self.process.poll() if self.process is not None else 0

    def kill(self, agent_first: bool) -> None:
        """Kill it and all that it has started."""
        assert self.process is not None
        pids = descendants(self.process.pid)
        for pid in pids if agent_first else reversed(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.alive = False
        wait_gone(pids)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill(agent_first=True)


def on_one_node(kind: str, folder: Path, directory: str, local_conf: str = "") -> list[str]:
    """Return the command of an agent. directory: checkpoint_dir, or where the job saves. local_conf: of one with a local_dir."""
    conf = f"checkpoint_dir={directory},last_call_timeout=0.2,backoff=0{local_conf}"
    options = [f"--nproc-per-node={WORLD}", "--max-restarts=1000000", f"--rdzv-conf={conf}"]
    return [*EXT, *options, JOB, kind, SAVE_DIR if local_conf else directory, str(folder / "notes")]


@dataclass
class Scene:
    """A directory of checkpoints, and what lies there that the job has not saved. copies: by name, what they are a copy of."""

    directory: str
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return "://" not in self.directory

    def prepare(self) -> None:
        filesystem, root = fsspec.core.url_to_fs(self.directory)
        for name, data in FOREIGN.items():
            filesystem.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(f"{root}/{name}", data)

    def missing(self) -> list[str]:
        filesystem, root = fsspec.core.url_to_fs(self.directory)
        filesystem.invalidate_cache()
        return [name for name in (*FOREIGN, *self.copies) if not filesystem.exists(f"{root}/{name}")]

    def copy(self, name: str, to: str) -> None:
        """As `cp -r` does. What the job removes meanwhile leaves no copy."""
        source, target = Path(self.directory, name), Path(self.directory, to)
        found = subprocess.run(["cp", "-r", source, target], check=False, capture_output=True)
        if found.returncode == 0:
            self.copies[to] = name
        else:
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)


class Campaign:
    """`results`: one for each kill."""

    world = WORLD
    next_save_s = 1.0  # to wait for a save to begin

    def __init__(
        self, kind: str, folder: Path, seed: int, environ: dict[str, str], bucket: str = "", all_every: int = 12
    ) -> None:
        """bucket: URL of an empty one, for the kinds that save there. all_every: each so many kills, the agent is killed, too."""
        self.kind, self._folder, self._all_every = kind, folder, all_every
        self._random = random.Random(f"{seed} {kind}")
        self._environ, self._bucket = environ, bucket
        self.results: list[Result] = []
        self._generation, self._number = 0, 0
        self._killed_at = time.monotonic()
        (folder / "notes").mkdir(parents=True)
        self._begin()

    def _begin(self) -> None:
        """Go on in a new, empty directory."""
        self._generation += 1
        self._hit, self._cut = "none", ()
        self._step, self._has_gone_on = 0, False  # where the last start went on, and whether that was further than before
        base = self._bucket or str(self._folder)
        self._scene = Scene(f"{base}/run{self._generation}")
        self._scene.prepare()
        self._ledger = Ledger()
        self._lines, self._starts = Lines(self._folder / "notes" / "ledger"), Lines(self._folder / "notes" / "starts")
        run = self._agent.run if self._generation > 1 else 0
        self._agent = self._agent_of(self._generation)
        self._agent.run = run
        self._lines.new(), self._starts.new()

    def _agent_of(self, generation: int) -> Agent:
        return Agent(on_one_node(self.kind, self._folder, self._scene.directory), self._folder, self._environ)

    def run(self, kills: int, limit_s: float) -> None:
        """Return after so many kills, or this time."""
        by = time.monotonic() + limit_s
        self._agent.start()
        try:
            while True:
                starts = self._await_start()
                is_right, is_last = self._judge(starts), self._number >= kills or time.monotonic() >= by
                if is_right and is_last:
                    self._finish(starts)
                if is_last:
                    break
                if is_right:
                    self._train_and_kill(starts)
        finally:
            (self._folder / "notes" / "stop").touch()
            self._agent.stop()

    def _await_start(self) -> list[Start]:
        """Return the next start of all ranks; none if the agent has ended before, or in 90 s."""
        seen: dict[tuple[int, int], list[Start]] = {}

        def look() -> list[Start]:
            for line in self._starts.new():
                said = json.loads(line)
                said["key"], said["found"] = tuple(said["key"]), tuple(map(tuple, said["found"]))
                start = Start(**said)
                seen.setdefault(start.key, []).append(start)
            return seen.get(max(seen), []) if seen else []

        def enough(found: list[Start]) -> bool:
            return len(found) == self.world or self._agent.ended() is not None

        found = poll(look, enough, time.monotonic() + START_S)
        return found if len(found) == self.world else []

    def _judge(self, starts: list[Start]) -> bool:
        """Note a result, and return whether the job is to train now. One that is wrong begins in a new directory instead."""
        took_s = time.monotonic() - self._killed_at
        self._ledger.take(self._lines.new())
        code = self._agent.ended()
        if starts:
            verdict, why = judge(starts, self._ledger, self._copies, self._missing())
        elif code == USAGE or (code == CODE and NONE_LEFT in self._last_words()):
            verdict, why = Verdict.ASKED, f"the agent has ended with {code}: {self._last_words()}"
        else:
            verdict, why = Verdict.ENDED, f"the agent has ended with {code} (None: it hangs): {self._last_words()}"
        resumes = starts[0].resumes if starts else None
        self._add(Result(self._number, self._hit, self._cut, verdict, why, resumes, took_s))
        if verdict in (Verdict.RIGHT, Verdict.OLDER):
            step = max((step for start in starts for _, step in start.found), default=0)
            self._ledger.resumed(step)
            self._has_gone_on, self._step = step > self._step, step
            return True
        self._agent.stop()
        if verdict is Verdict.ENDED:
            self._hit = "again"
        else:
            self._begin()
        self._agent.start()
        return False

    def _add(self, result: Result) -> None:
        self.results.append(result)
        said = {**vars(result), "verdict": result.verdict.value, "generation": self._generation, "expected": self._ledger.newest}
        with (self._folder / "report.jsonl").open("a") as report:
            report.write(json.dumps(said) + "\n")
        bad = [each for each in self.results if each.verdict is not Verdict.RIGHT]
        if result.verdict is not Verdict.RIGHT and len(bad) <= MOST_KEPT and self._scene.is_local:
            shutil.copytree(self._scene.directory, self._folder / f"kept{len(self.results)}", symlinks=True)

    def _missing(self) -> list[str]:
        return self._scene.missing()

    @property
    def _copies(self) -> dict[str, str]:
        return self._scene.copies

    def _finish(self, starts: list[Start]) -> None:
        """The last kill was judged, and the job has begun again."""

    def _last_words(self) -> str:
        lines = (self._folder / "agent.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:])[-600:]

    def _train_and_kill(self, starts: list[Start]) -> None:
        run, attempt = starts[0].key
        go = self._folder / "notes" / f"go-{run}-{attempt}"
        draw = self._random
        early = draw.random() < EARLY and self._has_gone_on
        if not early:
            go.touch()
            if self._number >= COPY_AFTER:
                self._copy()
        time.sleep(0 if self._has_gone_on else PROGRESS_S)
        time.sleep(draw.uniform(0, 0.02 if early else 1.2 if draw.random() < 0.85 else 3.0))
        if not early:
            self._await_moment()
        self._number += 1
        self._killed_at = time.monotonic()
        self._strike(starts)
        self._cut = tuple(sorted({name for _, name in self._ledger.open}))
        if not self._agent.alive:
            self._agent.start()

    def _strike(self, starts: list[Start]) -> None:
        if self._number % self._all_every == 0:
            self._kill_all()
        else:
            self._kill_ranks(starts)

    def _kill_all(self) -> None:
        self._hit = "all"
        self._agent.kill(agent_first=self._random.random() < 0.5)
        self._ledger.take(self._lines.new())

    def _kill_ranks(self, starts: list[Start]) -> None:
        draw = self._random
        own = self._pids()
        pids = [start.pid for start in starts if start.pid in own]
        draw.shuffle(pids)
        pids = pids[: draw.choice((1, 2, 2))]
        self._hit = "none" if not pids else "both" if len(pids) == self.world else "one"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(draw.choice((0, draw.uniform(0, 0.02))))
        self._ledger.take(self._lines.new())

    def _pids(self) -> set[int]:
        """Return the processes of the job."""
        return set(descendants(self._agent.process.pid)) if self._agent.process is not None else set()

    def _await_moment(self) -> None:
        if self._random.random() < IN_SAVE:
            self._await_save()
            time.sleep(self._random.uniform(0, SAVE_S))

    def _await_save(self) -> None:
        """Return as a rank begins to write."""
        by = time.monotonic() + self.next_save_s
        while time.monotonic() < by and self._agent.ended() is None:
            lines = self._lines.new()
            self._ledger.take(lines)
            if any(line.startswith("begin ") for line in lines):
                return
            time.sleep(0.001)

    def _copy(self) -> None:
        """Copy an older step, once or, in the job for that, again and again; then also under a greater number."""
        older = sorted(self._ledger.whole, key=lambda name: self._ledger.whole[name])[:-2]
        if not (self._scene.is_local and older) or (self._scene.copies and self.kind != "copy"):
            return
        name = self._random.choice(older)
        self._scene.copy(name, f"backup{self._number}_{name}")
        if self.kind == "copy":
            self._scene.copy(name, f"step_{900_000 + self._number}")

    def counts(self) -> Counter[str]:
        """Of the kills: by verdict, and with "all " before it those that hit the agent, too. cut: something was being saved."""
        killed = [each for each in self.results if each.kind not in NO_KILLS]
        found = Counter(each.verdict.value for each in killed)
        found.update(f"all {each.verdict.value}" for each in killed if each.kind == "all")
        found.update(kills=len(killed), cut=sum(bool(each.cut) for each in killed))
        return found
