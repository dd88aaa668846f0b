"""Read the plain values of a pickle without running any code: a stand-in replaces every class and function.

Numbers, strings, lists, tuples and dicts are returned as they are. An object becomes a `StandIn` that holds its state; the
storage of a tensor becomes an empty one. A pickle can only call what `find_class` returns, which here is always a stand-in.

One flipped bit can make a pickle ask for gigabytes: for a memo up to some index, or for bytes that it does not contain. So
`_walk` first goes through its instructions, and refuses a pickle that asks for more than it contains.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from elastic_ext.base.errors import ElasticExtError

LIMIT = 1 << 63  # a count is smaller than this
MAX_BYTES = 64 << 20  # larger pickles are not worth the cost of reading

# Unpickling raises these for damaged bytes, when an opcode is applied to the wrong object.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
    RecursionError, ImportError, AssertionError,
)  # fmt: skip


class PeekError(ElasticExtError):
    """The bytes are not a complete pickle."""


class StandIn:
    """An object of a pickle. `state`: the state that the pickle would have set."""

    state: object = None

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> StandIn:
        """Stand in for a call of an object that was itself the result of a call."""
        return StandIn()

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an item of a dict subclass such as OrderedDict. Such items are not needed."""

    def append(self, value: object) -> None:
        """Ignore an item of a list subclass."""

    def extend(self, values: object) -> None:
        """Ignore items of a list subclass."""

    def field(self, name: str) -> object:
        """Return a field of a dataclass or plain object, or None. A class with slots has its slot values second."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((state[name] for state in states if isinstance(state, dict) and name in state), None)


class StandInDict(dict[object, object]):
    """An OrderedDict of a pickle, such as a state dict, without its attributes."""

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes."""


class _Peeker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[StandIn | StandInDict]:
        return StandInDict if (module, name) == ("collections", "OrderedDict") else StandIn

    def persistent_load(self, pid: object) -> object:
        return StandIn()


class _StoragePeeker(_Peeker):
    """Also gathers the storages of tensors: by key, the name of the class and the number of elements."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.storages: dict[str, tuple[str, int]] = {}

    def find_class(self, module: str, name: str) -> type[StandIn | StandInDict]:
        if module == "torch" and name.endswith("Storage"):
            return type(name, (StandIn,), {})
        return super().find_class(module, name)

    def persistent_load(self, pid: object) -> object:
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], type) and is_count(pid[4]):
            self.storages[str(pid[2])] = pid[1].__name__, pid[4]
        if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module":  # the class of a whole module, with its source
            return pid[1]
        return StandIn()


# The argument of an instruction: a number of bytes (below 100), a line, or bytes after a length prefix of 1, 4 or 8 bytes.
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
    """Return the kind of argument of each opcode; _NONE for a byte that is not an opcode."""
    found = [_NONE] * 256
    for each in pickletools.opcodes:
        size = each.arg.n if each.arg is not None else 0
        found[ord(each.code)] = _SPECIAL.get(each.name, _FOLLOWS.get(size, size))
    return found


_INSTRUCTIONS = _table()


def _walk(data: bytes) -> int:
    """Return the length of the pickle that the data begin with. Raise PeekError if it asks for more than it contains.

    Each memo entry takes at least two bytes, and pickles number the entries from 0. This bounds the index.
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
            return at
        elif follows == _NONE:
            raise PeekError(f"the pickle cannot be read: byte {at - 1} is not an instruction")
        else:
            begin, at = at, _line_end(data, at)
            if follows == _PUT_LINE:
                text = data[begin : at - 1]
                _check_index(int(text) if text.isdigit() and len(text) < 20 else size, begin)
            elif follows == _LINES:
                at = _line_end(data, at)
    raise PeekError(f"the pickle cannot be read: it has no end within its {size} bytes")


def _check_index(index: int, at: int) -> None:
    if index > at // 2 + 1:
        raise PeekError(f"the pickle cannot be read: memo index {index} at byte {at}")


def _line_end(data: bytes, at: int) -> int:
    end = data.find(b"\n", at)
    if end < 0:
        raise PeekError(f"the pickle cannot be read: the line at byte {at} has no end")
    return end + 1


def peek(data: bytes) -> object:
    """Return the value of a pickle, with stand-ins for all objects. Memory use is proportional to the size of the pickle.

    Raises PeekError for damaged bytes.
    """
    _walk(data)
    return _load(_Peeker(io.BytesIO(data)))


@dataclass(frozen=True)
class Peeked:
    """A pickle at the begin of some data.

    Attributes:
        value: with stand-ins for all objects.
        length: in bytes.
        storages: of its tensors: by key, the name of the class and the number of elements.
    """

    value: object
    length: int
    storages: Mapping[str, tuple[str, int]]


def peek_first(data: bytes) -> Peeked:
    """Return the pickle that the data begin with. Raises PeekError for damaged bytes."""
    length = _walk(data)
    peeker = _StoragePeeker(data[:length])
    return Peeked(_load(peeker), length, peeker.storages)


def _load(peeker: pickle.Unpickler) -> object:
    try:
        value: object = peeker.load()
        return value
    except _DAMAGED as error:
        raise PeekError(f"the pickle cannot be read: {type(error).__name__}: {error}") from error


def number(values: object, *keys: str) -> int | None:
    """Return the value of the first of these keys whose value is a count; None without one, or if `values` is not a dict."""
    if not isinstance(values, Mapping):
        return None
    return next((value for key in keys if is_count(value := values.get(key))), None)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is an int from 0 to below LIMIT. An int in a pickle may have a million digits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT
