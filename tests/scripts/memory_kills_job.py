"""Train as chaos_training does, with ballast in the state and a copy in memory after each step, until there is a file "stop".

    python -m elastic_ext.agent ... memory_kills_job.py SOCKET BALLAST_BYTES

Each rank tells of itself by JSON datagrams to SOCKET: what ("loaded", "step", "done"), rank, pid, node, step, digest (that of
`chaos_training.py --alone`) and memory (the agent's directory). Of a load also: from ("memory", "disk" or "nothing"), and torn
(whether the ballast is not that of the step).
"""

import faulthandler
import json
import os
import socket
import sys

import torch
import torch.distributed as dist

from elastic_ext import Checkpointer
from elastic_ext.checkpoints.memory import pace
from tests.scripts.chaos_training import EXAMPLES, Training

STUCK_S = 60  # without a step; then the stacks go to stderr


class Ballast:
    """All its bytes are the number of the step, modulo 256."""

    def __init__(self, size: int) -> None:
        self.data = torch.zeros(size, dtype=torch.uint8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.data = state["data"]

    def is_of(self, step: int) -> bool:
        return bool((self.data == step % 256).all())


def main(path: str, size: int) -> None:
    faulthandler.dump_traceback_later(STUCK_S)
    pace.HOLD_S = pace.CLOSE_S = pace.BUFFERS_HOLD_S = pace.LEAST_SEND_S = 600.0  # on a busy machine no copy is left out, either
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.connect(path)
    memory = os.environ.get("ELASTIC_EXT_MEMORY_DIR", "")
    me = {"rank": rank, "pid": os.getpid(), "node": os.environ["NODE"], "memory": memory}
    training, ballast = Training(), Ballast(size)

    def tell(what: str, step: int, **more: object) -> None:
        told.send(json.dumps({**me, "what": what, "step": step, "digest": training.digest(), **more}).encode())

    with Checkpointer(model=training.model, optimizer=training.optimizer, extra={"ballast": ballast}) as checkpointer:
        position = checkpointer.load()
        source = "nothing" if position.path is None else "memory" if position.path.startswith(memory) else "disk"
        tell("loaded", position.step, **{"from": source, "torn": not ballast.is_of(position.step)})
        each, step = EXAMPLES // world, position.step
        while True:
            stop = torch.tensor([os.path.exists("stop")])
            dist.broadcast(stop, 0)
            if stop:
                break
            own = training.gradients(step, range(rank * each, (rank + 1) * each))
            everyone = [own.new_empty(own.shape) for _ in range(world)]
            dist.all_gather(everyone, own)
            training.advance(torch.cat(everyone))
            step += 1
            ballast.data.fill_(step % 256)
            checkpointer.snapshot(step)
            tell("step", step)
            faulthandler.dump_traceback_later(STUCK_S)
    tell("done", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
