"""Read the plain values of a pickle without running anything of it: every class and function in it is a stand-in.

Numbers, texts, lists, tuples and dicts come out as they are. An object comes out as a `StandIn` that holds its state, a tensor's
storage as an empty one. What a pickle may call is what `find_class` returns, which here is never anything but a stand-in.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

from elastic_ext.errors import ElasticExtError

MOST_BYTES = 64 << 20  # of a pickle that is looked into; larger ones would cost more than the look is worth

# What unpickling raises for damaged bytes: a wrong opcode meets the wrong object.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
    RecursionError, ImportError, AssertionError,
)  # fmt: skip


class PeekError(ElasticExtError):
    """The bytes are no whole pickle."""


class StandIn:
    """An object of a pickle. ``state``: what it was to be given."""

    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        """What a function gives that was itself given by one."""
        return StandIn()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """A subclass of dict, such as OrderedDict: its items do not matter here."""

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def field(self, name: str) -> Any:
        """A field of a dataclass or of a plain object; None where there is none. A class with slots has its state second."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((state[name] for state in states if isinstance(state, dict) and name in state), None)


class _Peeker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return StandIn

    def persistent_load(self, pid: Any) -> Any:
        return StandIn()


def peek(data: bytes) -> Any:
    """The value of a pickle, see above. Raises PeekError for damaged bytes."""
    try:
        return _Peeker(io.BytesIO(data)).load()
    except _DAMAGED as error:
        raise PeekError(f"the pickle cannot be read: {type(error).__name__}: {error}") from error


def number(values: Any, *keys: str) -> int | None:
    """The first of these keys that a dict has a whole number under."""
    if not isinstance(values, Mapping):
        return None
    found = (values.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool) and value >= 0), None)
