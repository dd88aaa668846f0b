"""What does a failure cost that no restart can cure? Restarts and worker-seconds, with the same --max-restarts.

    python benchmarks/code_bug_waste.py [--faults syntax,name,...] [--max-restarts 10]

Twelve kinds of failure on two workers. A restart cures one of them, flaky-once; a launcher that gave up there would be wrong.
Worker-seconds run from a worker's first line to its end, over all workers and attempts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jobs
import measure

BROKEN_JOB = Path(__file__).with_name("workers") / "broken_job.py"
FAULTS = (
    "syntax", "name", "import", "argument", "no-file", "shape", "usage",
    "key-late", "assert-late", "nan", "no-memory", "flaky-once",
)  # fmt: skip
CURED = "flaky-once"
SIDES = ("ours", "stock")


@dataclass(frozen=True)
class Cost:
    """returncode: None if the job had not ended at the deadline."""

    returncode: int | None
    restarts: int
    worker_seconds: float


def cost(returncode: int | None, stamps: Sequence[jobs.Stamp]) -> Cost:
    """A worker that was killed left no "end". It counts until the last "end" of its attempt."""
    seconds = 0.0
    for attempt in {stamp.attempt for stamp in stamps}:
        begins = [stamp.ns for stamp in stamps if (stamp.attempt, stamp.event) == (attempt, "begin")]
        ends = {stamp.rank: stamp.ns for stamp in stamps if (stamp.attempt, stamp.event) == (attempt, "end")}
        last = max(ends.values(), default=max(begins))
        for stamp in stamps:
            if (stamp.attempt, stamp.event) == (attempt, "begin"):
                seconds += max(0, ends.get(stamp.rank, last) - stamp.ns) / 1e9
    return Cost(returncode, max((stamp.attempt for stamp in stamps), default=0), seconds)


def run_job(agent: str, fault: str, max_restarts: int, timeout_s: float) -> Cost:
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory, "stamps")
        torchrun = (sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS[agent])
        options = ("--nproc-per-node=2", f"--max-restarts={max_restarts}")
        command = [*torchrun, *options, str(BROKEN_JOB), fault, str(stamps)]
        with open(Path(directory, "output"), "w") as output:
            returncode = jobs.run(command, directory, jobs.environment(), output, timeout_s)
        return cost(returncode, jobs.read_stamps(stamps))


def draw(figure: Any, found: dict[str, dict[str, Cost]]) -> None:
    axes = figure.subplots()
    places = range(len(found))
    for shift, agent, colour in ((-0.2, "ours", "#4c9f70"), (0.2, "stock", "#c8553d")):
        bars = axes.bar([place + shift for place in places], [sides[agent].worker_seconds for sides in found.values()], 0.4)
        for bar in bars:
            bar.set_color(colour)
        axes.bar_label(bars, [str(sides[agent].restarts) for sides in found.values()], fontsize=8)
        bars.set_label(agent)
    axes.set_xticks(list(places), list(found), rotation=30, ha="right")
    axes.set(ylabel="worker-seconds (bars: restarts)", title="Spent on a failure")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", type=lambda text: text.split(","), default=list(FAULTS), help=f"comma-separated, from: {', '.join(FAULTS)}"
    )
    parser.add_argument("--max-restarts", type=int, default=10, help="restart budget of both agents")
    parser.add_argument("--timeout", type=float, default=120, help="limit for one job, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    found: dict[str, dict[str, Cost]] = {}
    for fault in args.faults:
        found[fault] = {agent: run_job(agent, fault, args.max_restarts, args.timeout) for agent in SIDES}
        print(fault, found[fault], file=sys.stderr, flush=True)
    rows = [[fault, *(str(value) for agent in SIDES for value in _shown(sides[agent]))] for fault, sides in found.items()]
    header = ["failure", *(f"{agent} {what}" for agent in SIDES for what in ("exit code", "restarts", "worker s"))]
    bugs = [sides for fault, sides in found.items() if fault != CURED]
    total = {agent: sum(sides[agent].worker_seconds for sides in bugs) for agent in SIDES}
    text = measure.table(header, rows)
    saved = measure.ratio(total["stock"], total["ours"])
    text += f"\n\nBoth with --max-restarts={args.max_restarts}."
    text += f" On bugs stock spends {measure.shown(saved, 1)} times the worker-seconds."
    record = {
        "benchmark": "code_bug_waste",
        "rows": {fault: {agent: asdict(each) for agent, each in sides.items()} for fault, sides in found.items()},
        "stock_by_ours_worker_seconds": measure.rounded(saved, 1),
        "max_restarts": args.max_restarts,
        "machine": machine,
    }
    measure.publish(args.results, record, text, lambda figure: draw(figure, found))
    gave_up_too_late = any(sides["ours"].restarts > 1 for sides in bugs)
    gave_up_too_soon = CURED in found and found[CURED]["ours"].returncode != 0
    return 1 if gave_up_too_late or gave_up_too_soon else 0


def _shown(found: Cost) -> tuple[str, str, str]:
    return (
        "-" if found.returncode is None else str(found.returncode),
        str(found.restarts),
        measure.shown(found.worker_seconds, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
