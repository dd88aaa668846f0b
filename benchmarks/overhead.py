"""What does our agent cost while nothing fails? The throughput of entrypoints/train_fsdp.py.

    python benchmarks/overhead.py [--rounds 380] [--turn 0.5]

Our job and two of stock have the machine in turns: in each round every job runs for --turn seconds, ours for OURS times as long,
and the others stand still (SIGSTOP). So all have the same cores, and what disturbs the machine for longer than a round disturbs
all. Jobs one after the other, or beside each other, differ by up to 10 % here, which is far more than what is measured.

Throughput is the number of steps in all turns. Its ratio to both jobs of stock is taken from each BLOCK of rounds; the result
is the mean, with its standard error. The two jobs of stock show what the measurement makes of equal jobs.

Ours runs as installed (bootstrap, metrics, stderr relay, hang watch, stragglers, standbys) with all that shows what a job does:
events_file, metrics_discovery_dir, goodput, and metrics that are scraped in every SCRAPED-th round. What it does by
the clock it does half as often again as usual, since the clock goes on while it stands still: the result is rather too bad.

CPU of a step: what all processes of a job use for one. Agent's CPU: of the agent's own process; beside it: of its helpers
(reaper, stderr relay, standbys); shares of a core, by the clock. Memory of a standby: its proportional set size, which
counts the pages that standbys and their server share once.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import free_port

SCRIPT = Path(__file__).parent.parent / "entrypoints" / "train_fsdp.py"
LEAST_RATIO = 0.995  # of our throughput to stock's
SIDES: Mapping[str, str] = {"ours": "warm", "stock": "stock", "again": "stock"}  # names of jobs.AGENTS
TITLES = {"ours": "ours", "stock": "stock", "again": "stock, once more"}
OURS = 4  # turns in a row: what our agent does by the clock, it does once more while each of the others has one
MAX_CPU = 0.01  # of a core, of the agent's own process
BLOCK = 10  # rounds
SCRAPED = 3
WARM_UP_S = 15.0  # of each job alone: its standbys import
WORKERS = 2
TIMEOUT_S = 60.0  # of a job's first step
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds that this process, without its children, has used so far; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK_S


@dataclass(frozen=True)
class Look:
    """CPU seconds that a job has used so far: its agent, helpers, and workers with what those started."""

    agent: float
    beside: float
    workers: float


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def settings(side: str, directory: str, port: int) -> dict[str, str]:
    """Return what a side sets of our agent, in variables."""
    if side != "ours":
        return {}
    files = {"EVENTS_FILE": "events", "METRICS_DISCOVERY_DIR": "sd"}
    paths = {f"ELASTIC_EXT_{name}": str(Path(directory, file)) for name, file in files.items()}
    return {"ELASTIC_EXT_METRICS_PORT": str(port), **paths}


class Job:
    """A job that runs only in its turns."""

    def __init__(self, side: str, process: subprocess.Popen[str], errors: IO[str], port: int):
        self.side = side
        self.port = port
        self.steps = 0
        self._process = process
        self._errors = errors
        self._began = threading.Event()
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "tokens/s" in line:
                self.steps += 1
                self._began.set()

    def begin(self, seconds: float) -> None:
        """Run alone until the first step, and for some seconds more. Raises RuntimeError: there is no step."""
        if not self._began.wait(TIMEOUT_S):
            raise self._failed(f"no step within {TIMEOUT_S:.0f} s")
        self._run_for(seconds)
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float, scraped: bool) -> tuple[int, float]:
        """Run for some seconds. Returns the number of steps, and the seconds that it took. Raises RuntimeError: it has ended."""
        before, began = self.steps, time.monotonic()
        self._signal(signal.SIGCONT)
        if scraped:
            scrape(self.port)
        self._run_for(began + seconds - time.monotonic())
        self._signal(signal.SIGSTOP)
        return self.steps - before, time.monotonic() - began

    def look(self) -> Look:
        beside = workers = 0.0
        for pid in jobs.descendants(self._process.pid):
            try:
                is_worker = b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            workers, beside = (workers + cpu_s(pid), beside) if is_worker else (workers, beside + cpu_s(pid))
        return Look(cpu_s(self._process.pid), beside, workers)

    def standby_mb(self) -> float | None:
        """Memory of a standby; None: there are none. The job must be running."""
        seen = scrape(self.port)
        count = seen.get("elastic_ext_standbys", 0.0)
        return seen["elastic_ext_standby_memory_bytes"] / count / 2**20 if count else None

    def resumed(self) -> None:
        self._signal(signal.SIGCONT)

    def _run_for(self, seconds: float) -> None:
        try:
            code = self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return
        raise self._failed(f"exit code {code}, expected it to run")

    def _failed(self, how: str) -> RuntimeError:
        self._errors.seek(0)
        return RuntimeError(f"{self.side}: {how}\n{self._errors.read()[-jobs.TAIL :]}")

    def _signal(self, sig: signal.Signals) -> None:
        """The agent is stopped first and resumed last: it never sees its workers stand still."""
        pids = [self._process.pid, *jobs.descendants(self._process.pid)]
        for pid in pids if sig == signal.SIGSTOP else reversed(pids):
            try:
                os.kill(pid, sig)
            except ProcessLookupError:  # one of those that an agent starts for a moment
                continue


@contextmanager
def running(side: str) -> Iterator[Job]:
    """A job of a side, killed at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory, open(Path(directory, "errors"), "w+") as errors:
        torchrun = (sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS[SIDES[side]], f"--nproc-per-node={WORKERS}")
        saves = ("--checkpoint-dir", str(Path(directory, "checkpoints")), "--save-every=100000000")
        command = [*torchrun, str(SCRIPT), *saves, "--log-every=1", "--epochs=1000000", "--max-steps=100000000"]
        env = jobs.environment(**settings(side, directory, port))
        process = subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield Job(side, process, errors, port)
        finally:
            jobs.kill_whole(process.pid)
            process.wait()


@dataclass(frozen=True)
class Turns:
    """What the jobs did in a block of rounds: steps and seconds of each side."""

    steps: Mapping[str, int]
    seconds: Mapping[str, float]

    def rate(self, side: str) -> float:
        return self.steps[side] / self.seconds[side]


def block(started: Sequence[Job], rounds: int, turn_s: float) -> Turns:
    """Let each job run in turns. In each round another one begins."""
    steps, seconds = dict.fromkeys(SIDES, 0), dict.fromkeys(SIDES, 0.0)
    for number in range(rounds):
        first = number % len(started)
        for job in [*started[first:], *started[:first]]:
            is_ours = job.side == "ours"
            done, took_s = job.turn(OURS * turn_s if is_ours else turn_s, scraped=is_ours and number % SCRAPED == 0)
            steps[job.side] += done
            seconds[job.side] += took_s
    return Turns(steps, seconds)


def mean_of(ratios: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of ratios, and its standard error; None: one alone does not show it."""
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return statistics.fmean(ratios), error


@dataclass(frozen=True)
class Use:
    """What a side used while it was measured.

    steps_s: steps in a second of its turns. step_cpu_ms: CPU milliseconds of all processes for a step. agent_cpu, beside_cpu:
    shares of a core, by the clock. standby_mb: memory of a standby; None: there are none.
    """

    steps_s: float
    step_cpu_ms: float
    agent_cpu: float
    beside_cpu: float
    standby_mb: float | None


def use(job: Job, began: Look, steps: int, turns_s: float, took_s: float) -> Use:
    """began, steps: when the measurement began. turns_s: of this job's turns. took_s: by the clock."""
    ended, done = job.look(), job.steps - steps
    parts = [getattr(ended, of) - getattr(began, of) for of in ("agent", "beside", "workers")]
    job.resumed()
    memory = job.standby_mb() if job.side == "ours" else None
    return Use(done / turns_s, 1000 * sum(parts) / done, parts[0] / took_s, parts[1] / took_s, memory)


def measured(rounds: int, turn_s: float) -> tuple[list[Turns], dict[str, Use]]:
    """Return the blocks, and what each side used. Raises RuntimeError: a job has ended, or does not begin."""
    jobs.adopt_orphans()
    with ExitStack() as stack:
        started = []
        for each in SIDES:
            started.append(stack.enter_context(running(each)))
            started[-1].begin(WARM_UP_S)
        block(started, 1, turn_s)
        before, began = [(job.look(), job.steps) for job in started], time.monotonic()
        blocks = []
        for _ in range(max(1, rounds // BLOCK)):
            blocks.append(block(started, min(BLOCK, rounds), turn_s))
            print(*(f"{side}: {blocks[-1].rate(side):.2f} steps/s" for side in SIDES), sep=", ", file=sys.stderr, flush=True)
        took_s = time.monotonic() - began
        turns_s = [sum(each.seconds[job.side] for each in blocks) for job in started]
        found = [use(job, *then, its_s, took_s) for job, then, its_s in zip(started, before, turns_s, strict=True)]
    return blocks, dict(zip(SIDES, found, strict=True))


def ratios_to(other: str, blocks: Sequence[Turns], of: str = "ours") -> list[float]:
    return [each.rate(of) / each.rate(other) for each in blocks]


def draw(figure: Any, blocks: Sequence[Mapping[str, float]]) -> None:
    axes = figure.subplots()
    axes.boxplot([[each[side] for each in blocks] for side in SIDES], tick_labels=[TITLES[side] for side in SIDES])
    axes.set(ylabel=f"steps/s, in {BLOCK} rounds", ylim=(0, None), title="Throughput of train_fsdp.py")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=380)
    parser.add_argument("--turn", type=float, default=0.5, help="seconds of a turn; ours has OURS of them in a row")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    blocks, used = measured(args.rounds, args.turn)
    both = [(one + other) / 2 for one, other in zip(ratios_to("stock", blocks), ratios_to("again", blocks), strict=True)]
    ratio, error = mean_of(both)
    noise, noise_error = mean_of(ratios_to("again", blocks, of="stock"))
    record = {
        "benchmark": "overhead",
        "sides": {side: {name: measure.rounded(value, 5) for name, value in asdict(used[side]).items()} for side in SIDES},
        "ratio": measure.rounded(ratio, 4),
        "error": measure.rounded(error, 4),
        "noise": measure.rounded(noise, 4),
        "noise_error": measure.rounded(noise_error, 4),
        "blocks": [{side: measure.rounded(each.rate(side), 3) for side in SIDES} for each in blocks],
        "kept": ratio >= LEAST_RATIO and used["ours"].agent_cpu <= MAX_CPU,
        "machine": machine,
    }

    def row(title: str, of: str, digits: int, times: float = 1.0) -> list[str]:
        values = [getattr(used[side], of) for side in SIDES]
        return [title, *(measure.shown(None if value is None else times * value, digits) for value in values)]

    shown = [
        row("steps/s", "steps_s", 2),
        ["ours / stock", measure.shown(ratio, 4), "-", "-"],
        ["standard error of that", measure.shown(error, 4), "-", "-"],
        ["stock / stock, once more", "-", measure.shown(noise, 4), "-"],
        ["standard error of that", "-", measure.shown(noise_error, 4), "-"],
        row("CPU of a step (ms)", "step_cpu_ms", 2),
        row("agent's CPU (% of a core)", "agent_cpu", 2, 100),
        row("beside it (% of a core)", "beside_cpu", 2, 100),
        row("memory of a standby (MB)", "standby_mb", 0),
    ]
    text = measure.table(["", *(TITLES[side] for side in SIDES)], shown)
    measure.publish(args.results, record, text, lambda figure: draw(figure, record["blocks"]))
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
