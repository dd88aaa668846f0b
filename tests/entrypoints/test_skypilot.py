"""The command of entrypoints/skypilot/train.yaml, on two hosts, with the variables that SkyPilot sets. SkyPilot is not here."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.jobs import ROOT, Job
from tests.networks import network

TASK = yaml.safe_load((ROOT / "entrypoints" / "skypilot" / "train.yaml").read_text())
TRAIN = """
import os, signal
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), signal.SIGKILL)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(f"trained {dist.get_rank()} of {dist.get_world_size()} {os.environ['TORCHELASTIC_RUN_ID']}\\n", end="", flush=True)
"""


@pytest.mark.full
def test_its_command_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with ExitStack() as stack:
        hosts = stack.enter_context(network(TASK["num_nodes"])).hosts
        sets = {
            **{name: value.replace("/checkpoints", str(tmp_path)) for name, value in TASK["envs"].items()},
            "SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts),
            "SKYPILOT_NUM_NODES": str(len(hosts)),
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "SKYPILOT_TASK_ID": "sky-managed-2026-12-01-20-15-48-563597_train_1-0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "GLOO_SOCKET_IFNAME": "net0",
        }
        jobs = []
        for rank, host in enumerate(hosts):
            own = {"SKYPILOT_NODE_RANK": str(rank), "ELASTIC_EXT_NODE_NAME": f"node{rank}"}
            command = [*host.inside, "bash", "-c", TASK["run"]]
            jobs.append(stack.enter_context(Job(command, tmp_path, **sets, **own)))
        done = [job.finish() for job in jobs]
    said = "".join(each.all for each in done)
    assert [each.returncode for each in done] == [0, 0], said
    assert sorted(re.findall(r"trained \d of \d \S+", said)) == [
        f"trained {rank} of 2 {sets['SKYPILOT_TASK_ID']}" for rank in (0, 1)
    ]
    assert "rank 1 was killed by SIGKILL" in said


def test_a_bug_is_not_tried_again() -> None:
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [69, 75]
