"""`srun elastic-ext doctor --preflight` on a real Slurm."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_each_two_nodes_of_a_step_meet(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The variables of srun are enough. A batch script itself measures its own node only."""
    doctor = f"{sys.executable} -m elastic_ext.cli doctor --preflight --json"
    job = cluster.submit(
        tmp_path, "--nodes=3", "--output=%j.out", f"--wrap=srun --ntasks-per-node=1 {doctor} > together; {doctor} > alone"
    )
    job.await_state("COMPLETED", "FAILED")
    together, alone = (
        {(each["measure"], *each["nodes"]) for each in json.loads((tmp_path / name).read_text())["figures"]}
        for name in ("together", "alone")
    )
    nodes = ("n1", "n2", "n3")
    pairs = {(measure, *pair) for measure in ("bandwidth", "latency") for pair in combinations(nodes, 2)}
    assert together == {(measure, node) for measure in ("matmul", "copy", "disk") for node in nodes} | pairs, job.out
    assert alone == {(measure, "n1") for measure in ("matmul", "copy", "disk")}
