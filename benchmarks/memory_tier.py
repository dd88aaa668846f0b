"""What do copies in memory cost, and what does a failure cost with them?

    python benchmarks/memory_tier.py [--parts cost,failure,rates] [--mb 100,1000] [--ways none,default]
                                     [--faults worker,spare,fewer,node] [--repeat 3] [--steps 150] [--step-ms 50] [--device cpu]

All of it on this machine, over loopback, with the state on the CPU or (--device=cuda) on a GPU. Each part runs its ways in turn.

cost      One worker under an agent trains, and its state is saved in one of these ways. Throughput: its steps per
          second, as a share of those without any save. Stall: the median time until the call returns.
failure   Two and three agents with a worker each, the state sharded over them, and etcd (lease_ttl=2). A worker, or all processes
          of a node, get SIGKILL. The node's place is taken by a spare that has waited (spare), by a new agent that is started at
          once (node), or by none: the others share its part of the state (fewer). The time until all ranks have done the step
          after the last one before the fault, and the steps that were done twice. With copies in memory after each step, and
          with elastic_ext's checkpoints on disk every 20 steps; warm standbys on.
rates     Gigabytes per second: out of the state into the buffer, and back with its checksum, as a share of a plain copy in
          memory; from a worker to one of another node over gloo, with a checksum, as a share of a plain socket.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs
import measure
import torch
import torch.distributed as dist
import torch.multiprocessing
import xxhash

sys.path.append(str(Path(__file__).with_name("workers")))
from standby_count import await_standbys

sys.path.insert(0, str(Path(__file__).parent.parent))
from elastic_ext.checkpoints.memory.mirror import PIECE
from elastic_ext.checkpoints.memory.part import create, open_mapped
from elastic_ext.checkpoints.ranks import Ranks
from elastic_ext.checkpoints.storage import open_storage
from tests.etcd_server import EtcdServer

WORKER = Path(__file__).with_name("workers") / "memory_job.py"
PARTS = ("cost", "failure", "rates")
# (name for --ways, way, mode of the worker, memory_every)
WAYS = (
    ("none", "no saves", "none", 0),
    ("1", "memory, every step", "memory", 1),
    ("10", "memory, every 10 steps", "memory", 10),
    ("default", "memory, default", "memory", None),
    ("disk", "elastic_ext to disk, every 10 steps", "disk:10", 0),
    ("async", "dcp.async_save, every 10 steps", "async:10", 0),
    ("torch", "torch.save, every 10 steps", "torch:10", 0),
)
FAULTS = ("worker", "spare", "fewer", "node")
DISK_EVERY = 20  # steps, in the part "failure"
FAULT_STEP = 50  # of the part "failure"
MEMORY = "/dev/shm"
LIMIT_S = 180.0  # for a job, or a recovery


class Events:
    """Receives what workers/memory_job.py reports."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.all: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)

    def until(self, enough: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Receive until there is enough; return whether that was in time."""
        deadline = time.monotonic() + limit_s
        while not enough():
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self.all.append(json.loads(self._socket.recv(1 << 16)))
            except TimeoutError:
                return False
        return True

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.all if each["event"] == event]

    def close(self) -> None:
        self._socket.close()


@contextmanager
def job_folder() -> Iterator[tuple[Path, Events]]:
    """A folder for one job. Neither a process of the job nor the memory of a node that was killed whole survives the block."""
    jobs.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="memory_tier_") as name:
        events = Events(Path(name, "events"))
        try:
            yield Path(name), events
        finally:
            jobs.kill_children()
            events.close()


def start(
    folder: Path, node: str, where: list[str], arguments: list[str], every: int | None, **variables: str
) -> subprocess.Popen[bytes]:
    """Start an agent with one worker."""
    command = [
        sys.executable,
        "-m",
        "elastic_ext.agent",
        *where,
        "--nproc-per-node=1",
        "--max-restarts=20",
        str(WORKER),
        *arguments,
    ]
    settings = {
        "NODE": node,
        "ELASTIC_EXT_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "ELASTIC_EXT_MEMORY_EVERY": "" if every is None else str(every),
        "ELASTIC_EXT_MEMORY_LIMIT": "16G",
    }
    (folder / "checkpoints").mkdir(exist_ok=True)
    env = {key: value for key, value in {**jobs.environment(**settings), **variables}.items() if value}
    with open(folder / f"output.{node}", "wb") as output:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def tail(folder: Path) -> str:
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-jobs.TAIL :]}" for path in sorted(folder.glob("output.*"))
    )


# What copies cost.


def cost(mode: str, every: int | None, megabytes: int, step_ms: int, steps: int) -> tuple[float, float, int]:
    """Return (steps per second, seconds of stall, steps from one save to the next) of one job."""
    with job_folder() as (folder, events):
        start(folder, "a", [], [events.path, mode, str(megabytes), str(step_ms), str(steps)], every, ELASTIC_EXT_STANDBY="off")
        if not events.until(lambda: bool(events.of("done"))):
            raise SystemExit(f"{mode}: the job does not end\n{tail(folder)}")
        done, walked = events.of("done")[0], events.of("step")
        skipped = len(walked) // 3  # the first copies allocate memory, and the interval is not known yet
        rate = (len(walked) - skipped) / ((done["ns"] - walked[skipped - 1]["ns"]) / 1e9)
        return rate, done["stall_s"], done["every"]


def measure_cost(sizes: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    ways = [way for name, *way in WAYS if name in ("none", *args.ways.split(","))]
    for megabytes in sizes:
        found: dict[str, list[tuple[float, float, int]]] = {way: [] for way, _, _ in ways}
        for _ in range(args.repeat):
            for way, mode, every in ways:
                found[way].append(cost(mode, every, megabytes, args.step_ms, args.steps))
                print(f"cost, {megabytes} MB, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
        rates = {way: measure.median([rate for rate, _, _ in each]) for way, each in found.items()}
        for way, each in found.items():
            share = measure.ratio(rates[way], rates["no saves"])
            stall_s = measure.rounded(measure.median([stall_s for _, stall_s, _ in each]), 5)
            interval = measure.median([steps for _, _, steps in each])
            record = {"mb": megabytes, "way": way, "throughput": measure.rounded(share), "stall_s": stall_s, "every": interval}
            records.append(record)
    return records


# What a failure costs.


@dataclass(frozen=True)
class Loss:
    """What one fault has cost. seconds: until all are past the last step before it. steps: that were done twice."""

    seconds: float
    steps: int


def fail(fault: str, nodes: int, tier: str, megabytes: int, step_ms: int) -> Loss:
    mode, every = ("memory", 1) if tier == "memory" else (f"disk:{DISK_EVERY}", 0)
    with ExitStack() as stack:
        folder, events = stack.enter_context(job_folder())
        server = stack.enter_context(EtcdServer(folder / "etcd"))
        least = nodes - (fault == "fewer")
        where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", f"--nnodes={least}:{nodes}"]
        where.append("--rdzv-conf=lease_ttl=2,last_call_timeout=0.5,backoff=0")
        arguments = [events.path, mode, str(megabytes), str(step_ms)]
        agents = {name: start(folder, name, where, arguments, every) for name in "abcd"[: nodes + (fault == "spare")]}
        if not events.until(lambda: any(each["step"] >= FAULT_STEP for each in events.of("step"))):
            raise SystemExit(f"{tier}, {fault}: the job does not train\n{tail(folder)}")
        for agent in agents.values():
            await_standbys(agent.pid, 1)
        events.until(lambda: False, 0.5)  # what they have said meanwhile
        victim = max(events.of("resumed"), key=lambda each: each["rank"])
        killed_ns = time.monotonic_ns()
        if fault == "worker":
            os.kill(victim["pid"], signal.SIGKILL)
        else:
            jobs.kill_whole(agents[victim["node"]].pid)
        if fault == "node":
            start(folder, "new", where, arguments, every)
        old = {each["pid"] for each in events.of("resumed")}

        def past() -> dict[int, int]:
            last = max(each["step"] for each in events.of("step") if each["pid"] in old)
            again: dict[int, int] = {}  # by rank, when it was past that step
            for each in events.of("step"):
                if each["pid"] not in old and each["step"] > last:
                    again.setdefault(each["rank"], each["ns"])
            return again

        if not events.until(lambda: len(past()) == least):
            raise SystemExit(f"{tier}, {fault}: the job does not train again\n{tail(folder)}")
        last = max(each["step"] for each in events.of("step") if each["pid"] in old)
        resumed = next(each["step"] for each in events.of("resumed") if each["pid"] not in old)
        return Loss((max(past().values()) - killed_ns) / 1e9, last - resumed)


def measure_failure(sizes: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for megabytes in sizes:
        for nodes in (int(each) for each in args.nodes.split(",")):
            for fault in args.faults.split(","):
                found: dict[str, list[Loss]] = {"memory": [], "disk": []}
                for _ in range(args.repeat):
                    for tier, each in found.items():
                        each.append(fail(fault, nodes, tier, megabytes, args.step_ms))
                        print(f"failure, {megabytes} MB, {nodes} nodes, {fault}, {tier}: {each[-1]}", file=sys.stderr, flush=True)
                record: dict[str, Any] = {"mb": megabytes, "nodes": nodes, "fault": fault}
                for tier, each in found.items():
                    record[f"{tier}_s"] = measure.rounded(measure.median([loss.seconds for loss in each]))
                    record[f"{tier}_steps"] = max(loss.steps for loss in each)
                records.append({**record, "ratio": measure.rounded(measure.ratio(record["disk_s"], record["memory_s"]), 2)})
    return records


# How fast bytes move.


def seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


def plain_socket(data: memoryview) -> float:
    """Seconds to send these bytes to another thread over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        target = memoryview(bytearray(len(data)))

        def receive() -> None:
            at = 0
            while at < len(target):
                at += receiver.recv_into(target[at:])

        thread = threading.Thread(target=receive)
        began = time.monotonic()
        thread.start()
        sender.sendall(data)
        thread.join()
        receiver.close()
        return time.monotonic() - began


def load(folder: str, target: torch.Tensor) -> None:
    """Load the buffer as a worker does: map it, compare its checksum, copy it into place."""
    mapped = open_mapped(open_storage(folder), "buffer", private=True)
    xxhash.xxh3_64_hexdigest(mapped.bytes)
    target.copy_(mapped.tensor.view(torch.float32))


def send(rank: int, folder: str, size: int, repeat: int) -> None:
    """One of two ranks: rank 0 sends its part as copies are sent. Write how long that takes until the other has checked it."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    ranks, part = Ranks(timedelta(seconds=LIMIT_S)), torch.zeros(size, dtype=torch.uint8)
    took = []
    for _ in range(repeat):
        ranks.all_gather(None)
        began = time.monotonic()
        if rank == 0:
            for piece in part.split(PIECE):
                ranks.send(piece, 1)
        else:
            for work in [ranks.receive(piece, 0) for piece in part.split(PIECE)]:
                work.wait()
            xxhash.xxh3_64_hexdigest(memoryview(part.numpy()))
        ranks.all_gather(None)
        took.append(time.monotonic() - began)
    if rank == 0:
        Path(folder, "took").write_text(json.dumps(took))
    dist.destroy_process_group()


def rates(megabytes: int, repeat: int) -> dict[str, float | None]:
    """Return bytes per second, as medians."""
    size = megabytes * 1_000_000
    found: dict[str, list[float]] = {"copy": [], "socket": [], "out": [], "peer": [], "back": []}
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="memory_tier_") as name:
        source, target = torch.rand(size // 4), torch.empty(size // 4)
        data = memoryview(source.numpy()).cast("B")
        target.copy_(source)
        buffer = create(open_storage(name), "buffer", size)
        kept = buffer.tensor.view(torch.float32)
        for _ in range(repeat + 1):
            found["copy"].append(size / seconds(lambda: target.copy_(source)))
            found["socket"].append(size / plain_socket(data))
            found["out"].append(size / seconds(lambda: kept.copy_(source)))
            found["back"].append(size / seconds(lambda: load(name, target)))
        torch.multiprocessing.spawn(send, (name, size, repeat + 1), 2)
        found["peer"] = [size / each for each in json.loads(Path(name, "took").read_text())]
    return {way: measure.median(each[1:]) for way, each in found.items()}


def measure_rates(sizes: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for megabytes in sizes:
        found = rates(megabytes, args.repeat)
        shares = {f"{way}_of_copy": measure.ratio(found[way], found["copy"]) for way in ("out", "back")}
        shares["peer_of_socket"] = measure.ratio(found["peer"], found["socket"])
        records.append(
            {"mb": megabytes}
            | {f"{way}_gb_s": measure.rounded(each / 1e9 if each else None) for way, each in found.items()}
            | {key: measure.rounded(share, 2) for key, share in shares.items()}
        )
    return records


MEASURES = {"cost": measure_cost, "failure": measure_failure, "rates": measure_rates}


def draw(figure: Any, found: Mapping[str, list[dict[str, Any]]]) -> None:
    left, right = figure.subplots(1, 2)
    for megabytes in dict.fromkeys(record["mb"] for record in found.get("cost", [])):
        of_size = [record for record in found["cost"] if record["mb"] == megabytes]
        left.plot(
            [record["throughput"] for record in of_size], [record["way"] for record in of_size], "o", label=f"{megabytes} MB"
        )
    left.set(title="share of the steps per second without saves")
    for tier in ("memory", "disk"):
        rows = [f"{record['fault']}, {record['nodes']} nodes, {record['mb']} MB" for record in found.get("failure", [])]
        right.plot([record[f"{tier}_s"] for record in found.get("failure", [])], rows, "o", label=tier)
    right.set(title="seconds until past the last step", xlim=(0, None))
    for axes in (left, right):
        axes.invert_yaxis()
        if axes.lines:
            axes.legend(frameon=False)
    figure.set_size_inches(13, 4.5)


def text_of(found: Mapping[str, list[dict[str, Any]]]) -> str:
    tables = []
    for records in found.values():
        header = list(records[0])
        tables.append(
            measure.table(
                [header[1], header[0], *header[2:]],
                [[str(r[header[1]]), str(r[header[0]]), *(str(r[key]) for key in header[2:])] for r in records],
            )
        )
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, from: {', '.join(PARTS)}")
    parser.add_argument("--mb", default="100,1000", help="megabytes of state, comma-separated")
    names = ",".join(name for name, *_ in WAYS)
    parser.add_argument("--ways", default=names, help="to save in the part cost, comma-separated; without any is always one")
    parser.add_argument("--nodes", default="2,3", help="numbers of nodes of the part failure, comma-separated")
    parser.add_argument("--faults", default=",".join(FAULTS), help="of the part failure, comma-separated")
    parser.add_argument("--repeat", type=int, default=3, help="tries of each way")
    parser.add_argument("--steps", type=int, default=150, help="of each job in the part cost")
    parser.add_argument("--step-ms", type=int, default=50, help="about what a step takes, in milliseconds")
    jobs.add_device(parser)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    if unknown := [way for way in args.ways.split(",") if way not in names.split(",")]:
        parser.error(f"unknown {unknown[0]!r}; expected some of {names}")
    if unknown := [fault for fault in args.faults.split(",") if fault not in FAULTS]:
        parser.error(f"unknown {unknown[0]!r}; expected some of {', '.join(FAULTS)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sizes = [int(each) for each in args.mb.split(",")]
    found = {part: MEASURES[part](sizes, args) for part in parts}
    record = {"benchmark": "memory_tier", **found, "repeat": args.repeat, "step_ms": args.step_ms}
    record |= {"device": jobs.device(), "machine": measure.machine()}
    measure.publish(args.results, record, text_of(found), lambda figure: draw(figure, found))


if __name__ == "__main__":
    main()
