"""What does our agent cost while nothing fails? The throughput of entrypoints/train_fsdp.py.

    python benchmarks/overhead.py [--repeat 5] [--lines 20]

Ours and stock take turns, also at being first. Throughput is the median of the rates that the script prints, without the first
part, in which the standbys import. The ratio is the median of the ratios of the pairs. Ours runs as installed: bootstrap, metrics
(scraped at each printed rate), stderr relay, hang watch, standbys.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

SCRIPT = Path(__file__).parent.parent / "entrypoints" / "train_fsdp.py"
LEAST_RATIO = 0.99  # of our throughput to stock's
MAX_CPU = 0.01  # of a core, of the agent's own process
WARM_UP = 0.3  # of the printed rates
EVERY = 10  # steps between two of them
WORKERS = 2
TIMEOUT_S = 300.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


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


def one_run(agent: str, lines: int) -> Run:
    """agent: a key of jobs.AGENTS. Raises RuntimeError if the job fails."""
    port, first = free_port(), max(1, round(WARM_UP * lines))
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS[agent], f"--nproc-per-node={WORKERS}", str(SCRIPT)),
            *("--checkpoint-dir", str(Path(directory, "checkpoints")), f"--log-every={EVERY}", "--save-every=1000000"),
            *("--epochs=1000", f"--max-steps={EVERY * lines}"),
        ]
        env = jobs.environment(ELASTIC_EXT_METRICS_PORT=str(port))
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
                if agent != "stock" and first < len(rates) < lines:
                    memory = standby_mb(port) or memory
            job.wait()
            errors.seek(0)
            if job.returncode != 0 or len(rates) < lines:
                failure = f"exit code {job.returncode} after {len(rates)} printed rates, expected 0 and {lines}"
                raise RuntimeError(f"{agent}: {failure}\n{errors.read()[-jobs.TAIL :]}")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of runs under each agent")
    parser.add_argument("--lines", type=int, default=20, help="number of tokens/s lines that the script prints in a run")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    runs: dict[str, list[Run]] = {"ours": [], "stock": []}
    jobs.adopt_orphans()
    for number in range(args.repeat):
        for agent in sorted(runs, reverse=number % 2 == 1):
            runs[agent].append(one_run("warm" if agent == "ours" else agent, args.lines))
            print(agent, runs[agent][-1], file=sys.stderr, flush=True)
    ratio = measure.median([ours.tokens_s / stock.tokens_s for ours, stock in zip(runs["ours"], runs["stock"], strict=True)])
    sides = {agent: side(each) for agent, each in runs.items()}
    record = {
        "benchmark": "overhead",
        "sides": sides,
        "ratio": measure.rounded(ratio),
        "kept": (ratio or 0) >= LEAST_RATIO and sides["ours"]["agent_cpu"] <= MAX_CPU,
        "machine": machine,
    }
    shown = [
        ["tokens/s", f"{sides['ours']['tokens_s']:.0f}", f"{sides['stock']['tokens_s']:.0f}"],
        ["of stock's", measure.shown(ratio, 3), "1"],
        *(
            [title, *(measure.shown(100 * sides[agent][key], 2) for agent in ("ours", "stock"))]
            for title, key in (("agent's CPU (% of a core)", "agent_cpu"), ("beside it (% of a core)", "beside_cpu"))
        ),
        ["memory of a standby (MB)", measure.shown(sides["ours"]["standby_mb"], 0), "-"],
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.boxplot([[run.tokens_s for run in runs[agent]] for agent in runs], tick_labels=list(runs))
        axes.set(ylabel="tokens/s", ylim=(0, None), title="Throughput of train_fsdp.py")
        axes.spines[["top", "right"]].set_visible(False)

    measure.publish(args.results, record, measure.table(["", "ours", "stock"], shown), draw)
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
