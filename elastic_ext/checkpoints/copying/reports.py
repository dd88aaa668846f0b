"""What the copier tells the agent, one line each. Pure. The protocol around it is in `replicate`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_ext.base import records

SCHEMA = 1


@dataclass(frozen=True)
class CopyState:
    """The state after a turn."""

    sent: int = 0  # bytes sent in this turn
    # Steps by which the newest remote checkpoint is behind the newest local one; None: no remote one yet.
    lag_steps: int | None = 0
    lag_s: float = 0.0  # seconds that the oldest checkpoint in `waiting` has waited
    waiting: tuple[str, ...] = ()  # names of the local checkpoints that are newer than the newest complete remote one
    complete: str = ""  # name of the newest complete remote checkpoint; "": none
    failures: int = 0  # failed turns in a row
    reason: str = ""  # why the last one failed, for people
    others: str = ""  # text that changes while other nodes send what is missing; it has no other meaning
    # Seconds since this node began to copy the checkpoint that has become complete in this turn; None: none has.
    copy_s: float | None = None
    arrived: str = ""  # name of the last save of a script that has arrived; "": none has
    given_up: tuple[str, ...] = ()  # of `waiting`, what will never be there: at the end of a job nothing records it any more


@dataclass(frozen=True)
class Pulse:
    """Sign of life while one file takes long. pulse: bytes sent in this turn so far."""

    pulse: int


def made_progress(report: CopyState, before: CopyState) -> bool:
    """Return whether there was progress since `before`, on this node or another."""
    now, then = ((each.waiting, each.complete, each.others, each.arrived) for each in (report, before))
    return bool(report.sent) or now != then


def encode(message: CopyState | Pulse) -> str:
    """Return the line without the newline."""
    return records.encode(message, SCHEMA)


def decode(line: bytes) -> CopyState | Pulse:
    """Parse a line. Raises OtherSchema if another version wrote it, RecordError if it is not a message."""
    fields = records.parse(line, "a line of the copier", SCHEMA)
    return records.build(Pulse, fields, "a line") if "pulse" in fields else records.build(CopyState, fields, "a line")


def both(own: CopyState, script: CopyState) -> CopyState:
    """Return one report for our checkpoints and the saves of a script in one turn."""
    worse = max(own, script, key=lambda each: each.failures)
    lags = [each.lag_steps for each in (own, script) if each.waiting]
    return replace(
        own,
        lag_steps=None if None in lags else max((each for each in lags if each is not None), default=0),
        lag_s=max(own.lag_s, script.lag_s),
        waiting=own.waiting + script.waiting,
        given_up=own.given_up + script.given_up,
        failures=worse.failures,
        reason=worse.reason,
        copy_s=own.copy_s if own.copy_s is not None else script.copy_s,
        arrived=script.arrived,
        others=own.others + script.others,
    )
