"""Submits entrypoints/slurm/train.sbatch, unchanged, as a user does."""

from __future__ import annotations

import re
from pathlib import Path

from elastic_ext.own_etcd.folder import folder_of
from tests.jobs import DEFAULTS, ROOT, SCRIPTS
from tests.slurm.cluster import ENDED, SlurmCluster, SlurmJob

SBATCH = ROOT / "entrypoints" / "slurm" / "train.sbatch"
JOB = SCRIPTS / "slurm_job.py"


class Training:
    """Jobs in this folder; each brings its own etcd. The script is tests/scripts/slurm_job.py, its directory is `folder`."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
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
            "STATE": str(self.folder / "state"),
            "CHECKPOINT_DIR": str(self.folder / "checkpoints"),
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

    def explain(self, job: SlurmJob) -> str:
        """What `elastic-ext explain` says of the job that runs now, outside of it, as for whoever may read its state."""
        names = self.cluster.call("scontrol", "show", "hostnames", job.show()["NodeList"]).split()
        endpoint = "job:" + ",".join(self.cluster.nodes[name].address for name in names)
        command = ["elastic-ext", "explain", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job.id}"]
        return self.cluster.call(*command, ELASTIC_EXT_JOB_SECRET_FILE=str(self.folder / "state" / "secret"))

    def left_behind(self, but: str = "") -> list[str]:
        """What the jobs' etcd has left on the nodes: processes and files. but: a lost node. Other tests share /dev/shm."""
        found = []
        for name in self.cluster.nodes:
            if name != but:
                ours = " ".join(f"{folder_of(job.id, (), name, {})}".rpartition("_")[0] + "_*" for job in self.jobs)
                found += self.cluster.on_node(name, "sh", "-c", f"ls -d {ours}; pgrep -a etcd").splitlines()
        return found

    def finish(self) -> None:
        """Let the script end well."""
        (self.folder / "finish").touch()


def loads(job: SlurmJob, run: int) -> list[tuple[int, int, str]]:
    """Step, world size and node of each start of a worker in this run. The step is that of the checkpoint and of its content."""
    found = re.findall(rf"loaded (\d+) \((\d+)\) rank \d+ of (\d+) on (\w+) run {run} ", job.out)
    assert all(step == holds for step, holds, _, _ in found), found
    return [(int(step), int(world), node) for step, _, world, node in found]
