"""Train as chaos_training does, with a copy of the state in memory after each step, and tell of it on stdout.

    torchrun --nproc-per-node=2 memory_job.py STEPS SAVE_EVERY

Lines: `loaded RANK STEP DIGEST NAME`, `step RANK STEP DIGEST PID`, `done RANK STEP DIGEST`, `memory DIRECTORY`. DIGEST is that of
`chaos_training.py --alone`; NAME is that of the checkpoint or copy, with its directory's name.

The variable ACT may hold one thing to do, as JSON: {"at": WHERE, "step": N, "rank": R}, only before the first restart:
    planned    SIGKILL when the copy of step N has been planned, and no byte has been written
    half       SIGKILL when half of its tensors are in the buffer
    copied     SIGKILL before its checksum is computed
    reported   SIGKILL before the manifest is written
    committed  SIGKILL once it is
    hold       wait, in step N, for a lock on the file "gate"; all ranks do
    nan        a parameter becomes NaN in step N, and all ranks notice it in the next one, once that of a step before N is copied;
               in each of the first "times" rounds
With "hold": N beside another thing to do, or {"at": "", "hold": N}, all ranks wait for that lock in step N as well.
"""

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_ext import Checkpointer
from elastic_ext.checkpoints.directory.own_files import MANIFEST
from elastic_ext.checkpoints.memory import pace, part, saver
from elastic_ext.checkpoints.memory.devices import Copying
from tests.scripts.chaos_training import EXAMPLES, Training

STEP_S = 0.02


def tell(*what: object) -> None:
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def kill_when(act: dict, step: list[int]) -> None:
    """Replace the function at that point by one that kills this process at the copy of that step."""

    def die(_: object = None) -> None:
        _, of_attempt, copied = threading.current_thread().name.rpartition("memory-")
        if (int(copied) if of_attempt else step[0]) == act["step"]:  # training may be ahead of the thread
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str) -> None:
        genuine = getattr(owner, name)
        setattr(owner, name, lambda *args: (die(), genuine(*args))[1])

    def half(self: Copying, step: int, resting: list, moving: list) -> None:
        pairs = [*resting, *moving]
        genuine_start(self, step, pairs[: len(pairs) // 2], [])
        die()
        genuine_start(self, step, pairs[len(pairs) // 2 :], [])

    genuine_start = Copying.start
    match act["at"]:
        case "planned":
            before(part.Buffers, "begin")
        case "half":
            Copying.start = half
        case "copied":
            before(Copying, "finish")
        case "reported":
            before(saver, "commit")
        case "committed":
            before(part.Buffers, "committed")


def await_copy(step: int) -> None:
    """Wait for a copy of this step or a later one."""
    while not any(
        int(found.parent.name[5:13]) >= step for found in Path(os.environ["ELASTIC_EXT_MEMORY_DIR"]).glob(f"*/{MANIFEST}")
    ):
        time.sleep(STEP_S)


def main(steps: int, save_every: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    pace.HOLD_S = pace.CLOSE_S = pace.BUFFERS_HOLD_S = pace.LEAST_SEND_S = 600.0  # on a busy machine no copy is left out, either
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    act, first = json.loads(os.environ.get("ACT", "{}")), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    mine = act.get("rank", 0) == rank
    held = act["step"] if act.get("at") == "hold" else act.get("hold")
    nan_at = act["step"] if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < act.get("times", 0) else None
    now = [0]
    if first and mine:
        kill_when(act or {"at": ""}, now)
        tell("memory", os.environ.get("ELASTIC_EXT_MEMORY_DIR", ""))
    training = Training()
    with Checkpointer(model=training.model, optimizer=training.optimizer) as checkpointer:
        position = checkpointer.load()
        tell("loaded", rank, position.step, training.digest(), "/".join(Path(position.path or "none").parts[-2:]))
        each = EXAMPLES // world
        for step in range(position.step, steps):
            if step == nan_at:
                await_copy(step - 1)
                raise FloatingPointError("loss is nan")
            own = training.gradients(step, range(rank * each, (rank + 1) * each))
            everyone = [own.new_empty(own.shape) for _ in range(world)]
            dist.all_gather(everyone, own)
            training.advance(torch.cat(everyone))
            time.sleep(STEP_S)
            now[0] = step + 1
            if step + 1 == nan_at:
                training.model[0].bias.data[0] = torch.nan
            checkpointer.snapshot(step + 1)
            tell("step" if step + 1 != nan_at else "nan", rank, step + 1, training.digest(), os.getpid())
            if (step + 1) % save_every == 0:
                checkpointer.save(step + 1, wait=True)
            if first and held == step + 1:
                with open("gate") as gate:
                    fcntl.flock(gate, fcntl.LOCK_SH)
    tell("done", rank, steps, training.digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    assert saver  # imported, so that it uses what is replaced above
    main(int(sys.argv[1]), int(sys.argv[2]))
