"""What a restart should have resumed from, and what it did. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    RIGHT = "right"
    WRONG = "wrong"  # a mixture, another rank's file, a copy, nothing although there is something, or files have gone
    OLDER = "older"  # whole, but older than what the ledger has
    ASKED = "asked"
    ENDED = "ended"  # the agent has ended with a code that is no question


@dataclass(frozen=True)
class Start:
    """How a rank has begun. key: run and attempt. found: what, and the step that is in there."""

    rank: int
    pid: int
    key: tuple[int, int]
    resumes: str | None
    found: tuple[tuple[str, int], ...] = ()
    error: str = ""


@dataclass
class Ledger:
    """What the lines of a job say.

    whole: by name, the step of an entry that is done, and that no rank has begun to write again.
    """

    whole: dict[str, int] = field(default_factory=dict)
    open: dict[tuple[str, str], int] = field(default_factory=dict)  # by rank and name: the step of a save that has not ended
    removed: set[str] = field(default_factory=set)  # by the script

    def take(self, lines: Iterable[str]) -> None:
        for kind, *fields in (line.split(maxsplit=3) for line in lines):
            if kind == "done":
                self.whole[fields[1]] = int(fields[0])
            elif kind == "begin":
                rank, step, name = fields
                self.open[rank, name] = int(step)
                self.removed.discard(name)
                if self.whole.get(name) != int(step):
                    self.whole.pop(name, None)
            elif kind == "remove":
                self.removed.add(fields[2])
            else:
                self.open.pop((fields[0], fields[2]), None)

    @property
    def expected(self) -> int:
        """The least step that is right; 0: none is done."""
        return max(self.whole.values(), default=0)

    @property
    def newest(self) -> dict[str, int]:
        """The last few of `whole`."""
        return dict(sorted(self.whole.items(), key=lambda each: each[1])[-3:])

    def resumed(self, step: int) -> None:
        """The job goes on from this step: what was newer is forgotten, so that one fault counts once."""
        self.whole = {name: of for name, of in self.whole.items() if of <= step}
        self.open.clear()


def judge(starts: Sequence[Start], ledger: Ledger, copies: Collection[str], missing: Collection[str]) -> tuple[Verdict, str]:
    """Return the verdict on a start of all ranks, and why. copies: names made by hand. missing: foreign files that have gone."""
    names = {start.rank: start.resumes.rstrip("/").rpartition("/")[2] if start.resumes else None for start in starts}
    steps = {step for start in starts for _, step in start.found}
    for is_wrong, why in (
        (missing, f"files of the user have gone: {', '.join(sorted(missing))}"),
        (any(start.error for start in starts), f"it cannot be loaded: {_errors(starts)}"),
        (set(names.values()) & set(copies), f"a copy made by hand was chosen: {names}"),
        (None in names.values() and set(names.values()) != {None}, f"ranks differ: {names}"),
        (None in names.values() and ledger.expected, f"nothing, and step {ledger.expected} was done"),
        (len(steps) > 1, f"a mixture: {_mixture(starts)}"),
    ):
        if is_wrong:
            return Verdict.WRONG, why
    step = max(steps, default=0)
    if step < ledger.expected:
        return Verdict.OLDER, f"step {step} ({names}), and {_newest(ledger.whole)} was done"
    return Verdict.RIGHT, f"step {step}, of at least {ledger.expected}"


def _newest(whole: Mapping[str, int]) -> str:
    name = max(whole, key=lambda each: whole[each])
    return f"{name} of step {whole[name]}"


def _errors(starts: Sequence[Start]) -> str:
    return "; ".join(start.error.strip().splitlines()[-1] for start in starts if start.error)


def _mixture(starts: Sequence[Start]) -> str:
    found = {(f"rank {start.rank} {what}", step) for start in starts for what, step in start.found}
    return ", ".join(f"{what}: {step}" for what, step in sorted(found))
