"""Is a flipped bit in a replica found, on the right node, and does the job end as if there had been none? What does looking cost?

    python benchmarks/integrity.py [--rows parameter-3,state-3,parameter-2] [--repeat 3] [--every 100] [--mb 10,100]

Each row is a job of DDP over gloo on this machine, a node for each rank and a spare one: tests/scripts/replicated_job.py, with a
checkpoint after every 20 steps of 20 ms, and `integrity_every` of --every. Once, half-way to a comparison, a bit of rank 1 flips.
The table shows at which comparison that was found, seconds after the flip; whether the node of rank 1 left (of two replicas: both
were named, and the job restarted); from which step the job went on; and whether its last loss is, to the bit, that of stock
torchrun without a flip. Stock torchrun has no such comparison.

The cost: CPU time of one hash of all parameters of a model and of Adam's state, beside that of a training step of linear layers
on a batch of 32; one process, one thread, no agent. By `torch.hash_tensor`, and by the sum that takes its place where torch has
none. The share is that of one hash in --every steps. The thread also writes a small file for each; the agents do the rest.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jobs
import measure
import torch

from elastic_ext.features.integrity.worker import PARAMETER, ReplicaHashes

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.embedded_server import EmbeddedServer

SCRIPT = Path(__file__).parent.parent / "tests" / "scripts" / "replicated_job.py"
STEP_S = 0.02
TIMEOUT_S = 240.0
BATCH = 32
COPIES = 3  # a parameter, and Adam's two averages
AIM = 0.005  # of the time of training


@dataclass(frozen=True)
class Row:
    title: str
    ranks: int
    what: str


ROWS = {
    "parameter-3": Row("a parameter, one replica of 3", 3, "parameter"),
    "state-3": Row("Adam's state, one replica of 3", 3, "state"),
    "parameter-2": Row("a parameter, one replica of 2", 2, "parameter"),
}


@dataclass(frozen=True)
class Try:
    """One job.

    Attributes:
        found_at: step of the comparison; None: the flip was not found. found_s: since the flip.
        right: the right node was named.
        resumed_at: step from which the job went on.
        loss: the last one, to the bit; "": it did not train to its end.
    """

    found_at: int | None
    found_s: float | None
    right: bool
    resumed_at: int | None
    loss: str


class Job:
    """The plan of a row's jobs."""

    def __init__(self, row: Row, every: int) -> None:
        self._row, self._every = row, every
        self.flip_at = every + every // 2

    def undisturbed(self) -> str:
        """Return the last loss under stock torchrun, without a flip."""
        with tempfile.TemporaryDirectory() as directory:
            command = [*self._torchrun("--standalone", f"--nproc-per-node={self._row.ranks}"), *self._script(directory)]
            return _loss(self._run([command], directory, flips=False))

    def ours(self) -> Try:
        with tempfile.TemporaryDirectory() as directory, EmbeddedServer() as server:
            folder, nodes = Path(directory), self._row.ranks
            where = [*server.options, f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=integrity", f"--nnodes={nodes}"]
            conf = f"--rdzv-conf=integrity_every={self._every},checkpoint_dir={folder / 'checkpoints'}"
            torchrun = [*self._torchrun(*where, "--nproc-per-node=1", conf), *self._script(directory)]
            names = [f"n{number}" for number in range(nodes + 1)]  # with the spare
            commands = [["env", f"NODE={name}", f"ELASTIC_EXT_NODE_NAME={name}", *torchrun] for name in names]
            variables = {"ELASTIC_EXT_EVENTS_FILE": str(folder / "events"), "ELASTIC_EXT_STANDBY": "off"}
            output = self._run(commands, directory, True, **variables)
            events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        return outcome(output, events, self._row)

    def _torchrun(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *options]

    def _script(self, directory: str) -> list[str]:
        (Path(directory) / "checkpoints").mkdir()
        return [str(SCRIPT), directory, "ddp"]

    def _run(self, commands: Sequence[list[str]], directory: str, flips: bool, **variables: str) -> str:
        """Return what they print."""
        flip = f"0 1 {self.flip_at} {self._row.what}" if flips else ""
        env = jobs.environment(STEPS=str(4 * self._every), STEP_S=str(STEP_S), FLIP=flip, **variables)
        path = Path(directory, "output")
        with open(path, "w", errors="replace") as file:
            jobs.run_all(commands, directory, env, file, TIMEOUT_S)
        return path.read_text(errors="replace")


def _loss(output: str) -> str:
    found = set(re.findall(r"loss (\S+)", output))
    return found.pop() if len(found) == 1 else ""


def outcome(output: str, events: Sequence[dict[str, Any]], row: Row) -> Try:
    """Judge one job by what its workers printed, and its agents' events."""
    flipped, bad = re.search(r"a bit flips at (\S+)", output), re.search(r"rank 1 on (\S+) attempt 0", output)
    over = next((each for each in events if each["event"] == "round_over" and each["cause"] == "differs"), None)
    verdict = next((each for each in events if each["event"] == "decision" and each["rule"] == "replicas-differ"), None)
    resumed = set(re.findall(r"attempt 1 from step (\d+)", output))
    if flipped is None or bad is None or over is None or verdict is None:
        return Try(None, None, False, None, _loss(output))
    step = re.search(r"after step (\d+) of this round", over["reason"])
    if row.ranks > 2:
        right = (verdict["decision"], verdict["culprit_host"]) == ("replace_node", bad[1])
    else:
        hosts = set(re.findall(r"rank \d on (\S+) attempt 0", output))
        right = verdict["decision"] == "restart" and all(host in verdict["reason"] for host in hosts)
    found_s = over["monotonic"] - float(flipped[1])
    resumed_at = int(resumed.pop()) if len(resumed) == 1 else None
    return Try(int(step[1]) if step else None, round(found_s, 2), right, resumed_at, _loss(output))


def flips(name: str, losses: dict[int, str], repeat: int, every: int) -> dict[str, Any]:
    """Run the tries of a row. losses: the undisturbed ones so far, by the number of ranks."""
    row, tries = ROWS[name], []
    job = Job(row, every)
    undisturbed = losses[row.ranks] = losses.get(row.ranks) or job.undisturbed()
    for _ in range(repeat):
        tries.append(job.ours())
        print(name, tries[-1], file=sys.stderr, flush=True)
    good = [each for each in tries if each.right and each.loss == undisturbed != ""]
    return {
        "row": name,
        "flip_at": job.flip_at,
        "tries": [asdict(each) for each in tries],
        "good": len(good),
        "undisturbed": undisturbed,
        "median_s": measure.rounded(measure.median([each.found_s for each in tries if each.found_s is not None])),
        "kept": len(good) == repeat and all(is_in_time(each, job.flip_at, every) for each in tries),
    }


def is_in_time(each: Try, flip_at: int, every: int) -> bool:
    """Return whether the flip was found at the next comparison, and the job went on from before it."""
    last_equal = flip_at // every * every
    return each.found_at == last_equal + every and each.resumed_at is not None and each.resumed_at <= last_equal


# The cost.


class Training:
    """mb: megabytes of parameters and optimizer state."""

    def __init__(self, mb: int) -> None:
        width = 1024 if mb >= 50 else 256
        layers = max(1, round(mb * 1e6 / COPIES / 4 / (width * width + width)))
        self._model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self._data = torch.randn(BATCH, width)
        self.step()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._data).square().mean().backward()
        self._optimizer.step()

    def tensors(self) -> list[tuple[str, Any]]:
        state = self._optimizer.state
        return [item for each in self._model.parameters() for item in [(PARAMETER, each), *sorted(state[each].items())]]


def seconds(do: Callable[[], object], repeat: int) -> float:
    """Return the median CPU seconds: of one thread, that is the time on a machine with nothing else to do."""
    do()
    found = []
    for _ in range(repeat):
        began = time.process_time()
        do()
        found.append(time.process_time() - began)
    return measure.median(found) or 0.0


def cost(mb: int, repeat: int, every: int) -> dict[str, Any]:
    training = Training(mb)
    tensors = training.tensors()
    hashes = ReplicaHashes(every, lambda text: None, lambda line: None)
    step_s, hash_s = seconds(training.step, repeat), None
    if hasattr(torch, "hash_tensor"):
        hash_s = seconds(lambda: hashes._value(tensors), repeat)
    hashes.sums = True
    sum_s = seconds(lambda: hashes._value(tensors), repeat)
    return {
        "mb": round(sum(each.nbytes for _, each in tensors) / 1e6),
        "tensors": len(tensors),
        "step_ms": measure.rounded(step_s * 1e3, 2),
        "hash_ms": measure.rounded(None if hash_s is None else hash_s * 1e3, 2),
        "sum_ms": measure.rounded(sum_s * 1e3, 2),
        "share": measure.rounded((sum_s if hash_s is None else hash_s) / every / step_s, 5),
    }


def shown(record: dict[str, Any]) -> str:
    parts = []
    if record["rows"]:
        header = ["a bit flips in", "right node", "at step", "found at", "seconds", "on from", "loss as undisturbed"]
        cells = []
        for row in record["rows"]:
            tries = row["tries"]
            steps = [", ".join(sorted({str(each[key]) for each in tries})) for key in ("found_at", "resumed_at")]
            same = sum(each["loss"] == row["undisturbed"] != "" for each in tries)
            right = f"{sum(each['right'] for each in tries)} of {len(tries)}"
            seconds_ = measure.shown(row["median_s"], 1)
            title, at = ROWS[row["row"]].title, str(row["flip_at"])
            cells.append([title, right, at, steps[0], seconds_, steps[1], f"{same} of {len(tries)}"])
        parts.append(measure.table(header, cells))
    if record["cost"]:
        header = ["state", "step (ms)", "hash_tensor (ms)", "sum (ms)", f"of training, every {record['every']} steps"]
        cells = [
            [
                f"{each['mb']} MB",
                *(measure.shown(each[key], 1) for key in ("step_ms", "hash_ms", "sum_ms")),
                f"{100 * each['share']:.2f} %",
            ]
            for each in record["cost"]
        ]
        parts.append(measure.table(header, cells))
    return "\n\n".join(parts)


def draw(figure: Any, record: dict[str, Any]) -> None:
    axes, rows = figure.subplots(), record["cost"]
    for key, label in (("step_ms", "one training step"), ("hash_ms", "one hash_tensor"), ("sum_ms", "one sum")):
        axes.plot([each["mb"] for each in rows], [each[key] or 0.0 for each in rows], marker="o", label=label)
    axes.set(xlabel="MB of parameters and optimizer state", ylabel="milliseconds of one core", ylim=(0, None))
    axes.set(title="The hash of a rank's replicas")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s; or empty")
    parser.add_argument("--repeat", type=int, default=3, help="number of tries of each row")
    parser.add_argument("--every", type=int, default=100, help="steps from one hash to the next, a multiple of 20")
    parser.add_argument("--mb", default="10,100", help="megabytes of parameters and optimizer state, several by commas; or empty")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    wanted = list(filter(None, args.rows.split(",")))
    if unknown := [row for row in wanted if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leave through the with blocks
    machine = measure.machine()
    jobs.adopt_orphans()
    losses: dict[int, str] = {}
    rows = [flips(name, losses, args.repeat, args.every) for name in wanted]
    torch.set_num_threads(1)
    costs = [cost(int(mb), max(5, args.repeat), args.every) for mb in filter(None, args.mb.split(","))]
    record: dict[str, Any] = {"benchmark": "integrity", "every": args.every, "rows": rows, "cost": costs, "aim": AIM}
    record["kept"] = all(row["kept"] for row in rows) and all(each["share"] <= AIM for each in costs)
    record |= {"repeat": args.repeat, "machine": machine}
    measure.publish(args.results, record, shown(record), lambda figure: draw(figure, record))
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
