"""How long until a job that hangs trains again? From the hang to the first all_reduce after the restart, on all ranks.

    python benchmarks/hangs.py [--repeat 3] [--rows sleep,spin,stopped] [--timeout 90]

    sleep      the two ranks wait in different collectives, asleep, as gloo waits
    spin       the same, and each waits with a whole core, as NCCL waits; on the CPU, through tests/scripts/spinning_group.py
    stopped    rank 1 is stopped by a signal, and rank 0 waits for it

Stock torchrun has no hang detection: it waits until torch's own collectives time out. Both sides run with the timeout that
--timeout sets in the script; torch's defaults are 30 minutes for gloo and 10 minutes for NCCL. Ours is `--rdzv-backend=ext_c10d`
with defaults: no hang_timeout, the limits are learned. Stock is `--standalone` with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without
which most of its restarts do not come up (see restart_reliability.py). They take turns. Figures are medians.

    noticed    until the first worker of the next attempt runs the script
    again      until the first all_reduce of the next attempt is done on all ranks
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import measure

SCRIPT = Path(__file__).with_name("workers") / "hanging_job.py"
WORKERS = 2
ROWS = {
    "sleep": "ranks in different collectives, asleep (gloo)",
    "spin": "ranks in different collectives, spinning (as NCCL)",
    "stopped": "a rank is stopped by a signal",
}
SIDES = {"ours": {}, "stock": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
START_S = 60.0  # for a job to start, twice
OURS_S = 90.0  # more than any limit of ours in these rows


@dataclass(frozen=True)
class Recovery:
    """Seconds from the hang to what the module's docstring says."""

    noticed_s: float
    again_s: float


def recovery(stamps: Iterable[jobs.Stamp]) -> Recovery | None:
    """Return None if the job did not come up again on all ranks."""
    seen = list(stamps)
    faults = [stamp.ns for stamp in seen if stamp.event == "fault" and stamp.attempt == 0]
    later = sorted({stamp.attempt for stamp in seen if stamp.attempt > 0})
    for attempt in later:
        mine = [stamp for stamp in seen if stamp.attempt == attempt]
        done = [stamp.ns for stamp in mine if stamp.event == "all_reduce"]
        if len(faults) == len(done) == WORKERS:
            begins = [stamp.ns for stamp in mine if stamp.event == "begin"]
            return Recovery((min(begins) - max(faults)) / 1e9, (max(done) - max(faults)) / 1e9)
    return None


def one_try(side: str, row: str, collective_s: float) -> Recovery | None:
    """collective_s: the timeout of torch's collectives."""
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory, "stamps")
        torchrun = (sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS[side])
        command = [*torchrun, f"--nproc-per-node={WORKERS}", f"--max-restarts={jobs.MAX_RESTARTS}", str(SCRIPT), row]
        with open(Path(directory, "output"), "w", errors="replace") as output:
            env = jobs.environment(**SIDES[side])
            jobs.run([*command, str(stamps), str(collective_s)], directory, env, output, deadline_s(collective_s))
        return recovery(jobs.read_stamps(stamps))


def summary(tries: Sequence[Recovery | None]) -> dict[str, Any]:
    found = [each for each in tries if each is not None]
    return {
        "noticed_s": measure.rounded(measure.median([each.noticed_s for each in found])),
        "median_s": measure.rounded(measure.median([each.again_s for each in found])),
        "all_s": [measure.rounded(each.again_s) for each in found],
        "lost": len(tries) - len(found),
    }


def draw(figure: Any, rows: Sequence[dict[str, Any]], collective_s: float) -> None:
    axes = figure.subplots()
    for place, (side, color) in enumerate((("ours", "#4c9f70"), ("stock", "#c8553d"))):
        middles = [at + (place - 0.5) * 0.35 for at in range(len(rows))]
        axes.barh(middles, [row[side]["median_s"] or 0 for row in rows], height=0.32, color=color, label=side)
        for middle, row in zip(middles, rows, strict=True):
            axes.plot(row[side]["all_s"], [middle] * len(row[side]["all_s"]), ".", color="#333333", markersize=4)
    axes.axvline(collective_s, color="#999999", linestyle=":", label=f"torch's timeout, set to {collective_s:g} s")
    axes.set_yticks(range(len(rows)), [ROWS[row["row"]] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds until all train again", title="A job that hangs")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)


def shown(record: dict[str, Any]) -> str:
    """The table, and what it does not count."""
    cells, lost = [], []
    for row in record["rows"]:
        times = [measure.shown(row[side][what]) for side in SIDES for what in ("noticed_s", "median_s")]
        cells.append([ROWS[row["row"]], *times, measure.shown(row["ratio"], 1)])
        lost += [f"{side}, {ROWS[row['row']]}: {row[side]['lost']}" for side in SIDES if row[side]["lost"]]
    text = measure.table(["hang", "ours: noticed s", "again s", "stock: noticed s", "again s", "stock / ours"], cells)
    waits = f"Stock waits for torch's own timeout, which is {record['timeout_s']:g} s here, on both sides."
    late = f"Not counted: jobs not up again {deadline_s(record['timeout_s']):g} s after their start: {'; '.join(lost) or 'none'}."
    return f"{text}\n\nMedians of {record['repeat']}. {waits} {late}"


def deadline_s(collective_s: float) -> float:
    """How long a job may take."""
    return START_S + max(collective_s, OURS_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="number of tries of each side in each row")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s")
    parser.add_argument("--timeout", type=float, default=90.0, help="timeout of torch's collectives on both sides, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    wanted = args.rows.split(",")
    if unknown := [row for row in wanted if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of {', '.join(ROWS)}")
    machine = measure.machine()
    jobs.adopt_orphans()
    rows = []
    for row in wanted:
        tries: dict[str, list[Recovery | None]] = {side: [] for side in SIDES}
        for _ in range(args.repeat):
            for side, each in tries.items():
                each.append(one_try(side, row, args.timeout))
                print(row, side, each[-1], file=sys.stderr, flush=True)
        sides = {side: summary(each) for side, each in tries.items()}
        ratio = measure.rounded(measure.ratio(sides["stock"]["median_s"], sides["ours"]["median_s"]), 1)
        rows.append({"row": row, **sides, "ratio": ratio})
    record = {"benchmark": "hangs", "rows": rows, "timeout_s": args.timeout, "repeat": args.repeat, "machine": machine}
    measure.publish(args.results, record, shown(record), lambda figure: draw(figure, rows, args.timeout))
    return 0 if all(row["ours"]["lost"] == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
