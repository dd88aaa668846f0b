"""From good input and a seed to bad input: bytes, JSON, TOML."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Sequence
from typing import Any

DEEP = 100_000  # brackets: more than any recursion takes

_ODD_BYTES = (
    *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J\x1b[31m", b"\r\n", b"\x7f", b"\xc2\x9b", b"\xe2\x80\xae", b'"', b"{", b"}"),
    *(
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b"9" * 5000,
        b"-1",
        b"1e999",
        b"NaN",
        b"\\ud800",
        b"\\u0000",
        b"null",
        b"true",
        b"PK\x03\x04",
    ),
)

_HUGE = "<<huge>>"  # json.dumps refuses numbers of so many digits
_DEEP = "<<deep>>"
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**300, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "\0", "\x1b]0;x\x07", "a\nb", "\ud800", "x" * 100_000, "../../etc/passwd", "/", "-1", "1e9", "NaN"),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, {"schema": 1}, _HUGE, _DEEP),
)

_ODD_TOML = (
    *("[" * DEEP, "9" * 5000, "inf", "nan", "-0.0", "true", "''", '"\\u0000"', '"\\uD800"', "1979-05-27T07:32:00Z", "07:32:00"),
    *(
        "[]",
        "{}",
        "[[1], ['a']]",
        "{a = {b = {c = 1}}}",
        '"\x1b[2J"',
        "0x" + "f" * 5000,
        '"' + "x" * 100_000 + '"',
        "-1",
        "3.5",
        "=",
    ),
    "{a." + ".".join("a" * 2000) + " = 1}",
)


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Any bytes: one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_BYTES)(data, rng, others)
    return data


def _flip(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _remove(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def _double(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:]


def _insert(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_ODD_BYTES) + data[at:]


def _replace(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    odd = rng.choice(_ODD_BYTES)
    return data[:at] + odd + data[at + len(odd) :]


def _random(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 33)) + data[at:]


def _splice(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


_BYTES = (_flip, _flip, _cut, _remove, _double, _insert, _replace, _random, _splice)


def mutated_json(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Half of them stay JSON, with odd values, and missing, unknown and doubled fields."""
    try:
        value = json.loads(data) if rng.random() < 0.5 else None
    except ValueError:  # several lines of it
        value = None
    if value is None:
        return mutated(data, rng, others)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _changed(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).replace(f'"{_HUGE}"', "9" * 5000)
    return text.replace(f'"{_DEEP}"', "[" * 3000 + "]" * 3000).encode("utf-8", "surrogatepass")


def _changed(value: Any, rng: random.Random) -> Any:
    """At a random place."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        choice = rng.random()
        if choice < 0.1:
            del value[key]
        elif choice < 0.15 and isinstance(value, dict):
            value[rng.choice(("", "\0", "extra", "schema", "id", "\x1b[1m"))] = _odd(rng)
        elif choice < 0.2:
            return [value] if rng.random() < 0.5 else {"value": value}
        else:
            value[key] = _changed(value[key], rng)
        return value
    return rng.choice(([value], str(value), {"value": value})) if rng.random() < 0.1 else _odd(rng)


def _odd(rng: random.Random) -> Any:
    return copy.copy(rng.choice(_ODD_VALUES))


def mutated_toml(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    if rng.random() < 0.4:
        return mutated(data, rng, others)
    lines = data.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        key, _, value = lines[at].partition("=")
        odd = rng.choice(_ODD_TOML)
        lines[at] = rng.choice(
            (f"{key}= {odd}", f"{key}= {odd}", f"{odd} = {value}", lines[at] + "\n" + lines[at], f"[{key}]", f"[[{key}]]", "")
        )
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def mutated_text(text: str, rng: random.Random) -> str:
    """For what comes by an argument or a variable: no NUL there."""
    data = mutated(text.encode(), rng)[:130_000]
    return re.sub("\0", "", data.decode(errors="surrogateescape"))
