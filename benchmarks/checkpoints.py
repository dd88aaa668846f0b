"""What does it cost to know which checkpoint to resume from, and that it is sound?

    python benchmarks/checkpoints.py [--count 10000] [--megabytes 1024] [--repeat 5] [--rows choose,verify]

choose: find the newest complete one among --count on local disk, for each kind of name: one listing, one check. verify: check one
of ours, against only reading the same files with the same threads into the same buffers, in turns. The files are in the page
cache, which is the hard case: a disk would hide the cost of the checksums.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure

from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.checkpoints.directory.own_files import BLOCK, MANIFEST, Manifest, StoredFile, checksum, encode
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.storage import Storage, open_storage
from elastic_ext.checkpoints.verifying import verify

MAX_RATIO = 1.3  # of verifying to reading
MAX_SECONDS = 1.0  # for a choice among 10,000
SHARDS = 8


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def stored_file(storage: Storage, name: str, file: str) -> StoredFile:
    """The record of a file in the manifest."""
    with storage.open(f"{name}/{file}") as opened:
        digest = checksum(opened)
        return StoredFile(file, opened.tell(), digest)


# Choosing.


def write_own(root: Path, step: int, content: bytes) -> None:
    storage = open_storage(str(root))
    name = directory_name(step, 1)
    (root / name).mkdir()
    (root / name / "__0_0.distcp").write_bytes(content)
    (root / name / MANIFEST).write_bytes(encode(Manifest(step, 1, (stored_file(storage, name, "__0_0.distcp"),))))


def write_file(root: Path, step: int, content: bytes) -> None:
    (root / f"checkpoint_epoch_{step}.pt").write_bytes(content)


def write_trainer(root: Path, step: int, content: bytes) -> None:
    path = root / f"checkpoint-{step}"
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(content)
    (path / "trainer_state.json").write_text(f'{{"global_step": {step}}}')


KINDS = {"elastic_ext": write_own, "torch.save": write_file, "Hugging Face": write_trainer}


def choose(count: int, repeat: int) -> dict[str, Any]:
    import io

    import torch

    saved = io.BytesIO()
    torch.save({"epoch": 1}, saved)
    found = {}
    for kind, write in KINDS.items():
        with tempfile.TemporaryDirectory() as directory:
            for step in range(count):
                write(Path(directory), step, saved.getvalue())
            resume = newest_complete(directory).resume
            assert resume is not None
            assert str(count - 1) in resume.path
            seconds = [timed(lambda: newest_complete(directory)) for _ in range(repeat)]
            found[kind] = {"median_s": measure.rounded(measure.median(seconds), 4), "max_s": measure.rounded(max(seconds), 4)}
            print("choose", kind, found[kind], file=sys.stderr, flush=True)
    return found


# Verifying.


def read_plainly(paths: list[Path], threads: int) -> None:
    """Read as verify() does, without the checksums."""

    def read(path: Path) -> None:
        buffer = memoryview(bytearray(BLOCK))
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, paths))


def compare(megabytes: int, repeat: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        storage = open_storage(directory)
        name = directory_name(1, 1)
        names = [f"__{rank}_0.distcp" for rank in range(SHARDS)]
        block = random.Random(0).randbytes(1 << 20)
        for each in names:
            with storage.write(f"{name}/{each}") as file:
                for _ in range(megabytes // SHARDS):
                    file.write(block)
        storage.put(f"{name}/{MANIFEST}", encode(Manifest(1, 1, tuple(stored_file(storage, name, each) for each in names))))
        entry = next(storage.entries())
        paths = [Path(directory, name, each) for each in names]
        assert verify(storage, entry, threads=threads).sound
        reads, checks = [], []
        for _ in range(repeat):  # in turns, so that a busy machine hits both
            reads.append(timed(lambda: read_plainly(paths, threads)))
            checks.append(timed(lambda: verify(storage, entry, threads=threads)))
        print("verify", [round(s, 3) for s in reads], [round(s, 3) for s in checks], file=sys.stderr, flush=True)
    read_s, verify_s = measure.median(reads), measure.median(checks)
    return {
        "megabytes": megabytes // SHARDS * SHARDS,
        "threads": threads,
        "read_s": measure.rounded(read_s),
        "verify_s": measure.rounded(verify_s),
        "verify_by_read": measure.rounded(measure.ratio(verify_s, read_s), 2),
        "best_by_best": measure.rounded(measure.ratio(min(checks), min(reads)), 2),
    }


ROWS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "choose": lambda args: choose(args.count, args.repeat),
    "verify": lambda args: compare(args.megabytes, args.repeat, args.threads),
}


def kept(rows: dict[str, Any], count: int) -> bool:
    """Whether the promises are kept."""
    slow = [side for side in rows.get("choose", {}).values() if count <= 10_000 and side["median_s"] > MAX_SECONDS]
    return not slow and rows.get("verify", {}).get("verify_by_read", 0) <= MAX_RATIO


def table(rows: dict[str, Any], count: int) -> str:
    lines = [[f"choose among {count:,}, {kind}", f"{side['median_s']:.3f} s"] for kind, side in rows.get("choose", {}).items()]
    if "verify" in rows:
        side = rows["verify"]
        lines += [
            [f"read {side['megabytes']} MiB, {side['threads']} threads", f"{side['read_s']:.3f} s"],
            ["verify the same", f"{side['verify_s']:.3f} s"],
            ["verify / read", f"{side['verify_by_read']:.2f}"],
        ]
    return measure.table(["what", "median"], lines)


def draw(figure: Any, rows: dict[str, Any]) -> None:
    axes = figure.subplots()
    bars = {f"choose\n{kind}": side["median_s"] for kind, side in rows.get("choose", {}).items()}
    if "verify" in rows:
        bars |= {"plain read": rows["verify"]["read_s"], "verify": rows["verify"]["verify_s"]}
    axes.bar_label(axes.bar(list(bars), list(bars.values()), color="#4c9f70"), fmt="%.3f")
    axes.set(ylabel="seconds", title="Which checkpoint, and is it sound?")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=list(ROWS), help=f"comma-separated, from: {', '.join(ROWS)}"
    )
    parser.add_argument("--count", type=int, default=10_000, help="number of checkpoints to choose from")
    parser.add_argument("--megabytes", type=int, default=1024, help="MiB to read and verify")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads that read and verify")
    parser.add_argument("--repeat", type=int, default=5, help="number of measurements of each row")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    if unknown := [row for row in args.rows if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of {', '.join(ROWS)}")
    machine = measure.machine()
    rows = {row: ROWS[row](args) for row in args.rows}
    record = {"benchmark": "checkpoints", "rows": rows, "count": args.count, "kept": kept(rows, args.count), "machine": machine}
    measure.publish(args.results, record, table(rows, args.count), lambda figure: draw(figure, rows))
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
