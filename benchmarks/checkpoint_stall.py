"""How long does a save hold up training? elastic_ext.Checkpointer, torch.save and torch.distributed.checkpoint.async_save.

    python benchmarks/checkpoint_stall.py [--mb 500] [--saves 7] [--directory DIR] [--upload-mb 100]

One process, tensors on the CPU, the three in turns, so that a busy disk hits all. The stall is the time until the call returns.
Each save ends before the next one begins. The first save is shown separately, because it allocates the memory for the copy. The
whole is the time until the checkpoint is committed: ours is then synced to disk and has checksums, async_save's is synced without
checksums, torch.save's is in the page cache only.

Overlap: the share of its usual speed that a loop of matrix products (one thread) keeps from the call of save() to the commit, on
the disk and on an S3 server (moto's, which needs a processor of its own here). 1 means that nothing is lost.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed.checkpoint as dcp

from elastic_ext import Checkpointer

TENSORS = 64
NO_WORSE_THAN_ASYNC = 1.0


@dataclass
class Times:
    """Seconds of each save: until the call returns (stall), and until everything is written (whole)."""

    stall: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def add(self, save: Callable[[], Callable[[], object]]) -> None:
        """Time one save. save: starts it and returns a function that waits for its end."""
        began = time.monotonic()
        wait = save()
        self.stall.append(time.monotonic() - began)
        wait()
        self.whole.append(time.monotonic() - began)


def model_of(megabytes: int) -> torch.nn.Module:
    each = megabytes * 1_000_000 // 4 // TENSORS
    return torch.nn.ParameterList([torch.rand(each) for _ in range(TENSORS)])


def measured(model: torch.nn.Module, directory: Path, saves: int) -> dict[str, Times]:
    times = {name: Times() for name in ("torch.save", "dcp.async_save", "elastic_ext")}
    with Checkpointer(directory / "ours", model=model, keep_last=1) as ours:

        def plain() -> Callable[[], object]:
            torch.save(model.state_dict(), directory / "plain.pt")
            return lambda: None

        def torch_async() -> Callable[[], object]:
            found: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=directory / "dcp")
            future: Future[object] = getattr(found, "upload_completion", found)
            return future.result

        steps = count(1)

        def own() -> Callable[[], object]:
            ours.save(next(steps))
            return ours.wait

        for _ in range(saves):
            for name, save in (("torch.save", plain), ("dcp.async_save", torch_async), ("elastic_ext", own)):
                times[name].add(save)
            shutil.rmtree(directory / "dcp")
        if ours.last_error is not None:
            raise SystemExit(f"our save failed: {ours.last_error}")
    return times


# Training beside a save.


def products(until: Callable[[], bool]) -> float:
    """Matrix products per second in this thread."""
    one, done, began = torch.rand(256, 256), 0, time.monotonic()
    while not until():
        one @ one
        done += 1
    return done / (time.monotonic() - began)


def overlap(megabytes: int, where: str, saves: int) -> dict[str, float | None]:
    """Medians: the share of its speed that the loop keeps, and the seconds of a save."""
    kept, took = [], []
    with Checkpointer(where, model=model_of(megabytes), keep_last=1) as ours:
        ours.save(0, wait=True)  # allocates the memory for the copy
        for step in range(1, saves + 1):
            rest_until = time.monotonic() + 2.0
            rest = products(lambda until=rest_until: time.monotonic() > until)
            began = time.monotonic()
            ours.save(step)
            saved = threading.Thread(target=ours.wait)
            saved.start()
            stalled_s = time.monotonic() - began
            during = products(lambda waits=saved: not waits.is_alive())
            saved.join()
            whole_s = time.monotonic() - began
            kept.append(during / rest * (whole_s - stalled_s) / whole_s)
            took.append(whole_s)
        if ours.last_error is not None:
            raise SystemExit(f"our save failed: {ours.last_error}")
    return {"overlap": measure.rounded(measure.median(kept), 2), "whole_s": measure.rounded(measure.median(took), 2)}


def overlaps(megabytes: int, folder: Path, saves: int) -> dict[str, dict[str, float | None]]:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.s3 import S3Server

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    server = S3Server()
    os.environ.update(server.environ)
    try:
        found = {"disk": overlap(megabytes, str(folder / "overlap"), saves)}
        found["S3"] = overlap(megabytes, f"{server.bucket()}/overlap", saves)
    finally:
        server.stop()
        torch.set_num_threads(threads)
    return found


def draw(figure: Any, times: dict[str, Times]) -> None:
    stall, whole = figure.subplots(1, 2)
    for axes, kind in ((stall, "stall"), (whole, "whole")):
        axes.boxplot([getattr(each, kind) for each in times.values()], tick_labels=list(times))
        axes.set(title=f"{kind} of a save", ylabel="s", ylim=(0, None))
        axes.tick_params(axis="x", labelrotation=15)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=500, help="megabytes of each save")
    parser.add_argument("--saves", type=int, default=7, help="number of saves of each kind")
    parser.add_argument("--upload-mb", type=int, default=100, help="megabytes of each save in the overlap measurement")
    parser.add_argument("--directory", help="a directory on the disk to measure; default: a temporary one")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        times = measured(model_of(args.mb), Path(folder), args.saves)
        kept = overlaps(args.upload_mb, Path(folder), max(1, args.saves // 2))
    rows, record = [], {"benchmark": "checkpoint_stall", "mb": args.mb, "saves": args.saves, "machine": measure.machine()}
    for name, each in times.items():
        later = measure.median(each.stall[1:]) or each.stall[0]
        spread = f"{min(each.stall):.3f} to {max(each.stall):.3f}"
        row = {"first_stall_s": each.stall[0], "stall_s": later, "whole_s": measure.median(each.whole)}
        rows.append([name, *(measure.shown(value, 3) for value in row.values()), spread])
        record[name] = {key: measure.rounded(value, 6) for key, value in row.items()}
    async_s, own_s = (record[name]["stall_s"] for name in ("dcp.async_save", "elastic_ext"))
    record["ratio_async"] = measure.rounded(measure.ratio(async_s, own_s), 2)
    record["ratio_plain"] = measure.rounded(measure.ratio(record["torch.save"]["stall_s"], own_s), 2)
    record["aim_met"] = record["ratio_async"] >= NO_WORSE_THAN_ASYNC
    text = f"{args.mb} MB on the CPU, medians of {args.saves} saves in turn; stall without the first save.\n\n"
    text += measure.table(["save", "first stall, s", "stall, s", "whole, s", "all stalls, s"], rows)
    text += f"\n\nStall of dcp.async_save over ours: {record['ratio_async']} (aim: {NO_WORSE_THAN_ASYNC} or more); "
    text += f"of torch.save over ours: {record['ratio_plain']}.\n\n"
    record["overlap"] = kept
    shown = [[name, *(measure.shown(each[key]) for key in ("overlap", "whole_s"))] for name, each in kept.items()]
    text += measure.table([f"training beside a save of {args.upload_mb} MB", "of its speed", "whole, s"], shown)
    measure.publish(args.results, record, text, lambda figure: draw(figure, times))


if __name__ == "__main__":
    main()
