"""Groups of ranks that use `Checkpointer`, forked from one process that has imported torch: a group starts at once.

Reads requests from stdin, one JSON object a line, and answers on stdout, one JSON object a line:
    {"task": ..., "world": N, "args": {...}, "env": {...}, "kill_s": delay or null, "kill": [ranks],
     "kill_from": "start" or "load",
     "user": uid, "file_limit": bytes, "nodes": [ranks of each], "memory": directory, "resume": name, "each": [{...}]}
    -> {"stopped": rank, "pid": pid, "others": [pids]} whenever a rank has stopped,
       then {"results": [...]}: what the task returned, or null.
nodes: as which nodes the ranks run. memory: with a directory for each node's copies in memory. resume: the copy to load.
each: variables of each rank.
"""

import codecs
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401  (imported once, before the forks)
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory.own_files import Manifest, StoredFile, encode
from elastic_ext.checkpoints.memory import mirror, pace, part, saver
from elastic_ext.checkpoints.memory.devices import Copying
from elastic_ext.checkpoints.memory.part import Buffers
from elastic_ext.checkpoints.ranks import FailureKind, LocalTier, Ranks, SaveFailure
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.writing import saving
from elastic_ext.checkpoints.writing.checkpointer import Checkpointer, SaveEvent
from elastic_ext.checkpoints.writing.dcp_files import HashedFile
from elastic_ext.checkpoints.writing.loading import TrainingPosition
from elastic_ext.training import progress
from tests.scripts import chaos_training
from tests.scripts.memory_job import kill_when

GRACE_S = 0.7  # between the death of one rank and that of the others
READY = -1  # where rank 0 tells that it has loaded


class Loader:
    """Stands for a data loader: a place of its own on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def state_dict(self) -> dict:
        return {"rank": self.rank, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"] if state["rank"] == self.rank else -1


class Training:
    """A state that tells its step: every parameter, moment, generator and loader is a function of it."""

    def __init__(self, rank: int, world: int, elements: int = 600) -> None:
        self.rank = rank
        self.model: nn.Module = nn.Sequential(nn.Linear(elements // 20, 20), nn.Linear(20, 7))
        if world > 1:
            self.model = fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.loader = Loader(rank)
        self.go_to(0)

    @torch.no_grad()
    def go_to(self, step: int) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            parameter.fill_(step + number / 16)
            zero = torch.zeros_like(parameter)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": zero + step + 0.25,
                "exp_avg_sq": zero + step + 0.5,
            }
        random.seed(f"{step} {self.rank}")
        self.loader.step = step

    @torch.no_grad()
    def wrong(self, step: int, world_changed: bool = False) -> list[str]:
        """What is not as `go_to(step)` leaves it."""
        found = []
        for number, parameter in enumerate(self.model.parameters()):
            moments = self.optimizer.state[parameter]
            wanted = {"step": step, "exp_avg": step + 0.25, "exp_avg_sq": step + 0.5}
            pairs = {key: (moments[key], value) for key, value in wanted.items()} | {"value": (parameter, step + number / 16)}
            for key, (tensor, value) in pairs.items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if not bool((local == value).all()):
                    found.append(f"{key} of parameter {number}")
        if not world_changed:
            if self.loader.step != step:
                found.append(f"loader at {self.loader.step}")
            if random.random() != random.Random(f"{step} {self.rank}").random():
                found.append("generator")
        return found

    def checkpointer(self, directory: str, **options: Any) -> Checkpointer:
        return Checkpointer(directory, model=self.model, optimizer=self.optimizer, dataloader=self.loader, **options)


def at_moment(args: dict, rank: int, *calls: tuple[Any, str]) -> None:
    """Send this process the signal of args, if they name its rank: right before or after the n-th of these calls."""
    if rank not in args.get("signal_ranks", ()):
        return
    moments = count(1)

    def pass_moment() -> None:
        if next(moments) == args["signal_at"]:
            os.kill(os.getpid(), args["signal"])

    def around(genuine: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            pass_moment()
            found = genuine(*given, **named)
            pass_moment()
            return found

        return call

    for owner, name in calls:
        setattr(owner, name, around(getattr(owner, name)))


def tell(args: dict, rank: int, step: int) -> None:
    """Write to the file of this rank that a step is committed, where a test wants that."""
    if "told" in args:
        with open(f"{args['told']}.{rank}", "a") as file:
            file.write(f"{step}\n")


def begin(rank: int, world: int, args: dict, **options: Any) -> tuple[Training, Checkpointer, TrainingPosition, list[str]]:
    """Load; the last of the results is what is wrong then."""
    training = Training(rank, world, args.get("elements", 600))
    checkpointer = training.checkpointer(args["directory"], **{**options, **args.get("options", {})})
    position = checkpointer.load()
    if rank == 0:
        os.write(READY, b"1")
    wrong = training.wrong(position.step, 0 < position.world_size != world) if position.path else []
    return training, checkpointer, position, wrong


def raised_by(call: Callable[..., object], *args: Any, **named: Any) -> str:
    """The error of ours that a call raises; "" if none."""
    try:
        call(*args, **named)
    except ElasticExtError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(rank: int, world: int, args: dict) -> dict:
    """Load, check, and save step after step. `told`: gets a line for each save that this rank was told is committed."""
    events: list[SaveEvent] = []

    def note(event: SaveEvent) -> None:
        events.append(event)
        if event.kind == "saved":
            tell(args, rank, event.step)

    training, checkpointer, position, wrong = begin(rank, world, args, on_event=note)
    at_moment(args, rank, (HashedFile, "write"), (saving, "commit"))

    def steps() -> None:
        for step in range(position.step + 1, position.step + 1 + args["steps"]):
            training.go_to(step)
            checkpointer.save(step)
            if args.get("wait"):
                checkpointer.wait()
                if "ballast" in args and (rank, step) == (0, 2):
                    Path(args["ballast"]).unlink()  # the disk has room again

    raised = raised_by(steps)
    checkpointer.close()
    return {
        "step": position.step,
        "wrong": wrong,
        "raised": raised,
        "error": checkpointer.last_error,
        "saved": checkpointer.last_saved,
        "dataloader": position.dataloader,
        "events": [[event.kind, event.step, event.reason] for event in events],
    }


def copy_to_memory(rank: int, world: int, args: dict) -> dict:
    """Load, check, and copy the state to memory step after step; to disk, too, now and then. most: files of parts at once."""
    genuine, most = part.create, [0]

    def counted(*args: Any) -> Any:
        made = genuine(*args)
        most[0] = max(most[0], len(list(Path(os.environ["ELASTIC_EXT_MEMORY_DIR"]).rglob("*.mem"))))
        return made

    part.create = counted
    if "least_send_s" in args:
        pace.LEAST_SEND_S, mirror.FIRST_PAUSE_S = args["least_send_s"], mirror.MAX_PAUSE_S
    if args.get("slow_network"):  # and no rate that was set
        mirror.Mirror.send_s = lambda *_: 0.0
    mirror.PIECE = args.get("piece", mirror.PIECE)
    progress.ProgressRow.report_copied = lambda row, step, stall_s, every: tell(args, rank, step)
    training, checkpointer, position, wrong = begin(rank, world, args, memory_every=1)
    of_buffers = (Buffers, "begin"), (part, "view"), (part, "write_index"), (Copying, "finish")
    at_moment(args, rank, *of_buffers, (saver, "_put"), (Ranks, "all_gather"), (Ranks, "send"))
    now = [position.step]
    if args.get("act", {}).get("rank") == rank:
        kill_when(args["act"], now)
    for step in range(position.step + 1, position.step + 1 + args["steps"]):
        now[0] = step
        training.go_to(step)
        checkpointer.snapshot(step, epoch=step // 10, note={"step": step})
        if step % args.get("save_every", 10) == 0:
            checkpointer.save(step)
    checkpointer.close()
    return {
        "step": position.step,
        "path": position.path,
        "epoch": position.epoch,
        "note": dict(position.note),
        "most": most[0],
        "wrong": wrong,
        "generators": position.generators,
        "dataloader": position.dataloader,
    }


class Meter:
    """Stands for an object of the user, with a tensor and values beside it."""

    def __init__(self, **values: Any) -> None:
        self.state: dict[str, Any] = {"average": torch.zeros(3), **values}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def meter(rank: int, world: int, args: dict) -> dict:
    """Save a meter, in memory or on disk, after its values have become other ones; or load it into one with the first values."""
    held = Meter(**args["values"])
    if rank in args.get("uneven", ()):
        held.state = {"another": torch.zeros(1000), **held.state}
    _, checkpointer, position, _ = begin(rank, world, args, extra={"meter": held}, memory_every=1)
    if "become" in args:
        held.state |= {"average": torch.ones(3), **args["become"]}
        for step in (1, 2):
            checkpointer.snapshot(step)
        if args["save"]:
            checkpointer.save(2)
    checkpointer.close()
    values = {key: value for key, value in held.state.items() if not isinstance(value, torch.Tensor)}
    found = {"step": position.step, "path": checkpointer._loader.copy, "error": checkpointer.last_error}
    return {**found, **values, "average": held.state["average"].tolist()}


def averages(rank: int, world: int, args: dict) -> dict:
    """Save an object with a tensor like each parameter, in memory or on disk; or load it into one that has what `there` says."""
    training = Training(rank, world)
    parameters = list(training.model.parameters())

    def average(like: str, factor: int) -> Any:
        """Of each parameter: its number; and its elements counted, in a tensor that is placed as the parameter or is whole."""
        found = {}
        for number, parameter in enumerate(parameters):
            whole = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape) * factor + number
            sharded = like == "sharded" and isinstance(parameter, DTensor)
            found[number] = (number, distribute_tensor(whole, parameter.device_mesh, [Shard(0)]) if sharded else whole)
        return found

    states = {"empty": lambda: {}, "sharded": lambda: average("sharded", 0), "whole": lambda: average("whole", 0)}
    held = Meter()
    held.state = average("sharded", 1) if args["save"] else states[args["there"]]()
    checkpointer = training.checkpointer(args["directory"], extra={"average": held}, memory_every=1)
    step = checkpointer.load().step
    if args["save"] == "memory":
        for number in (1, 2):
            checkpointer.snapshot(number)
    elif args["save"]:
        checkpointer.save(2)
    checkpointer.close()
    right = []
    for number, (_, wanted) in average("whole", 1).items():
        kept, tensor = held.state.get(number, (None, torch.zeros(0)))
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        right.append(kept == number and torch.equal(whole, wanted) and whole.dtype == wanted.dtype)
    kinds = {type(tensor).__name__ for _, tensor in held.state.values()}
    return {"step": step, "path": checkpointer._loader.copy, "kinds": sorted(kinds), "right": all(right)}


def refused(rank: int, world: int, args: dict) -> dict:
    """Save objects with sharded tensors of which no load could put the parts together."""
    held = Meter()
    mesh = init_device_mesh("cpu", (world,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    states = {"partial": partial, "beside a tensor": {"deque": deque([sharded]), "t": torch.zeros(1)}, "alone": deque([sharded])}
    _, checkpointer, *_ = begin(rank, world, args, extra={"meter": held}, memory_every=1)
    raised = {}
    for step, (name, state) in enumerate(states.items(), 1):
        held.state = {"a": state}
        raised[name] = raised_by(checkpointer.save, step, wait=True)
        checkpointer.wait()
        checkpointer.snapshot(step)
    checkpointer.close()
    return {"raised": raised, "saved": checkpointer.last_saved}


def failing_start(count: int) -> None:
    """The first copies of this rank fail, and then it has no buffers any more."""
    genuine = Copying.start
    left = [count]

    def start(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError("no copy")
        genuine(*args)

    Copying.start = start
    fit = Buffers.fit
    asked = [0]

    def fits(self: Buffers, size: int) -> bool:
        asked[0] += 1
        return fit(self, size) and asked[0] != count + 2  # new buffers are made right after the last failure

    Buffers.fit = fits


def together(rank: int, world: int, args: dict) -> dict:
    """Copy to memory under a fault. `timeout_s` ends the run of ranks that wait for each other."""
    if args.get("refuses") == rank:
        failing_start(args["steps_that_fail"])
    options = {"memory_every": args.get("every", [1] * world)[rank], "timeout": timedelta(seconds=args.get("timeout_s", 600))}
    training, checkpointer, position, _ = begin(rank, world, args, **options)
    faulty = rank in args.get("faulty", [0])
    threads = threading.Thread.start
    manifest, asked = checkpointer._manifest, [0]

    def counted(*args: Any) -> Any:
        asked[0] += 1
        return manifest(*args)

    checkpointer._manifest = counted

    def no_thread(thread: threading.Thread) -> None:
        if "memory-" in thread.name:
            raise RuntimeError("can't start new thread")
        threads(thread)

    for step in range(position.step + 1, position.step + 1 + args["steps"]):
        training.go_to(step)
        fault = args["fault"] if faulty and step in args.get("at", ()) else ""
        if fault == "thread":
            threading.Thread.start = no_thread
        note: Any = {"note": {"step": lambda: 0}, "no mapping": 5}.get(fault, {"step": step})
        if fault != "absent":
            checkpointer.snapshot(step, note=note)
        threading.Thread.start = threads
    checkpointer.close()
    return {"step": position.step, "next": checkpointer._memory._schedule.due, "asked": asked[0]}


def late_generation(rank: int, world: int, args: dict) -> dict:
    """Load a copy while the directory of checkpoints cannot be written to; then save twice. The first save fails."""
    genuine = saving.open_generation, saving.save_to

    def away(*_: Any) -> Any:
        raise TimeoutError("away")

    saving.open_generation, saving.save_to = away, lambda *_: saving.AttemptOutcome(SaveFailure(FailureKind.FULL, "no space"))
    training, checkpointer, position, _ = begin(rank, world, args, memory_every=args.get("every", 1))
    step = position.step
    checkpointer.snapshot(step + 1)
    saving.open_generation = genuine[0]
    checkpointer.save(step + 2, wait=True)
    saving.save_to = genuine[1]
    checkpointer.save(step + 3)
    kept = sorted(path.name for path in Path(os.environ["ELASTIC_EXT_MEMORY_DIR"]).glob("step_*/*"))
    for number in range(step + 4, step + 4 + args["steps"]):
        training.go_to(number)
        checkpointer.snapshot(number)
    checkpointer.close()
    return {"step": step, "kept": kept}


def slow_buffers(rank: int, world: int, args: dict) -> dict:
    """Rank 1 makes its buffers only after training has done some steps more."""
    went_on, genuine = threading.Event(), part.create
    found: list[bool] = []

    def create(*args: Any) -> Any:
        found.append(rank != 1 or went_on.wait(60))
        return genuine(*args)

    part.create, pace.BUFFERS_HOLD_S = create, 0.0
    training, checkpointer, *_ = begin(rank, world, args, memory_every=1)
    for step in range(1, 30):
        training.go_to(step)
        checkpointer.snapshot(step)
        if step == 6:
            went_on.set()
            checkpointer._memory.wait()
    checkpointer.close()
    return {"went_on": all(found), "buffers": len(found)}


def left_out(rank: int, world: int, args: dict) -> dict:
    """Rank 1 is not done with one copy when the next, the last one, is due, and leaves it out. Then all end together."""
    ended, genuine = threading.Event(), pace.Schedule.choose
    pace.HOLD_S = 0.0

    def choose(schedule: pace.Schedule, *args: Any) -> None:
        genuine(schedule, *args)
        if rank == 1 and training.loader.step >= 3:
            ended.wait(60)

    pace.Schedule.choose = choose
    training, checkpointer, *_ = begin(rank, world, args, memory_every=1, timeout=timedelta(seconds=args["timeout_s"]))
    for step in range(1, 5):
        training.go_to(step)
        checkpointer.snapshot(step)
        if step < 3 or (step, rank) == (3, 0):
            checkpointer._memory.wait()
    ended.set()
    checkpointer.close()
    dist.barrier()
    pace.CLOSE_S = 1.0
    checkpointer.close()  # as at the end of a `with`
    return {"lost": checkpointer._memory._ranks.lost}


def exchange_fails(rank: int, world: int, args: dict) -> dict:
    """At the last copy rank 1 raises an error in the exchange of parts, or has not come to it before all have ended."""
    ended, genuine = threading.Event(), mirror.Mirror.exchange

    def exchange(*call: Any) -> None:
        if rank == 1 and training.loader.step >= 3:
            if args["error"]:
                raise MemoryError("made up")
            ended.wait(60)
        genuine(*call)

    mirror.Mirror.exchange = exchange
    if not args["error"]:
        pace.CLOSE_S = 0.5
    training, checkpointer, *_ = begin(rank, world, args, memory_every=1, timeout=timedelta(seconds=args["timeout_s"]))
    for step in range(1, 4):
        training.go_to(step)
        checkpointer.snapshot(step)
        if step < 3:
            checkpointer._memory.wait()
    checkpointer.close()
    dist.barrier()
    ended.set()
    return {"due": checkpointer._memory._schedule.due}


def unsharded_gradients(rank: int, world: int, args: dict) -> dict:
    """A save in the middle of an accumulation that FSDP2 keeps to itself, and one after it."""
    training, checkpointer, *_ = begin(rank, world, args)
    training.model.set_requires_gradient_sync(False)
    training.model(torch.ones(2, 30)).sum().backward()
    raised = raised_by(checkpointer.save, 1, accumulation=1)
    checkpointer.wait()
    told = checkpointer.last_error
    checkpointer.save(1, wait=True)
    return {"raised": raised, "told": told, "saved": checkpointer.last_saved}


def calls(rank: int, world: int, args: dict) -> dict:
    """Call the checkpointer as args say: [name, ranks that do, step, micro-steps]. "reduce": a collective of training.

    "late": to each save from here on, seconds in place of a step. "memory limit": a timeout of the copies in memory, likewise.
    "after": goes on once each other rank has asked whether the save that it is at has been left out.
    """
    training = Training(rank, world)
    events: list[SaveEvent] = []
    options = {"memory_every": 1, "timeout": timedelta(seconds=60), "on_event": events.append}
    checkpointer = training.checkpointer(args["directory"], **options)
    loaded = []
    saver = checkpointer._saver
    is_left_out = saver.is_left_out

    def asked(at: Any) -> bool:
        found = is_left_out(at)
        if saver._at == at:
            saver.is_left_out = is_left_out
            dist.barrier()
        return found

    for name, ranks, *where in args["calls"]:
        if name == "reduce":
            dist.all_reduce(torch.zeros(1))
        elif name == "after":
            if rank in ranks:
                dist.barrier()
            else:
                saver.is_left_out = asked
        elif name == "wait":
            checkpointer.wait()
            if checkpointer._memory is not None:
                checkpointer._memory.wait()
            dist.barrier()
        elif rank not in ranks:
            continue
        elif name == "late":
            saving.LATE_S = where[0]
        elif name == "memory limit":
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=where[0]), checkpointer._memory._ranks.group)
        elif name == "load":
            training.loader.step = -1
            position = checkpointer.load()
            loaded.append([position.step, position.accumulation, training.loader.step])
        else:
            step, accumulation = where
            training.loader.step = 10 * step + accumulation
            for parameter in training.model.parameters() if accumulation else ():
                parameter.grad = torch.zeros_like(parameter)
            getattr(checkpointer, name)(step, accumulation=accumulation)
    checkpointer.close()
    failed = [event.step for event in events if event.kind == "failed"]
    return {"loaded": loaded, "failed": failed, "saved": [event.step for event in events if event.kind == "saved"]}


def extra_of_rank_0(rank: int, world: int, args: dict) -> dict:
    """Rank 0 has an average beside the model; the others have what args say: no such object, or an empty one. Save and load."""
    held = Meter()
    held.state = {"t": torch.full((3,), 7.0)} if rank == 0 else {}
    extra = {"average": held} if rank == 0 or args["others"] == "an empty one" else {}
    _, checkpointer, *_ = begin(rank, world, args, extra=extra)
    checkpointer.save(1, wait=True)
    error = checkpointer.last_error
    if rank == 0:
        held.state = {"t": torch.zeros(3)}
    step = checkpointer.load().step
    return {"error": error, "step": step, "held": held.state.get("t", torch.zeros(0)).tolist()}


class Unwilling(Meter):
    """One that cannot be saved the first time."""

    failed = False

    def state_dict(self) -> dict:
        if not self.failed:
            self.failed = True
            raise LookupError("not now")
        return super().state_dict()


def fail_once(where: str, rank: int) -> dict[str, Any]:
    """Make the first save fail, in a way that nobody has foreseen, on rank 0 alone or on all ranks; return more options."""
    left = [1]

    def failing(genuine: Any) -> Any:
        def fails(*args: Any) -> Any:
            if left:
                left.clear()
                raise LookupError("not now")
            return genuine(*args)

        return fails

    if where == "decision of rank 0":
        saving.open_generation = failing(saving.open_generation)
    elif where == "between collectives":
        saving.save_to = failing(saving.save_to)
    return {"extra": {"meter": Unwilling() if where == "state of rank 1" and rank == 1 else Meter()}}


def unforeseen(rank: int, world: int, args: dict) -> list[str | None]:
    """Save twice; the first save fails. What was told after each."""
    training = Training(rank, world)
    options = {**fail_once(args["where"], rank), **args.get("options", {}), "timeout": timedelta(seconds=60)}
    checkpointer = training.checkpointer(args["directory"], **options)
    told = []
    for step in (1, 2):
        if args["where"] == "death of rank 1" and rank == 1:
            break
        training.go_to(step)
        checkpointer.save(step, wait=True)
        told.append(checkpointer.last_error)
    return told


def unreadable_manifest(rank: int, world: int, args: dict) -> dict:
    """Commit a copy in memory of which rank 0 has sent a manifest that nobody can read; then one with a good one."""
    tier = LocalTier(open_storage(args["directory"]), (world,), 0, rank == 0)
    ranks, told = Ranks(timedelta(seconds=60)), []
    for manifest in (b"{", encode(Manifest(1, 1, ()))):
        file = StoredFile(f"rank_{rank:05d}.mem", 0, "")
        report = mirror.RankReport("step_00000001.g0001", manifest if rank == 0 else b"", pace.Timing(), file)
        outcome = saver.commit(tier, "", report, ranks)
        told.append([outcome.committed, outcome.failure.reason if outcome.failure else ""])
    return {"told": told}


def refused_load(rank: int, world: int, args: dict) -> dict:
    """Load what cannot be loaded into this model."""
    return {"raised": raised_by(Training(rank, world, args["elements"]).checkpointer(args["directory"]).load)}


def alone(rank: int, world: int, args: dict) -> list[str]:
    """What `chaos_training.py --alone` prints."""
    return list(chaos_training.alone(args["steps"]))


def checkpointed(rank: int, world: int, args: dict) -> list[str]:
    """What a rank of checkpointed_job.py writes."""
    from tests.scripts import checkpointed_job  # needs torchdata, which may be missing

    words = checkpointed_job.arguments(args["words"])
    checkpointed_job.train(words)
    return Path(f"{words.out}.{rank}").read_text().splitlines()


TASKS = {
    task.__name__: task
    for task in (
        *(calls, train, copy_to_memory, meter, averages, refused, together, slow_buffers, left_out, exchange_fails),
        *(unsharded_gradients, extra_of_rank_0, unforeseen, unreadable_manifest, refused_load),
        *(late_generation, alone, checkpointed),
    )
}


def run_rank(request: dict, rank: int, rendezvous: str) -> None:
    world = request["world"]
    os.environ.update(environment_on(request, rank) if "nodes" in request else {})
    os.environ.update({**request.get("env", {}), **request.get("each", [{}] * world)[rank]}, RANK=str(rank))
    if request.get("file_limit"):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
    if "user" in request:
        os.setuid(request["user"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{rendezvous}/store", world), rank=rank, world_size=world)
    result = TASKS[request["task"]](rank, world, request["args"])
    Path(rendezvous, f"result.{rank}").write_text(json.dumps(result))


def environment_on(request: dict, rank: int) -> dict[str, str]:
    """What the agent of a rank's node would tell it."""
    ends = list(accumulate(request["nodes"]))
    node = next(number for number, end in enumerate(ends) if rank < end)
    memory = f"{request['memory']}/{node}"
    found = {"GROUP_RANK": str(node), "LOCAL_RANK": str(rank - ends[node] + request["nodes"][node])}
    found |= {"ELASTIC_EXT_MEMORY_DIR": memory, "ELASTIC_EXT_MEMORY_LIMIT": str(1 << 30)}
    if request.get("resume"):
        found["ELASTIC_EXT_RESUME_FROM"] = f"{memory}/{request['resume']}"
    return found


def forked(do: Any) -> int:
    """Run `do` in a child; return its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            do()
            status = 0
        except BaseException:  # noqa: BLE001  (the child ends here)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def kill_later(pidfds: list[int], delay_s: float, ready: int | None = None) -> None:
    """The random instant, counted from when rank 0 has loaded where `ready` is given."""
    if ready is not None:
        os.read(ready, 1)
    time.sleep(delay_s)
    for pidfd in pidfds:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            continue


def run(request: dict) -> None:
    global READY
    with tempfile.TemporaryDirectory() as rendezvous:
        os.chmod(rendezvous, 0o777)  # for a rank that changes its user
        ready, READY = os.pipe()
        pids = {forked(lambda rank=rank: run_rank(request, rank, rendezvous)): rank for rank in range(request["world"])}
        pidfds = {rank: os.pidfd_open(pid) for pid, rank in pids.items()}
        killers: set[int] = set()
        if request.get("kill_s") is not None:
            victims = [pidfds[rank] for rank in request["kill"]]
            from_load = ready if request["kill_from"] == "load" else None
            killers.add(forked(lambda: kill_later(victims, request["kill_s"], from_load)))
        left = set(pids)
        while left:
            pid, status = os.waitpid(-1, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                answer({"stopped": pids[pid], "pid": pid, "others": sorted(left - {pid})})
                continue
            left.discard(pid)
            killers.discard(pid)
            if pid in pids and os.WIFSIGNALED(status) and left:  # the others may go on a little; none waits for it for ever
                killers.add(forked(lambda: kill_later(list(pidfds.values()), GRACE_S)))
        for killer in killers:
            os.kill(killer, signal.SIGKILL)
            os.waitpid(killer, 0)
        for number in (ready, READY, *pidfds.values()):
            os.close(number)
        files = [Path(rendezvous, f"result.{rank}") for rank in range(request["world"])]
        answer({"results": [json.loads(file.read_text()) if file.exists() else None for file in files]})


ANSWERS = os.dup(1)


def answer(found: dict) -> None:
    os.write(ANSWERS, f"{json.dumps(found)}\n".encode())


def main() -> None:
    os.dup2(2, 1)  # torch 2.8 prints how gloo connects
    torch.set_num_threads(1)
    # A busy machine may take long; these tests count steps, and what is to be late is so in the order of events.
    pace.BUFFERS_HOLD_S = pace.HOLD_S = pace.CLOSE_S = saving.LATE_S = 600.0
    codecs.lookup("latin1")  # pickles need it, and another user may not reach Python's library
    logging.basicConfig(level=logging.INFO, format=f"%(process)d {logging.BASIC_FORMAT}")
    for line in sys.stdin:
        run(json.loads(line))


if __name__ == "__main__":
    main()
