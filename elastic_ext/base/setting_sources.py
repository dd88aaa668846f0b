"""Reads settings from their three sources. The first one wins: `--rdzv-conf key=value,...`, the environment
(`ELASTIC_EXT_<KEY>`), the TOML file that `ELASTIC_EXT_CONFIG` names. Standard library only.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_ext.base import user_files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import literal
from elastic_ext.base.setting_types import SettingType

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)

ENV_PREFIX = "ELASTIC_EXT_"

# Our variables that are not settings: CONFIG names the file, and the agent sets the others for its workers (a worker may start an
# agent of its own).
NOT_SETTINGS = frozenset({"CONFIG", "WORKER", "RESUME_STEP", "MEMORY_DIR", "MEMORY_PEER", "LAUNCH", "COPIER"})

# Keys of `--rdzv-conf` that torch's own c10d rendezvous reads (torch/distributed/elastic/rendezvous, 2.8 to 2.15). They are
# passed on unchanged; torchrun itself adds `timeout`.
TORCH_KEYS = frozenset(
    {
        "timeout",
        "store_type",
        "read_timeout",
        "is_host",
        "join_timeout",
        "last_call_timeout",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
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
    known: Mapping[str, SettingType], renamed: Mapping[str, str], rdzv_conf: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the settings that some source gives.

    Args:
        known: the types of all settings, by key.
        renamed: the new key for each old one. An old key works, but logs a warning.
        rdzv_conf: the keys and values of `--rdzv-conf`, including torch's own.
        environ: the environment of the agent.

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


def _from_file(path: str | None) -> tuple[str, Mapping[str, Any]]:
    if not path:
        return "", {}
    try:
        return path, tomllib.loads(user_files.read_text(path, MAX_BYTES))
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


def _with_new_keys(given: Mapping[str, Any], renamed: Mapping[str, str], origin: str) -> dict[str, Any]:
    found = {}
    for key, value in given.items():
        new = renamed.get(key, key)
        if new != key:
            if new in given:
                raise UsageError(f"setting {new} is given twice in {origin}: {key} is its old name")
            logger.warning("setting %s in %s is now called %s; the old name works until the next release", key, origin, new)
        found[new] = value
    return found


def _parsed(known: Mapping[str, SettingType], key: str, value: Any, origin: str) -> Any:
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
