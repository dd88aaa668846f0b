"""What the names of checkpoints say: which belong together, in which order, and the step."""

from __future__ import annotations

import re

from elastic_ext.base.name_pattern import compiled
from elastic_ext.checkpoints.formats.manifest import order_of

OWN_FAMILY = "step_#.g# of elastic_ext"

# The two halves of 0.25 are a value in the name (a loss, a learning rate), never a step.
_INTEGER = re.compile(r"(?<![0-9])(?<![0-9]\.)[0-9]+(?![0-9])(?!\.[0-9])")
_DIGITS = re.compile(r"[0-9]+")


def step_of(name: str, pattern: str = "") -> int | None:
    """The step that a name tells: that of our own, the {step} of the user's pattern, else the last integer.

    step_00000120.g0003 -> 120, checkpoint_epoch_5.pt -> 5, step_00000120 -> 120, model_latest.pt -> None.
    """
    numbers = numbers_of(name, pattern)
    return numbers[-1] if numbers else None


def numbers_of(name: str, pattern: str = "") -> tuple[int, ...]:
    """What orders the names of a family; the step is last. Of our own: (generation, step)."""
    order = order_of(name)
    if order is not None:
        return order
    return _told(name, pattern) or tuple(int(digits) for digits in _INTEGER.findall(name))


def pattern_of(name: str, pattern: str = "") -> str:
    """The family: the name with each run of digits replaced by '#', which is what all names written by one line of code have in
    common; our own are one, and so is what a user's pattern with {step} or {epoch} matches."""
    if order_of(name) is not None:
        return OWN_FAMILY
    return pattern if _told(name, pattern) else _DIGITS.sub("#", name)


def is_exact(name: str, pattern: str = "") -> bool:
    """True where the numbers alone give the order: no need to ask what they count."""
    return order_of(name) is not None or bool(_told(name, pattern))


def _told(name: str, pattern: str) -> tuple[int, ...]:
    """(epoch, step), or what there is of it, by the user's pattern."""
    match = compiled(pattern).fullmatch(name) if pattern else None
    found = match.groupdict() if match else {}
    return tuple(int(found[key]) for key in ("epoch", "step") if key in found)
