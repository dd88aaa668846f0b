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
from itertools import pairwise
from pathlib import Path

from tests.chaos.seeded.checks import Event, groups, of
from tests.chaos.seeded.schedule import KINDS


@dataclass(frozen=True)
class Outcome:
    """Of one fault. seconds: the longest time after it in which no step was made by all ranks that none had made before."""

    kind: str
    new_round: bool
    seconds: float
    charged: bool
    left: bool


def outcomes(events: Sequence[Event]) -> list[Outcome]:
    """Of a run's fault, where it was the only one: of several nobody can tell whose is what."""
    strikes = of(events, "strike")
    return [_outcome(strikes[0], events)] if len(strikes) == 1 else []


def _outcome(strike: Event, events: Sequence[Event]) -> Outcome:
    after = [each for each in events if each["t"] >= strike["t"]]
    known = groups([each for each in events if each["t"] < strike["t"]])
    advances = [strike["t"], *(at for at in _advances(events) if at > strike["t"])]
    return Outcome(
        kind=strike["kind"],
        new_round=any(name not in known for name in groups(after)),
        seconds=max((later - at for at, later in pairwise(advances)), default=0.0),
        charged=any(each["charged"] for each in of(after, "decision")),
        left=any(each["code"] != 0 and each["pid"] not in strike["pids"] for each in of(after, "exit")),
    )


def _advances(events: Sequence[Event]) -> list[float]:
    """When all ranks of a group had told of a step beyond all before it."""
    furthest, found = 0, []
    told: dict[tuple[str, int], set[int]] = defaultdict(set)
    for each in of(events, "step"):
        ranks = told[each["group"], each["step"]]
        ranks.add(each["rank"])
        if len(ranks) == each["world"] and each["step"] > furthest:
            furthest = each["step"]
            found.append(each["t"])
    return found


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
            times = [each.seconds for each in all_of]
            counts = [
                sum(each.new_round for each in all_of),
                sum(each.charged for each in all_of),
                sum(each.left for each in all_of),
            ]
            times_shown = f"{statistics.median(times):.1f} | {max(times):.1f}"
            lines.append(f"| {kind} | {len(all_of)} | {' | '.join(map(str, counts))} | {times_shown} |")
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
