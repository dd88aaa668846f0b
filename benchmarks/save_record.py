"""What does the record of saves cost a worker? Optimizer steps, and saves of many files, with it and without it.

    python benchmarks/save_record.py [--repeat 5] [--parameters 300] [--steps 200] [--files 1000] [--seconds 10]

One process under the bootstrap, with directories to watch and without, in turns. CPU time of the process, the least of ten
stretches of steps and of three saves: what disturbs the machine only adds. Each parameter raises one audit event in each step of
AdamW, and the record's hook gets it: so what one event adds is measured on its own, too (`id`). A start is the time of an empty
script from exec to its end, by the clock.

Then a real agent with a worker that saves as many files every second, with a `checkpoint_dir` and without: its steps per second,
how long a save takes, and the agent's CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
from overhead import cpu_s

sys.path.insert(0, str(Path(__file__).parent.parent))
from elastic_ext.agent.launch import BOOTSTRAP
from elastic_ext.workers.progress_layout import ROW_BYTES

WORKER = Path(__file__).parent / "workers" / "saving_loop.py"
JOB = WORKER.with_name("saving_job.py")
SIDES = {"without": False, "with": True}
TIMEOUT_S = 600.0
STARTS = 20  # of an empty script, in each turn


def environment(folder: Path, watched: bool) -> dict[str, str]:
    """Return what the agent would give to a worker. folder: for its files; the directory of checkpoints is in it."""
    (folder / "progress").write_bytes(b"\0" * ROW_BYTES)
    message: dict[str, object] = {"slot": 0, "progress": str(folder / "progress"), "stacks": str(folder / "stacks")}
    if watched:
        message |= {"journal": str(folder / "saves"), "saves_below": [str(folder / "checkpoints")]}
    return {**os.environ, "ELASTIC_EXT_WORKER": json.dumps(message), "RANK": "0"}


def one_turn(watched: bool, sizes: Sequence[int]) -> dict[str, float]:
    """Run the worker and some empty scripts once; return their seconds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "checkpoints").mkdir()
        (folder / "empty.py").write_text("")
        environ = environment(folder, watched)
        command = [sys.executable, "-u", BOOTSTRAP, str(WORKER), str(folder / "checkpoints"), *map(str, sizes)]
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        starts = []
        for _ in range(STARTS):
            began = time.monotonic()
            # Without a timeout: with one, subprocess looks for the end at intervals of up to 50 ms.
            subprocess.run([sys.executable, "-u", BOOTSTRAP, str(folder / "empty.py")], env=environ, check=True)
            starts.append(time.monotonic() - began)
        return {**json.loads(ran.stdout), "start_s": min(starts)}


def under_an_agent(watched: bool, files: int, seconds: float) -> dict[str, float]:
    """Run a job that saves every second, once; return its figures, and the agent's CPU seconds for each save."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = f"{name}/checkpoints"
        settings = [f"--rdzv-conf=standby=off,metrics_port=off{f',checkpoint_dir={directory}' if watched else ''}"]
        command = [sys.executable, "-m", "elastic_ext.agent", "--nproc-per-node=1", *settings, str(JOB), directory]
        with (
            open(f"{name}/log", "w") as log,
            subprocess.Popen(
                [*command, str(files), str(seconds)], cwd=name, stdout=subprocess.PIPE, stderr=log, text=True
            ) as agent,
        ):
            assert agent.stdout is not None
            agent.stdout.readline()
            before = cpu_s(agent.pid)
            found = json.loads(agent.stdout.readline())
            used = cpu_s(agent.pid) - before
        return {**found, "agent_cpu_s": used / found["saves"]}


def agent_result(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float | None]:
    """Return the figures of the jobs under an agent for the JSON line."""
    names = {"steps_per_s": 1, "save_s": 4, "agent_cpu_s": 4}
    return {
        f"agent_{name.removeprefix('agent_')}_{side}": measure.rounded(
            measure.median([each[name] for each in turns[side]]), digits
        )
        for name, digits in names.items()
        for side in SIDES
    }


def result_of(seconds: Mapping[str, Mapping[str, Sequence[float]]], sizes: Sequence[int]) -> dict[str, float | None]:
    """Return the figures for the JSON line. seconds: by side and what was measured."""
    least = {side: {name: min(values) for name, values in found.items()} for side, found in seconds.items()}
    parameters, _, files = sizes
    plain, recorded = least["without"], least["with"]
    return {
        "steps_per_s_without": measure.rounded(1 / plain["step_s"], 1),
        "steps_per_s_with": measure.rounded(1 / recorded["step_s"], 1),
        "us_per_event": measure.rounded((recorded["event_s"] - plain["event_s"]) * 1e6),
        "ms_per_step_of_events": measure.rounded((recorded["event_s"] - plain["event_s"]) * parameters * 1e3),
        "save_s_without": measure.rounded(plain["save_s"], 4),
        "save_s_with": measure.rounded(recorded["save_s"], 4),
        "us_per_file": measure.rounded((recorded["save_s"] - plain["save_s"]) / files * 1e6, 1),
        "start_ms_without": measure.rounded(plain["start_s"] * 1e3, 2),
        "start_ms_with": measure.rounded(recorded["start_s"] * 1e3, 2),
    }


def draw(figure: Any, found: Mapping[str, float | None]) -> None:
    """Draw each figure with the record as a share of the one without it."""
    names = {"steps_per_s": "steps per second", "save_s": "time of a save", "start_ms": "time of a start"}
    shares = {name: (found[f"{name}_with"] or 0.0) / (found[f"{name}_without"] or 1.0) for name in names}
    axes = figure.subplots()
    axes.barh([names[name] for name in reversed(shares)], [shares[name] for name in reversed(shares)], color="#2e7d4f")
    axes.axvline(1.0, color="#888888", linewidth=1)
    axes.set(title="With the record of saves, as a share of without", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10, help="of each job under an agent")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args(argv)
    sizes = args.parameters, args.steps, args.files
    seconds: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in SIDES}
    for _ in range(args.repeat):
        for side, watched in SIDES.items():
            for name, value in one_turn(watched, sizes).items():
                seconds[side][name].append(value)
    jobs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(args.repeat):
        for side, watched in SIDES.items():
            jobs[side].append(under_an_agent(watched, args.files, args.seconds))
    found = {**result_of(seconds, sizes), **agent_result(jobs)}
    record = {
        "benchmark": "save_record",
        "parameters": args.parameters,
        "files": args.files,
        **found,
        "machine": measure.machine(),
    }
    rows = [
        (name, *(measure.shown(found[f"{name}_{side}"], 4) for side in SIDES))
        for name in ("steps_per_s", "save_s", "start_ms", "agent_steps_per_s", "agent_save_s", "agent_cpu_s")
    ]
    measure.publish(args.results, record, measure.table(("", *SIDES), rows), lambda figure: draw(figure, found))


if __name__ == "__main__":
    main()
