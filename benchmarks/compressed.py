"""Does the simulation predict what real jobs lose to failures? One schedule of failures, for a real job and in virtual time.

    python benchmarks/compressed.py [--nodes 3] [--failures 16] [--gap 20] [--calibrate 2] [--step-ms 500] [--save-every 6]
                                    [--seed 1]

Real: stock torchrun with the plug-in, etcd, a gloo worker on each node (workers/scheduled_job.py) that saves with the
Checkpointer, another node that waits as a spare, and a new one for each that leaves. A restart takes seconds, with standby=off.
Time is compressed: a failure comes --gap seconds after training has begun again, on average (exponential, plus half a second).

Two jobs run. The first has --calibrate failures of each kind: the medians of what it takes for a step, a save and a restart
go into the simulation (scale/scheduled.py). The second has the schedule that the simulation is to predict, drawn with --seed.
The promise: ETTR within 10 %, and the same restarts and decisions.

ETTR is the share of the time that is new steps, from the first step of the job on.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jobs
import measure
from memory_tier import Events, job_folder, tail
from scale import scheduled
from scale.job import LOST, NEW, SAVES
from scale.scheduled import BAD_NODE, KILLED, LOOKS, NODE_GONE, RAISES, RESTART, Measured, Planned, Scheduled

sys.path.insert(0, str(Path(__file__).parent.parent))
from elastic_ext.etcd import EtcdClient
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.rendezvous import running_job
from tests.etcd_server import EtcdServer

WORKER = Path(__file__).with_name("workers") / "scheduled_job.py"
SPARES = 1
LEAST_GAP_S = 0.5
CALIBRATION_GAP_S = 8.0
START_S = 300.0  # limit for a round
OFF = 0.1  # the promise
SIGNALS = {KILLED: signal.SIGKILL, RAISES: signal.SIGUSR1, BAD_NODE: signal.SIGUSR2}
LEAVES = (BAD_NODE, NODE_GONE)


@dataclass
class Round:
    """What a round of workers has reported. workers: their "resumed", by rank. steps, saved: those of rank 0."""

    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)

    def began_s(self, step_s: float) -> float:
        return self.steps[0]["ns"] / 1e9 - step_s


@dataclass(frozen=True)
class Played:
    """A real job that went through a schedule. failed_s: moments of its failures, ended_s: the end (monotonic)."""

    schedule: Sequence[Planned]
    rounds: Sequence[Round]
    failed_s: Sequence[float]
    ended_s: float
    verdicts: Sequence[JobVerdict]

    def steps_s(self) -> list[float]:
        """Return the time of each step but the first ones of rounds."""
        pairs = [pair for each in self.rounds for pair in zip(each.steps, each.steps[1:], strict=False)]
        return [(later["ns"] - earlier["ns"]) / 1e9 for earlier, later in pairs]

    def ready_s(self) -> list[float]:
        """Return how long after each save's step rank 0 saw that it was committed."""
        found = []
        for each in self.rounds:
            done = {step["step"]: step["ns"] for step in each.steps}
            found += [(saved["ns"] - done[saved["step"]]) / 1e9 for saved in each.saved if saved["step"] in done]
        return found

    def restarts_s(self, step_s: float) -> list[float]:
        began = [each.began_s(step_s) for each in self.rounds[1:]]
        return [at - failed for at, failed in zip(began, self.failed_s, strict=True)]

    def lost_steps(self) -> int:
        pairs = zip(self.rounds, self.rounds[1:], strict=False)
        return sum(earlier.steps[-1]["step"] - later.workers[0]["step"] for earlier, later in pairs)

    def account(self, step_s: float) -> dict[str, float]:
        """Return where the time went, in seconds."""
        whole_s = self.ended_s - self.rounds[0].began_s(step_s)
        new_s = (self.rounds[-1].steps[-1]["step"] - self.rounds[0].workers[0]["step"]) * step_s
        lost_s, restart_s = self.lost_steps() * step_s, sum(self.restarts_s(step_s))
        return {NEW: new_s, LOST: lost_s, RESTART: restart_s, SAVES: whole_s - new_s - lost_s - restart_s}


class RealJob:
    """A real job, in a folder of its own and on an etcd."""

    def __init__(self, folder: Path, events: Events, endpoint: str, args: argparse.Namespace) -> None:
        self._folder, self._events, self._endpoint = folder, events, endpoint
        self._nodes, self._step_s = args.nodes, args.step_ms / 1000
        self._script = [str(WORKER), events.path, str(args.step_ms), str(args.save_every)]
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._taken = 0
        self.rounds: list[Round] = []
        (folder / "checkpoints").mkdir()
        for _ in range(self._nodes + SPARES):
            self._start()

    def _start(self) -> None:
        node, least = f"n{len(self._agents)}", self._nodes
        where = ("--rdzv-backend=ext_etcd", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=job", f"--nnodes={least}:{least}")
        options = ("--nproc-per-node=1", "--max-restarts=1000", *self._script)
        settings = {"NODE_NAME": node, "CHECKPOINT_DIR": str(self._folder / "checkpoints"), "STANDBY": "off"}
        env = jobs.environment(NODE=node, **{f"ELASTIC_EXT_{name}": value for name, value in settings.items()})
        with open(self._folder / f"output.{node}", "wb") as output:
            self._agents[node] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *where, *options],
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def play(self, schedule: Sequence[Planned], tail_s: float) -> Played:
        """Go through a schedule, and train for `tail_s` after it."""
        failed_s = []
        for number, planned in enumerate(schedule, 1):
            self._trains_until(number, planned.gap_s)
            failed_s.append(time.monotonic())
            self._fail(planned)
            print(f"failure {number} of {len(schedule)}: {planned}", file=sys.stderr, flush=True)
        ended_s = self._trains_until(len(schedule) + 1, tail_s)
        with EtcdClient(self._endpoint) as client:
            verdicts = running_job.read(client, "job").ledger.verdicts
        return Played(schedule, self.rounds, failed_s, ended_s, verdicts)

    def _trains_until(self, rounds: int, seconds: float) -> float:
        """Wait until this round has trained for so long, and return the moment."""
        if not self._receive(lambda: len(self.rounds) == rounds and bool(self.rounds[-1].steps), START_S):
            raise SystemExit(f"round {rounds} does not train\n{tail(self._folder)}")
        until_s = self.rounds[-1].began_s(self._step_s) + seconds
        self._receive(lambda: False, until_s - time.monotonic())
        return until_s

    def _receive(self, enough: Callable[[], bool], limit_s: float) -> bool:
        def sorted_in() -> bool:
            for each in self._events.all[self._taken :]:
                if each["event"] == "resumed":
                    if not self.rounds or each["rank"] in self.rounds[-1].workers:
                        self.rounds.append(Round())
                    self.rounds[-1].workers[each["rank"]] = each
                elif each["pid"] == self.rounds[-1].workers.get(0, {}).get("pid"):
                    (self.rounds[-1].saved if each["event"] == "saved" else self.rounds[-1].steps).append(each)
            self._taken = len(self._events.all)
            return enough()

        return self._events.until(sorted_in, limit_s)

    def _fail(self, planned: Planned) -> None:
        victim = self.rounds[-1].workers[planned.victim]
        if planned.kind == NODE_GONE:
            jobs.kill_whole(self._agents[victim["node"]].pid)
        else:
            os.kill(victim["pid"], SIGNALS[planned.kind])
        if planned.kind in LEAVES:
            self._start()


def real(schedule: Sequence[Planned], tail_s: float, args: argparse.Namespace) -> Played:
    """Play a schedule. Nothing of the job survives this."""
    with job_folder() as (folder, events), EtcdServer(folder / "etcd") as server:
        return RealJob(folder, events, server.endpoint, args).play(schedule, tail_s)


def measured(calibration: Played, save_every: int) -> Measured:
    """Return what the simulation is given."""
    steps_s = calibration.steps_s()
    step_s, mean_s = statistics.median(steps_s), statistics.mean(steps_s)
    restarts: dict[str, list[float]] = {}
    for planned, restart_s in zip(calibration.schedule, calibration.restarts_s(step_s), strict=True):
        restarts.setdefault(planned.kind, []).append(restart_s)
    medians = {kind: statistics.median(each) for kind, each in restarts.items()}
    ready_s = statistics.median(calibration.ready_s())
    return Measured(step_s, max(0.0, 1 - step_s / mean_s), save_every * mean_s, ready_s, medians)


def schedules(args: argparse.Namespace) -> tuple[list[Planned], list[Planned]]:
    """Return the schedule for the measurement of the times, and the one to predict."""
    drawn = random.Random(args.seed)
    first = [Planned(CALIBRATION_GAP_S, kind, n % args.nodes) for n in range(args.calibrate) for kind in LOOKS]
    gaps_s = [LEAST_GAP_S + drawn.expovariate(1 / args.gap) for _ in range(args.failures)]
    return first, [Planned(gap_s, drawn.choice(list(LOOKS)), drawn.randrange(args.nodes)) for gap_s in gaps_s]


def compared(played: Played, simulated: Scheduled, step_s: float) -> dict[str, Any]:
    ours, theirs = played.account(step_s), simulated.account.seconds
    ettr, predicted = ours[NEW] / sum(ours.values()), simulated.account.ettr
    made, expected = scheduled.decisions(played.verdicts), scheduled.decisions(simulated.verdicts)
    same = sum(one == other for one, other in zip(made, expected, strict=False))
    restarts = len(played.rounds) - 1, simulated.account.restarts
    return {
        "ettr": [round(ettr, 4), round(predicted, 4)],
        "off": round(predicted / ettr - 1, 4),
        "restarts": list(restarts),
        "decisions": [len(made), len(expected)],
        "same_decisions": same,
        "seconds": {name: [round(ours[name], 1), round(theirs[name], 1)] for name in ours},
        "kept": abs(predicted / ettr - 1) <= OFF and restarts[0] == restarts[1] and same == len(made) == len(expected),
    }


def text_of(found: Mapping[str, Any], times: Measured) -> str:
    rows = [["ETTR", *(f"{100 * each:.1f} %" for each in found["ettr"])]]
    rows += [["restarts", *map(str, found["restarts"])], ["decisions on failures of workers", *map(str, found["decisions"])]]
    rows += [[f"{name}, s", *(f"{each:.1f}" for each in pair)] for name, pair in found["seconds"].items()]
    taken = [["a step", f"{times.step_s:.3f}"], ["until a save can be used", f"{times.ready_s:.3f}"]]
    taken += [[f"until it trains again: {kind}", f"{seconds:.2f}"] for kind, seconds in times.restart_s.items()]
    said = f"Off by {100 * found['off']:+.1f} %; {found['same_decisions']} of {found['decisions'][0]} decisions are the same."
    header = ["one job under one schedule", "real", "simulated"]
    return "\n\n".join([measure.table(header, rows), said, measure.table(["measured before", "s"], taken)])


def draw(figure: Any, found: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    left = [0.0, 0.0]
    for name, pair in found["seconds"].items():
        axes.barh(["real", "simulated"], pair, left=left, label=name)
        left = [begun + more for begun, more in zip(left, pair, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="s", title="Where the time of a job goes")
    axes.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3, help="besides the spares")
    parser.add_argument("--failures", type=int, default=16, help="of the job to predict")
    parser.add_argument("--gap", type=float, default=20.0, help="mean seconds of training between two failures")
    parser.add_argument("--calibrate", type=int, default=2, help="failures of each kind to measure the times")
    parser.add_argument("--step-ms", type=int, default=500, help="of a step, in milliseconds")
    parser.add_argument("--save-every", type=int, default=6, help="steps from one save to the next")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # nothing of a job is left
    machine = measure.machine()
    first, schedule = schedules(args)
    times = measured(real(first, CALIBRATION_GAP_S, args), args.save_every)
    played = real(schedule, args.gap, args)
    simulated = Scheduled(args.nodes, schedule, args.gap, times)
    simulated.play()
    found = compared(played, simulated, times.step_s)
    record = {
        "benchmark": "compressed",
        **found,
        "restart_s": {kind: round(seconds, 3) for kind, seconds in times.restart_s.items()},
        "step_s": round(times.step_s, 4),
        "ready_s": round(times.ready_s, 4),
        "nodes": args.nodes,
        "failures": args.failures,
        "seed": args.seed,
        "machine": machine,
    }
    measure.publish(args.results, record, text_of(found, times), lambda figure: draw(figure, found))
    return 0 if found["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
