"""The wire protocol between an agent and the program that copies its checkpoints (`replicate`), version SCHEMA.

Environment, set by the agent: ELASTIC_EXT_LOCAL_DIR and ELASTIC_EXT_CHECKPOINT_DIR (`tiers`), as workers have them; and
TOKEN_ENV, the agent's token: when the agent is gone, the reaper ends the processes that carry it. They are not arguments, because
every user of the machine can read those, and a URL may hold credentials. The bandwidth is an argument, `--mb-s N`.

Standard input, one order a line:
    look        a checkpoint was saved, or may have been
    finish      copy what is left, then end
Its end means that the agent is gone, and ends the program.

Standard output, one JSON object a line, with a field "schema":
    Report      after each turn
    Pulse       now and then while one file takes long
A line that is neither is a library's print.

Exit code: 0: after `finish`, everything is copied; UNFINISHED: after `finish`, the other nodes' files do not come any more; other
codes: it died.
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
class Report:
    """The state after a turn.

    Attributes:
        sent: bytes of this turn.
        lag_steps: steps that the newest checkpoint of the remote directory is behind the newest one here; None: it has none yet.
        lag_s: seconds that the oldest one that is not there has been waiting.
        waiting: names of those here that are newer than the newest complete one there.
        complete: name of the newest complete one there, "": none.
        failures: failed turns in a row; reason: why the last one failed, for people.
        others: changes while other nodes send what is still missing; the text has no other meaning.
    """

    sent: int = 0
    lag_steps: int | None = 0
    lag_s: float = 0.0
    waiting: tuple[str, ...] = ()
    complete: str = ""
    failures: int = 0
    reason: str = ""
    others: str = ""


@dataclass(frozen=True)
class Pulse:
    """The program is at work on a file that takes long. pulse: bytes of this turn so far."""

    pulse: int


def moved(report: Report, before: Report) -> bool:
    """Return whether anything came nearer to being complete since, here or on another node. Pure."""
    now, then = ((each.waiting, each.complete, each.others) for each in (report, before))
    return bool(report.sent) or now != then


def encode(message: Report | Pulse) -> str:
    """Return the line, without its end."""
    return json.dumps({"schema": SCHEMA, **asdict(message)})


def decode(line: bytes) -> Report | Pulse:
    """Raises OtherSchema for a line of another version, RecordError for one that is no message."""
    fields = records.parse(line, "a line of the copier", SCHEMA)
    return records.build(Pulse, fields, "a line") if "pulse" in fields else records.build(Report, fields, "a line")
