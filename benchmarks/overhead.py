"""What does our agent cost while nothing fails? The throughput of entrypoints/train_fsdp.py.

    python benchmarks/overhead.py [--repeat 5] [--lines 20]

Ours runs beside stock, and beside ours with `metrics=off`, at the same time: each job has half of the cores for itself, so what
disturbs the machine disturbs both. Then they change places. A ratio is the geometric mean of the two; the result is the median of
--repeat ratios, with its standard error. One after the other, jobs differ by up to 10 % here.

Throughput is the median of the rates that the script prints, without the first part, in which the standbys import. Ours runs as
installed (bootstrap, metrics, stderr relay, hang watch, standbys) with all that shows what a job does: events_file, metrics_file,
metrics_discovery_dir, goodput, and metrics that are scraped at each printed rate. With `metrics=off` it has none of these files,
and nothing scrapes.

CPU of a step: what all processes of a job use for one. It is disturbed less than the throughput, and shows what a job on busy
cores pays. Agent's CPU: of the agent's own process, and of its helpers beside the workers (reaper, stderr relay, standbys).
Memory of a standby: its proportional set size, which counts the pages that standbys and their server share once.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

SCRIPT = Path(__file__).parent.parent / "entrypoints" / "train_fsdp.py"
LEAST_RATIO = 0.99  # of our throughput to stock's
LEAST_RATIO_OFF = 0.995  # of our throughput to that with metrics=off
SIDES = ("ours", "off", "stock")
OTHERS = ("stock", "off")
COMPARED = {"tokens_s": ("tokens/s", 0), "step_cpu_ms": ("CPU of a step (ms)", 2)}  # fields of Run: title and digits
MEDIAN_ERROR = 1.25  # standard error of a median, in those of a mean of as many: sqrt(pi / 2), for a normal distribution
MAX_CPU = 0.01  # of a core, of the agent's own process
WARM_UP = 0.3  # of the printed rates
EVERY = 10  # steps between two of them
WORKERS = 2
TIMEOUT_S = 300.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Run:
    """
    tokens_s: the median rate.
    step_cpu_ms: CPU milliseconds of all processes for a step.
    agent_cpu, beside_cpu: shares of a core.
    standby_mb: memory of a standby; None: none.
    """

    tokens_s: float
    step_cpu_ms: float
    agent_cpu: float
    beside_cpu: float
    standby_mb: float | None


def cpu_s(pid: int) -> float:
    """CPU seconds that this process, without its children, has used so far; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S


@dataclass(frozen=True)
class Look:
    """CPU seconds that a job has used at a moment (monotonic): its agent, helpers, and workers with what those started."""

    agent: float
    beside: float
    workers: float
    at: float


def look(agent: int) -> Look:
    beside = workers = 0.0
    for pid in jobs.descendants(agent):
        try:
            is_worker = b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        workers, beside = (workers + cpu_s(pid), beside) if is_worker else (workers, beside + cpu_s(pid))
    return Look(cpu_s(agent), beside, workers, time.monotonic())


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def standby_mb(port: int) -> float | None:
    seen = scrape(port)
    count = seen.get("elastic_ext_standbys", 0.0)
    return seen["elastic_ext_standby_memory_bytes"] / count / 2**20 if count else None


def settings(side: str, directory: str, port: int) -> dict[str, str]:
    """Return what a side sets of our agent, in variables."""
    if side == "off":
        return {"ELASTIC_EXT_METRICS": "off"}
    files = {"EVENTS_FILE": "events", "METRICS_FILE": "job.prom", "METRICS_DISCOVERY_DIR": "sd"}
    paths = {f"ELASTIC_EXT_{name}": str(Path(directory, file)) for name, file in files.items()}
    return {"ELASTIC_EXT_METRICS_PORT": str(port), **paths}


def one_run(side: str, lines: int, place: Sequence[str]) -> Run:
    """side: one of SIDES. place: one of `halves`. Raises RuntimeError if the job fails."""
    agent = "stock" if side == "stock" else "warm"
    port, first = free_port(), max(1, round(WARM_UP * lines))
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *place,
            *(sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS[agent], f"--nproc-per-node={WORKERS}", str(SCRIPT)),
            *("--checkpoint-dir", str(Path(directory, "checkpoints")), f"--log-every={EVERY}", "--save-every=1000000"),
            *("--epochs=1000", f"--max-steps={EVERY * lines}"),
        ]
        env = jobs.environment(**settings(side, directory, port))
        rates, looks, memory = [], [], None
        with (
            open(Path(directory, "errors"), "w+") as errors,
            subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as job,
        ):
            assert job.stdout is not None
            for line in job.stdout:
                if (found := re.search(r"tokens/s (\d+)", line)) is None:
                    continue
                rates.append(float(found[1]))
                if len(rates) in (first, lines - 1):
                    looks.append(look(job.pid))
                if side == "ours" and first < len(rates) < lines:
                    memory = standby_mb(port) or memory
            job.wait()
            errors.seek(0)
            if job.returncode != 0 or len(rates) < lines:
                failure = f"exit code {job.returncode} after {len(rates)} printed rates, expected 0 and {lines}"
                raise RuntimeError(f"{side}: {failure}\n{errors.read()[-jobs.TAIL :]}")
    began, ended = looks
    agent, beside, workers = ended.agent - began.agent, ended.beside - began.beside, ended.workers - began.workers
    step_ms, took_s = 1000 * (agent + beside + workers) / (EVERY * (lines - 1 - first)), ended.at - began.at
    return Run(measure.median(rates[first:]) or 0.0, step_ms, agent / took_s, beside / took_s, memory)


def side(runs: list[Run]) -> dict[str, Any]:
    memory = [run.standby_mb for run in runs if run.standby_mb is not None]
    return {
        "tokens_s": measure.rounded(measure.median([run.tokens_s for run in runs]), 0),
        "all_tokens_s": [round(run.tokens_s) for run in runs],
        "step_cpu_ms": measure.rounded(measure.median([run.step_cpu_ms for run in runs]), 2),
        "agent_cpu": measure.rounded(measure.median([run.agent_cpu for run in runs]), 4),
        "beside_cpu": measure.rounded(measure.median([run.beside_cpu for run in runs]), 4),
        "standby_mb": measure.rounded(measure.median(memory), 1),
    }


def halves(swapped: bool) -> list[list[str]]:
    """Return how a command begins that has half of the cores, for each half. Raises RuntimeError: there is one core only."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        raise RuntimeError("this needs two cores: each job has half of them")
    places = (cores[half:], cores[:half]) if swapped else (cores[:half], cores[half:])
    return [["taskset", "--cpu-list", ",".join(map(str, each))] for each in places]


def side_by_side(sides: Sequence[str], lines: int, swapped: bool) -> list[Run]:
    """Run two sides at the same time, each on half of the cores. swapped: on the other half. Raises RuntimeError as `one_run`."""
    with ThreadPoolExecutor(len(sides)) as threads:
        return list(threads.map(one_run, sides, [lines] * len(sides), halves(swapped)))


def ratio_of(ratios: Sequence[float]) -> tuple[float, float | None]:
    """Return the median of the ratios, and its standard error; None if one pair alone cannot show it.

    ratios: in turns, places swapped each time.
    """
    logs = list(map(math.log, ratios))
    both = [math.exp((one + swapped) / 2) for one, swapped in zip(logs[::2], logs[1::2], strict=True)]
    error = MEDIAN_ERROR * statistics.stdev(both) / math.sqrt(len(both)) if len(both) > 1 else None
    return statistics.median(both), error


def rows_of(
    title: str, digits: int, of: str, sides: Mapping[str, Mapping[str, Any]], ratios: Mapping[str, tuple[float, float | None]]
) -> list[list[str]]:
    """Return the rows of one of COMPARED: each side's figure, our ratio to it, and the error of that."""
    others = [ratios[each] for each in SIDES[1:]]
    return [
        [title, *(measure.shown(sides[each][of], digits) for each in SIDES)],
        [f"ours / this, {title}", "1", *(measure.shown(ratio, 4) for ratio, _ in others)],
        [f"standard error of that, {title}", "-", *(measure.shown(error, 4) for _, error in others)],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of pairs of each kind, in both places")
    parser.add_argument("--lines", type=int, default=20, help="number of tokens/s lines that the script prints in a run")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    pairs: dict[str, list[tuple[Run, Run]]] = {each: [] for each in OTHERS}
    jobs.adopt_orphans()
    for number in range(2 * args.repeat):
        for other, found in pairs.items():
            ours, beside = side_by_side(("ours", other), args.lines, swapped=number % 2 == 1)
            found.append((ours, beside))
            print(f"ours / {other}: {ours.tokens_s / beside.tokens_s:.4f}", ours, beside, file=sys.stderr, flush=True)
    ratios = {
        of: {other: ratio_of([getattr(ours, of) / getattr(each, of) for ours, each in found]) for other, found in pairs.items()}
        for of in COMPARED
    }
    (ratio, error), (ratio_off, error_off) = (ratios["tokens_s"][other] for other in OTHERS)
    runs = {other: [pair[1] for pair in found] for other, found in pairs.items()}
    runs["ours"] = [pair[0] for found in pairs.values() for pair in found]
    sides = {each: side(runs[each]) for each in SIDES}
    record = {
        "benchmark": "overhead",
        "sides": sides,
        "ratio": measure.rounded(ratio, 4),
        "error": measure.rounded(error, 4),
        "ratio_off": measure.rounded(ratio_off, 4),
        "error_off": measure.rounded(error_off, 4),
        "cpu_ratios": {other: [measure.rounded(each, 4) for each in found] for other, found in ratios["step_cpu_ms"].items()},
        "kept": ratio >= LEAST_RATIO and ratio_off >= LEAST_RATIO_OFF and sides["ours"]["agent_cpu"] <= MAX_CPU,
        "machine": machine,
    }
    shown = [
        *(row for of, (title, digits) in COMPARED.items() for row in rows_of(title, digits, of, sides, ratios[of])),
        *(
            [title, *(measure.shown(100 * sides[each][key], 2) for each in SIDES)]
            for title, key in (("agent's CPU (% of a core)", "agent_cpu"), ("beside it (% of a core)", "beside_cpu"))
        ),
        ["memory of a standby (MB)", measure.shown(sides["ours"]["standby_mb"], 0), "-", "-"],
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.boxplot([[run.tokens_s for run in runs[each]] for each in runs], tick_labels=list(runs))
        axes.set(ylabel="tokens/s", ylim=(0, None), title="Throughput of train_fsdp.py")
        axes.spines[["top", "right"]].set_visible(False)

    measure.publish(args.results, record, measure.table(["", "ours", "metrics=off", "stock"], shown), draw)
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
