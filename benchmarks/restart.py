"""How long does a restart take? From a fault to the first all_reduce of the next attempt on all ranks.

    python benchmarks/restart.py [--repeat 5] [--rows sigkill,early,exit,raise,sigsegv,ignore,ddp,fsdp,eight] [--busy 0]

"warm" is our agent with defaults, once its standbys are ready; "cold" is the same with standby=off. In the row early the fault
does not wait for them: it comes with the first collectives, while they still import. The rows ddp and fsdp end after two
optimizer steps. The row eight has 8 workers, the others 2.

Stock is `--standalone` with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which most of its restarts do not come up at all (see
restart_reliability.py). Both agents run the same script with the same --max-restarts=3; they take turns, and take turns at being
first. Figures are medians.

The phases; workers/faulty_job.py reports where they end, and each ends when the last rank gets there:

    agent        the next workers' processes are made (noticed, the other worker stopped, rendezvous done)
    interpreter  the first line of the script (ours: through the bootstrap)
    torch        torch and torch.distributed are imported
    collective   the first all_reduce is done: gloo's, or NCCL's with --device=cuda (then workers may share a GPU)
    steps        two steps of DDP or FSDP2 are done

A warm standby's process is older than the fault, so its first two phases are one. The border between these two phases is accurate
to 10 ms, the clock tick of /proc, for all agents.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs
import measure


@dataclass(frozen=True)
class Row:
    """A fault of rank 1 and the work of the job, as workers/faulty_job.py names them."""

    fault: str
    title: str
    work: str = "none"
    workers: int = 2
    early: bool = False  # the fault does not wait for standbys


ROWS = {
    "sigkill": Row("kill", "SIGKILL"),
    "early": Row("kill", "SIGKILL in the first second", early=True),
    "exit": Row("exit", "sys.exit(3)"),
    "raise": Row("raise", "raise RuntimeError"),
    "sigsegv": Row("segv", "SIGSEGV"),
    "ignore": Row("ignore", "SIGKILL, the other ignores SIGTERM"),
    "ddp": Row("kill", "SIGKILL, two steps of DDP", "ddp"),
    "fsdp": Row("kill", "SIGKILL, two steps of FSDP2", "fsdp"),
    "eight": Row("kill", "SIGKILL, 1 of 8 workers", workers=8),
}
IGNORE = "ignore"  # stock waits 30 s here, so it gets fewer tries
SIDES = {"warm": "warm", "ours": "cold", "stock": "stock"}
"""Keys of jobs.AGENTS, and how they are shown."""
EVENTS = ("process", "user_code", "torch", "all_reduce", "steps")
PHASES = ("agent", "interpreter", "torch", "collective", "steps")
BARS = {"warm": ("elastic_ext", "#2a6fb0"), "stock": ("stock torchrun", "#d9822b")}
"""The sides in the plot: label and colour."""
TIMEOUT_S = 120.0
VARIABLES = {"ours": {"ELASTIC_EXT_STANDBY": "off"}, "stock": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}


@dataclass(frozen=True)
class Recovery:
    """phases_s: seconds by PHASES; they add up to the whole. attempt: the one that came up; above 1 if restarts failed."""

    attempt: int
    phases_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.phases_s.values())


def recovery(stamps: Iterable[jobs.Stamp], workers: int = 2) -> Recovery | None:
    """The first attempt after the fault in which every rank finished; None: there was none."""
    stamps = list(stamps)
    fault_ns = next((stamp.ns for stamp in stamps if stamp.event == "fault"), None)
    for attempt in sorted({stamp.attempt for stamp in stamps} - {0}):
        reached = {event: [s.ns for s in stamps if (s.attempt, s.event) == (attempt, event)] for event in EVENTS}
        if fault_ns is not None and len(reached["steps"]) == workers:
            borders = [fault_ns, *(max(reached[event]) for event in EVENTS)]
            if borders[1] < fault_ns:  # the process of a standby
                borders[1] = borders[2]
            return Recovery(attempt, {PHASES[i]: (borders[i + 1] - borders[i]) / 1e9 for i in range(len(PHASES))})
    return None


@dataclass
class Side:
    """The tries of one agent in one row. lost: tries that never recovered."""

    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0

    def add(self, found: Recovery | None) -> None:
        if found is None:
            self.lost += 1
        else:
            self.recoveries.append(found)

    @property
    def total_s(self) -> float | None:
        return measure.median([found.total_s for found in self.recoveries])

    @property
    def phases_s(self) -> dict[str, float | None]:
        return {phase: measure.median([found.phases_s[phase] for found in self.recoveries]) for phase in PHASES}

    def record(self) -> dict[str, Any]:
        """For the JSON line. burned: restarts beyond the first."""
        return {
            "median_s": measure.rounded(self.total_s),
            "phases_s": {phase: measure.rounded(seconds) for phase, seconds in self.phases_s.items()},
            "all_s": [measure.rounded(found.total_s) for found in self.recoveries],
            "burned": sum(found.attempt - 1 for found in self.recoveries),
            "lost": self.lost,
        }


def one_try(agent: str, row: str, busy: int) -> Recovery | None:
    """busy: number of processes beside the job that each keep one processor busy."""
    job = ROWS[row]
    warm = agent == "warm" and not job.early
    for _ in range(busy):
        subprocess.Popen([sys.executable, "-c", "while True: pass"])  # `run_faulty` ends all children of this process
    ended = jobs.run_faulty(agent, job.fault, TIMEOUT_S, job.work, job.workers, warm, **VARIABLES.get(agent, {}))
    found = recovery(ended.stamps, job.workers)
    if found is None:
        print(f"{agent} {row}: did not recover, exit code {ended.returncode}\n{ended.output}", file=sys.stderr)
    return found


def measure_row(row: str, tries: dict[str, int], busy: int) -> dict[str, Side]:
    sides = {agent: Side() for agent in tries}
    for number in range(max(tries.values())):
        for agent in sorted(tries, reverse=number % 2 == 1):
            if number < tries[agent]:
                found = one_try(agent, row, busy)
                sides[agent].add(found)
                shown = f"{found.total_s:.2f} s (attempt {found.attempt})" if found else "lost"
                print(f"{row} {number + 1}/{tries[agent]} {SIDES[agent]}: {shown}", file=sys.stderr, flush=True)
    return sides


def row_cells(row: str, sides: dict[str, Side]) -> list[str]:
    warm, ours, stock = sides["warm"], sides["ours"], sides["stock"]

    def phases(side: Side) -> str:
        return " + ".join(measure.shown(seconds) for seconds in side.phases_s.values())

    totals = [
        *(measure.shown(side.total_s) for side in (warm, ours, stock)),
        *(measure.shown(measure.ratio(stock.total_s, side.total_s)) for side in (warm, ours)),
    ]
    return [ROWS[row].title, *totals, phases(warm), phases(ours), phases(stock)]


def draw(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Two bars for each row of the JSON line, ours (warm) and stock's, on one log axis; the table has cold starts and phases."""
    figure.set_size_inches(9, 1.4 + 0.55 * len(rows))
    axes = figure.subplots()
    for offset, (agent, (label, colour)) in zip((-0.2, 0.2), BARS.items(), strict=True):
        seconds = [each[agent]["median_s"] or 0.0 for each in rows]
        bars = axes.barh([row + offset for row in range(len(rows))], seconds, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{measure.shown(each[agent]['median_s'])} s" for each in rows], padding=4)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    every = [each[agent]["median_s"] for each in rows for agent in BARS if each[agent]["median_s"]] or [1.0]
    axes.set_xlim(10 ** (math.ceil(math.log10(min(every))) - 1), 2 * max(every))  # a whole decade; room for the last label
    axes.set_xlabel("seconds, on a log scale")
    axes.set_yticks(range(len(rows)), [ROWS[each["row"]].title for each in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("From the fault of a worker to the next collective: shorter is better")
    figure.legend(loc="outside lower center", ncols=len(BARS), frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of tries of each agent in each row")
    parser.add_argument("--stock-ignore-repeat", type=int, default=2, help="tries of stock in the row 'ignore', 30 s each")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated, from: {', '.join(ROWS)}")
    parser.add_argument("--busy", type=int, default=0, help="processes beside the jobs that each keep one processor busy")
    jobs.add_device(parser)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    rows = args.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of {', '.join(ROWS)}")

    machine = measure.machine()
    found, load = {}, {}
    for row in rows:
        stock_tries = min(args.repeat, args.stock_ignore_repeat) if row == IGNORE else args.repeat
        found[row] = measure_row(row, {"warm": args.repeat, "ours": args.repeat, "stock": stock_tries}, args.busy)
        load[row] = measure.machine()["load_1m"]
    header = ["fault of 1 of 2 workers", *(f"{name} s" for name in SIDES.values()), "stock / warm", "stock / cold"]
    header += [f"{name} by phase" for name in SIDES.values()]
    text = measure.table(header, [row_cells(row, sides) for row, sides in found.items()])
    text += f"\n\nMedians of {args.repeat}. Phases: {' + '.join(PHASES)}."
    text += f" Beside them, {args.busy} other processes kept processors busy." if args.busy else ""
    if IGNORE in found:
        text += f" Stock's figure in the row with SIGTERM ignored: {len(found[IGNORE]['stock'].recoveries)} tries."
    records = [
        {
            "row": row,
            **{agent: side.record() for agent, side in sides.items()},
            "ratio": measure.rounded(measure.ratio(sides["stock"].total_s, sides["ours"].total_s)),
            "ratio_warm": measure.rounded(measure.ratio(sides["stock"].total_s, sides["warm"].total_s)),
            "load_1m_after": load[row],
        }
        for row, sides in found.items()
    ]
    record = {"benchmark": "restart", "rows": records, "repeat": args.repeat, "busy": args.busy, "device": jobs.device()}
    record["machine"] = machine
    measure.publish(args.results, record, text, lambda figure: draw(figure, records))
    return 1 if any(sides[agent].lost for sides in found.values() for agent in ("warm", "ours")) else 0


if __name__ == "__main__":
    sys.exit(main())
