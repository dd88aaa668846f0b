"""A small training whose state after each step is the same to the bit at every world size; it tells all that it does.

    chaos_training.py EVENTS STEPS END    as a worker, for STEPS steps at least, until the file END is there
    chaos_training.py --alone STEPS       one JSON list: the state's digest after each step, from 0 on

EVENTS is a named pipe, which gets one JSON object a line: what ("loaded", "step", "saving" or "done"), the time on the monotonic
clock, host, rank, world, group (the round's store and the restart count: another one in each round), pid, step, and the state's
digest. Each example has a gradient of its own; all ranks gather those of all examples and add them up in the same order.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

EXAMPLES = 12  # of each step, on all ranks together
WIDTH = 6
SAVE_EVERY = 5
STEP_S = 0.04  # of work: the agents need the processors too


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def gradients(self, step: int, examples: range) -> torch.Tensor:
        """One row for each of these examples."""
        data = torch.randn(EXAMPLES, WIDTH + 1, generator=torch.Generator().manual_seed(step))
        rows = []
        for number in examples:
            loss = (self.model(data[number, :-1]) - data[number, -1:]).square().sum()
            rows.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(self.model.parameters()))]))
        return torch.stack(rows)

    def advance(self, gradients: torch.Tensor) -> None:
        """gradients: of all examples, in order."""
        mean = gradients.sum(dim=0) / EXAMPLES
        parameters = list(self.model.parameters())
        for parameter, part in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            moments = self.optimizer.state.get(parameter, {})
            for tensor in (parameter.detach(), *(moments[key] for key in sorted(moments))):
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def alone(steps: int) -> Iterator[str]:
    training = Training()
    yield training.digest()
    for step in range(steps):
        training.advance(training.gradients(step, range(EXAMPLES)))
        yield training.digest()


def train(tell: Callable[..., None], steps: int, end: str) -> None:
    from elastic_ext import Checkpointer

    rank, world = dist.get_rank(), dist.get_world_size()
    each = EXAMPLES // world
    training = Training()
    checkpointer = Checkpointer(model=training.model, optimizer=training.optimizer)
    position = checkpointer.load()
    step = position.step
    tell("loaded", step, training.digest(), path=(position.path or "").rpartition("/")[2])
    ends = False
    while step < steps or not ends:
        own = training.gradients(step, range(rank * each, (rank + 1) * each))
        seen = torch.full((each, 1), float(os.path.exists(end)))  # all must end after the same step
        everyone = [torch.empty(each, own.shape[1] + 1) for _ in range(world)]
        dist.all_gather(everyone, torch.cat([own, seen], dim=1))
        gathered = torch.cat(everyone)
        training.advance(gathered[:, :-1])
        ends = bool(gathered[:, -1].any())
        time.sleep(STEP_S)
        step += 1
        tell("step", step, training.digest())
        if checkpointer.save_requested(step) or step % SAVE_EVERY == 0:
            tell("saving", step, training.digest())
            checkpointer.save(step)
    checkpointer.save(step, wait=True)
    checkpointer.close()
    tell("done", step, training.digest(), error=checkpointer.last_error)


def main(events: str, steps: int, end: str) -> None:
    with open(events, "wb", buffering=0) as pipe:
        dist.init_process_group("gloo")
        group = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        me = {
            "host": os.environ["CHAOS_HOST"],
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "group": group,
            "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "pid": os.getpid(),
        }

        def tell(what: str, step: int, digest: str, **more: object) -> None:
            line = {"what": what, "t": time.monotonic(), **me, "step": step, "digest": digest, **more}
            pipe.write(json.dumps(line).encode() + b"\n")  # atomic: less than PIPE_BUF

        train(tell, steps, end)
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "--alone":
        print(json.dumps(list(alone(int(sys.argv[2])))))
    else:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
