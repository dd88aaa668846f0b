"""How long until a late rank or host is named, is it the right one, and is anything named in a job that nothing disturbs?

    python benchmarks/stragglers.py [--repeat 3] [--rows rank-10,rank-30,host-10,host-30] [--seconds 120]
                                    [--quiet-minutes 30] [--samples 20]

Two nodes of two ranks, DDP over gloo, on one machine; `--rdzv-backend=ext_c10d`, with defaults. With root, the second node runs
in a time namespace whose monotonic clock is 1000 s ahead, so that the agents have to align their clocks.

    rank-N      from some moment on rank 3 sleeps longer in each step, by N % of it
    host-N      ranks 2 and 3 do
    quiet       no rank does, for --quiet-minutes, beside a process that uses a core for 5 s of each 10 s. Each rank computes for
                about a third of its step. Whatever is named is a false name
    overhead    two nodes of one rank, which compute without sleeps: by how much longer the job's steps take after which a sample
                of the flight recorder is taken, against the median of all steps; all ranks take it after the same one. Nothing
                else of this holds up a step: between two samples, a thread reads two numbers every 2 s

Seconds until named count from the first late step to the event `straggler`. Stock torchrun has nothing to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

SCRIPT = Path(__file__).with_name("workers") / "straggling_job.py"
STEP_S = 0.06
BEGIN_S = 12.0  # after the first steps: the job has been sampled
START_S = 180.0  # for a job to start and to end, on a busy machine
AIM_S = 60.0  # until named
AIM_OVERHEAD = 0.005
MATMULS = 60  # of the row `quiet`: about 20 ms
MATMULS_ALONE = 120  # of the row `overhead`, without sleeps
HELD_UP = 3  # steps after a sample that may take longer
MAX_S = 3600.0
FULL = 1000  # steps after which torch's recorder holds as many collectives as it can: 2000, two or three a step
AHEAD_S = 1000
LOAD = "import time\nwhile True:\n    end = time.monotonic() + 5\n    while time.monotonic() < end: pass\n    time.sleep(5)\n"


@dataclass(frozen=True)
class Row:
    """late: ranks. part: of a step. rank: to be named on the host; None: the host as a whole."""

    title: str
    late: tuple[int, ...]
    part: float
    rank: int | None


ROWS = {
    "rank-10": Row("one rank, by 10 % of a step", (3,), 0.1, 3),
    "rank-30": Row("one rank, by 30 % of a step", (3,), 0.3, 3),
    "host-10": Row("one host, by 10 % of a step", (2, 3), 0.1, None),
    "host-30": Row("one host, by 30 % of a step", (2, 3), 0.3, None),
}


@dataclass(frozen=True)
class Found:
    """What one job has shown.

    Attributes:
        stamps: of rank 0, by event; see straggling_job.py.
        names: the events `straggler` that begin one.
        times: see straggling_job.py.
    """

    stamps: dict[str, dict[str, Any]]
    names: tuple[dict[str, Any], ...]
    times: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Steps per second."""
        begin, end = self.stamps["begin"], self.stamps["end"]
        return (end["steps"] - begin["steps"]) / (end["time"] - begin["time"])


@dataclass(frozen=True)
class Try:
    """named_s: until the first name; None: nothing was named. right: it was the right one."""

    named_s: float | None
    right: bool
    share: float | None


def other_clock() -> list[str]:
    """The beginning of a command that gives it a monotonic clock of its own; empty where that is not possible."""
    unshare = shutil.which("unshare")
    own = ["--time", f"--monotonic={AHEAD_S}", "--fork", "--kill-child"]
    if unshare is None or os.geteuid() != 0:
        return []
    return [unshare, *own] if subprocess.run([unshare, *own, "true"], capture_output=True, check=False).returncode == 0 else []


def run_job(plan: dict[str, Any], end_when_named: bool = False, ranks: int = 2) -> Found:
    """Run a job of two nodes. Raises RuntimeError: it did not train.

    plan: what straggling_job.py wants, without its files. ranks: of each node.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder, output = Path(directory), Path(directory, "output")
        with open(output, "w", errors="replace") as file:
            commands = _commands(folder, plan, end_when_named, ranks)
            jobs.run_all(commands, directory, jobs.environment(), file, plan["seconds"] + START_S)
        found = Found(_stamps(folder / "stamps"), tuple(_names(folder / "events")), next(_lines(folder / "times"), {}))
        if not {"begin", "end"} <= found.stamps.keys():
            raise RuntimeError(f"the job did not train to its end:\n{output.read_text(errors='replace')[-jobs.TAIL :]}")
        return found


def _commands(folder: Path, plan: dict[str, Any], end_when_named: bool, ranks: int) -> list[list[str]]:
    """Return those of the nodes of the job."""
    events = folder / "events"
    files: dict[str, Any] = {"samples": 0, **{name: str(folder / name) for name in ("stamps", "times")}}
    files["until"] = str(events if end_when_named else folder / "never")
    where = ["--rdzv-backend=ext_c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=stragglers", "--nnodes=2"]
    where.append("--local-addr=127.0.0.1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={ranks}"]
    script = [str(SCRIPT), json.dumps(files | plan)]
    return [
        [*prefix, "env", f"ELASTIC_EXT_NODE_NAME={name}", f"ELASTIC_EXT_EVENTS_FILE={events}", *torchrun, *script]
        for name, prefix in (("na", []), ("nb", other_clock()))
    ]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        yield json.loads(line)


def _stamps(path: Path) -> dict[str, dict[str, Any]]:
    return {each["event"]: each for each in _lines(path)}


def _names(path: Path) -> Iterator[dict[str, Any]]:
    for each in _lines(path):
        if each["event"] == "straggler" and each["late"]:
            yield each


def outcome(found: Found, row: Row) -> Try:
    """Judge one job."""
    late = found.stamps.get("late")
    if late is None or not found.names:
        return Try(None, False, None)
    first = found.names[0]
    named_s = datetime.fromisoformat(first["time"].replace("Z", "+00:00")).timestamp() - late["time"]
    right = all(each["rank"] == row.rank and each["host"] != late["host"] for each in found.names) and named_s >= 0
    return Try(named_s, right, first["share"])


def one_try(row: Row, seconds: float) -> Try:
    plan = {"step_s": STEP_S, "matmul": 0, "late": row.late, "late_s": STEP_S * row.part, "begin_s": BEGIN_S}
    return outcome(run_job(plan | {"seconds": BEGIN_S + seconds}, end_when_named=True), row)


@contextmanager
def load() -> Iterator[None]:
    """A process that uses a core half of the time."""
    process = subprocess.Popen([sys.executable, "-c", LOAD])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def quiet(minutes: float) -> dict[str, Any]:
    """Run the job that nothing disturbs but the load."""
    plan = {"step_s": STEP_S - 0.02, "matmul": MATMULS, "late": [], "late_s": 0.0, "begin_s": 0.0, "seconds": 60 * minutes}
    with load():
        found = run_job(plan)
    return {
        "minutes": minutes,
        "false_names": len(found.names),
        "names": [{key: each[key] for key in ("host", "rank", "seconds", "share")} for each in found.names],
        "steps_s": measure.rounded(found.rate),
    }


def overhead(samples: int, first: int = FULL) -> dict[str, Any]:
    """Run the job that computes until it was sampled so often. Raises RuntimeError: it did not train, or was not in MAX_S.

    first: steps before that, whose samples do not count.
    """
    plan = {"step_s": 0.0, "matmul": MATMULS_ALONE, "late": [], "late_s": 0.0, "begin_s": 0.0, "seconds": MAX_S}
    found = held_up(**run_job(plan | {"samples": samples, "first": first}, ranks=1).times, first=first)
    return {**found, "kept": found["share"] + 2 * found["error"] <= AIM_OVERHEAD}


def held_up(steps: Sequence[float], sampled: Sequence[int], first: int = FULL) -> dict[str, Any]:
    """Return by how much samples hold up a job. Raises RuntimeError: there were fewer than two.

    steps: what each took, in seconds. sampled: the indices of those after which a sample was taken. first: the first that counts.
    """
    usual, whole = statistics.median(steps), [at for at in sampled if first <= at < len(steps) - HELD_UP]
    if len(whole) < 2:
        raise RuntimeError(f"{len(whole)} samples in {len(steps)} steps say nothing")
    extra_s = [sum(steps[at + 1 : at + 1 + HELD_UP]) - HELD_UP * usual for at in whole]
    apart_s = sum(steps[whole[0] : whole[-1]]) / (len(whole) - 1)
    return {
        "samples": len(whole),
        "step_s": measure.rounded(usual, 4),
        "apart_s": measure.rounded(apart_s, 2),
        "extra_s": measure.rounded(statistics.mean(extra_s), 4),
        "share": measure.rounded(statistics.mean(extra_s) / apart_s, 5),
        "error": measure.rounded(statistics.stdev(extra_s) / len(extra_s) ** 0.5 / apart_s, 5),
    }


def summary(tries: Sequence[Try]) -> dict[str, Any]:
    named_s = [each.named_s for each in tries if each.named_s is not None]
    return {
        "tries": len(tries),
        "right": sum(each.right for each in tries),
        "median_s": measure.rounded(measure.median(named_s), 1),
        "all_s": [measure.rounded(each, 1) for each in named_s],
        "share": measure.rounded(measure.median([each.share for each in tries if each.share is not None])),
    }


def kept(record: dict[str, Any]) -> bool:
    """Whether all aims were reached, of what was measured."""
    rows = all(row["right"] == row["tries"] and max(row["all_s"], default=AIM_S + 1) <= AIM_S for row in record["rows"])
    calm = record["quiet"] is None or record["quiet"]["false_names"] == 0
    return rows and calm and (record["overhead"] is None or record["overhead"]["kept"])


def shown(record: dict[str, Any]) -> str:
    cells, rows = [], record["rows"]
    for row in rows:
        seconds = [measure.shown(each, 0) for each in (row["median_s"], max(row["all_s"], default=None))]
        cells.append([ROWS[row["row"]].title, f"{row['right']} of {row['tries']}", *seconds, measure.shown(row["share"])])
    parts = [measure.table(["late", "named right", "seconds", "at most", "share of a step"], cells)] if cells else []
    if (calm := record["quiet"]) is not None:
        parts.append(
            f"A job that nothing disturbs, beside other load, for {calm['minutes']:g} minutes: {calm['false_names']} names."
        )
    if (cost := record["overhead"]) is not None:
        parts.append(
            f"A sample of a full recorder held up the job by {1e3 * cost['extra_s']:.1f} ms, once in {cost['apart_s']:.1f} s: "
            f"{cost['share']:.2%}, standard error {cost['error']:.2%} (the aim is {AIM_OVERHEAD:.1%}). That is the mean of "
            f"{cost['samples']}; two nodes of one rank, steps of {1e3 * cost['step_s']:.0f} ms."
        )
    if not rows and calm is None:
        return "\n\n".join(parts)
    clocks = f"clocks {AHEAD_S} s apart" if record["clocks_apart"] else "one clock"
    parts.append(f"Two nodes of two ranks on one machine, {clocks}, steps of {record['step_s'] * 1e3:g} ms.")
    return "\n\n".join(parts)


def draw(figure: Any, record: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = record["rows"]
    bars = axes.barh(range(len(rows)), [row["median_s"] or 0 for row in rows], height=0.5, color="#4c9f70")
    axes.bar_label(bars, [f"{row['right']} of {row['tries']} right" for row in rows], padding=3)
    for at, row in enumerate(rows):
        axes.plot(row["all_s"], [at] * len(row["all_s"]), ".", color="#333333", markersize=4)
    axes.axvline(AIM_S, color="#999999", linestyle=":", label="aim")
    axes.set_yticks(range(len(rows)), [ROWS[row["row"]].title for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds until named", title="A rank or a host that is late")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="number of tries of each row")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s; or empty")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long a name may take")
    parser.add_argument("--quiet-minutes", type=float, default=30.0, help="length of the job that nothing disturbs; 0: none")
    parser.add_argument("--samples", type=int, default=20, help="for the overhead; 0: it is not measured")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    wanted = args.rows.split(",") if args.rows else []
    if unknown := [row for row in wanted if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leave through the with blocks
    machine = measure.machine()
    jobs.adopt_orphans()
    rows = []
    for name in wanted:
        tries = []
        for _ in range(args.repeat):
            tries.append(one_try(ROWS[name], args.seconds))
            print(name, tries[-1], file=sys.stderr, flush=True)
        rows.append({"row": name, **summary(tries)})
    record: dict[str, Any] = {"benchmark": "stragglers", "rows": rows, "step_s": STEP_S, "clocks_apart": bool(other_clock())}
    record["quiet"] = quiet(args.quiet_minutes) if args.quiet_minutes else None
    record["overhead"] = overhead(args.samples) if args.samples else None
    record |= {"repeat": args.repeat, "machine": machine, "kept": kept(record)}
    measure.publish(args.results, record, shown(record), (lambda figure: draw(figure, record)) if record["rows"] else None)
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
