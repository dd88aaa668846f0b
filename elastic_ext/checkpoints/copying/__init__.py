"""The wire protocol between an agent and the program that copies its checkpoints (`replicate`), version SCHEMA.

Environment, set by the agent: ELASTIC_EXT_LOCAL_DIR and ELASTIC_EXT_CHECKPOINT_DIR (`tiers`), as for workers; and TOKEN_ENV, the
agent's token: when the agent is gone, the reaper ends the processes that carry it. These are not arguments, because every user of
the machine can read arguments, and a URL may hold credentials. The bandwidth is an argument, `--mb-s N`.

Standard input, one order per line:
    look        a checkpoint was saved, or may have been
    finish      copy the rest, then end
End of input means that the agent is gone, and ends the program.

Standard output, one JSON object per line, with a field "schema":
    Report      after each turn
    Pulse       at intervals while one file takes long
Any other line was printed by a library.

Exit code: 0: everything is copied, after `finish`; UNFINISHED: other nodes' files stopped arriving, after `finish`; other codes:
the program died.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from elastic_ext.base import records

SCHEMA = 1
TOKEN_ENV = "ELASTIC_EXT_COPIER"
LOOK, FINISH = "look", "finish"
UNFINISHED = 3


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


@dataclass(frozen=True)
class Pulse:
    """Sign of life while one file takes long. pulse: bytes sent in this turn so far."""

    pulse: int


def made_progress(report: CopyState, before: CopyState) -> bool:
    """Return whether there was progress since `before`, on this node or another. Pure."""
    now, then = ((each.waiting, each.complete, each.others) for each in (report, before))
    return bool(report.sent) or now != then


def encode(message: CopyState | Pulse) -> str:
    """Return the line without the newline."""
    return json.dumps({"schema": SCHEMA, **asdict(message)})


def decode(line: bytes) -> CopyState | Pulse:
    """Parse a line. Raises OtherSchema if another version wrote it, RecordError if it is not a message."""
    fields = records.parse(line, "a line of the copier", SCHEMA)
    return records.build(Pulse, fields, "a line") if "pulse" in fields else records.build(CopyState, fields, "a line")
