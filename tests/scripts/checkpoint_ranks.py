"""Groups of ranks that use `Checkpointer`, forked from one process that has imported torch: a group starts at once.

Reads requests from stdin, one JSON object a line, and answers on stdout, one JSON object a line:
    {"task": ..., "world": N, "args": {...}, "env": {...}, "kill_s": delay or null, "kill": [ranks],
     "kill_from": "start" or "load",
     "user": uid, "file_limit": bytes, "nodes": [ranks of each], "memory": directory, "resume": name}
    -> {"stopped": rank, "pid": pid, "others": [pids]} whenever a rank has stopped,
       then {"results": [...]}: what the task returned, or null.
nodes: as which nodes the ranks run. memory: with a directory for each node's copies in memory. resume: the copy to load.
"""

import codecs
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from itertools import accumulate
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
from torch.distributed.tensor import DTensor

from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.checkpoints.directory.generations import StaleGroup
from elastic_ext.checkpoints.memory import commit as copies
from elastic_ext.checkpoints.memory import part, saver
from elastic_ext.checkpoints.memory.buffers import Buffers
from elastic_ext.checkpoints.memory.devices import Copying
from elastic_ext.checkpoints.writing import background, commit
from elastic_ext.checkpoints.writing.checkpointer import Checkpointer, Event
from elastic_ext.checkpoints.writing.dcp_files import HashedFile
from elastic_ext.checkpoints.writing.ranks import Ranks

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


def at_write(count: int, number: int) -> None:
    """Send this process a signal when it is about to write for the count-th time, to a data file or a manifest."""
    seen = 0
    write, put_manifest = HashedFile.write, commit.commit

    def counted() -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), number)

    def counted_write(self: Any, data: Any) -> int:
        counted()
        return write(self, data)

    def counted_commit(*args: Any) -> Any:
        counted()
        outcome = put_manifest(*args)
        counted()
        return outcome

    HashedFile.write, commit.commit = counted_write, counted_commit


def train(rank: int, world: int, args: dict) -> dict:
    """Load, check, and save step after step. `told`: gets a line for each save that this rank was told is committed."""
    training = Training(rank, world, args.get("elements", 600))
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if event.kind == "saved" and "told" in args:
            with open(f"{args['told']}.{rank}", "a") as file:
                file.write(f"{event.step}\n")

    background.FIRST_PAUSE_S = args.get("pause_s", background.FIRST_PAUSE_S)
    checkpointer = training.checkpointer(args["directory"], on_event=note, **args.get("options", {}))
    position = checkpointer.load()
    if rank == 0:
        os.write(READY, b"1")
    wrong = training.wrong(position.step, 0 < position.world_size != world) if position.path else []
    if args.get("signal") and rank in args.get("signal_ranks", [0]):
        at_write(args["signal_at"], args["signal"])
    raised = ""
    try:
        for step in range(position.step + 1, position.step + 1 + args["steps"]):
            training.go_to(step)
            checkpointer.save(step)
            if args.get("wait"):
                checkpointer.wait()
                if "after" in args:
                    AFTER[args["after"]](rank, step, args)
    except ElasticExtError as error:
        raised = f"{type(error).__name__}: {error}"
    checkpointer.close()
    return {
        "step": position.step,
        "path": position.path,
        "wrong": wrong,
        "raised": raised,
        "error": checkpointer.last_error,
        "saved": checkpointer.last_saved,
        "dataloader": position.dataloader,
        "events": [[event.kind, event.step, event.reason] for event in events],
    }


def copy_to_memory(rank: int, world: int, args: dict) -> dict:
    """Load, check, and copy the state to memory step after step; to disk, too, now and then."""
    training = Training(rank, world, args.get("elements", 600))

    def note(step: int, stall_s: float, every: int) -> None:
        if "told" in args:
            with open(f"{args['told']}.{rank}", "a") as file:
                file.write(f"{step}\n")

    saver.reports.report_copied = note
    checkpointer = training.checkpointer(args["directory"], memory_every=1, **args.get("options", {}))
    position = checkpointer.load()
    if rank == 0:
        os.write(READY, b"1")
    wrong = training.wrong(position.step, 0 < position.world_size != world) if position.path else []
    if args.get("signal") and rank in args["signal_ranks"]:
        at_copy(args["signal_at"], args["signal"])
    for step in range(position.step + 1, position.step + 1 + args["steps"]):
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
        "wrong": wrong,
        "generators": position.generators,
        "dataloader": position.dataloader,
    }


def at_copy(count: int, number: int) -> None:
    """Send this process a signal at the count-th of these moments in the life of a copy in memory."""
    seen = 0

    def counted() -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), number)

    def between(owner: Any, name: str) -> None:
        genuine = getattr(owner, name)

        def around(*args: Any, **named: Any) -> Any:
            counted()
            found = genuine(*args, **named)
            counted()
            return found

        setattr(owner, name, around)

    for owner, name in ((Buffers, "begin"), (part, "view"), (part, "write_index"), (Copying, "finish")):
        between(owner, name)
    between(copies, "_put")
    between(Ranks, "all_gather")


def stale_prune(rank: int, world: int, args: dict) -> dict:
    """Save, stop, and prune when another group has taken over."""
    training = Training(rank, world)
    checkpointer = training.checkpointer(args["directory"], keep_last=1)
    checkpointer.load()
    training.go_to(1)
    checkpointer.save(1, wait=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        list(checkpointer._retention.prune("step_00000001.g0001"))
    except StaleGroup as error:
        return {"raised": str(error)}
    return {"raised": ""}


def unsharded_gradients(rank: int, world: int, args: dict) -> dict:
    """A save in the middle of an accumulation that FSDP2 keeps to itself, and one after it."""
    training = Training(rank, world)
    checkpointer = training.checkpointer(args["directory"])
    checkpointer.load()
    training.model.set_requires_gradient_sync(False)
    training.model(torch.ones(2, 30)).sum().backward()
    raised = ""
    try:
        checkpointer.save(1, accumulation=1)
    except UsageError as error:
        raised = str(error)
    checkpointer.wait()
    told = checkpointer.last_error
    checkpointer.save(1, wait=True)
    return {"raised": raised, "told": told, "saved": checkpointer.last_saved}


def go_back(rank: int, world: int, args: dict) -> dict:
    """Load again in the same process, and train the steps again."""
    training = Training(rank, world)
    checkpointer = training.checkpointer(args["directory"], keep_last=9)
    first = checkpointer.load().step
    for step in (first + 1, first + 2):
        training.go_to(step)
        checkpointer.save(step)
    back = checkpointer.load()
    wrong = training.wrong(back.step)
    training.go_to(back.step + 1)
    checkpointer.save(back.step + 1, wait=True)
    return {"first": first, "back": back.step, "wrong": wrong, "error": checkpointer.last_error}


def free_space(rank: int, step: int, args: dict) -> None:
    """The disk has room again after the second save."""
    if rank == 0 and step == 2:
        Path(args["ballast"]).unlink()


AFTER = {"free_space": free_space}
TASKS = {
    "train": train,
    "copy_to_memory": copy_to_memory,
    "stale_prune": stale_prune,
    "unsharded_gradients": unsharded_gradients,
    "go_back": go_back,
}


def run_rank(request: dict, rank: int, rendezvous: str) -> None:
    os.environ.update(request.get("env", {}), RANK=str(rank))
    world = request["world"]
    if "nodes" in request:
        os.environ.update(environment_on(request, rank))
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
                print(json.dumps({"stopped": pids[pid], "pid": pid, "others": sorted(left - {pid})}), flush=True)
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
        print(json.dumps({"results": [json.loads(file.read_text()) if file.exists() else None for file in files]}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    codecs.lookup("latin1")  # pickles need it, and another user may not reach Python's library
    logging.basicConfig(level=logging.INFO, format=f"%(process)d {logging.BASIC_FORMAT}")
    for line in sys.stdin:
        run(json.loads(line))


if __name__ == "__main__":
    main()
