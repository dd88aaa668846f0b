"""A job of several nodes that saves in `save_dir()`, on each node a `local_dir` of its own: all parts are one save.

Ranks, copiers, single agents, machines and all agents at once are killed, at the moments of `local`, or up to 2 s after a save,
while it is listed and recorded. An agent comes back with its disk, a machine with an empty one. What may not be passed over, the
records say as soon as the victims are dead: see `whole_saves`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import KnownSave, Trust
from elastic_ext.checkpoints.storage import LocalStorage
from tests.chaos.kills.campaign import JOB, SAVE_DIR, Agent, Result, Scene
from tests.chaos.kills.judging import Start, Verdict
from tests.chaos.kills.local import COPIER, MB_S, LocalCampaign, different, empty
from tests.jobs import AGENT, command_of, descendants
from tests.ports import free_port

VICTIMS = {"rank": 0.28, "copier": 0.2, "agent": 0.2, "machine": 0.2, "agents": 0.12}
MOMENTS = {"save": 0.2, "copy": 0.2, "rotation": 0.2, "record": 0.25, "any": 0.15}
RECORD_S = 2.0  # after a save: it is listed, and recorded, on all nodes
APART_S = 1.0  # between the deaths of a copier and a rank
FIRST_SAVE_S = 60.0
MOMENT_S = 4.0  # to wait for one
PACES = ("0.015", "0.1", "0.25")  # seconds of a step: a save each 0.1 to 1 s, which takes some 3 s to be recorded on all nodes
KEPT = ("2", "4")  # saves
_STEP = re.compile(r"(?:step_|ckpt_|-ba)(\d+)")
_RANK = re.compile(r"(?:ckpt_\d+_|-rank)(\d+)\.pt")


@dataclass(frozen=True)
class FoundPart:
    """A recorded save in one directory. Its files are as they were recorded."""

    known: KnownSave
    part: int
    parts: int


def found_parts(directory: Path) -> list[FoundPart]:
    """Return what a directory has of proved saves."""
    storage, found = LocalStorage(str(directory)), []
    for known in stored.known_saves(storage).values():
        save = stored.read_save(storage, known)
        if save is not None and stored.trust(save.as_whole, stored.files_at(storage, known.name))[0] is Trust.PROVED:
            found.append(FoundPart(known, save.part, save.parts))
    return found


def whole_saves(parts: Iterable[FoundPart], world: int) -> dict[str, int]:
    """Return the entries of which each part is there, and, of files of ranks, those of all ranks: by name, their steps. Pure."""
    numbers: defaultdict[tuple[KnownSave, int], set[int]] = defaultdict(set)
    for each in parts:
        numbers[each.known, each.parts].add(each.part)
    whole = {known.name for (known, count), of in numbers.items() if len(of) == count}
    ranks: defaultdict[int, set[str]] = defaultdict(set)
    for name in whole:
        if (rank := _RANK.search(name)) is not None:
            ranks[step_of(name)].add(rank[1])
    return {name: step_of(name) for name in whole if _RANK.search(name) is None or len(ranks[step_of(name)]) == world}


def step_of(name: str) -> int:
    found = _STEP.search(name)
    return int(found[1]) if found is not None else 0


def files_in(directory: Path) -> set[str]:
    """Return the files of a directory, but for those of ours, by their paths relative to it."""
    found = (Path(folder, name).relative_to(directory) for folder, _, names in os.walk(directory) for name in names)
    return {str(path) for path in found if not path.parts[0].startswith(".")}


def gone(before: Iterable[str], now: Iterable[str], removed: Iterable[str]) -> list[str]:
    """Return the files that have gone, and that the script has not removed, nor another part of their save. Pure."""
    return sorted(path for path in {*before} - {*now} if path.partition("/")[0] not in {*removed})


@dataclass
class Nodes:
    """The agents of all nodes, as one: see `campaign.Agent`."""

    agents: Mapping[str, Agent]
    run: int = 0
    process: None = None
    killed: set[str] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return not self.killed

    def start(self) -> None:
        """Start those that do not run."""
        for each in self.agents.values():
            if not each.alive or each.ended() is not None:
                each.start()
        self.killed.clear()

    def ended(self) -> int | None:
        """Return the code of an agent that has ended, and was not killed; None: there is none."""
        codes = [each.ended() for each in self.agents.values() if each.alive]
        return next((code for code in codes if code is not None), None)

    def kill_one(self, name: str, agent_first: bool) -> None:
        self.agents[name].kill(agent_first)
        self.killed.add(name)

    def stop(self) -> None:
        for each in self.agents.values():
            each.stop()


class ApartCampaign(LocalCampaign):
    next_save_s = MOMENT_S

    def __init__(self, kind: str, folder: Path, seed: int, nodes: int = 2, ranks: int = 1) -> None:
        """nodes: their number. ranks: of each."""
        self._names, self._ranks = [f"node{number}" for number in range(nodes)], ranks
        self.world = nodes * ranks
        self._must: dict[str, int] = {}  # by name, the steps of saves that may not be passed over
        self._before: dict[str, set[str]] = {}  # by directory, the files that were there after the kill
        self._done = 0  # the step of the last save that was done when the victims died
        super().__init__(kind, folder, seed, folder / "nodes")

    def _agent_of(self, generation: int) -> Agent:
        self._must, self._before, self._locals = {}, {}, []
        conf = f"checkpoint_dir={self._scene.directory},local_dir=local,local_saves=all,last_call_timeout=1,backoff=0"
        conf += f",copy_mb_s={self._random.choice(MB_S)}"
        where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--local-addr=127.0.0.1"]
        size = [f"--nnodes={len(self._names)}", f"--nproc-per-node={self._ranks}", "--max-restarts=1000000"]
        command = [*AGENT, "--rdzv-backend=ext_c10d", *where, *size, f"--rdzv-conf={conf}"]
        command += [JOB, self.kind, SAVE_DIR, str(self._folder / "notes")]
        agents, pace = {}, {"KILLS_KEPT": self._random.choice(KEPT), "KILLS_PACE_S": self._random.choice(PACES)}
        for name in self._names:
            folder = self._local_root / f"run{generation}" / name
            folder.mkdir(parents=True)
            local = Scene(str(folder / "local"))
            local.prepare()
            self._locals.append(local)
            environ = {**pace, "KILLS_APART": "1", "ELASTIC_EXT_NODE_NAME": name}
            agents[name] = Agent(command, folder, environ)
        return Nodes(agents)  # type: ignore[return-value]

    @property
    def _nodes(self) -> Nodes:
        assert isinstance(self._agent, Nodes)
        return self._agent

    # The moment.

    def _await_moment(self) -> None:
        draw = self._random
        if not self._has_gone_on:  # a third failure without progress would end the job
            self._await(self._saved, FIRST_SAVE_S)
        self._moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if self._moment in ("save", "record"):
            self._await_save()
        elif self._moment != "any" and not self._await(self._copying if self._moment == "copy" else self._removing(), MOMENT_S):
            self._moment = "any"
        time.sleep(draw.uniform(0, RECORD_S if self._moment == "record" else 0.05))

    # The victim.

    def _strike(self, starts: list[Start]) -> None:
        draw = self._random
        victim = draw.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        numbers = range(len(self._names)) if victim == "agents" else [draw.randrange(len(self._names))]
        if victim in ("agent", "agents", "machine"):
            for number in numbers:
                self._nodes.kill_one(self._names[number], agent_first=draw.random() < 0.5)
        if victim == "machine":
            empty(self._locals[numbers[0]])
        if victim == "copier":
            self._kill_copier_of(self._names[numbers[0]])
            time.sleep(draw.uniform(0, APART_S))
        if victim in ("rank", "copier"):
            self._kill_ranks(starts)
        self._ledger.take(self._lines.new())
        self._hit = f"{victim} {self._moment}"
        self._look()

    def _pids(self) -> set[int]:
        running = [each.process for each in self._nodes.agents.values() if each.process is not None and each.ended() is None]
        return {pid for process in running for pid in descendants(process.pid)}

    def _kill_copier_of(self, name: str) -> None:
        process = self._nodes.agents[name].process
        assert process is not None
        for pid in descendants(process.pid):
            if COPIER in command_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _look(self) -> None:
        """Note what is there now."""
        parts = [each for local in self._locals for each in found_parts(Path(local.directory))]
        arrived = whole_saves(found_parts(Path(self._scene.directory)), self.world)
        self._must = {**whole_saves(parts, self.world), **arrived}
        self._before = {each.directory: files_in(Path(each.directory)) for each in self._locals}
        there = files_in(Path(self._scene.directory))
        self._before[self._scene.directory] = {path for path in there if path.partition("/")[0] in arrived}

    # What was found.

    def _missing(self) -> list[str]:
        lost = []
        for directory, before in self._before.items():
            lost += [f"{name} in {directory}" for name in gone(before, files_in(Path(directory)), self._ledger.removed)]
        return [*super()._missing(), *lost]

    def _judge(self, starts: list[Start]) -> bool:
        self._ledger.take(self._lines.new())
        if self._hit != "elsewhere":
            self._done, self._ledger.whole = self._ledger.expected, dict(self._must)
        return super()._judge(starts)

    def _add(self, result: Result) -> None:
        super()._add(replace(result, done=self._done))

    def _last_words(self) -> str:
        found = []
        for name, each in self._nodes.agents.items():
            log = self._local_root / f"run{self._generation}" / name / "agent.log"
            lines = log.read_text(errors="replace").splitlines()
            found.append(f"{name} {each.ended()}: " + " | ".join(lines[-3:])[-600:])
        return "; ".join(found)

    def _code(self) -> int | None:
        codes = [each.ended() for each in self._nodes.agents.values()]
        return None if None in codes else next((code for code in codes if code), 0)

    def _left(self) -> tuple[list[str], str]:
        """What has no record, or has lost its other part, is counted only: agents do not know what it is part of."""
        left, others = list[str](), list[str]()
        recorded = whole_saves([part for each in self._locals for part in found_parts(Path(each.directory))], self.world)
        for each in self._locals:
            for name in different(Path(each.directory), Path(self._scene.directory)):
                entry = name.partition("/")[0]
                (left if entry in recorded or step_of(entry) in (0, self._ledger.expected) else others).append(name)
        return left, f", but {len(others)} files of saves without a record, or of parts: {', '.join(others)}" if others else ""

    def _lose_all(self) -> None:
        for each in self._locals:
            empty(each)
        self._before = {}
        self._step = 0

    def lost(self) -> Sequence[tuple[str, int]]:
        """Return for each right restart whom the kill had hit, and how many steps that were saved were passed over."""
        right = [each for each in self.results if each.verdict is Verdict.RIGHT and each.kind.split()[0] in VICTIMS]
        return [
            (each.kind, max(0, each.done - (step_of(each.resumes.rpartition("/")[2]) if each.resumes else 0))) for each in right
        ]
