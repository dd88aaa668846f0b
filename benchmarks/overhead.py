"""What does our agent cost while nothing fails? The throughput of entrypoints/train_fsdp.py.

    python benchmarks/overhead.py [--repeat 5] [--lines 20]

Three sides take turns, also at being first: ours, ours with `metrics=off`, and stock. Throughput is the median of the rates that
the script prints, without the first part, in which the standbys import. A ratio is the median of the ratios of the pairs. Ours
runs as installed (bootstrap, metrics, stderr relay, hang watch, standbys) with all that shows what a job does: events_file,
metrics_file, metrics_discovery_dir, goodput, and metrics that are scraped at each printed rate. With `metrics=off` it has none
of these files, and nobody scrapes.

Agent's CPU: of the agent's own process, and of its helpers beside the workers (reaper, stderr relay, standbys).
Memory of a standby: its proportional set size, which counts the pages that standbys and their server share once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

SCRIPT = Path(__file__).parent.parent / "entrypoints" / "train_fsdp.py"
LEAST_RATIO = 0.99  # of our throughput to stock's
LEAST_RATIO_OFF = 0.995  # of our throughput to that with metrics=off
SIDES = ("ours", "off", "stock")
MAX_CPU = 0.01  # of a core, of the agent's own process
WARM_UP = 0.3  # of the printed rates
EVERY = 10  # steps between two of them
WORKERS = 2
TIMEOUT_S = 300.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Throughput(Protocol):
    @property
    def tokens_s(self) -> float: ...


@dataclass(frozen=True)
class Run:
    """tokens_s: the median rate. agent_cpu, beside_cpu: shares of a core. standby_mb: memory of a standby; None: none."""

    tokens_s: float
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


def beside_the_workers(agent: int) -> float:
    """CPU seconds of the agent's helpers: all descendants except the workers and what those started."""
    pids = set(jobs.descendants(agent))
    for pid in list(pids):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"\0LOCAL_RANK=" in environ:
            pids.discard(pid)
    return sum(map(cpu_s, pids))


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


def one_run(side: str, lines: int) -> Run:
    """side: one of SIDES. Raises RuntimeError if the job fails."""
    agent = "stock" if side == "stock" else "warm"
    port, first = free_port(), max(1, round(WARM_UP * lines))
    with tempfile.TemporaryDirectory() as directory:
        command = [
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
                    looks.append((cpu_s(job.pid), beside_the_workers(job.pid), time.monotonic()))
                if side == "ours" and first < len(rates) < lines:
                    memory = standby_mb(port) or memory
            job.wait()
            errors.seek(0)
            if job.returncode != 0 or len(rates) < lines:
                failure = f"exit code {job.returncode} after {len(rates)} printed rates, expected 0 and {lines}"
                raise RuntimeError(f"{side}: {failure}\n{errors.read()[-jobs.TAIL :]}")
    (own, beside, began), (own_end, beside_end, ended) = looks
    took_s = ended - began
    return Run(measure.median(rates[first:]) or 0.0, (own_end - own) / took_s, (beside_end - beside) / took_s, memory)


def side(runs: list[Run]) -> dict[str, Any]:
    memory = [run.standby_mb for run in runs if run.standby_mb is not None]
    return {
        "tokens_s": measure.rounded(measure.median([run.tokens_s for run in runs]), 0),
        "all_tokens_s": [round(run.tokens_s) for run in runs],
        "agent_cpu": measure.rounded(measure.median([run.agent_cpu for run in runs]), 4),
        "beside_cpu": measure.rounded(measure.median([run.beside_cpu for run in runs]), 4),
        "standby_mb": measure.rounded(measure.median(memory), 1),
    }


def turns(sides: Sequence[str], number: int) -> list[str]:
    """Return the order of the sides in a turn: each is first, and each runs before and after each other, as often."""
    at = number % len(sides)
    return [*sides[at:], *sides[:at]][:: -1 if number // len(sides) % 2 else 1]


def paired(runs: Sequence[Throughput], others: Sequence[Throughput]) -> float:
    """Return the median ratio of the throughput of runs to that of the others of the same turns."""
    return measure.median([run.tokens_s / other.tokens_s for run, other in zip(runs, others, strict=True)]) or 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of runs of each side")
    parser.add_argument("--lines", type=int, default=20, help="number of tokens/s lines that the script prints in a run")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    runs: dict[str, list[Run]] = {each: [] for each in SIDES}
    jobs.adopt_orphans()
    for number in range(args.repeat):
        for each in turns(SIDES, number):
            runs[each].append(one_run(each, args.lines))
            print(each, runs[each][-1], file=sys.stderr, flush=True)
    ratio, ratio_off = (paired(runs["ours"], runs[other]) for other in ("stock", "off"))
    sides = {each: side(found) for each, found in runs.items()}
    record = {
        "benchmark": "overhead",
        "sides": sides,
        "ratio": measure.rounded(ratio),
        "ratio_off": measure.rounded(ratio_off, 4),
        "kept": ratio >= LEAST_RATIO and ratio_off >= LEAST_RATIO_OFF and sides["ours"]["agent_cpu"] <= MAX_CPU,
        "machine": machine,
    }
    shown = [
        ["tokens/s", *(f"{sides[each]['tokens_s']:.0f}" for each in SIDES)],
        ["ours / this", "1", measure.shown(ratio_off, 4), measure.shown(ratio, 3)],
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
