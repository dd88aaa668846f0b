"""Parse the name of a checkpoint: its family, its order within the family, and its step.

A family is all checkpoints whose names come from one line of code, so that only their numbers differ.
"""

from __future__ import annotations

import re

from elastic_ext.base.name_pattern import compile_pattern
from elastic_ext.checkpoints.formats.manifest import order_of

OWN_FAMILY = "step_#.g# of elastic_ext"

# The two halves of 0.25 belong to a value (a loss, a learning rate) and are never a step.
_INTEGER = re.compile(r"(?<![0-9])(?<![0-9]\.)[0-9]+(?![0-9])(?!\.[0-9])")
_DIGITS = re.compile(r"[0-9]+")


def step_of(name: str, pattern: str = "") -> int | None:
    """Return the step in a name: from our own naming, else {step} of the user's pattern, else the last integer.

    step_00000120.g0003 -> 120, checkpoint_epoch_5.pt -> 5, step_00000120 -> 120, model_latest.pt -> None.
    """
    numbers = numbers_of(name, pattern)
    return numbers[-1] if numbers else None


def numbers_of(name: str, pattern: str = "") -> tuple[int, ...]:
    """Return the numbers that order the names of a family, the step last. For our own names: (generation, step)."""
    order = order_of(name)
    if order is not None:
        return order
    return _pattern_numbers(name, pattern) or tuple(int(digits) for digits in _INTEGER.findall(name))


def family_of(name: str, pattern: str = "") -> str:
    """Return the family of a name: the name with each run of digits replaced by '#'.

    All our own names form one family. So do all names that match a user's pattern with {step} or {epoch}.
    """
    if order_of(name) is not None:
        return OWN_FAMILY
    return pattern if _pattern_numbers(name, pattern) else _DIGITS.sub("#", name)


def is_exact(name: str, pattern: str = "") -> bool:
    """Return whether the numbers are known to be generation, epoch or step. If so, they alone give the order."""
    return order_of(name) is not None or bool(_pattern_numbers(name, pattern))


def _pattern_numbers(name: str, pattern: str) -> tuple[int, ...]:
    """Return (epoch, step) by the user's pattern, or only the one that the pattern has."""
    match = compile_pattern(pattern).fullmatch(name) if pattern else None
    found = match.groupdict() if match else {}
    return tuple(int(found[key]) for key in ("epoch", "step") if key in found)
