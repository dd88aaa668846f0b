"""Families of names that belong together: model, ema and optimizer of the same steps; the best beside the latest. Pure.

Of such families the one that holds the state of an optimizer is the one that training resumes from. If that does not decide, only
the user can say which: `checkpoint_pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.formats.names import OWN_FAMILY, words_of

# Words by which parts and copies of the same state differ. One of _COPIES is a copy of an earlier or of the same state.
_COPIES = frozenset({"best", "backup", "bak", "copy", "old"})
_NEWEST = frozenset({"last", "latest", "final", "current", "newest"})
_PARTS = frozenset(
    (
        *("model", "models", "weights", "params", "state", "dict", "ema", "averaged", "avg", "net", "head", "backbone"),
        *("opt", "optim", "optimizer", "optimizers", "sched", "scheduler", "adapter", "lora", "text", "unet", "vae"),
        *("g", "d", "gen", "disc", "generator", "discriminator", "encoder", "decoder", "teacher", "student"),
        *("actor", "critic", "policy", "value", "reward"),
    )
)
_FIRST = frozenset({"model", "checkpoint", "ckpt"})  # in an example for people
_VERSION = re.compile(r"[-_]v[0-9]+(?![0-9])")
_ROLES = _COPIES | _NEWEST | _PARTS | {"checkpoint", "ckpt", "trainer", "training"}


@dataclass(frozen=True)
class Names:
    """The names of a family.

    Attributes:
        pattern: of its family.
        unit: what their numbers count, see `names.unit_of`.
        steps: all of their steps.
        times: when the first and the last of several were written; None if there is one, or if a time is unknown.
    """

    pattern: str
    unit: str = ""
    steps: frozenset[int] = frozenset()
    times: tuple[float, float] | None = None


@dataclass(frozen=True)
class Claim:
    """The newest complete member of a family.

    Attributes:
        name: its name.
        names: of its family.
        written_at: in seconds since the epoch; minus infinity if unknown.
        training: whether it holds the state of an optimizer; None if unknown.
        step: None if unknown.
        tracked: a tool's own file names it as the newest.
        full: a file of Lightning, which holds all that training needs.
    """

    name: str
    names: Names
    written_at: float
    training: bool | None = None
    step: int | None = None
    tracked: bool = False
    full: bool = False


@dataclass(frozen=True)
class Best:
    """The claim to resume from. index: among the claims. question: why it is none, and what to set; "" if there is one."""

    index: int
    question: str = ""


def resolve(claims: Sequence[Claim]) -> Best:
    """Return the claim to resume from. Of those written at the same time the one of the greatest step wins, then the first.

    What is known to hold an optimizer goes before what is known to hold none. The best only counts where it is further than
    all others. The rest goes by the time, unless what was written last belongs together with others that are as good.
    """
    left = list(range(len(claims)))
    if any(claims[index].training for index in left):
        left = [index for index in left if claims[index].training is not False]
    left = [index for index in left if not _is_aside(claims[index])] or left
    others = [index for index in left if not is_copy(claims[index].names.pattern)]
    if others and not _is_further(claims, left, others):
        left = others
    last = max(left, key=lambda index: (claims[index].written_at, _or_before_all(claims[index].step), -index))
    family = [index for index in left if index == last or are_kin(claims[index].names, claims[last].names)]
    for better in ([index for index in family if claims[index].training], [index for index in family if claims[index].tracked]):
        family = better or family
    lines = {_line(claims[index].names.pattern) for index in family}
    if len(lines) > 1 and len({numbers for _, numbers in lines}) == 1 and all(claims[index].full for index in family):
        return Best(max(family, key=lambda index: (_or_before_all(claims[index].step), claims[index].written_at)))
    if len(lines) > 1:
        return Best(last, _question([claims[index] for index in family]))
    return Best(last if last in family else max(family, key=lambda index: claims[index].written_at))


def is_copy(pattern: str) -> bool:
    """Return whether a family is of copies: of the best state, or of an old one."""
    return not _COPIES.isdisjoint(words_of(pattern))


def are_kin(one: Names, other: Names) -> bool:
    """Return whether two families belong together: they share a step, or have no steps and names that differ in their roles.

    Two runs of a job, one after the other, do not.
    """
    if OWN_FAMILY in (one.pattern, other.pattern):
        return False
    if one.times is not None and other.times is not None and not _overlap(one.times, other.times):
        return False
    if one.steps or other.steps:
        return one.unit == other.unit and not one.steps.isdisjoint(other.steps)
    return words_of(one.pattern) ^ words_of(other.pattern) <= _ROLES


def _is_aside(claim: Claim) -> bool:
    """Return whether it is known to hold no optimizer, and its name has no step and no word of a checkpoint: args.pt."""
    return claim.training is False and not claim.names.steps and _ROLES.isdisjoint(words_of(claim.name))


def _or_before_all(step: int | None) -> int:
    return -1 if step is None else step


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _is_further(claims: Sequence[Claim], left: Sequence[int], others: Collection[int]) -> bool:
    """Return whether one called the best is known to have done more steps than all others."""
    steps = [claims[index].step for index in others]
    best = max((claims[index].step or 0 for index in left if index not in others), default=0)
    return all(step is not None and step < best for step in steps)


def _line(pattern: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return what the names of the same state have in common, whether it is called the last, the best or a number.

    A number that stays in a family, such as a seed, is one of another run; but Lightning's -v1 is another save of the same.
    """
    pattern = _VERSION.sub("", pattern)
    return words_of(pattern) - _COPIES - _NEWEST, tuple(re.findall(r"[0-9]+", pattern))


def _question(family: Sequence[Claim]) -> str:
    names = sorted(claim.name for claim in family)
    known = "each holds an optimizer" if family[0].training else "none is known to hold both an optimizer and what it trains"
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    example = max(family, key=lambda claim: not _FIRST.isdisjoint(words_of(claim.name))).names.pattern
    return (
        f"{listed} belong together, and {known}: set checkpoint_pattern to the names to resume from, "
        f"e.g. checkpoint_pattern={example.replace('#', '{step}', 1).replace('#', '*')}"
    )
