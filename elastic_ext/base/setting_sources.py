"""The types of settings, and their three sources. The first one wins: `--rdzv-conf key=value,...`, the environment
(`ELASTIC_EXT_<KEY>`), the TOML file that `ELASTIC_EXT_CONFIG` names. Standard library only.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.base import files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.kinds import KINDS
from elastic_ext.base.printable import literal
from elastic_ext.base.records import MAX_NAME, is_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SettingType:
    # makes the value from a text; raises ValueError, KeyError, OverflowError or RecursionError if it is invalid
    parse: Callable[[str], object]
    expected: str  # completes "expected ..." in the error message
    secret: bool = False  # messages must not show the value


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
        compile_pattern(text)
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

STEP, EPOCH = "{step}", "{epoch}"
_WILD = {"*": ".*", "?": ".", STEP: "(?P<step>[0-9]{1,18})", EPOCH: "(?P<epoch>[0-9]{1,18})"}
_PARTS = re.compile(r"(\*+|\?|\{step\}|\{epoch\})")


@functools.lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a `checkpoint_pattern` as a regular expression. Raises UsageError if it is invalid."""
    if not pattern or "/" in pattern or any(pattern.count(field) > 1 for field in (STEP, EPOCH)) or pattern.count("*") > 4:
        raise UsageError(
            f"checkpoint_pattern {pattern!r}: expected a name, with * (4 at most) and ? as wildcards, and {STEP} and {EPOCH} for "
            "numbers, e.g. model_{step}.pt"
        )
    parts = (part[0] if part.startswith("*") else part for part in _PARTS.split(pattern) if part)
    return re.compile("".join(_WILD.get(part, re.escape(part)) for part in parts), re.DOTALL)


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ENV_PREFIX = "ELASTIC_EXT_"

# Our variables that are not settings: CONFIG names the file, and the agent sets the others for its workers (a worker may start an
# agent of its own).
NOT_SETTINGS = frozenset({"CONFIG", "WORKER", "RESUME_STEP", "MEMORY_DIR", "MEMORY_DOMAIN", "LAUNCH", "COPIER"})

# Keys of `--rdzv-conf` that torch's own c10d rendezvous reads (torch/distributed/elastic/rendezvous, 2.8 to 2.15). They are
# passed on unchanged; torchrun itself adds `timeout`.
TORCH_KEYS = frozenset(
    {
        *("timeout", "store_type", "read_timeout", "is_host", "join_timeout", "last_call_timeout", "close_timeout"),
        *("heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    }
)

# Kubernetes sets variables in every pod for every Service of the namespace. Those of a Service named "elastic-ext" would look
# like settings.
_KUBERNETES_SERVICE = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")

# METRICS_PORT is a setting, but also a variable of a Service named "...-metrics".
_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

MAX_BYTES = 1 << 20  # of the settings file
MAX_CHARACTERS = 200  # of an invalid value in a message

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")  # spaces and line breaks may separate words


def read_values(
    known: Mapping[str, SettingType], renamed: Mapping[str, str], rdzv_conf: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the settings that some source gives.

    known: the types of all settings, by key. renamed: the new key for each old one. An old key works, but logs a warning.
    rdzv_conf: the keys and values of `--rdzv-conf`, including torch's own. environ: the environment of the agent.

    Raises:
        UsageError: an unknown key (the message names the nearest known one), a key given by its old and its new name, an invalid
            value, or an unreadable file.
    """
    found: dict[str, Any] = {}
    keys = {*known, *renamed}
    for origin, given in (
        _from_file(environ.get(ENV_PREFIX + "CONFIG")),
        ("the environment", _from_environ(environ, keys)),
        ("--rdzv-conf", {key: value for key, value in rdzv_conf.items() if not _is_torchs(key, keys)}),
    ):
        for key, value in _with_new_keys(given, renamed, origin).items():
            found[key] = _parsed(known, key, value, origin)
    return found


def _is_torchs(key: str, ours: set[str]) -> bool:
    """Return whether torch reads this key itself: a known one, or one that is new in the installed torch."""
    if key in TORCH_KEYS or key in ours or not key.isidentifier():
        return key in TORCH_KEYS
    for name in ("c10d_rendezvous_backend", "dynamic_rendezvous"):
        spec = importlib.util.find_spec(f"torch.distributed.elastic.rendezvous.{name}")
        if spec is not None and spec.origin and re.search(rf'params\.get\w*\(\s*"{key}"', Path(spec.origin).read_text()):
            logger.info("--rdzv-conf=%s is torch's own, for its own rendezvous; elastic_ext does not need it", key)
            return True
    return False


def _from_file(path: str | None) -> tuple[str, Mapping[str, object]]:
    if not path:
        return "", {}
    try:
        return path, tomllib.loads(files.read_text(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the settings file {path} (ELASTIC_EXT_CONFIG) cannot be read as TOML: {error}") from error


def _from_environ(environ: Mapping[str, str], keys: set[str]) -> Mapping[str, str]:
    found = {}
    for name, value in environ.items():
        key = name.removeprefix(ENV_PREFIX)
        if key == name or key in NOT_SETTINGS or (key == "RESUME_FROM" and ENV_PREFIX + "WORKER" in environ):
            continue
        if _KUBERNETES_SERVICE.search(key) and (key.lower() not in keys or _KUBERNETES_ADDRESS.match(value)):
            continue
        found[key.lower()] = value
    return found


def _with_new_keys(given: Mapping[str, object], renamed: Mapping[str, str], origin: str) -> dict[str, object]:
    found = {}
    for key, value in given.items():
        new = renamed.get(key, key)
        if new != key:
            if new in given:
                raise UsageError(f"setting {new} is given twice in {origin}: {key} is its old name")
            logger.warning("setting %s in %s is now called %s; the old name works until the next release", key, origin, new)
        found[new] = value
    return found


def _parsed(known: Mapping[str, SettingType], key: str, value: object, origin: str) -> object:
    if key not in known:
        if key[:1] in ("'", '"'):
            raise UsageError(f"{origin} has quotes around {literal(key, MAX_CHARACTERS)}: they are for a shell, leave them out")
        near = difflib.get_close_matches(key, [*known, *TORCH_KEYS], n=1, cutoff=0.0)
        raise UsageError(f"unknown setting {key!r} in {origin}: did you mean {near[0]!r}?")
    shown = "***" if known[key].secret else literal(value, MAX_CHARACTERS)
    try:
        text = str(value).strip()
        if _CONTROL.search(text):
            raise UsageError(f"setting {key}={shown} in {origin}: expected a text without control characters")
        return known[key].parse(text)
    except (ValueError, KeyError, OverflowError, RecursionError) as error:  # a file may hold a number or a table of any size
        raise UsageError(f"setting {key}={shown} in {origin}: expected {known[key].expected}") from error
