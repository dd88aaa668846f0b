"""Two groups of workers open one directory of checkpoints: what the older one is told, and what its agent does."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory.generations import KEPT_MARKERS, Opener, StaleGroup, open_generation, refuse_stale
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from tests.jobs import AGENT, Job, run

OLD = Opener("job", 3, "a")


@pytest.mark.parametrize(
    ("old", "new", "saved", "said", "rule"),
    [
        (OLD, Opener("job", 0, "b"), True, "another launch, of this job, saves to the directory; give each", "directory-taken"),
        (OLD, Opener("other", 0, "b"), True, "another launch, of job other, saves to the directory; give", "directory-taken"),
        (Opener(), Opener("job", 0, "b"), True, "another launch, of job job, saves to the directory", "directory-taken"),
        (OLD, Opener("eval", 0, "b"), False, "another launch, of job eval, has opened the directory and saved", "no-evidence"),
        (OLD, Opener("job", 4, "a"), True, "restart 4 of this launch has taken the place of these workers", "no-evidence"),
        (OLD, Opener(), True, "workers without an agent have opened the directory", "no-evidence"),
        (OLD, None, True, "others, perhaps of this launch, have opened the directory", "no-evidence"),
        (None, OLD, True, "others, perhaps of this launch, have opened the directory", "no-evidence"),
    ],
)
def test_the_older_group_learns_who_owns_the_directory(
    tmp_path: Path, old: Opener | None, new: Opener | None, saved: bool, said: str, rule: str
):
    storage = open_storage(str(tmp_path))
    generation = open_generation(storage, old or Opener())
    newest = open_generation(storage, new or Opener())
    if saved:
        (tmp_path / directory_name(7, newest)).mkdir()
    for number, opener in enumerate((old, new), 1):
        if opener is None:
            (tmp_path / MARKERS / f"generation-0000000{number}").write_text("{")
    with pytest.raises(StaleGroup) as stale:
        refuse_stale(storage, generation)
    message = str(stale.value)
    assert message.startswith(said)  # a verdict shows the first 200 characters
    assert f": generation 2 has opened {tmp_path}, this group of workers is generation 1 and must not commit" in message
    assert "paused" not in message
    raised = RaisedException(f"{StaleGroup.__module__}.StaleGroup", message)
    assert classify(Evidence(0, 1, exception=raised, first_step_done=True)).rule == rule


def test_an_older_restart_may_not_open(tmp_path: Path):
    """The same one may, and another launch, which counts from 0 again. A few markers stay."""
    storage = open_storage(str(tmp_path))
    for number, opener in enumerate((OLD, OLD, Opener("job", 0, "b"), Opener(), Opener("job", 4, "a")), 1):
        assert open_generation(storage, opener) == number
    with pytest.raises(StaleGroup, match=r"restart 4 of job job has opened .*, this is restart 3: these workers belong to"):
        open_generation(storage, OLD)
    for _ in range(KEPT_MARKERS):
        open_generation(storage, Opener())
    assert len(list(storage.entries(MARKERS))) == KEPT_MARKERS


TRAINS = """
import sys, time, torch, torch.distributed as dist, elastic_ext
dist.init_process_group("gloo")
checkpointer = elastic_ext.Checkpointer(model=torch.nn.Linear(1, 1), keep_last=10**6)  # what others load is not removed
at = checkpointer.load().step
print("at", at, flush=True)
for step in range(at + 1, 10**6):
    checkpointer.save(step, wait=True)
    print("saved", step, checkpointer.last_error is None, flush=True)
    if sys.argv[1:] and step == 1:
        open(sys.argv[1]).read()  # until the other end is closed
    time.sleep(0.1)
"""
LOADS = "import torch, elastic_ext\nprint(elastic_ext.Checkpointer(model=torch.nn.Linear(1, 1)).load().step > 0)"


def agent(run_id: str, *command: str) -> list[str]:
    conf = "--rdzv-conf=checkpoint_dir=kept,backoff=0"
    return [*AGENT, "--nproc-per-node=1", "--max-restarts=3", f"--rdzv-id={run_id}", conf, *command]


@pytest.mark.full
def test_a_newer_jobs_save_stops_the_older_one(tmp_path: Path):
    """A restart of the older would take the directory from the newer, whose restart would take it back, and so on."""
    (tmp_path / "train.py").write_text(TRAINS)
    os.mkfifo(tmp_path / "pause")
    with Job(agent("job", "train.py", "pause"), tmp_path) as older:
        older.wait_for(r"saved \d+ True", 1)
        with Job(agent("job", "train.py"), tmp_path) as newer:
            newer.wait_for(r"saved \d+ True", 1)
            (tmp_path / "pause").write_text("")  # which opens it, and so waits for the reader
            ended = older.finish()
            assert ended.returncode == 65, ended.err
            assert re.search(r"elastic_ext: stop: rank 0 raised .*StaleGroup: .* \(kind code, rule directory-taken\)", ended.err)
            assert "another launch, of this job, saves to the directory; give each its own" in ended.err
            newer.wait_for(r"saved \d+ True", 20)
            newer.process.send_signal(signal.SIGTERM)
            done = newer.finish()
    assert "StaleGroup" not in done.err


@pytest.mark.full
def test_an_evaluation_under_an_agent_costs_one_restart(tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "evaluate.py").write_text(LOADS)
    with Job(agent("job", "train.py"), tmp_path) as trains:
        trains.wait_for(r"saved \d+ True", 2)
        evaluated = run(agent("evaluation", "evaluate.py"), tmp_path)
        assert (evaluated.returncode, evaluated.out.split()) == (0, ["True"]), evaluated.err
        again = int(trains.wait_for(r"(?m)^at (\d+)$", 2)[1][1])
        assert again > 0
        trains.wait_for(rf"saved {again + 3} True", 1)
        trains.process.send_signal(signal.SIGTERM)
        done = trains.finish()
    assert done.err.count("elastic_ext: restart: ") == 1, done.err
    assert "another launch, of job evaluation, has opened the directory and saved nothing there yet" in done.err
