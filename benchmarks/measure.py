"""Medians, ratios, and how every benchmark publishes: one table, one JSON line, one plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def median(values: Sequence[float]) -> float | None:
    """The median, in the unit of the values; None if there are none."""
    return statistics.median(values) if values else None


def ratio(stock: float | None, ours: float | None) -> float | None:
    """How many times as long stock takes; None: one of the two was not measured."""
    return stock / ours if stock is not None and ours else None


def rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def machine() -> dict[str, Any]:
    """The machine, for the JSON line. load_1m: processes that wanted a core in the last minute, the benchmark's included."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded columns, for terminals. The first column is text, the others are figures."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def row(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:])])


def publish(results: Path, record: dict[str, Any], text: str, draw: Callable[[Any], None] | None = None) -> None:
    """Print the table and the JSON line; write both, and the plot, to `results`, named after record["benchmark"].

    draw: called with an empty matplotlib Figure, if matplotlib is installed.
    """
    results.mkdir(parents=True, exist_ok=True)
    name = record["benchmark"]
    if "measured" not in record:  # else it is only drawn again
        record = {**record, "measured": _moment()}
    line = json.dumps(record)
    (results / f"{name}.md").write_text(text + "\n")
    (results / f"{name}.json").write_text(line + "\n")
    if draw is not None:
        plot(results / f"{name}.png", draw)
    print(text, line, sep="\n\n", flush=True)


def _moment() -> dict[str, str]:
    """Today's date (UTC), and the commit of the checkout; "" outside of one."""
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"date": datetime.now(timezone.utc).date().isoformat(), "commit": commit}


def plot(path: Path, draw: Callable[[Any], None]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed; pip install matplotlib")
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=100)
