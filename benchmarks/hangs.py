"""How long until a job that hangs trains again? From the hang to the first all_reduce after the restart, on all ranks.

    python benchmarks/hangs.py [--repeat 3] [--rows sleep,spin,elsewhere,stopped,device,item,evaluates,compiles]
                               [--timeout 90] [--alone 180] [--device cpu]

    sleep      the two ranks wait in different collectives, asleep, as gloo waits
    spin       the same, and each waits with a whole core, as NCCL waits; on the CPU, through tests/scripts/spinning_group.py
    elsewhere  each has begun another collective, which the other has not, and its main thread computes
    stopped    rank 1 is stopped by a signal, and rank 0 waits for it
    device     the ranks' GPUs wait in different collectives of NCCL, and the ranks in torch.cuda.synchronize. Needs --device=cuda
    item       the same, and the ranks wait in `loss.item()`

What must not count as a hang, ours alone; each takes --alone seconds:

    evaluates  rank 0 works alone, and rank 1 waits for it with a whole core, as NCCL waits
    compiles   rank 1 compiles before its first step, and rank 0 waits in that step's collective

Stock torchrun has no hang detection: it waits until torch's own collectives time out. Both sides run with the timeout that
--timeout sets in the script; torch's defaults are 30 minutes for gloo and 10 minutes for NCCL. Ours is `--rdzv-backend=ext_c10d`
with defaults: no hang_timeout, the limits are learned. Stock is `--standalone` with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without
which most of its restarts do not come up (see restart_reliability.py). They take turns. Figures are medians.

    noticed    until the first worker of the next attempt runs the script
    again      until the first all_reduce of a later attempt is done on all ranks
    named      the job's own words: the rank that was waited for, and in what the others wait
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jobs
import measure

SCRIPT = Path(__file__).with_name("workers") / "hanging_job.py"
WORKERS = 2


ROWS = {
    "sleep": "ranks in different collectives, asleep (gloo)",
    "spin": "ranks in different collectives, spinning (as NCCL)",
    "elsewhere": "ranks in different collectives, main threads compute",
    "stopped": "a rank is stopped by a signal",
    "device": "GPUs in different collectives, ranks in synchronize",
    "item": "GPUs in different collectives, ranks in loss.item()",
}
QUIET = {"evaluates": "rank 0 evaluates alone", "compiles": "rank 1 compiles before its first step"}
SIDES = {"ours": {}, "stock": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
START_S = 90.0  # for a job to start once, on a busy machine, too
OURS_S = 90.0  # more than any limit of ours in these rows


@dataclass(frozen=True)
class Recovery:
    """Seconds from the hang to what the module's docstring says.

    Attributes:
        again_s: None if the job did not come up on all ranks.
        named: from our log.
    """

    noticed_s: float
    again_s: float | None
    named: str = ""


def recovery(stamps: Iterable[jobs.Stamp]) -> Recovery | None:
    """Return None if no worker started again."""
    seen = list(stamps)
    faults = [stamp.ns for stamp in seen if stamp.event == "fault"]
    if len(faults) != WORKERS:
        return None
    later = [stamp for stamp in seen if stamp.ns > max(faults)]
    begins = [stamp.ns for stamp in later if stamp.event == "begin"]
    if not begins:
        return None
    done: dict[int, int] = {}  # the first all_reduce of each rank
    for stamp in later:
        if stamp.event == "all_reduce":
            done.setdefault(stamp.rank, stamp.ns)

    def since(ns: int) -> float:
        return (ns - max(faults)) / 1e9

    return Recovery(since(min(begins)), since(max(done.values())) if len(done) == WORKERS else None)


def torchrun(side: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS[side], f"--nproc-per-node={WORKERS}"]


def one_try(side: str, row: str, collective_s: float) -> Recovery | None:
    """collective_s: the timeout of torch's collectives."""
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory, "stamps")
        script = [f"--max-restarts={jobs.MAX_RESTARTS}", str(SCRIPT), row, str(stamps), str(collective_s)]
        command = [*torchrun(side), *script]
        with open(Path(directory, "output"), "w", errors="replace") as output:
            jobs.run_all([command], directory, jobs.environment(**SIDES[side]), output, limit_s(collective_s))
        found = recovery(jobs.read_stamps(stamps))
        return found and replace(found, named=named(Path(directory, "output").read_text(errors="replace")))


def named(output: str) -> str:
    """Return what our log says of the hang; "" without a verdict."""
    said = re.search(r"elastic_ext: restart: (.*?)(?:; restart \d+ of \d+)? \(kind hang", output)
    return said[1] if said else ""


def quiet_try(row: str, alone_s: float, collective_s: float) -> dict[str, Any]:
    """What became of a job that does not hang: its exit code (None: killed at the limit), and its restarts."""
    with tempfile.TemporaryDirectory() as directory:
        stamps = Path(directory, "stamps")
        script = [f"--max-restarts={jobs.MAX_RESTARTS}", str(SCRIPT), row, str(stamps), str(alone_s + collective_s), str(alone_s)]
        with open(Path(directory, "output"), "w", errors="replace") as output:
            command, env = [*torchrun("ours"), *script], jobs.environment()
            [code] = jobs.run_all([command], directory, env, output, 2 * START_S + alone_s + collective_s)
        begins = {stamp.attempt for stamp in jobs.read_stamps(stamps) if stamp.event == "begin"}
    return {"row": row, "alone_s": alone_s, "code": code, "restarts": len(begins) - 1}


def skip_reason(row: str) -> str | None:
    """Why this cannot be measured; None: it can."""
    return "needs a GPU and --device=cuda" if row in ("device", "item") and jobs.device() == "cpu" else None


def summary(tries: Sequence[Recovery | None]) -> dict[str, Any]:
    noticed_s = [each.noticed_s for each in tries if each is not None]
    again_s = [each.again_s for each in tries if each is not None and each.again_s is not None]
    return {
        "noticed_s": measure.rounded(measure.median(noticed_s)),
        "median_s": measure.rounded(measure.median(again_s)),
        "all_s": [measure.rounded(each) for each in again_s],
        "lost": len(tries) - len(again_s),
        "named": next((each.named for each in tries if each is not None and each.named), ""),
    }


def draw(figure: Any, rows: Sequence[dict[str, Any]], collective_s: float) -> None:
    axes = figure.subplots()
    for place, (side, color) in enumerate((("ours", "#4c9f70"), ("stock", "#c8553d"))):
        middles = [at + (place - 0.5) * 0.35 for at in range(len(rows))]
        bars = axes.barh(middles, [row[side]["median_s"] or 0 for row in rows], height=0.32, color=color, label=side)
        axes.bar_label(bars, ["" if row[side]["all_s"] else f"not in {row['limit_s']:g} s" for row in rows], padding=3)
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
        title = ROWS[row["row"]]
        times = [measure.shown(row[side][what]) for side in SIDES for what in ("noticed_s", "median_s")]
        cells.append([title, *times, measure.shown(row["ratio"], 1)])
        for side in SIDES:
            if row[side]["lost"]:
                lost.append(f"{side}, {title}: {row[side]['lost']} (not in {row['limit_s']:g} s)")
    text = measure.table(["hang", "ours: noticed s", "again s", "stock: noticed s", "again s", "stock / ours"], cells)
    waits = f"Stock waits for torch's own timeout, which is {record['timeout_s']:g} s here, on both sides."
    late = f"Not counted, because they did not train again: {'; '.join(lost) or 'none'}."
    skipped = "".join(f" Skipped: {ROWS[row]} ({reason})." for row, reason in record["skipped"].items())
    said = "".join(f"\n- {ROWS[row['row']]}: {row['ours']['named']}" for row in record["rows"] if row["ours"]["named"])
    quiet = "".join(
        f"\n- {QUIET[row['row']]} for {row['alone_s']:g} s: {row['restarts']} restarts, exit code {row['code']}"
        for row in record["quiet"]
    )
    text += f"\n\nMedians of {record['repeat']}. {waits} {late}{skipped}"
    return text + (f"\n\nNamed by ours:\n{said}" if said else "") + (f"\n\nNo hang, ours:\n{quiet}" if quiet else "")


def limit_s(collective_s: float) -> float:
    """How long a job may take."""
    return 2 * START_S + max(collective_s, OURS_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="number of tries of each side in each row")
    parser.add_argument("--rows", default=",".join([*ROWS, *QUIET]), help="some of %(default)s")
    parser.add_argument("--timeout", type=float, default=90.0, help="timeout of torch's collectives on both sides, in seconds")
    parser.add_argument("--alone", type=float, default=180.0, help="how long a rank works alone where nothing hangs, in seconds")
    jobs.add_device(parser)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    wanted = args.rows.split(",")
    if unknown := [row for row in wanted if row not in ROWS and row not in QUIET]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of {', '.join([*ROWS, *QUIET])}")
    # Leave through the with blocks, so that no agent and no namespace stays.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    machine = measure.machine()
    jobs.adopt_orphans()
    rows = []
    skipped = {row: reason for row in wanted if (reason := skip_reason(row)) is not None}
    for row in (each for each in wanted if each in ROWS):
        if row in skipped:
            print(row, "skipped:", skipped[row], file=sys.stderr, flush=True)
            continue
        tries: dict[str, list[Recovery | None]] = {side: [] for side in SIDES}
        for _ in range(args.repeat):
            for side, each in tries.items():
                each.append(one_try(side, row, args.timeout))
                print(row, side, each[-1], file=sys.stderr, flush=True)
        sides = {side: summary(each) for side, each in tries.items()}
        ratio = measure.rounded(measure.ratio(sides["stock"]["median_s"], sides["ours"]["median_s"]), 1)
        rows.append({"row": row, **sides, "ratio": ratio, "limit_s": limit_s(args.timeout)})
    quiet = [quiet_try(row, args.alone, args.timeout) for row in wanted if row in QUIET]
    print(*quiet, sep="\n", file=sys.stderr, flush=True)
    record = {"benchmark": "hangs", "rows": rows, "skipped": skipped, "quiet": quiet, "timeout_s": args.timeout}
    record |= {"repeat": args.repeat, "device": jobs.device(), "machine": machine}
    measure.publish(args.results, record, shown(record), lambda figure: draw(figure, rows, args.timeout))
    kept = all(row["ours"]["lost"] == 0 for row in rows) and all(each["restarts"] == each["code"] == 0 for each in quiet)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
