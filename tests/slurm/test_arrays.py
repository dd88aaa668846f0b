"""Arrays under entrypoints/slurm/train.sbatch, and heterogeneous jobs under the script of its README, on a real Slurm."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs import DEFAULTS
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import SBATCH, Training, loads

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # a minute each on an idle machine


def test_tasks_beside_each_other_do_not_meet(training: Training) -> None:
    """On one node. Slurm shows all tasks for the id of the last one, and would requeue all: that one is requeued, alone.

    The first is cancelled before, which is no reason for another one to end.
    """
    array = training.submit("--nodes=1", "--nodelist=n1", "--array=3-5", "--output=%A_%a.out")
    first, middle, last = (replace(array, id=f"{array.id}_{task}") for task in (3, 4, 5))
    for each in (first, middle, last):
        each.await_out("trains rank .* run 0")
        assert [step for step, _, _ in loads(each, 0)] == [0]
    checkpoints = training.folder / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"3", "4", "5"}
    training.cluster.call("scancel", first.id)
    first.await_state("CANCELLED")
    assert last.show()["JobId"] == array.id
    training.cluster.call("scancel", "--signal=USR1", last.id)
    said = last.await_out(r"exit code \d+: not requeued|requeued \(run 1\)")
    assert [each[0] for each in said] == ["requeued (run 1)"], last.out
    last.await_out("trains rank .* run 1")
    assert [step > 0 for step, _, _ in loads(last, 1)] == [True]
    training.finish()
    for each, restarts in ((middle, "0"), (last, "1")):
        shown = each.await_state("COMPLETED", "FAILED")
        assert (shown["ExitCode"], shown["Restarts"]) == ("0:0", restarts), each.out
    assert len(re.findall("loaded", middle.out)) == 1
    assert {path.name for path in (training.folder / "state").iterdir()} == {"3", "4", "5"}


# What the test changes: workers on processors, and fewer of them.
SMALLER = {
    "--nodes=1 --gpus-per-node=8": "--nodes=1 --cpus-per-task=2",
    "--nodes=4 --gpus-per-node=4": "--nodes=2",
    "$SLURM_GPUS_ON_NODE": "$SLURM_CPUS_ON_NODE",
}
TOLD = """
import os, pathlib
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0 and os.environ["RANK"] == "0": os._exit(1)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("trained", *map(os.environ.get, ("SLURMD_NODENAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE")), flush=True)
"""


def test_components_train_together(cluster: SlurmCluster, tmp_path: Path) -> None:
    """One node with two workers, two with one each: the script of the README, a worker of which crashes once."""
    found = re.search(r"```bash\n(#!/bin/bash\n.*?hetjob.*?)```", (SBATCH.parent / "README.md").read_text(), re.DOTALL)
    assert found is not None
    script = found[1]
    for written, here in SMALLER.items():
        assert written in script
        script = script.replace(written, here)
    (tmp_path / "het.sbatch").write_text(script)
    (tmp_path / "train.py").write_text(TOLD)
    job = cluster.submit(tmp_path, "--output=%j.out", "het.sbatch", "train.py", **DEFAULTS)
    shown = job.await_state("COMPLETED", "FAILED")
    assert shown["ExitCode"] == "0:0", job.out
    trained = re.findall(r"trained n\d (\d) (\d)", job.out)
    assert sorted(trained) == [("1", "4"), ("1", "4"), ("2", "4"), ("2", "4")], job.out
