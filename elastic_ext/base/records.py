"""The codec of records that cross processes: from a frozen dataclass to JSON, and back to the dataclass or a RecordError.

Anyone with access to a job's etcd or store can write anything there: another job's keys, text that is not UTF-8, deeply nested
lists, endless numbers. The reader checks every field against its type in the dataclass; the `Annotated` types below add
ranges. It ignores unknown fields, so that a field can be added within a schema.

A field's key in JSON is its name, or the name given by `stored_as`. Standard library only.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from elastic_ext.base.errors import ElasticExtError

T = TypeVar("T")

MAX_BYTES = 2 << 20  # of a record; etcd takes requests of 1.5 MiB (--max-request-bytes), a torch store any size
MAX_NAME = 200  # characters of any part of a key: a run id, a host name, a node id
_LEAST, _MOST = -(2**63), 2**63 - 1  # of any whole number


class RecordError(ElasticExtError):
    """This version cannot read a record in etcd, a store or a file."""


class OtherSchema(RecordError):
    """The record was written by another version."""


@dataclass(frozen=True)
class Within:
    """The range of a number in a record, both ends included."""

    least: float
    most: float

    def __call__(self, value: float) -> bool:
        return self.least <= value <= self.most


def is_name(text: str) -> bool:
    """Return whether this may be part of a key: 1 to MAX_NAME printable characters, none of them "/"."""
    return 0 < len(text) <= MAX_NAME and "/" not in text and text.isprintable()


Count = Annotated[int, Within(0, 2**31 - 1)]
Port = Annotated[int, Within(0, 65535)]
Rank = Annotated[int, Within(-1, 2**31 - 1)]  # -1: no worker
Seconds = Annotated[float, Within(0, 1e9)]  # clocks and select() do not accept arbitrary numbers
Ratio = Annotated[float, Within(0, 1e9)]
ZeroOrOne = Annotated[int, Within(0, 1)]
Name = Annotated[str, is_name]
NameOrEmpty = Annotated[str, lambda text: not text or is_name(text)]

_KEY = "key"  # of a field's metadata


def stored_as(key: str) -> Mapping[str, str]:
    """Return the metadata of a field whose key in JSON is not its name: `field(metadata=stored_as("verdict"))`."""
    return {_KEY: key}


@cache
def _names(kind: type) -> Mapping[str, str]:
    """Return the names of a record's fields, by key. Raises TypeError: it is not a dataclass."""
    if not is_dataclass(kind):
        raise TypeError(f"expected a dataclass, got a {kind.__name__}")
    return {of.metadata.get(_KEY, of.name): of.name for of in fields(kind)}


def plain(record: object) -> dict[str, Any]:
    """Return a record as JSON values, in the form that `build` reads: enum members by value, tuples as lists.

    Raises TypeError: it is not a dataclass.
    """
    return {key: _plain_value(value) for key, value in _values(record).items()}


def _values(record: object) -> dict[str, object]:
    kind: Any = type(record)
    return {key: getattr(record, name) for key, name in _names(kind).items()}


def _plain_value(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain_value(each) for each in value]
    return plain(value) if is_dataclass(value) else value


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain_value)  # made once: a leader writes thousands of records


def encode(record: object, schema: int) -> str:
    """Return a record as JSON, in the form that `read` reads."""
    return _ENCODER.encode({"schema": schema, **_values(record)})


def read(kind: type[T], data: bytes | str, what: str, schema: int) -> T:
    """Read a record of this kind and schema.

    what: the record or its key, for error messages.

    Raises OtherSchema: another version wrote it; RecordError: it is not such a record.
    """
    return build(kind, parse(data, what, schema), what)


def parse(data: bytes | str, what: str, schema: int) -> dict[str, Any]:
    """Return a record's fields as JSON values; every text in them can be encoded. Raises the same errors as `read`."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, expected {MAX_BYTES} at most")
        text = data if isinstance(data, str) else data.decode()
        found = _DECODER.decode(text)
        if "\\u" in text or not text.isascii():  # else it cannot hold a lone surrogate
            found = _encodable(found)
        given = found.pop("schema")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        text = f"{what} holds no record of elastic_ext ({_one_line(error)}): is the run id used by something else?"
        raise RecordError(text) from error
    if type(given) is not int or given != schema:
        seen = given if type(given) is int and abs(given) <= _MOST else f"of type {type(given).__name__}"
        text = (
            f"{what} was written with schema {seen}, expected {schema}: all nodes of a job need the same version of elastic_ext"
        )
        raise OtherSchema(text)
    return dict(found)


def build(kind: type[T], data: object, what: str) -> T:
    """Make a dataclass from JSON values. Raises RecordError."""
    of: Any = kind
    try:
        made = cast(T, _dataclass(of)(data))
    except (ValueError, TypeError) as error:
        raise RecordError(f"{what} holds no {kind.__name__.lower()} of elastic_ext: {_one_line(error)}") from error
    return made


def _one_line(error: BaseException) -> str:
    """Return one line that does not repeat the record's content."""
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_NAME]}"


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # made once: the leader of thousands of nodes spends most of its time reading


def _encodable(value: object) -> object:
    """Return the value without lone surrogates, which no key and no message can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {name: _encodable(each) for name, each in value.items()}
    return value


# The functions below map a field's type to a function that makes its value from JSON. Each raises ValueError or TypeError, whose
# text must not repeat the value, because it may have any length.

Make = Callable[[object], object]


@cache
def _dataclass(kind: Any) -> Make:
    hints = get_type_hints(kind, include_extras=True)
    makers = {key: (name, _maker(hints[name])) for key, name in _names(kind).items()}

    def make(value: object) -> object:
        if not isinstance(value, Mapping):
            raise _wrong_type(value, kind.__name__)
        given = {}
        for key, (name, of) in makers.items():
            if key in value:
                try:
                    given[name] = of(value[key])
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{kind.__name__}.{key}: {error}") from error
        if makers and not given:
            raise ValueError(f"none of the fields of {kind.__name__}")
        return kind(**given)

    return make


@cache
def _maker(hint: Any) -> Make:
    of: Any = hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(_maker(arguments[0]), hint.__metadata__[0])
    if origin in (Union, types.UnionType):
        return _any_of([_maker(one) for one in arguments])
    if origin is tuple:  # tuple[X, ...]
        return _tuple_of(_maker(arguments[0]))
    if hint in _PLAIN:
        return _PLAIN[hint]
    if is_dataclass(hint):
        made: Make = _dataclass(of)
        return made
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member_of(hint)
    raise TypeError(f"no record holds a {hint!r}")


def _wrong_type(value: object, wanted: str) -> TypeError:
    return TypeError(f"of type {type(value).__name__}, expected {wanted}")


def _whole(value: object) -> int:
    if type(value) is not int:
        raise _wrong_type(value, "a whole number")
    if not _LEAST <= value <= _MOST:
        raise ValueError("a number beyond 64 bits")
    return value


def _number(value: object) -> float:
    if type(value) is int:
        return _whole(value)
    if type(value) is not float:
        raise _wrong_type(value, "a number")
    if not math.isfinite(value):
        raise ValueError("a number that is not finite")
    return value


def _exactly(kind: type) -> Make:
    def make(value: object) -> object:
        if type(value) is not kind:
            raise _wrong_type(value, kind.__name__)
        return value

    return make


_PLAIN: dict[object, Make] = {
    int: _whole,
    float: _number,
    str: _exactly(str),
    bool: _exactly(bool),
    type(None): _exactly(type(None)),
}


def _checked(make: Make, good: Callable[[Any], bool]) -> Make:
    def checked(value: object) -> object:
        made = make(value)
        if not good(made):
            raise ValueError("out of range" if isinstance(made, (int, float)) else "a text that is not allowed here")
        return made

    return checked


def _any_of(makers: list[Make]) -> Make:
    def make(value: object) -> object:
        for one in makers:
            try:
                return one(value)
            except (ValueError, TypeError) as error:
                last = error
        raise last

    return make


def _tuple_of(make: Make) -> Make:
    def made(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(value, "a list")
        return tuple(map(make, value))

    return made


def _member_of(kind: type[Enum]) -> Make:
    values = {member.value: member for member in kind}

    def make(value: object) -> object:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"expected one of {', '.join(map(str, values))}")
        return values[value]

    return make
