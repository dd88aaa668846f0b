"""The table fault -> what happens -> time without training, from the histories of real runs.

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

from tests.chaos.seeded.checks import Event, groups, of, verdicts
from tests.chaos.seeded.schedule import BETWEEN, KINDS

HEADING = """\
Of runs with one fault, on hosts that trained, in which all checks held. "An agent left" counts agents that left by themselves and
were started again. Seconds without a step of all ranks: where a new round began, until the next group made its first; else the
longest from the fault until it was healed.
"""


@dataclass(frozen=True)
class Outcome:
    """Of one fault. seconds, left: see HEADING."""

    kind: str
    new_round: bool
    seconds: float
    charged: bool
    left: bool


def outcomes(events: Sequence[Event]) -> list[Outcome]:
    """Of a run's fault, where it was the only one: of several nobody can tell whose is what. None where it met no training."""
    strikes = of(events, "strike")
    if len(strikes) != 1 or not _struck_training(strikes[0], events):
        return []
    seconds = _stood_still(strikes[0], events)
    return [] if seconds is None else [_outcome(strikes[0], events, seconds)]


def _outcome(strike: Event, events: Sequence[Event], seconds: float) -> Outcome:
    after = [each for each in events if each["t"] >= strike["t"]]
    return Outcome(
        kind=strike["kind"],
        new_round=bool(groups(after).keys() - _known(strike, events)),
        seconds=seconds,
        charged=any(each["charged"] for each in verdicts(after)),
        left=any(_left(each, strike, after) for each in of(after, "exit")),
    )


def _known(strike: Event, events: Sequence[Event]) -> list[str]:
    """The groups that there were before it, in their order."""
    return list(groups([each for each in events if each["t"] < strike["t"]]))


def _struck_training(strike: Event, events: Sequence[Event]) -> bool:
    """Whether its hosts, if it has any, were of the group that was there."""
    known = _known(strike, events)
    there = {each["host"] for each in groups(events)[known[-1]]} if known else set()
    return bool(there) and {host for host in strike["target"].split(BETWEEN) if host} <= there


def _left(left: Event, strike: Event, after: Sequence[Event]) -> bool:
    dismissed = {each["host"] for each in of(after, "dismissed")}
    again = any(each["host"] == left["host"] and each["t"] >= left["t"] for each in of(after, "started"))
    return left["code"] != 0 and left["pid"] not in strike["pids"] and left["host"] not in dismissed and again


def _stood_still(strike: Event, events: Sequence[Event]) -> float | None:
    """None: the job was over before this could be seen."""
    known, steps = _known(strike, events), _steps(events)
    healed = max((each["t"] for each in of(events, "heal")), default=strike["t"])
    at = [strike["t"], *(t for t, _ in steps if t > strike["t"])]
    gaps = list(pairwise(at))
    begins = next((t for t, name in steps if name not in known), None)
    if begins is not None:
        return next(later - before for before, later in gaps if later == begins)
    if at[-1] <= healed:
        return None
    return max(later - before for before, later in gaps if before <= healed)


def _steps(events: Sequence[Event]) -> list[tuple[float, str]]:
    """When all ranks of a group had made a step, and which group."""
    found = []
    for name, told in groups(events).items():
        by_step: dict[int, dict[int, float]] = defaultdict(dict)
        for each in of(told, "step"):
            by_step[each["step"]][each["rank"]] = each["t"]
        found += [(max(times.values()), name) for times in by_step.values() if len(times) == told[0]["world"]]
    return sorted(found)


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
    found, failed = [], []
    for path in sorted(folder.glob("*/history.jsonl")):
        problems = path.with_name("problems.json")
        if not path.parent.name.isdigit() or not problems.exists():
            continue
        if json.loads(problems.read_text()):
            failed.append(path.parent.name)
        else:
            found += outcomes([json.loads(line) for line in path.read_text().splitlines()])
    print(f"{HEADING}\n" + "\n".join(rows(found)))
    if failed:
        print(f"\nLeft out, because a check did not hold: {', '.join(sorted(failed, key=int))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
