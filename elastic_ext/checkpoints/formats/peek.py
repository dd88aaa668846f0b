"""Read the plain values of a pickle without running any of it: a stand-in takes the place of every class and function.

Numbers, strings, lists, tuples and dicts come out as they are. An object comes out as a `StandIn` that holds its state, the
storage of a tensor as an empty one. A pickle can only call what `find_class` returns, which here is always a stand-in.

One flipped bit can make a pickle ask for gigabytes: for a memo up to some index, or for bytes that it does not contain. So it is
first walked through, instruction by instruction, and refused if it asks for more than it contains.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import TypeGuard

from elastic_ext.base.errors import ElasticExtError

LIMIT = 1 << 63  # of a count
MOST_BYTES = 64 << 20  # of a pickle that is read; reading a larger one would cost more than it is worth

# What unpickling raises for damaged bytes: a wrong opcode meets the wrong object.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
    RecursionError, ImportError, AssertionError,
)  # fmt: skip


class PeekError(ElasticExtError):
    """The bytes are not a whole pickle."""


class StandIn:
    """An object of a pickle. `state`: what the pickle would have set as its state."""

    state: object = None

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> StandIn:
        """Return what a function returns that was itself returned by a function."""
        return StandIn()

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an item of a subclass of dict, such as OrderedDict: its items are not needed."""

    def append(self, value: object) -> None:
        """Ignore an item of a subclass of list."""

    def extend(self, values: object) -> None:
        """Ignore items of a subclass of list."""

    def field(self, name: str) -> object:
        """Return a field of a dataclass or plain object; None if it has none. A class with slots has its state second."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((state[name] for state in states if isinstance(state, dict) and name in state), None)


class _Peeker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[StandIn]:
        return StandIn

    def persistent_load(self, pid: object) -> StandIn:
        return StandIn()


# What follows the opcode of an instruction: a number of bytes (below 100); a line; bytes counted by the first 1, 4 or 8 of them.
_LINE, _LINES, _COUNTED_1, _COUNTED_4, _COUNTED_8, _PUT_LINE, _PUT_1, _PUT_4, _END, _NONE = range(100, 110)
_FOLLOWS: dict[int, int] = {
    pickletools.UP_TO_NEWLINE: _LINE,
    pickletools.TAKEN_FROM_ARGUMENT1: _COUNTED_1,
    pickletools.TAKEN_FROM_ARGUMENT4: _COUNTED_4,
    pickletools.TAKEN_FROM_ARGUMENT4U: _COUNTED_4,
    pickletools.TAKEN_FROM_ARGUMENT8U: _COUNTED_8,
}
_SPECIAL = {"GLOBAL": _LINES, "INST": _LINES, "PUT": _PUT_LINE, "BINPUT": _PUT_1, "LONG_BINPUT": _PUT_4, "STOP": _END}
_COUNTS = {_COUNTED_1: 1, _COUNTED_4: 4, _COUNTED_8: 8}
_PUTS = {_PUT_1: 1, _PUT_4: 4}


def _table() -> list[int]:
    """Return what follows each opcode; _NONE for a byte that is none."""
    found = [_NONE] * 256
    for each in pickletools.opcodes:
        size = each.arg.n if each.arg is not None else 0
        found[ord(each.code)] = _SPECIAL.get(each.name, _FOLLOWS.get(size, size))
    return found


_INSTRUCTIONS = _table()


def _walk(data: bytes) -> None:
    """Raise PeekError if this is not a pickle, or asks for more than it contains.

    Each entry of the memo takes at least two bytes, and pickles number the entries from 0: that limits the index.
    """
    at, size = 0, len(data)
    while at < size:
        follows = _INSTRUCTIONS[data[at]]
        at += 1
        if follows < _LINE:
            at += follows
        elif follows in _COUNTS:
            begin = at + _COUNTS[follows]
            at = begin + int.from_bytes(data[at:begin], "little")
        elif follows in _PUTS:
            end = at + _PUTS[follows]
            _check_index(int.from_bytes(data[at:end], "little"), at)
            at = end
        elif follows == _END:
            return
        elif follows == _NONE:
            raise PeekError(f"the pickle cannot be read: byte {at - 1} is not an instruction")
        else:
            begin, at = at, _line_end(data, at)
            if follows == _PUT_LINE:
                text = data[begin : at - 1]
                _check_index(int(text) if text.isdigit() and len(text) < 20 else size, begin)
            elif follows == _LINES:
                at = _line_end(data, at)
    raise PeekError(f"the pickle cannot be read: it does not end within its {size} bytes")


def _check_index(index: int, at: int) -> None:
    if index > at // 2 + 1:
        raise PeekError(f"the pickle cannot be read: memo index {index} at byte {at}")


def _line_end(data: bytes, at: int) -> int:
    end = data.find(b"\n", at)
    if end < 0:
        raise PeekError(f"the pickle cannot be read: a line without an end at byte {at}")
    return end + 1


def peek(data: bytes) -> object:
    """Return the value of a pickle, with stand-ins for all objects. Takes memory in proportion to the size of the pickle.

    Raises PeekError for damaged bytes.
    """
    _walk(data)
    try:
        value: object = _Peeker(io.BytesIO(data)).load()
        return value
    except _DAMAGED as error:
        raise PeekError(f"the pickle cannot be read: {type(error).__name__}: {error}") from error


def number(values: object, *keys: str) -> int | None:
    """Return the value of the first of these keys that has a count as its value; None if there is none, or no dict."""
    if not isinstance(values, Mapping):
        return None
    return next((value for key in keys if is_count(value := values.get(key))), None)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number from 0 to LIMIT. One in a pickle may have a million digits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT
