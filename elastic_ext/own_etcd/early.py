"""The few options of torchrun that an etcd of the job needs, read before torch can read them. Pure.

A guess: only torch knows which options take a value. A wrong one costs a process that ends again (`bring.begin`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NAMES = ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr", "rdzv_backend")
BACKEND = "ext_etcd"


@dataclass(frozen=True)
class Options:
    """As of torchrun. rdzv_conf: its keys and values."""

    endpoint: str
    run_id: str
    local_addr: str | None
    rdzv_conf: Mapping[str, str]


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Options | None:
    """Return the options before the script; None unless the backend is ours on etcd, or where they cannot be read."""
    found = {name: environ[f"PET_{name.upper()}"] for name in _NAMES if f"PET_{name.upper()}" in environ}
    waiting = ""  # an option whose value may follow
    for word in argv:
        if word.startswith("-") and word != "-m":
            option, equals, value = word.lstrip("-").partition("=")
            option = option.replace("-", "_")
            if equals and option in _NAMES:
                found[option] = value
            waiting = "" if equals else option
        elif waiting:
            found |= {waiting: word} if waiting in _NAMES else {}
            waiting = ""
        else:
            break
    conf = _conf(found.get("rdzv_conf", ""))
    if found.get("rdzv_backend") != BACKEND or conf is None or not found.get("rdzv_id"):
        return None
    return Options(found.get("rdzv_endpoint", ""), found["rdzv_id"], found.get("local_addr"), conf)


def _conf(text: str) -> dict[str, str] | None:
    """Return the pairs of --rdzv-conf; None if torch would refuse them."""
    pairs = [pair.partition("=") for pair in text.strip().split(",") if text.strip()]
    if not all(key.strip() and equals and value.strip() for key, equals, value in pairs):
        return None
    return {key.strip(): value.strip() for key, _, value in pairs}
