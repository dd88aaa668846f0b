"""Submits entrypoints/slurm/train.sbatch, unchanged, as a user does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.etcd_server import EtcdServer
from tests.jobs import DEFAULTS, ROOT, SCRIPTS
from tests.slurm.cluster import ENDED, SlurmCluster, SlurmJob

SBATCH = ROOT / "entrypoints" / "slurm" / "train.sbatch"
JOB = SCRIPTS / "slurm_job.py"


class Training:
    """Jobs with this etcd, in this folder. The job script is tests/scripts/slurm_job.py, its directory is `folder`."""

    def __init__(self, cluster: SlurmCluster, etcd: EtcdServer, folder: Path) -> None:
        self.cluster, self.etcd, self.folder = cluster, etcd, folder
        self.jobs: list[SlurmJob] = []

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cluster.call("scancel", "--signal=KILL", "--full", *(job.id for job in self.jobs), check=False)
        self.cluster.call("scancel", *(job.id for job in self.jobs), check=False)
        for job in self.jobs:
            job.await_state(*ENDED)

    def submit(self, *options: str, script: tuple[str, ...] = (), **variables: str) -> SlurmJob:
        """options: of sbatch. script: what to train, and its arguments. variables: of train.sbatch, and settings."""
        given = {
            **DEFAULTS,
            "ENDPOINT": self.etcd.endpoint,
            "STATE": str(self.folder / "state"),
            "ELASTIC_EXT_SETTLE": "5",  # a busy machine may be slow to tell of a failure
            "ELASTIC_EXT_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            **variables,
        }
        train = script or (str(JOB), str(self.folder))
        job = self.cluster.submit(self.folder, *options, str(SBATCH), *train, **given)
        self.jobs.append(job)
        return job

    def fault(self, node: str, what: str) -> None:
        """See slurm_job.py."""
        writing = self.folder / "writing"
        writing.write_text(what)
        writing.rename(self.folder / f"fault.{node}")

    def finish(self) -> None:
        """Let the script end well."""
        (self.folder / "finish").touch()


def loads(job: SlurmJob, run: int) -> list[tuple[int, int, str]]:
    """Step, world size and node of each start of a worker in this run. The step is that of the checkpoint and of its content."""
    found = re.findall(rf"loaded (\d+) \((\d+)\) rank \d+ of (\d+) on (\w+) run {run} ", job.out)
    assert all(step == holds for step, holds, _, _ in found), found
    return [(int(step), int(world), node) for step, _, world, node in found]
