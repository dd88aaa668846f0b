"""Read the plain values of a pickle without running anything of it: every class and function in it is a stand-in.

Numbers, texts, lists, tuples and dicts come out as they are. An object comes out as a `StandIn` that holds its state, a tensor's
storage as an empty one. What a pickle may call is what `find_class` returns, which here is never anything but a stand-in.

One flipped bit can make a pickle ask for gigabytes: for a memo up to some index, for bytes that it does not hold. So it is walked
through first, instruction by instruction, and what it asks for is held against what it is.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any

from elastic_ext.base.errors import ElasticExtError

LIMIT = 1 << 63  # of a count
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


# What follows an instruction: so many bytes; or a line; or as many as the first 1, 4, 8 bytes tell.
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
    """By instruction, see _FOLLOWS; _NONE: there is no such one."""
    found = [_NONE] * 256
    for each in pickletools.opcodes:
        size = each.arg.n if each.arg is not None else 0
        found[ord(each.code)] = _SPECIAL.get(each.name, _FOLLOWS.get(size, size))
    return found


_INSTRUCTIONS = _table()


def _walk(data: bytes) -> None:
    """Raises PeekError for what is no pickle, or asks for more than it is.

    An entry of the memo takes two bytes at least, and pickles number theirs from 0: no index can be higher than that.
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
            _hold_index(int.from_bytes(data[at:end], "little"), at)
            at = end
        elif follows == _END:
            return
        elif follows == _NONE:
            raise PeekError(f"the pickle cannot be read: byte {at - 1} is no instruction")
        else:
            begin, at = at, _line_end(data, at)
            if follows == _PUT_LINE:
                text = data[begin : at - 1]
                _hold_index(int(text) if text.isdigit() and len(text) < 20 else size, begin)
            elif follows == _LINES:
                at = _line_end(data, at)
    raise PeekError(f"the pickle cannot be read: it goes on behind its {size} bytes")


def _hold_index(index: int, at: int) -> None:
    if index > at // 2 + 1:
        raise PeekError(f"the pickle cannot be read: memo index {index} at byte {at}")


def _line_end(data: bytes, at: int) -> int:
    end = data.find(b"\n", at)
    if end < 0:
        raise PeekError(f"the pickle cannot be read: a line without an end at byte {at}")
    return end + 1


def peek(data: bytes) -> Any:
    """The value of a pickle, see above. Raises PeekError for damaged bytes. Costs memory as its size does."""
    _walk(data)
    try:
        return _Peeker(io.BytesIO(data)).load()
    except _DAMAGED as error:
        raise PeekError(f"the pickle cannot be read: {type(error).__name__}: {error}") from error


def number(values: Any, *keys: str) -> int | None:
    """The first of these keys that a dict has a whole number under."""
    if not isinstance(values, Mapping):
        return None
    return next((value for key in keys if is_count(value := values.get(key))), None)


def is_count(value: Any) -> bool:
    """A pickle's number may have a million digits, which Python will not even print."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT
