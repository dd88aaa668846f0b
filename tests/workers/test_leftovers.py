"""What stopped workers leave running: only what holds something of the next round ends, until the agent dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from elastic_ext.workers.leftovers import Needs, reason
from tests.jobs import AGENT, Job, wait_gone

NEEDS = Needs(port=29400, directories=("/data/run", "/local"))


@pytest.mark.parametrize(
    ("name", "files", "ports", "why"),
    [
        ("python", ["/dev/null", "/dev/nvidia3"], [], "the GPU /dev/nvidia3"),
        ("python", ["/dev/dri/renderD128"], [], "the GPU /dev/dri/renderD128"),
        ("python", ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/accelerate"], [], ""),  # as each program that lists GPUs
        ("nvidia-cuda-mps", ["/dev/nvidia3"], [], ""),
        ("nvidia-cuda-mps", ["/data/run/log"], [], "/data/run/log"),
        ("tar", ["/data/run/step_5/rank_0.pt"], [], "/data/run/step_5/rank_0.pt"),
        ("tar", ["/data/run2/x", "/data/run", "socket:[29400]"], [6379], ""),
        ("redis", ["socket:[7]"], [6379, 29400], "port 29400"),
    ],
)
def test_only_what_the_next_round_needs_counts(name, files, ports, why):
    assert reason(name, files, ports, NEEDS) == why


def test_without_directories_no_file_counts():
    assert reason("tar", ["/data/run/x"], [], Needs(1)) == ""


SCRIPT = """
import os, signal, subprocess, sys
def daemon(then):
    "Of another environment, session and parent, with no descriptor of ours. Return its pid."
    daemonize = f"sh -c 'echo $$; exec sleep 10000 {then}' &"
    with subprocess.Popen(["env", "-i", "setsid", "sh", "-c", daemonize], stdout=subprocess.PIPE) as shell:
        return int(shell.stdout.readline())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("cache", daemon("> /dev/null"), flush=True)
    print("holder", daemon("> checkpoints/part"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
print("late", daemon("> /dev/null"), flush=True)
signal.pause()
"""


@pytest.mark.seam
def test_a_restart_spares_daemons_an_agents_death_none(tmp_path: Path) -> None:
    """The second round's worker was a warm standby, if one was ready."""
    (tmp_path / "leaves.py").write_text(SCRIPT)
    (tmp_path / "checkpoints").mkdir()
    options = ["--nproc-per-node=1", "--max-restarts=1", "--rdzv-conf=checkpoint_dir=checkpoints,metrics_port=off"]
    with Job([*AGENT, *options, "leaves.py"], tmp_path, forks=False) as job:
        cache, holder, late = (int(job.wait_for(rf"(?m)^{name} (\d+)$")[0][1]) for name in ("cache", "holder", "late"))
        try:
            assert wait_gone([holder]) == []
            held = re.escape(f"{tmp_path}/checkpoints/part")
            job.wait_for(rf"a worker has left process {holder} \(sleep\) running, which holds {held}")  # logged once it has gone
            os.kill(cache, 0)  # raises if it is gone
        finally:
            job.process.send_signal(signal.SIGKILL)
            left = wait_gone([cache, holder, late])
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert left == []
