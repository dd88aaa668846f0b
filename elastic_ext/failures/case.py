"""Evidence as JSON, the input of `elastic-ext explain`. Every field is checked. Standard library only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ext.base.errors import UsageError
from elastic_ext.failures.evidence import Evidence, Platform, Precedent, RaisedException, Wrapped

Fields = Mapping[str, tuple[str, Callable[[object], bool]]]


def _optional(good: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or good(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_signal(value: object) -> bool:
    return isinstance(value, str) and (value in signal.Signals.__members__ or value.startswith("signal "))


def _list_of(good: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(good, value))


_TEXT = ("a string", _optional(_is_text))
_TEXTS = ("a list of strings", _optional(_list_of(_is_text)))
_FLAG = ("true, false or null", _optional(_is_flag))
_COUNT = ("a whole number, 0 or more", _optional(_is_count))
_SIGNAL = ('the name of a signal, e.g. "SIGKILL"', _optional(_is_signal))
_OBJECT = ("an object", _optional(_is_object))

EVIDENCE: Fields = {
    "id": ("a string or a whole number", _optional(lambda value: _is_text(value) or type(value) is int)),
    "rank": _COUNT,
    "exit_code": ("a whole number", _optional(lambda value: type(value) is int)),
    "signal": _SIGNAL,
    "exception": _OBJECT,
    "stderr_tail": _TEXT,
    "step": _COUNT,
    "first_step_done": _FLAG,
    "warm": _FLAG,
    "agent_signal": _SIGNAL,
    "oom_kills": _COUNT,
    "xids": ("a list of whole numbers", _optional(_list_of(_is_count))),
    "gpu_recovery": _TEXTS,
    "platform": _OBJECT,
    "hang": _FLAG,
    "cut": _TEXTS,
    "differs": _TEXTS,
    "checkpoint_load": _FLAG,
    "node_health_failed": _FLAG,
    "node": _TEXT,
    "history": ("a list of objects", _optional(_list_of(_is_object))),
    "expect": ("an object", lambda value: True),  # for tests of the table; ignored here
}
WRAPPED: Fields = {"type": ("a string", _is_text), "message": _TEXT, "bases": _TEXTS, "errno": _COUNT}
_OBJECTS = ("a list of objects", _optional(_list_of(_is_object)))
EXCEPTION: Fields = {**WRAPPED, "frames": _TEXTS, "causes": _TEXTS, "wrapped": _OBJECTS}
PLATFORM: Fields = {"name": _TEXT, "reason": _TEXT, "disruption_target": _FLAG}
PAST: Fields = {
    "same_fingerprint": ("true or false", _is_flag),
    "progress": _FLAG,
    "node": _TEXT,
    "first_step_done": _FLAG,
    "cut": _TEXTS,
    "moved": _FLAG,
}


def parse_evidence(case: object) -> Evidence:
    """Return the evidence in a JSON value. Fields that are missing or null are unknown.

    Raises:
        UsageError: not an object, unknown fields (the message names them), or a value of the wrong type.
    """
    if not isinstance(case, dict):
        raise UsageError(f"expected a JSON object with evidence, found {type(case).__name__}")
    _check(case, EVIDENCE, "")
    exception, platform = case.get("exception"), case.get("platform") or {}
    _check(platform, PLATFORM, "platform.")
    return Evidence(
        rank=case.get("rank") or 0,
        exit_code=case.get("exit_code"),
        signal=case.get("signal"),
        exception=_exception(exception) if exception is not None else None,
        step=case.get("step"),
        first_step_done=case.get("first_step_done"),
        warm=case.get("warm"),
        stderr_tail=case.get("stderr_tail") or "",
        agent_signal=case.get("agent_signal"),
        oom_kills=case.get("oom_kills"),
        xids=tuple(case.get("xids") or ()),
        gpu_recovery=tuple(case.get("gpu_recovery") or ()),
        platform=Platform(platform.get("name") or "", platform.get("reason") or "", platform.get("disruption_target")),
        hang=case.get("hang"),
        cuts=(tuple(case["cut"]),) if case.get("cut") else (),
        differs=tuple(case.get("differs") or ()),
        checkpoint_load=case.get("checkpoint_load"),
        node_health_failed=case.get("node_health_failed"),
        node=case.get("node"),
        history=tuple(_past(past, number) for number, past in enumerate(case.get("history") or ())),
    )


def _exception(case: Mapping[str, Any]) -> RaisedException:
    own = _wrapped(case, EXCEPTION, "exception")
    frames, causes = (tuple(case.get(name) or ()) for name in ("frames", "causes"))
    wrapped = tuple(
        _wrapped(each, WRAPPED, f"exception.wrapped[{number}]") for number, each in enumerate(case.get("wrapped") or ())
    )
    return RaisedException(own.type, own.message, frames, causes, own.bases, own.errno, wrapped)


def _wrapped(case: Mapping[str, Any], fields: Fields, name: str) -> Wrapped:
    _check(case, fields, f"{name}.")
    if "type" not in case:
        raise UsageError(f"{name}.type is missing")
    return Wrapped(case["type"], case.get("message") or "", tuple(case.get("bases") or ()), case.get("errno"))


def _past(past: Mapping[str, Any], number: int) -> Precedent:
    _check(past, PAST, f"history[{number}].")
    return Precedent(
        past.get("same_fingerprint", False),
        past.get("progress"),
        past.get("node"),
        past.get("first_step_done"),
        cut=tuple(past.get("cut") or ()),
        moved=past.get("moved") is not False and past.get("node") is not None,  # as a restart moves them
    )


def _check(values: Mapping[str, Any], fields: Fields, prefix: str) -> None:
    if unknown := [f"{prefix}{key}" for key in values if key not in fields]:
        raise UsageError(f"unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}; known: {', '.join(fields)}")
    for key, value in values.items():
        expected, good = fields[key]
        if not good(value):
            raise UsageError(f"{prefix}{key}={str(value)[:60]!r}: expected {expected}")
