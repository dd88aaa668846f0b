"""Where nodes are, as Slurm's topology plugin has it, on a real Slurm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.jobs import DEFAULTS, TORCHRUN
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SWITCHES = """
SwitchName=leaf3 Nodes=n1
SwitchName=leaf2 Nodes=n2
SwitchName=leaf1 Nodes=n3
SwitchName=spine Switches=leaf[1-3]
"""
TELLS = "import os; print('at', *map(os.environ.get, ('RANK', 'SLURMD_NODENAME', 'ELASTIC_EXT_MEMORY_DOMAIN')), flush=True)"


def test_ranks_follow_the_switches(tmp_path: Path) -> None:
    """Though no setting says where a node is; copies in memory go by it, too. Slurm's own order is n1, n2, n3."""
    (tmp_path / "tells.py").write_text(TELLS)
    options = ["--rdzv-backend=ext_etcd", "--rdzv-endpoint=job:", "--nnodes=3", f"--rdzv-conf=checkpoint_dir={tmp_path}/saves"]
    agent = shlex.join([*TORCHRUN, *options, f"--rdzv-id={tmp_path.name}", "tells.py"])
    secret = {"ELASTIC_EXT_JOB_SECRET_FILE": str(tmp_path / "secret")}
    with SlurmCluster(3, SWITCHES, TopologyPlugin="topology/tree") as cluster:
        job = cluster.submit(tmp_path, "--nodes=3", "--output=%j.out", f"--wrap=srun {agent}", **DEFAULTS, **secret)
        assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0", job.out
    told = sorted(re.findall(r"at (\d) (\w+) (\S+)", job.out))
    assert told == [("0", "n3", "spine.leaf1"), ("1", "n2", "spine.leaf2"), ("2", "n1", "spine.leaf3")]
