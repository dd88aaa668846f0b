"""Jobs that save in their training threads, in random orders of their ranks: at each point, no torn save is proved."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from elastic_ext.checkpoints.record.journal import NOWHERE, JournalLine, SaveJournal, SavePath
from elastic_ext.checkpoints.record.proof import prove

Act = tuple[str, ...]  # "step", "write FILE SAVE", "close FILE SAVE", "rename FROM TO", "remove ENTRY", "wait NAME", "leave"
EVERY, SAVES = 3, 3


@dataclass(frozen=True)
class Way:
    """How a job saves. files: of each rank that writes. in_place: always to one name. staged: to another name, then renamed."""

    ranks: int
    writers: int
    files: int
    in_place: bool
    staged: bool
    rotates: bool
    in_step: bool  # a step begins on a rank when all have come to it

    def name(self, number: int) -> str:
        return "last" if self.in_place else f"s_{number}"

    def acts(self, rank: int) -> Iterator[Act]:
        for number in range(1, SAVES + 1):
            for step in range(EVERY):
                yield from [("wait", f"step_{number}_{step}")] if self.in_step else []
                yield ("step",)
            folder = f"tmp_{number}" if self.staged else self.name(number)
            for file in range(self.files if rank < self.writers else 0):
                yield "write", f"{folder}/r{rank}_{file}", str(number)
                yield "close", f"{folder}/r{rank}_{file}", str(number)
            if self.staged or self.rotates:
                yield "wait", f"saved_{number}"
            if rank == 0 and self.staged:
                yield "rename", folder, self.name(number)
            if rank == 0 and self.rotates and number > 1 and not self.in_place:
                yield "remove", self.name(number - 1)
            if self.staged:
                yield "wait", f"renamed_{number}"
        yield from [("wait", "last")] if self.in_step else []
        yield ("step",)
        yield ("leave",)


@dataclass
class Job:
    """A job that runs one act after the other. storage: of each file there, its save, and whether it is closed."""

    way: Way
    events: dict[int, list[JournalLine]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[int, int] = field(default_factory=dict)
    storage: dict[str, tuple[str, bool]] = field(default_factory=dict)
    now: int = 0

    def note(self, rank: int, kind: str, place: str = "", to: str = "") -> None:
        self.now += 1
        places = [SavePath(0, each) if each else NOWHERE for each in (place, to)]
        line = JournalLine(kind, self.steps[rank], self.now, place=places[0], to=places[1], number=int(kind == "s"))
        self.events[rank].append(line)

    def inside(self, entry: str) -> list[str]:
        return [each for each in self.storage if each.startswith(f"{entry}/")]

    def do(self, rank: int, act: str, *of: str) -> None:
        if act == "step":
            self.steps[rank] += 1
            self.note(rank, "s")
        elif act == "write":
            self.note(rank, "w", of[0])
            self.storage[of[0]] = of[1], False
        elif act == "close":
            self.storage[of[0]] = of[1], True
        elif act == "rename":
            self.note(rank, "m", *of)
            for each in self.inside(of[1]):
                del self.storage[each]
            for each in self.inside(of[0]):
                self.storage[of[1] + each[len(of[0]) :]] = self.storage.pop(each)
        elif act == "remove":
            for each in self.inside(of[0]):
                self.note(rank, "d", each)
                del self.storage[each]
        elif act == "leave":
            self.note(rank, "x")

    def proved(self) -> list[str]:
        journals = [SaveJournal(rank, 10 + rank, 0, tuple(of)) for rank, of in self.events.items()]
        return [each.entry.path for each in prove(journals, self.steps).saves if each.proved and not each.gone]

    def is_whole(self, entry: str) -> bool:
        found = [self.storage[each] for each in self.inside(entry)]
        return (
            len(found) == self.way.writers * self.way.files
            and len({each for each, _ in found}) == 1
            and all(closed for _, closed in found)
        )


def run(way: Way, order: random.Random) -> Job:
    """Run a job to its end; check the record at each point."""
    job = Job(way, steps=dict.fromkeys(range(way.ranks), 0))
    left = {rank: list(way.acts(rank)) for rank in range(way.ranks)}
    passed: dict[str, int] = defaultdict(int)  # how many ranks have come to it
    came: set[tuple[int, str]] = set()
    while any(left.values()):
        rank = order.choice([each for each, acts in left.items() if acts])
        act, *of = left[rank][0]
        if act == "wait":
            if (rank, of[0]) not in came:
                came.add((rank, of[0]))
                passed[of[0]] += 1
            if passed[of[0]] < way.ranks:
                continue
        job.do(rank, act, *of)
        del left[rank][0]
        torn = [each for each in job.proved() if not job.is_whole(each)]
        assert not torn, (way, torn, job.storage, dict(job.events))
    return job


@pytest.mark.parametrize("seed", range(40))
def test_no_torn_save_is_proved(seed: int) -> None:
    order = random.Random(seed)
    ranks = order.choice([1, 2, 3])
    flags = [order.random() < 0.5 for _ in range(4)]
    way = Way(ranks, order.choice([1, ranks]), order.choice([1, 2, 3]), *flags)
    job = run(way, order)
    assert way.name(SAVES) in job.proved(), way  # the last one is proved at the end
