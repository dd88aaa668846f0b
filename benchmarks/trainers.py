"""What do saves in memory bring a trainer? Hugging Face's Trainer, Lightning, accelerate and dcp.async_save, two ranks on CPUs.

    python benchmarks/trainers.py [--trainers huggingface,dcp_async] [--mb 48] [--steps 200] [--every 40] [--repeat 1]

Each trainer, one job after the other: under stock torchrun without saves, under ours with saves on a disk, and with saves in
memory (`local_dir`), which the copier brings to that disk. That is a file system of its own: what is written waits until
the device has it, and the kernel lets through 200 MB/s, as a share does that many nodes use. This needs root.

- Stall: the time from the step before a save to the step after it, without the median of such times without a save.
- Share: all stalls together, as a share of the time of training. Speed: steps per second, as a share of those without saves.
- Copier: its processor seconds for each save.

Then one rank, or the agent alone, is killed in the middle between two saves, with saves in memory. The agent is started again at
once. Lost: steps that are done twice. Seconds: until the first step that is not. The last loss and all weights are compared with
those of the job that nothing has disturbed, to the bit.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import measure

TRAINERS = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate", "dcp_async": "torch"}
NAMES = {"huggingface": "Hugging Face", "lightning": "Lightning", "accelerate": "accelerate", "dcp_async": "dcp.async_save"}
WAYS = {"none": "no saves, stock", "disk": "disk", "local": "memory"}
VICTIMS = ("worker", "agent")
JOB = Path(__file__).with_name("workers") / "trainer_job.py"
MB_S, DISK_MB = 200, 2000
JOB_S = 300.0
SHARE_AIM = 0.01
CLONE_NEWNS = 0x00020000


@dataclass(frozen=True)
class Sizes:
    mb: int
    steps: int
    every: int

    @property
    def killed(self) -> int:
        """The step at which something is killed: in the middle after half of the saves."""
        return (self.steps // 2 // self.every) * self.every + self.every // 2


@dataclass
class Notes:
    """What a job has noted. steps: of each start of rank 0, in their order: number and seconds (CLOCK_MONOTONIC) of each."""

    steps: list[list[tuple[int, float]]] = field(default_factory=list)
    ends: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, line: str) -> None:
        kind, _, rank, *rest = line.split()
        if kind == "end":
            self.ends.add((rank, *rest))
        elif rank == "0":
            step, ns = map(int, rest)
            if not self.steps or step <= self.steps[-1][-1][0]:
                self.steps.append([])
            self.steps[-1].append((step, ns / 1e9))


@dataclass(frozen=True)
class Ran:
    """How a job went. killed_at: seconds (CLOCK_MONOTONIC). copier_s: processor seconds; 0: there was none."""

    notes: Notes
    killed_at: float
    copier_s: float


# The figures. Pure.


def stalls(steps: Sequence[tuple[int, float]], every: int) -> list[float]:
    """Return by how many seconds each save has held up the step after it. The first steps, which warm up, do not count."""
    took = {step: after - at for (step, at), (_, after) in pairwise(steps)}
    plain = measure.median([seconds for step, seconds in took.items() if step % every and step > 3]) or 0.0
    return [seconds - plain for step, seconds in took.items() if step % every == 0]


def speed(steps: Sequence[tuple[int, float]]) -> float:
    """Steps per second, once warm."""
    (first, began), (last, ended) = steps[min(3, len(steps) - 2)], steps[-1]
    return (last - first) / (ended - began)


def lost(ran: Ran, every: int) -> tuple[int, int, float]:
    """Return the steps that were done twice, those done since the last save, and the seconds from the kill to a new step."""
    before, after = ran.notes.steps[0], ran.notes.steps[-1]
    last = before[-1][0] - 1  # the last one had only begun
    new_at = next(at for step, at in after if step > last)
    return last - (after[0][0] - 1), last % every, new_at - ran.killed_at


# The jobs.


def run(trainer: str, way: str, sizes: Sizes, disk: Path, victim: str = "") -> Ran:
    """Run one job to its end. Raises SystemExit with its last words if it fails."""
    every = 0 if way == "none" else sizes.every
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, tempfile.TemporaryDirectory(dir=disk) as directory:
        folder = Path(name)
        conf = [f"--rdzv-conf=checkpoint_dir={directory}" + (f",local_dir={name}/local" if way == "local" else "")] * bool(every)
        command = [sys.executable, "-m", "torch.distributed.run", *jobs.AGENTS["stock" if way == "none" else "ours"], *conf]
        command += ["--nproc-per-node=2", "--max-restarts=1", str(JOB), trainer, f"{name}/notes"]
        command += map(str, (sizes.mb, sizes.steps, every, sizes.killed if victim == "worker" else 0))
        with open(folder / "log", "w") as log:

            def start() -> subprocess.Popen[bytes]:
                environ = jobs.environment(HF_HUB_OFFLINE="1")
                return subprocess.Popen(command, cwd=name, env=environ, stdout=log, stderr=log, start_new_session=True)

            try:
                code, killed_at, copier_s = _watched(start, folder / "notes", sizes.killed if victim == "agent" else 0)
            finally:
                jobs.kill_children()
        if code != 0:
            raise SystemExit(f"{trainer}, {way}, {victim}: the job ended with {code}\n{(folder / 'log').read_text()[-3000:]}")
        notes = Notes()
        for line in (folder / "notes").read_text().splitlines():
            notes.add(line)
        if victim == "worker":  # it was the last to note anything in its attempt
            killed = [line.split() for line in (folder / "notes").read_text().splitlines() if line.startswith("step 0 1 ")]
            killed_at = int(killed[-1][-1]) / 1e9
        return Ran(notes, killed_at, copier_s)


def _watched(start: Callable[[], subprocess.Popen[bytes]], notes: Path, killed: int) -> tuple[int | None, float, float]:
    """Return the code of the job, when its agent was killed, and the copier's processor seconds."""
    agent, by, killed_at, used = start(), time.monotonic() + JOB_S, 0.0, dict[int, float]()
    while agent.poll() is None and time.monotonic() < by:
        for pid in jobs.descendants(agent.pid):
            if (seconds := _copier_s(pid)) is not None:
                used[pid] = seconds
        if killed and not killed_at and notes.exists() and f" 0 {killed} " in notes.read_text():
            killed_at = time.monotonic()
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            agent = start()
        threading.Event().wait(0.02)
    return agent.poll(), killed_at, sum(used.values())


def _copier_s(pid: int) -> float | None:
    try:
        if b"replicate" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return None
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slow_disk() -> Path:
    """Mount a file system that takes 200 MB/s; this process alone sees it, and it goes with it. Raises SystemExit."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.chaos.seeded import surroundings

    if why := surroundings.unavailable("disk slow"):
        raise SystemExit(f"no slow disk here: {why}")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise SystemExit("unshare: not allowed, and the slow disk is a mount of this process alone; run it as root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    path, image = Path(tempfile.mkdtemp()), Path("/dev/shm", f"trainers-{os.getpid()}.img")
    try:
        surroundings.slow_device(path, image, DISK_MB)
    finally:
        image.unlink()
    subprocess.run(["mount", "-o", "remount,sync", str(path)], check=True)
    surroundings.slow(path, MB_S * 1_000_000, 0)
    return path


def measured(trainer: str, sizes: Sizes, disk: Path, repeat: int) -> dict[str, Any]:
    """Return a row of the record."""
    ran: dict[str, list[Ran]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way in WAYS:
            ran[way].append(run(trainer, way, sizes, disk))
    undisturbed = ran["none"][0].notes.ends
    plain = measure.median([speed(each.notes.steps[0]) for each in ran["none"]]) or 0.0
    row: dict[str, Any] = {"step_ms": measure.rounded(1000 / plain, 1), "same_every_time": True}
    for way in ("disk", "local"):
        found = [stalls(each.notes.steps[0], sizes.every) for each in ran[way]]
        all_stalls = [seconds for each in found for seconds in each]
        trained = sum(each.notes.steps[0][-1][1] - each.notes.steps[0][0][1] for each in ran[way])
        speeds = [speed(each.notes.steps[0]) for each in ran[way]]
        row[way] = {
            "stall_ms": measure.rounded(1000 * (measure.median(all_stalls) or 0.0), 1),
            "all_ms": [round(1000 * seconds) for seconds in all_stalls],
            "share": measure.rounded(sum(all_stalls) / trained, 4),
            "speed": measure.rounded((measure.median(speeds) or 0.0) / plain, 3),
            "save_every_s": measure.rounded(trained / len(all_stalls), 1),
            "copier_s": measure.rounded(sum(each.copier_s for each in ran[way]) / len(all_stalls), 3),
        }
    row["same_every_time"] = all(each.notes.ends == undisturbed for runs in ran.values() for each in runs)
    for victim in VICTIMS:
        killed = [run(trainer, "local", sizes, disk, victim) for _ in range(repeat)]
        losses = [lost(each, sizes.every) for each in killed]
        row[victim] = {
            "lost_steps": [steps for steps, _, _ in losses],
            "since_save": [steps for _, steps, _ in losses],
            "next_step_s": measure.rounded(measure.median([seconds for _, _, seconds in losses]), 2),
            "equal": sum(each.notes.ends == undisturbed for each in killed),
            "runs": repeat,
        }
    return row


# The results.


def text_of(record: Mapping[str, Any]) -> str:
    rows = record["rows"]
    saves = [
        [
            f"{NAMES[trainer]}, {WAYS[way]}",
            *(measure.shown(row[way][key], 1) for key in ("stall_ms", "save_every_s")),
            *(measure.shown(100 * row[way][key], 1) for key in ("share", "speed")),
            measure.shown(row[way]["copier_s"] if way == "local" else None),
        ]
        for trainer, row in rows.items()
        for way in ("disk", "local")
    ]
    kills = [
        [
            f"{NAMES[trainer]}, {victim}",
            *(", ".join(map(str, row[victim][key])) for key in ("lost_steps", "since_save")),
            measure.shown(row[victim]["next_step_s"]),
            f"{row[victim]['equal']} of {row[victim]['runs']}",
        ]
        for trainer, row in rows.items()
        for victim in VICTIMS
    ]
    head = f"{record['mb']} MB in a save, two ranks, a disk that takes {MB_S} MB/s. {record['note']}".strip()
    first = measure.table(["saves", "stall, ms", "a save each, s", "share, %", "speed, %", "copier, s a save"], saves)
    second = measure.table(["killed", "steps lost", "since the save", "s to the next step", "equal to the bit"], kills)
    return f"{head}\n\n{first}\n\n{second}"


def draw(figure: Any, record: Mapping[str, Any]) -> None:
    rows = record["rows"]
    stall, lost = figure.subplots(1, 2)
    names, height = [NAMES[trainer] for trainer in rows], 0.38
    pairs = (
        (stall, "stall of a save, ms", [("disk", "disk", "#b0b0b0"), ("local", "memory", "#2e7d4f")], "stall_ms"),
        (
            lost,
            "from the kill to the next new step, s",
            [("worker", "worker", "#2e7d4f"), ("agent", "agent", "#9cc9ae")],
            "next_step_s",
        ),
    )
    for axes, title, sides, key in pairs:
        for offset, (side, label, color) in zip((-height / 2, height / 2), sides, strict=True):
            values = [row[side][key] for row in rows.values()]
            bars = axes.barh([at + offset for at in range(len(rows))], values, height, label=label, color=color)
            axes.bar_label(bars, [f" {value:.0f}" if value >= 10 else f" {value:.1f}" for value in values], fontsize=8)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--mb", type=int, default=48, help="megabytes of a save")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=40, help="steps from one save to the next")
    parser.add_argument("--repeat", type=int, default=1, help="jobs of each kind")
    parser.add_argument("--note", default="", help="on this machine, for the results")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    jobs.adopt_orphans()
    machine, sizes, disk = measure.machine(), Sizes(args.mb, args.steps, args.every), slow_disk()
    rows = {}
    try:
        for trainer in args.trainers.split(","):
            if importlib.util.find_spec(TRAINERS[trainer]) is None:
                print(f"{trainer}: {TRAINERS[trainer]} is not installed", file=sys.stderr)
                continue
            rows[trainer] = measured(trainer, sizes, disk, args.repeat)
            print(trainer, rows[trainer], file=sys.stderr, flush=True)
    finally:
        subprocess.run(["umount", str(disk)], check=False)
        shutil.rmtree(disk, ignore_errors=True)
    record = {"benchmark": "trainers", "mb": args.mb, "steps": args.steps, "every": args.every, "repeat": args.repeat}
    record |= {"note": args.note, "rows": rows, "machine": machine}
    record["aim_met"] = all(row["local"]["share"] < SHARE_AIM for row in rows.values())
    measure.publish(args.results, record, text_of(record), lambda figure: draw(figure, record))


if __name__ == "__main__":
    main()
