"""The types of settings: how to parse a text, and what the error message says is expected. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_ext.base import name_pattern
from elastic_ext.base.errors import UsageError
from elastic_ext.base.kinds import KINDS
from elastic_ext.base.records import MAX_NAME, is_name


@dataclass(frozen=True)
class SettingType:
    """The type of a setting.

    Attributes:
        parse: makes the value from a text; raises ValueError, KeyError, OverflowError or RecursionError if it is invalid.
        expected: completes "expected ..." in the error message.
        secret: messages must not show the value.
    """

    parse: Callable[[str], Any]
    expected: str
    secret: bool = False


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bytes(text: str) -> int:
    number = text.lower().rstrip("kmgt")
    value = int(float(number) * _UNITS[text.lower().removeprefix(number)])
    if value < 0:
        raise ValueError(text)
    return value


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def _float_from(least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def _int_within(least: int, most: float = float("inf")) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return parse


def one_of(*choices: str) -> SettingType:
    """Return the type of a setting that takes one of these texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return SettingType(parse, f"{', '.join(choices[:-1])} or {choices[-1]}")


def _kind_limits(text: str) -> tuple[tuple[str, int], ...]:
    limits = {kind: int(count) for kind, _, count in (each.partition(":") for each in text.split())}
    if not limits or not limits.keys() <= set(KINDS) or min(limits.values()) < 0:
        raise ValueError(text)
    return tuple(limits.items())


def _pattern(text: str) -> str:
    try:
        name_pattern.compile_pattern(text)
    except UsageError as error:
        raise ValueError(text) from error
    return text


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(text.split())
    if not names or not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(text)
    return names


def _text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


_LOCAL_URLS = ("file://", "local://")  # of fsspec, which also takes relative paths in them


def _directory(text: str) -> str:
    """Make a path absolute, once for the agent and all it starts: a script may change its directory. URLs stay as they are."""
    scheme = next((scheme for scheme in _LOCAL_URLS if text.startswith(scheme)), "")
    path = text.removeprefix(scheme)
    if not path or "://" in path:
        return _text(text)
    try:
        return scheme + os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError as error:
        raise ValueError(text) from error


def _name(text: str) -> str:
    """Check a name that becomes part of etcd keys, followed by a number and a process id."""
    if not is_name(text) or len(text) > MAX_NAME // 2:
        raise ValueError(text)
    return text


BOOLEAN = SettingType(lambda text: _BOOLEANS[text.lower()], "on or off")
SECONDS = SettingType(_float_from(0), "a number of seconds, 0 or more")
SECONDS_FROM_1 = SettingType(_float_from(1), "a number of seconds, 1 or more")
# Prometheus itself forgets an agent 5 minutes after its last scrape; a node that ends holds its place in the cluster meanwhile.
LINGER_SECONDS = SettingType(_float_from(0, 300), "a number of seconds, 0 to 300")
WHOLE_SECONDS = SettingType(_int_within(2), "a whole number of seconds, 2 or more")  # etcd's leases cannot be shorter
STEPS = SettingType(_int_within(0), "a whole number of steps, 0 or more")
BYTES = SettingType(_bytes, "a number of bytes, or of K, M, G or T (powers of 1024), e.g. 4G")
MB_PER_SECOND = SettingType(_float_from(0), "a number of megabytes per second, 0 or more")
PORT = SettingType(_int_within(0, 65535), "a port number, 0 to 65535")
RESTARTS = SettingType(_int_within(-1), "a whole number, or -1 for no limit")
# The items of lists are separated by spaces, since --rdzv-conf cannot hold commas.
KIND_LIMITS = SettingType(
    _kind_limits, f"kinds with a limit for each, e.g. 'hang:3 network:20'; the kinds are {', '.join(KINDS)}"
)
MODULES = SettingType(_modules, "names of modules, separated by spaces")
PATTERN = SettingType(
    _pattern, "a name, with * (4 at most) and ? as wildcards, and {step} and {epoch} for numbers, e.g. model_{step}.pt"
)
TEXT = SettingType(_text, "a non-empty text")
DIRECTORY = SettingType(
    _directory, "a non-empty text: a URL or a path, which must be absolute if the working directory has been removed"
)
SECRET = SettingType(_text, "a non-empty text", secret=True)
NAME = SettingType(_name, f"1 to {MAX_NAME // 2} printable characters without a /")
