"""entrypoints/slurm/train.sbatch, unchanged, on a real Slurm: what every job needs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from elastic_ext.failures import slurm
from tests.jobs import DEFAULTS, ROOT
from tests.slurm.cluster import SlurmCluster, SlurmJob
from tests.slurm.jobs import SBATCH, Training
from tests.until import until


@pytest.mark.seam
def test_a_good_job_and_one_with_a_bug(training: Training) -> None:
    """Both at once, on a node each. The verdict is the exit code, whatever srun says."""
    ends_well, has_a_bug = training.folder / "well.py", training.folder / "bug.py"
    ends_well.write_text("print('trained')")
    has_a_bug.write_text("import no_such_module")
    good = training.submit("--nodes=1", script=(str(ends_well),), STATE=str(training.folder / "good"))
    bad = training.submit("--nodes=1", script=(str(has_a_bug),), STATE=str(training.folder / "bad"))
    assert bad.await_state("COMPLETED", "FAILED")["ExitCode"] == "65:0"
    assert good.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert good.out.count("trained\n") == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in bad.out
    assert "exit code 65: not requeued" in bad.out
    (ended,) = training.cluster.completions(bad.id)  # once: it was not requeued
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "65:0")
    until(lambda: not training.left_behind(), "nothing left of the jobs' etcd: the keepers end last")


@pytest.mark.full
def test_an_array(training: Training) -> None:
    """Each task is a job of its own: run id, state, output. sacct knows their ends without a database (--completion)."""
    script = training.folder / "told.py"
    script.write_text(
        "import os; names = 'SLURM_ARRAY_TASK_ID SLURM_JOB_ID TORCHELASTIC_RUN_ID'; "
        "print('task', *map(os.environ.get, names.split()))"
    )
    job = training.submit("--nodes=1", "--array=3,5", script=(str(script),), STATE="")
    job.await_array_ended(2)
    outputs = [out.read_text() for out in training.folder.glob("*.out")]
    told = [re.findall(r"task (\d) (\d+) (\d+)\n", each)[0] for each in outputs]
    assert sorted(task for task, _, _ in told) == ["3", "5"]
    assert all(job_id == run_id for _, job_id, run_id in told)
    shown = training.cluster.call("sacct", "--completion", "--noheader", "--format=jobid,state")
    completed = {line.split()[0] for line in shown.splitlines() if "COMPLETED" in line}
    assert len({job_id for _, job_id, _ in told} & completed) == 2, shown


@pytest.mark.seam
def test_slurm_reads_its_own_lists_of_hosts(cluster: SlurmCluster) -> None:
    environ = {**cluster.environ, "SLURM_JOB_NODELIST": "n[1-3],gpu[08-10],login"}
    assert slurm.hostnames(environ) == ("n1", "n2", "n3", "gpu08", "gpu09", "gpu10", "login")


# What a test changes: where the shared storage is, and sizes. A spare that comes when so short a job is over would run it again.
SMALLER = {"--nodes=4 --gpus-per-node=8": "--nodes=1", "--nodes=5 --gpus-per-node=8": "--nodes=1", "SPARES=1": "SPARES=0"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "commands"),
    [
        (SBATCH.parent / "README.md", r"```sh\n(.*?)```"),
        (SBATCH, r"submit it with\n#     (.*?)\n"),
        (ROOT / "elastic_ext" / "docs" / "getting-started.md", r"```sh\n(CHECKPOINT_DIR=.*?)```"),
    ],
    ids=["page", "script", "start"],
)
def test_commands_as_written(training: Training, file: Path, commands: str) -> None:
    """With CHECKPOINT_DIR, which agents and Checkpointer have as ELASTIC_EXT_CHECKPOINT_DIR."""
    found = re.search(commands, file.read_text(), re.DOTALL)
    assert found is not None
    command, shared = found[1], training.folder / "shared"
    for written, here in {**SMALLER, "/mnt/shared": str(shared)}.items():
        command = command.replace(written, here)
    place = training.folder / "entrypoints" / "slurm"  # of the checkout, or the folder of a copy
    place.mkdir(parents=True)
    for folder in (place, training.folder):
        shutil.copy(SBATCH, folder)
    (training.folder / "train.py").write_text(
        "import os, sys; names = 'CHECKPOINT_DIR', 'ELASTIC_EXT_CHECKPOINT_DIR'; "
        "print('saves in', *map(os.environ.get, names), sys.argv[1])"
    )
    said = training.cluster.call("sh", "-ec", command, cwd=training.folder, **DEFAULTS)
    jobs = [SlurmJob(training.cluster, number, training.folder) for number in re.findall(r"Submitted batch job (\d+)", said)]
    training.jobs += jobs
    assert len(jobs) == command.count("sbatch ") - command.count("train.sbatch ") >= 1
    for job in jobs:
        assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.out
        assert f"saves in {shared}/checkpoints {shared}/checkpoints --its=arguments\n" in job.out
