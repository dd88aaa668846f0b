"""Trains on the CPU and saves in one of many ways below CHECKPOINTS, for tests/workers/test_saves.py.

    recorded_job.py CHECKPOINTS WAY [AT]

AT: the job kills itself with SIGKILL as its AT-th save has made its first write, where the way has such a place.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT, WAY = Path(sys.argv[1]), sys.argv[2]
KILL_AT = int(sys.argv[3]) if len(sys.argv) > 3 else 0
SAVES, EVERY = 3, 3

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())


def train(steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def state() -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def between(number: int) -> None:
    """A place between two writes of a save."""
    if number == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def folder(number: int) -> Path:
    path = ROOT / f"step_{number * EVERY}"
    path.mkdir(exist_ok=True)
    return path


def plain(number: int) -> None:
    torch.save(model.state_dict(), folder(number) / "model.pt")
    between(number)
    torch.save(optimizer.state_dict(), folder(number) / "optimizer.pt")


def single_file(number: int) -> None:
    torch.save(state(), ROOT / f"step_{number * EVERY}.pt")
    between(number)


def tensors(number: int) -> None:
    from safetensors.torch import save_file

    save_file(model.state_dict(), folder(number) / "model.safetensors")
    between(number)
    (folder(number) / "trainer_state.json").write_text(json.dumps({"global_step": number * EVERY}))


def dcp_sync(number: int) -> None:
    dcp.save(state(), checkpoint_id=folder(number), no_dist=True)
    between(number)


def is_pool_there() -> bool:
    """Whether a thread of a pool has not ended."""
    frames = list(sys._current_frames().values())
    for frame in frames:  # grows
        if frame.f_code.co_filename.endswith("concurrent/futures/thread.py"):
            return True
        frames += [frame.f_back] if frame.f_back is not None else []
    return False


def dcp_async(number: int) -> None:
    found = dcp.async_save(state(), checkpoint_id=folder(number), no_dist=True)
    between(number)
    train(1)
    getattr(found, "upload_completion", found).result()
    while is_pool_there():  # torch's thread needs more time to end than tiny steps
        train(1)


def dcp_process(number: int) -> None:
    """In a process that torch starts, which no hook sees."""
    if number == 1:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    found = dcp.async_save(state(), checkpoint_id=folder(number), async_checkpointer_type=kind)
    between(number)
    train(1)
    getattr(found, "upload_completion", found).result()


def in_thread(number: int) -> None:
    def write() -> None:
        plain(number)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


pool = concurrent.futures.ThreadPoolExecutor(2)


def in_pool(number: int) -> None:
    kept, target = state(), folder(number)
    list(pool.map(lambda name: torch.save(kept[name], target / f"{name}.pt"), kept))
    between(number)


work: queue.Queue[int] = queue.Queue()


def in_queue(number: int) -> None:
    if number == 1:

        def serve() -> None:
            while True:
                plain(work.get())
                work.task_done()

        threading.Thread(target=serve, daemon=True).start()
    work.put(number)
    work.join()


def staged(number: int) -> None:
    target = ROOT / "tmp-save"
    target.mkdir()
    torch.save(state(), target / "state.pt")
    between(number)
    (target / "info.json").write_text("{}")
    target.rename(ROOT / f"step_{number * EVERY}")


def in_place(number: int) -> None:
    target = ROOT / "last"
    target.mkdir(exist_ok=True)
    torch.save(model.state_dict(), target / "model.pt")
    between(number)
    torch.save(optimizer.state_dict(), target / "optimizer.pt")


def rotated(number: int) -> None:
    plain(number)
    if number > 1:
        shutil.rmtree(ROOT / f"step_{(number - 1) * EVERY}")
    if number == SAVES:
        os.kill(os.getpid(), signal.SIGKILL)


def forked(number: int) -> None:
    child = os.fork()
    if child == 0:
        plain(number)
        os._exit(0)
    os.waitpid(child, 0)


def copied(number: int) -> None:
    source = ROOT.parent / "elsewhere"
    source.mkdir(exist_ok=True)
    torch.save(state(), source / "state.pt")
    shutil.copytree(source, ROOT / f"step_{number * EVERY}")
    between(number)


def by_command(number: int) -> None:
    torch.save(state(), ROOT.parent / "outside.pt")
    subprocess.run(["cp", ROOT.parent / "outside.pt", ROOT / f"step_{number * EVERY}.pt"], check=True)


def on_sigterm(number: int) -> None:
    if number == SAVES:

        def save_and_exit(*_: object) -> None:
            plain(number)
            raise SystemExit(143)

        signal.signal(signal.SIGTERM, save_and_exit)
        os.kill(os.getpid(), signal.SIGTERM)
    plain(number)


def cut_by_handler(number: int) -> None:
    """The handler's SystemExit leaves a save that it has interrupted."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)
    torch.save(model.state_dict(), folder(number) / "model.pt")
    if number == SAVES:
        os.kill(os.getpid(), signal.SIGTERM)
    torch.save(optimizer.state_dict(), folder(number) / "optimizer.pt")


def by_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(4) * at, "labels": torch.ones(1)}

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    arguments = TrainingArguments(
        str(ROOT), max_steps=10, save_steps=EVERY, save_total_limit=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model=Regression(), args=arguments, train_dataset=Rows())
    trainer.train()


WAYS: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        *(
            plain,
            single_file,
            tensors,
            dcp_sync,
            dcp_async,
            dcp_process,
            in_thread,
            in_pool,
            in_queue,
            staged,
            in_place,
            rotated,
            forked,
        ),
        *(copied, by_command, on_sigterm, cut_by_handler),
    )
}


def main() -> None:
    if WAY == "by_trainer":
        by_trainer()
        return
    for number in range(1, SAVES + 1):
        train(EVERY)
        WAYS[WAY](number)
    train(EVERY)


if __name__ == "__main__":
    main()
