"""Frozen records from what JSON holds: every field is of the type that its class says, or it is no such record."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def make(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return kind(**values), a dataclass. Records in the fields must have been made already; lists become tuples.

    Raises:
        TypeError: a field is missing, unknown or of another type; the message names it.
    """
    of: Any = kind
    hints = _hints(of)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise TypeError(f"{kind.__name__}.{name} is of type {type(value).__name__}")
    return kind(**given)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_fits(one, get_args(hint)[0]) for one in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)
