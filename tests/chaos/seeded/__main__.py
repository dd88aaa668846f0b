"""Seeded runs of a job under faults; see tests/chaos/README.md.

    python -m tests.chaos.seeded --seed 7                        one run
    python -m tests.chaos.seeded --seed 7 --only 0,2             with some of its faults
    python -m tests.chaos.seeded --seed 100 --runs 300           many, two side by side; what fails is shrunk
    python -m tests.chaos.seeded --plan FOLDER/7/plan.json       a plan of an earlier run, or one made by hand
    python -m tests.chaos.seeded --etcd=embedded --seed 7        without etcd, on the store that the job's first host has

FOLDER/SEED gets plan.json, history.jsonl and the agents' logs. Exit code 0: all checks held. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from tests.chaos import processes
from tests.chaos.seeded import checks, schedule
from tests.chaos.seeded.hosts import SCRIPT
from tests.chaos.seeded.run import Run
from tests.chaos.seeded.schedule import Plan
from tests.jobs import RUNNING, Finished, ended, environment

RUN_S = 1200.0
ALONE_STEPS = 1000  # more than almost all runs make
MISSED = "missed.json"  # in the folder of a run: the kinds of its faults that were not done


def one(plan: Plan, folder: Path) -> list[str]:
    """Return what does not hold. folder: of this run, in one that has what all runs need."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(schedule.encode(plan), indent=1))
    if not processes.own_shared_memory():  # mounts would be the machine's, for good
        raise PermissionError("unshare or mount: not allowed, and the disks of a run are mounts of its own; run it as root")
    processes.adopt_orphans()
    with ExitStack() as stack:
        events = Run(plan, folder, stack).go()
    steps = max((each["step"] for each in checks.of(events, *checks.TRAINING)), default=0)
    problems = checks.broken(plan, events, undisturbed(folder.parent, steps))
    (folder / MISSED).write_text(json.dumps([each["kind"] for each in checks.of(events, "nobody", "skipped")]))
    (folder / "problems.json").write_text(json.dumps(problems, indent=1))
    return problems


def undisturbed(folder: Path, steps: int, anew: bool = False) -> list[str]:
    """The state after each step of a run that nothing happens to. anew: the training may have changed since the last one."""
    path = folder / "alone.json"
    known = [] if anew or not path.exists() else list(json.loads(path.read_text()))
    if len(known) > steps:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, SCRIPT, "--alone", str(max(steps, ALONE_STEPS))]
    done = subprocess.run(command, check=True, capture_output=True, env=environment())
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:  # others may read, or do the same
        file.write(done.stdout)
    os.replace(file.name, path)
    return list(json.loads(done.stdout))


def started(seed: int, folder: Path, positions: set[int] | None = None, embedded: bool = False) -> list[str]:
    """A run in a process of its own; what does not hold."""
    only = [] if positions is None else ["--only", ",".join(map(str, sorted(positions)))]
    command = [sys.executable, "-m", "tests.chaos.seeded", f"--seed={seed}", f"--folder={folder}", *only, *mode(embedded)]
    problems = folder / _name(str(seed), positions) / "problems.json"
    problems.unlink(missing_ok=True)  # of an earlier run
    try:
        done = ended(command, RUN_S)
    except subprocess.TimeoutExpired:
        return [f"no end in {RUN_S:g} s"]
    return reported(problems.read_text() if problems.exists() else None, done)


def reported(problems: str | None, done: Finished) -> list[str]:
    """What does not hold, and if the run came to no end of its own, that. problems: what it wrote, None: nothing."""
    found = [] if problems is None else list(json.loads(problems))
    if problems is None or done.returncode != bool(found):
        found.append(f"the suite itself left with {done.returncode}: {done.err[-2000:]}")
    return found


def _name(of: str, positions: set[int] | None) -> str:
    """Of a run's folder: of all faults of a plan, or of those at these positions."""
    return of if positions is None else f"{of}-only-{'-'.join(map(str, sorted(positions)))}"


def mode(embedded: bool) -> list[str]:
    """What chooses such plans."""
    return [f"--etcd={schedule.EMBEDDED}"] if embedded else []


def many(first: int, runs: int, folder: Path, side_by_side: int, embedded: bool) -> int:
    failed, without, began = [], 0, time.monotonic()
    pool = ThreadPoolExecutor(side_by_side)
    waiting = {pool.submit(started, seed, folder, None, embedded): seed for seed in range(first, first + runs)}
    try:
        for each in as_completed(waiting):
            seed, problems = waiting[each], each.result()
            kinds = [fault.kind for fault in schedule.plan(seed, embedded).faults]
            at = f"[{time.monotonic() - began:.0f} s]"
            missed = json.loads((folder / str(seed) / MISSED).read_text()) if not problems else []
            partly = f" (not done: {', '.join(missed)})" if missed else ""
            print(f"{at} seed {seed}: {'FAILED' if problems else 'passed'}: {', '.join(kinds)}{partly}", flush=True)
            without += bool(missed)
            for problem in problems:
                print(f"    {problem}", flush=True)
            if problems:
                failed.append(seed)
    finally:
        pool.shutdown(cancel_futures=True)  # told to end, it starts no further run
    for seed in failed:
        shrunk(seed, folder, embedded)
    some = f", {without} of them without one of their faults" if without else ""
    print(f"{runs - len(failed)} of {runs} runs passed{some}; histories: {folder}")
    return 1 if failed else 0


def shrunk(seed: int, folder: Path, embedded: bool) -> None:
    plan = schedule.plan(seed, embedded)
    kept = schedule.fewest(len(plan.faults), lambda positions: bool(started(seed, folder, positions, embedded)))
    faults, only = [plan.faults[each] for each in sorted(kept)], ",".join(map(str, sorted(kept)))
    again = " ".join(["python -m tests.chaos.seeded", f"--seed {seed} --only {only}", *mode(embedded)])
    print(f"seed {seed}: the fewest faults that fail: {faults}\n    again: {again}")


def _plan(args: argparse.Namespace) -> tuple[Plan, str]:
    """The plan that is asked for, and the name of its folder."""
    plan, name = (
        (schedule.decode(json.loads(args.plan.read_text())), args.plan.stem)
        if args.plan is not None
        else (schedule.plan(args.seed, bool(args.etcd)), str(args.seed))
    )
    positions = None if args.only is None else {int(each) for each in args.only.split(",") if each}
    return plan if positions is None else schedule.only(plan, positions), _name(name, positions)


def _end() -> None:
    """By the way of all exits: nothing stays."""
    for child in list(RUNNING):
        child.terminate()
    sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="of the run, or of the first of many")
    what.add_argument("--plan", type=Path, help="a plan.json")
    parser.add_argument("--etcd", choices=[schedule.EMBEDDED], help="no etcd; else the seed says where it is")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--only", help="positions of the faults that are meant, e.g. 0,2")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "chaos"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: _end())
    folder = args.folder.resolve()
    if args.runs > 1:
        undisturbed(folder, ALONE_STEPS, anew=True)
        return many(args.seed, args.runs, folder, args.side_by_side, bool(args.etcd))
    plan, name = _plan(args)
    problems = one(plan, folder / name)
    for problem in problems:
        print(f"{name}: {problem}", file=sys.stderr)
    if problems:
        print(f"{name}: faults {[str(each) for each in plan.faults]}\nhistory and logs: {folder / name}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
