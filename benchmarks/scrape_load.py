"""What does a storm at the metrics port cost the training? The throughput of entrypoints/train_fsdp.py with it and without it.

    python benchmarks/scrape_load.py [--repeat 5] [--seconds 10]

The storm is workers/scrape_storm.py: 1,000 scrapes a second, 500 connections that ask nothing, a slow reader, rubbish, what looks
like TLS, and headers of 10 MB. The job is one agent with one worker of one thread. Three kinds of runs take turns, also at being
first: quiet; a storm at the agent's port (storm); and the same storm beside the job, at a server that has its answer ready
(workers/plain_server.py) and nothing to do with the job (control). On a machine of two cores the storm's clients alone take CPU
time from the training: the control says how much. The clients have nice 19; neither server has.

Throughput is the median of the rates that the script prints in the given seconds, after a warm-up. A ratio is the median of the
ratios of the pairs; the one that counts is that of storm to control. Agent's CPU: of its own process. Leaked: descriptors and
threads that the agent has more than before the storm, once its clients have been dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jobs
import measure
from overhead import cpu_s, scrape

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

WORKERS = Path(__file__).parent / "workers"
SCRIPT = Path(__file__).parent.parent / "entrypoints" / "train_fsdp.py"
EVERY = 10  # steps between two printed rates
SIDES = ("quiet", "storm", "control")
LEAST_RATIO = 0.97  # of the throughput under the storm to that of the control
MAX_CPU = 0.25  # of a core, of the agent in a storm of 10 s: the server's share and burst, and the agent's own work
WARM_UP = 5  # printed rates
START_S = 120.0
STORM_SPARE_S = 30.0  # until the storm's last clients have their answers
DROPPED_S = 15.0  # until the agent has dropped the last client; it does so after 10 s


@dataclass(frozen=True)
class Run:
    """tokens_s: the median rate. agent_cpu: share of a core. storm: what came; None: nothing. leaked: descriptors, threads."""

    tokens_s: float
    agent_cpu: float
    storm: dict[str, float] | None
    leaked: tuple[int, int]


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
        """Raises RuntimeError if fewer come."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._seen) >= count, START_S):
                raise RuntimeError(f"{len(self._seen)} rates in {START_S:g} s, expected {count}; exit code {self._job.poll()}")

    def between(self, began: float, ended: float) -> list[float]:
        with self._changed:
            return [rate for at, rate in self._seen if began <= at <= ended]

    def close(self) -> None:
        self._thread.join()


def held(pid: int) -> tuple[int, int]:
    """How many descriptors and threads a process has."""
    descriptors, threads = (sum(1 for _ in Path(f"/proc/{pid}", each).iterdir()) for each in ("fd", "task"))
    return descriptors, threads


def leaked(pid: int, before: tuple[int, int]) -> tuple[int, int]:
    """What a process holds more than before, once the storm's clients are gone."""
    end = time.monotonic() + DROPPED_S
    while True:
        more = held(pid)[0] - before[0], held(pid)[1] - before[1]
        if max(more) <= 0 or time.monotonic() > end:
            return more
        time.sleep(0.2)  # no event marks it


@contextlib.contextmanager
def plain_server(size: int) -> Iterator[int]:
    """A server with an answer of this size, in bytes; yields its port."""
    command = [sys.executable, str(WORKERS / "plain_server.py"), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()


def storm_of(kind: str, port: int, seconds: float) -> dict[str, float] | None:
    """Let the time of one measurement pass, with what comes in it. port: the agent's."""
    if kind == "quiet":
        return idle_for(seconds)
    if kind == "storm":
        return run_storm(port, seconds)
    with plain_server(page_size(port)) as plain:
        return run_storm(plain, seconds)


def page_size(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return len(answer.read())


def one_run(kind: str, seconds: float) -> Run:
    """kind: one of SIDES. Raises RuntimeError if the job does not train."""
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
                scrape(port)  # the first opens what stays open
                before = held(job.pid)
                began, cpu = time.monotonic(), cpu_s(job.pid)
                storm = storm_of(kind, port, seconds)
                ended, cpu = time.monotonic(), cpu_s(job.pid) - cpu
                scrape(port)  # the agent still answers
                if not (seen := rates.between(began, ended)):
                    raise RuntimeError(f"no rates in {ended - began:.1f} s; exit code {job.poll()}")
                return Run(measure.median(seen) or 0.0, cpu / (ended - began), storm, leaked(job.pid, before))
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
    command = ["nice", "-n", "19", sys.executable, str(WORKERS / "scrape_storm.py"), str(port), str(seconds)]
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
        "leaked": max(max(run.leaked) for run in runs),
        "scrapes_s": measure.rounded(measure.median([run.storm["per_second"] for run in runs if run.storm is not None]), 0),
    }


def turns(sides: Sequence[str], number: int) -> list[str]:
    """Return the order of the sides in a turn: each is first, and each runs before and after each other, as often."""
    at = number % len(sides)
    return [*sides[at:], *sides[:at]][:: -1 if number // len(sides) % 2 else 1]


def paired(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """Return the median ratio of the throughput of runs to that of the others of the same turns."""
    return measure.median([run.tokens_s / other.tokens_s for run, other in zip(runs, others, strict=True)]) or 0.0


def draw(figure: Any, sides: Mapping[str, Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    axes.boxplot([each["all_tokens_s"] for each in sides.values()], tick_labels=list(sides))
    axes.set(ylabel="tokens/s", ylim=(0, None), title="Throughput of train_fsdp.py under a storm")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of pairs of runs")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a storm lasts")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    runs: dict[str, list[Run]] = {each: [] for each in SIDES}
    jobs.adopt_orphans()
    for number in range(args.repeat):
        for each in turns(SIDES, number):
            runs[each].append(one_run(each, args.seconds))
            print(each, asdict(runs[each][-1]), file=sys.stderr, flush=True)
    ratio = paired(runs["storm"], runs["control"])
    of_quiet = {each: paired(runs[each], runs["quiet"]) for each in ("storm", "control")}
    sides = {each: side(found) for each, found in runs.items()}
    record = {
        "benchmark": "scrape_load",
        "sides": sides,
        "storms": [run.storm for run in runs["storm"]],
        "controls": [run.storm for run in runs["control"]],
        "ratio": measure.rounded(ratio),
        "of_quiet": {each: measure.rounded(found) for each, found in of_quiet.items()},
        "kept": ratio >= LEAST_RATIO and sides["storm"]["agent_cpu"] <= MAX_CPU and sides["storm"]["leaked"] <= 0,
        "machine": machine,
    }
    shown = [
        ["tokens/s", *(measure.shown(sides[each]["tokens_s"], 0) for each in SIDES)],
        ["of the quiet job's", "1", *(measure.shown(of_quiet[each], 3) for each in SIDES[1:])],
        ["storm / control", "-", measure.shown(ratio, 3), "1"],
        ["scrapes/s", *(measure.shown(sides[each]["scrapes_s"], 0) for each in SIDES)],
        ["agent's CPU (% of a core)", *(measure.shown(100 * sides[each]["agent_cpu"], 1) for each in SIDES)],
        ["leaked descriptors or threads", *(str(sides[each]["leaked"]) for each in SIDES)],
    ]
    measure.publish(args.results, record, measure.table(["", *SIDES], shown), lambda figure: draw(figure, sides))
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
