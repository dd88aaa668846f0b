"""What do failures cost jobs of 64 to 131,072 GPUs, with our decisions, with stock's, and at best?

    python benchmarks/simulate.py [--jobs 6] [--failures 30] [--processes 2] [--sizes 64,...] [--parts curves,decisions,checks]

Nothing runs but a simulation, in virtual time. What decides is elastic_ext itself: classify, judgement, policy with its ledger,
budget and backoff, the limits of hangs, the interval of copies in memory, and `rendezvous.rounds` for one loss at a size. How
long the phases take comes from the published results here, and from published figures where only a cluster shows them:
`scale/inputs.py` has each figure with its source, `scale/__init__.py` says what the parts are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
from scale import inputs, study
from scale.sides import OURS, SIDES
from scale.study import Effort

PARTS = ("curves", "decisions", "checks")
COLOURS = ("#2e7d4f", "#7cbf95", "#c3a02b", "#c0504d", "#8d5a99", "#888888")
CHECKED_FAILURES = 2000  # in each job of a check: nothing is judged there


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def by_size(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["gpus"], {})[row["side"]] = row
    return found


def sizes_table(rows: Sequence[dict[str, Any]]) -> str:
    header = ["GPUs", "spares", *(f"{side.name}: ETTR" for side in SIDES), "ours: goodput"]
    lines = []
    for gpus, sides in by_size(rows).items():
        cells = [f"{percent(sides[side.name]['ettr'])} ± {100 * sides[side.name]['plus_minus']:.2f}" for side in SIDES]
        ours = sides[OURS.name]
        lines.append([f"{gpus:,}", str(ours["spares"]), *cells, percent(ours["goodput"])])
    return measure.table(header, lines)


def lost_table(rows: Sequence[dict[str, Any]]) -> str:
    ours = [row for row in rows if row["side"] == OURS.name]
    names = list(dict.fromkeys(name for row in reversed(ours) for name in row["lost"]))
    header = ["ours, GPU-hours lost a day to", *(f"{row['gpus']:,}" for row in ours)]
    lost = {name: [f"{row['gpu_hours_lost_a_day'].get(name, 0):,.1f}" for row in ours] for name in names}
    return measure.table(header, [[name, *cells] for name, cells in lost.items()])


def curves_table(curves: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        [curve, str(row["x"]), f"{row['gpus']:,}", row["side"], f"{percent(row['ettr'])} ± {100 * row['plus_minus']:.2f}"]
        for curve, rows in curves.items()
        for row in rows
    ]
    return measure.table(["curve", "at", "GPUs", "side", "ETTR"], lines)


def decisions_table(found: dict[str, dict[str, Any]]) -> str:
    faults = list(dict.fromkeys(fault for mix in found.values() for fault in mix["shares"]))
    lines = [[name, *(percent(mix["shares"].get(fault, 0.0), 3) for fault in faults)] for name, mix in found.items()]
    wrong = []
    for name, mix in found.items():
        for each in mix["wrong"]:
            shown = [each[key] for key in ("fault", "cause", "shows", "when")]
            wrong.append([name, *shown, percent(each["share"], 3), str(each["restarts"]), each["end"]])
    header = ["mix", "what is wrong", "cause", "shows", "comes back", "of the mix", "restarts", "end"]
    return "\n\n".join([measure.table(["mix", *faults], lines), measure.table(header, wrong)])


def checks_table(checks: dict[str, list[dict[str, float]]]) -> str:
    lines = []
    for name, rows in checks.items():
        for row in rows:
            formula = row.get("formula", row.get("plan", 0.0))
            lines.append([name, f"{row['gpus']:,}", percent(formula), percent(row["simulated"]), f"{100 * row['off']:+.2f} %"])
    return measure.table(["ETTR by", "GPUs", "formula", "simulated", "off"], lines)


def limits(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What ours loses most to, by size."""
    return {str(row["gpus"]): next(iter(row["lost"]), "") for row in rows if row["side"] == OURS.name}


def checked(effort: Effort, sizes: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, float]]]:
    more = Effort(4, min(CHECKED_FAILURES, 40 * effort.failures), effort.processes)
    phases = {"detection": 30.0, "restart": 200.0}
    return {
        "Meta's formula": [study.against_meta(gpus, more) for gpus in (1024, 4096, 16_384)],
        "the planner's closed form": [study.against_closed_form(gpus, more, phases, 6.5) for gpus in (1024, 16_384, 131_072)],
        "the plan, against jobs with lasting faults": study.against_plan(sizes),
    }


def draw(figure: Any, record: dict[str, Any]) -> None:
    axes = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = dict(zip([side.name for side in SIDES], COLOURS, strict=True))
    found = by_size(record["sizes"])
    for side in SIDES:
        rows = [sides[side.name] for sides in found.values()]
        off = [row["plus_minus"] for row in rows]
        axes[0].errorbar(list(found), [row["ettr"] for row in rows], off, label=side.name, color=colours[side.name], capsize=2)
    axes[0].set(xscale="log", xlabel="GPUs", ylabel="ETTR", title="Share of the time that is new steps", ylim=(0, 1.02))
    axes[0].legend(fontsize=7, loc="lower left")
    ours = [sides[OURS.name] for sides in found.values()]
    names = list(dict.fromkeys(name for row in reversed(ours) for name in row["lost"]))[:9]
    below, sizes = [0.0] * len(ours), [str(gpus) if gpus < 1024 else f"{gpus // 1024}k" for gpus in found]
    for name in names:
        shares = [100 * row["lost"].get(name, 0.0) for row in ours]
        axes[1].bar(sizes, shares, bottom=below, label=name)
        below = [one + more for one, more in zip(below, shares, strict=True)]
    axes[1].set(title="Ours: what takes the rest, in %", xlabel="GPUs")
    axes[1].legend(fontsize=7)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="jobs for each point")
    parser.add_argument("--failures", type=int, default=30, help="failures in each job, without those that a fault causes again")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the work")
    parser.add_argument("--sizes", default=",".join(map(str, study.SIZES)), help="GPUs, 8 to a node")
    parser.add_argument("--parts", default=",".join(PARTS), help="besides the sizes; some of %(default)s")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    parts = set(args.parts.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"unknown part {min(unknown)!r}; expected some of {', '.join(PARTS)}")
    effort, machine, began = Effort(args.jobs, args.failures, args.processes), measure.machine(), time.monotonic()
    rows = study.sizes(effort, [int(size) for size in args.sizes.split(",")])
    record: dict[str, Any] = {
        "benchmark": "simulate",
        "rate": round(inputs.RATES["Llama 3"].value, 3),
        "sizes": rows,
        "limits": limits(rows),
        "inputs": [list(row) for row in inputs.table()],
        "jobs": effort.jobs,
        "failures": effort.failures,
    }
    texts = [sizes_table(rows), lost_table(rows)]
    if "checks" in parts:
        record["checks"], record["leader_cpu_s"] = checked(effort, rows), study.leader_cpu()
        texts.append(checks_table(record["checks"]))
    if "decisions" in parts:
        record["decisions"] = study.decided()
        texts.append(decisions_table(record["decisions"]))
    if "curves" in parts:
        record["curves"] = study.curves(effort)
        texts.append(curves_table(record["curves"]))
    texts.append(measure.table(["input", "value", "source"], [list(row) for row in inputs.table()]))
    record["took_s"], record["machine"] = round(time.monotonic() - began, 1), machine
    measure.publish(args.results, record, "\n\n".join(texts), lambda figure: draw(figure, record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
