"""What scripts pass to `Checkpointer`: checked at the call, before anything is written and before any collective.

A wrong value that only rank 0 looks at, or that a reader refuses later, would leave other ranks waiting or lose a checkpoint.
Every function raises UsageError, which names the argument, its value, and what is expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import literal
from elastic_ext.checkpoints.formats.manifest import MOST_SHOWN, count


def whole(name: str, value: object, least: int = 0) -> int:
    """Return a whole number as a plain int."""
    try:
        return count(value, least)
    except ValueError:
        raise _wrong(name, value, f"a whole number, {least} or more") from None


def whole_or_none(name: str, value: object, least: int = 0) -> int | None:
    """Return a whole number as a plain int, or None, which leaves the choice to us."""
    return None if value is None else whole(name, value, least)


def position(step: object, epoch: object, accumulation: object) -> tuple[int, int, int]:
    """Return where training is, as plain ints."""
    return whole("step", step), whole("epoch", epoch), whole("accumulation", accumulation)


def time_limit(name: str, value: object) -> timedelta:
    """Return a time limit."""
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise _wrong(name, value, "a datetime.timedelta above 0, such as timedelta(minutes=30)")
    return value


def note(value: object) -> None:
    """Check the note of a save. Whether its values are JSON shows as it is written, in the background."""
    if value is not None and not isinstance(value, Mapping):
        raise _wrong("note", value, "a mapping, such as a dict, or None")


def _wrong(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name} is {literal(value, MOST_SHOWN)}, expected {expected}")
