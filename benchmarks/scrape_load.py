"""What does a storm at the metrics port cost the training? The throughput of entrypoints/train_fsdp.py with it and without it.

    python benchmarks/scrape_load.py [--repeat 5] [--seconds 10]

The storm is workers/scrape_storm.py: 1,000 scrapes a second, 500 connections that ask nothing, a slow reader, rubbish, what looks
like TLS, and headers of 10 MB. The job is one agent with one worker of one thread, so of two cores it leaves one to the agent and
the storm. The storm is a process of its own with nice 19: it gets what the others leave, and on a busy machine reaches less;
the table says how much. What the agent does for it is not nice, and is what this measures.

Both kinds of runs take turns, also at being first. Throughput is the median of the rates that the script prints in the given
seconds, after a warm-up. The ratio is the median of the ratios of the pairs. Agent's CPU: of the agent's own process.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jobs
import measure
from overhead import EVERY, SCRIPT, cpu_s, scrape

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

STORM = Path(__file__).parent / "workers" / "scrape_storm.py"
LEAST_RATIO = 0.97  # of the throughput under the storm to that without it
WARM_UP = 5  # printed rates
START_S = 120.0
STORM_SPARE_S = 30.0  # until the storm's last clients have their answers


@dataclass(frozen=True)
class Run:
    """tokens_s: the median rate. agent_cpu: share of a core. storm: what came; None: there was none."""

    tokens_s: float
    agent_cpu: float
    storm: dict[str, float] | None


class Rates:
    """The rates that a job prints, by when they came."""

    def __init__(self, job: subprocess.Popen[str]) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._job.stdout is not None
        for line in self._job.stdout:
            if (found := re.search(r"tokens/s (\d+)", line)) is not None:
                with self._changed:
                    self._seen.append((time.monotonic(), float(found[1])))
                    self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Raises RuntimeError if so many do not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._seen) >= count, START_S):
                raise RuntimeError(f"{len(self._seen)} rates in {START_S:g} s, expected {count}; exit code {self._job.poll()}")

    def between(self, began: float, ended: float) -> list[float]:
        with self._changed:
            return [rate for at, rate in self._seen if began <= at <= ended]

    def close(self) -> None:
        self._thread.join()


def one_run(with_storm: bool, seconds: float) -> Run:
    """Raises RuntimeError if the job does not train."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS["ours"], "--nproc-per-node=1", str(SCRIPT)),
            *("--checkpoint-dir", str(Path(directory, "checkpoints")), f"--log-every={EVERY}", "--save-every=1000000"),
            *("--epochs=100000", "--max-steps=1000000"),
        ]
        env = jobs.environment(ELASTIC_EXT_METRICS_PORT=str(port), ELASTIC_EXT_STANDBY="off")
        with subprocess.Popen(
            command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as job:
            rates = Rates(job)
            try:
                rates.wait(WARM_UP)
                began, cpu = time.monotonic(), cpu_s(job.pid)
                storm = run_storm(port, seconds) if with_storm else idle_for(seconds)
                ended, cpu = time.monotonic(), cpu_s(job.pid) - cpu
                scrape(port)  # the agent still answers
                if not (seen := rates.between(began, ended)):
                    raise RuntimeError(f"no rates in {ended - began:.1f} s; exit code {job.poll()}")
                return Run(measure.median(seen) or 0.0, cpu / (ended - began), storm)
            finally:
                end(job)
                rates.close()


def end(job: subprocess.Popen[str]) -> None:
    job.terminate()
    try:
        job.wait(jobs.TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        jobs.kill_whole(job.pid)
    jobs.kill_children()


def run_storm(port: int, seconds: float) -> dict[str, float]:
    command = ["nice", "-n", "19", sys.executable, str(STORM), str(port), str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds + STORM_SPARE_S, check=True)
    return {str(name): float(value) for name, value in json.loads(done.stdout).items()}


def idle_for(seconds: float) -> None:
    """The measurement itself: time passes, and no event ends it."""
    time.sleep(seconds)


def side(runs: list[Run]) -> dict[str, Any]:
    return {
        "tokens_s": measure.rounded(measure.median([run.tokens_s for run in runs]), 0),
        "all_tokens_s": [round(run.tokens_s) for run in runs],
        "agent_cpu": measure.rounded(measure.median([run.agent_cpu for run in runs]), 4),
        "scrapes_s": measure.rounded(measure.median([run.storm["per_second"] for run in runs if run.storm is not None]), 0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of pairs of runs")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a storm lasts")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    runs: dict[str, list[Run]] = {"quiet": [], "storm": []}
    jobs.adopt_orphans()
    for number in range(args.repeat):
        for name in sorted(runs, reverse=number % 2 == 1):
            runs[name].append(one_run(name == "storm", args.seconds))
            print(name, asdict(runs[name][-1]), file=sys.stderr, flush=True)
    ratio = measure.median([storm.tokens_s / quiet.tokens_s for storm, quiet in zip(runs["storm"], runs["quiet"], strict=True)])
    sides = {name: side(each) for name, each in runs.items()}
    record = {
        "benchmark": "scrape_load",
        "sides": sides,
        "storms": [run.storm for run in runs["storm"]],
        "ratio": measure.rounded(ratio),
        "kept": (ratio or 0) >= LEAST_RATIO,
        "machine": machine,
    }
    shown = [
        ["tokens/s", *(measure.shown(sides[name]["tokens_s"], 0) for name in runs)],
        ["of the quiet job's", "1", measure.shown(ratio, 3)],
        ["scrapes/s", *(measure.shown(sides[name]["scrapes_s"], 0) for name in runs)],
        ["agent's CPU (% of a core)", *(measure.shown(100 * sides[name]["agent_cpu"], 1) for name in runs)],
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.boxplot([[run.tokens_s for run in runs[name]] for name in runs], tick_labels=list(runs))
        axes.set(ylabel="tokens/s", ylim=(0, None), title="Throughput of train_fsdp.py under a storm")
        axes.spines[["top", "right"]].set_visible(False)

    measure.publish(args.results, record, measure.table(["", "quiet", "storm"], shown), draw)
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
