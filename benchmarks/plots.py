"""Draws the plots again from the JSON lines in benchmarks/results; measures nothing.

    python benchmarks/plots.py [--list]

The JSON of those in `MEASURED` has medians only, and their plots show each try: `make bench` draws these when it measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import report

Record = Mapping[str, Any]
Draw = Callable[[Any, Any, Record], None]  # of a script (a module), an empty figure, and the record
MEASURED = ("checkpoint_stall", "own_etcd", "verdict")


def _of_node_loss(script: Any, figure: Any, record: Record) -> None:
    def cell(stored: Record) -> SimpleNamespace:
        outcomes = [script.Outcome(script.Result(result), after_s) for result, after_s in stored["outcomes"]]
        shown = script.Cell(outcomes).shown
        return SimpleNamespace(total_s=stored["median_s"], phases_s=stored["phases_s"], shown=shown)

    rows = {row["row"]: {side: cell(row[side]) for side in row if side in script.SIDES} for row in record["rows"]}
    script.draw(figure, rows)


def _of_growth(script: Any, figure: Any, record: Record) -> None:
    script.draw(figure, [row for row in record["rows"] if "why" not in row], record["fits"])


def _of_reliability(script: Any, figure: Any, record: Record) -> None:
    agents = [name for name in record if isinstance(record[name], dict) and "tries" in record[name]]
    script.draw(figure, {each: Counter({name: record[each][name] for name in script.VERDICTS}) for each in agents})


def _of_rendezvous(script: Any, figure: Any, record: Record) -> None:
    def outcome(stored: Record) -> SimpleNamespace:
        phases = {part: stored[part] and SimpleNamespace(**stored[part]) for part in ("form", "rejoin")}
        return SimpleNamespace(**phases)

    rows = {row["agents"]: {side: outcome(row[side]) for side in row if side != "agents"} for row in record["rows"]}
    script.draw(figure, rows)


def _of_bugs(script: Any, figure: Any, record: Record) -> None:
    rows = record["rows"].items()
    script.draw(figure, {row: {agent: SimpleNamespace(**cost) for agent, cost in sides.items()} for row, sides in rows})


DRAWN: dict[str, Draw] = {
    "checkpoints": lambda script, figure, record: script.draw(figure, record["rows"]),
    "classification": lambda script, figure, record: script.draw(figure, record["rows"], script.PROMISE_MS),
    "code_bug_waste": _of_bugs,
    "compressed": lambda script, figure, record: script.draw(figure, record),
    "growth": _of_growth,
    "handlers": lambda script, figure, record: script.draw(figure, record["rows"]),
    "hangs": lambda script, figure, record: script.draw(figure, record["rows"], record["timeout_s"]),
    "integrity": lambda script, figure, record: script.draw(figure, record),
    "memory_tier": lambda script, figure, record: script.draw(figure, record),
    "node_loss": _of_node_loss,
    "overhead": lambda script, figure, record: script.draw(figure, record["blocks"]),
    "rendezvous": _of_rendezvous,
    "restart": lambda script, figure, record: script.draw(figure, record["rows"]),
    "restart_reliability": _of_reliability,
    "save_record": lambda script, figure, record: script.draw(figure, record),
    "scrape_load": lambda script, figure, record: script.draw(figure, record["sides"]),
    "simulate": lambda script, figure, record: script.draw(figure, record),
    "steady_state": lambda script, figure, record: script.draw(
        figure, {side: SimpleNamespace(**record[side]) for side in ("ours", "stock")}
    ),
    "trainers": lambda script, figure, record: script.draw(figure, record),
    "stragglers": lambda script, figure, record: script.draw(figure, record),
}


def has_plot(benchmark: report.Benchmark) -> bool:
    """Whether there is something to draw: one way to run the stragglers has no rows."""
    return benchmark.script != "stragglers" or bool(json.loads(benchmark.result.read_text())["rows"])


def drawn() -> dict[Path, report.Benchmark]:
    """Return the plots that this draws, each with its benchmark."""
    each = [one for one in report.BENCHMARKS if one.script in DRAWN and one.result.exists() and has_plot(one)]
    return {one.result.with_suffix(".png"): one for one in each}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="draw nothing, list the plots")
    args = parser.parse_args()
    for path, benchmark in drawn().items():
        print(path.relative_to(report.REPOSITORY), flush=True)
        if not args.list:
            record, script = json.loads(benchmark.result.read_text()), importlib.import_module(benchmark.script)
            measure.plot(path, lambda figure, script=script, record=record: DRAWN[script.__name__](script, figure, record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
