"""The table fault -> what happens -> time until all train again, from the histories of real runs.

python -m tests.chaos.seeded.table FOLDER
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.seeded.checks import Event, groups, of
from tests.chaos.seeded.schedule import KINDS


@dataclass(frozen=True)
class Outcome:
    """Of one fault. seconds: from the strike until all ranks had made a step that none had made before it; None: never again."""

    kind: str
    new_round: bool
    seconds: float | None
    charged: bool
    left: bool


def outcomes(events: Sequence[Event]) -> list[Outcome]:
    """Of all faults of a run that had no other fault beside them: nobody can tell whose is what."""
    strikes = of(events, "strike")
    return [_outcome(strikes[0], events)] if len(strikes) == 1 else []


def _outcome(strike: Event, events: Sequence[Event]) -> Outcome:
    before = [each for each in of(events, "step") if each["t"] < strike["t"]]
    furthest = max((each["step"] for each in before), default=0)
    known = {f"{each['group']}.{each['restart']}" for each in before}
    later = groups([each for each in events if each["t"] >= strike["t"]])
    again = [at for told in later.values() if (at := _all_beyond(told, furthest)) is not None]
    after = [each for each in events if each["t"] >= strike["t"]]
    return Outcome(
        kind=strike["kind"],
        new_round=any(name not in known for name in later),
        seconds=min(again) - strike["t"] if again else None,
        charged=any(each["charged"] for each in of(after, "decision")),
        left=any(each["code"] != 0 and each["pid"] not in strike["pids"] for each in of(after, "exit")),
    )


def _all_beyond(told: Sequence[Event], step: int) -> float | None:
    """When the last rank of a group had made a step beyond this one."""
    first: dict[int, float] = {}
    for each in of(told, "step"):
        if each["step"] > step:
            first.setdefault(each["rank"], each["t"])
    return max(first.values()) if told and len(first) == told[0]["world"] else None


def rows(found: Iterable[Outcome]) -> list[str]:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for each in found:
        by_kind[each.kind].append(each)
    lines = [
        "| fault | runs | new round | charged | an agent left, and came again | median s | worst s |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if all_of := by_kind.get(kind):
            times = [each.seconds for each in all_of if each.seconds is not None]
            counts = [
                sum(each.new_round for each in all_of),
                sum(each.charged for each in all_of),
                sum(each.left for each in all_of),
            ]
            shown = f"{statistics.median(times):.1f} | {max(times):.1f}" if times else "- | -"
            lines.append(f"| {kind} | {len(all_of)} | {' | '.join(map(str, counts))} | {shown} |")
    return lines


def main(folder: Path) -> None:
    found = []
    for path in sorted(folder.glob("*/history.jsonl")):
        problems = path.with_name("problems.json")
        if path.parent.name.isdigit() and problems.exists() and json.loads(problems.read_text()) == []:
            found += outcomes([json.loads(line) for line in path.read_text().splitlines()])
    print("\n".join(rows(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
