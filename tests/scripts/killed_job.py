"""A job that is killed at random moments, for tests/chaos/kills: it trains a tiny model on two ranks and saves every few steps.

    killed_job.py KIND DIRECTORY NOTES

All that it saves is filled with the step of the save. As it begins, it reads what it is to resume from and notes what it found;
then it waits until the campaign lets it train. DIRECTORY: that of the checkpoints, a
path or a URL, or `save_dir()`. NOTES: see killed_notes.py.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from killed_notes import RANK, Notes, Pace
from torch.nn.parallel import DistributedDataParallel

import elastic_ext

EVERY = 4  # steps from one save to the next


def job(kind: str, directory: str, notes: Notes) -> None:
    import killed_saves

    dist.init_process_group("gloo")
    if "KILLS_APART" in os.environ:
        notes.agree()
    saver = killed_saves.KINDS[kind](directory, notes)
    step = notes.start(elastic_ext.resume_from(), saver.load)
    model = torch.nn.Linear(64, 64)
    forward = model if saver.own_parts else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    forward, optimizer = saver.prepare(forward, optimizer)
    pace, saved = Pace(notes), 0
    while not pace.ends:
        step += 1
        optimizer.zero_grad()
        forward(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        fill(model, optimizer, step)
        pace.stepped(saved if saver.is_over() else 0)
        if step % EVERY == 0 and not pace.ends:
            saver.save(step, model, optimizer)
            saved = step
    saver.close()
    dist.destroy_process_group()


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(step)
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(step)


def main() -> None:
    kind, directory, notes = sys.argv[1], sys.argv[2], Notes(sys.argv[3])
    if directory == "save_dir()":
        directory = elastic_ext.save_dir()
    if kind in ("trainer", "peft", "lightning"):
        import killed_trainers

        getattr(killed_trainers, kind)(directory, notes)
    else:
        job(kind, directory, notes)
    print(f"rank {RANK} is done", flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)


if __name__ == "__main__":
    main()
