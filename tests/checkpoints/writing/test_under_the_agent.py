"""A job with the Checkpointer under our agent. That it loses no step when told to leave: entrypoints/test_train_fsdp.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkpoints.rank_groups import RankGroups
from tests.jobs import AGENT, run


def said(tmp_path: Path, out: str, what: str) -> list[list[str]]:
    """What each of the two ranks said."""
    return [re.findall(rf"^{what} (.*)$", (tmp_path / f"{out}.{rank}").read_text(), re.MULTILINE) for rank in range(2)]


def unbroken_state(groups: RankGroups, tmp_path: Path, steps: int) -> list[list[str]]:
    words = [f"{tmp_path}/unbroken", f"--out={tmp_path}/unbroken", f"--steps={steps}"]
    groups.run("checkpointed", 2, {"words": words})
    return said(tmp_path, "unbroken", "state")


def newest(directory: Path) -> int:
    return max(int(path.parent.name[5:13]) for path in directory.glob("step_*/manifest.json"))


@pytest.mark.seam
def test_a_relative_directory_outlives_a_scripts_chdir(tmp_path):
    (tmp_path / "moves.py").write_text(
        "import os, sys, torch, torch.distributed as dist, elastic_ext\nos.makedirs('sub', exist_ok=True)\nos.chdir('sub')\n"
        "dist.init_process_group('gloo')\ncheckpointer = elastic_ext.Checkpointer(model=torch.nn.Linear(1, 1))\n"
        "step = checkpointer.load().step\nprint('loaded', step, os.environ['ELASTIC_EXT_CHECKPOINT_DIR'], flush=True)\n"
        "if step == 0:\n    checkpointer.save(5, wait=True)\n    os._exit(3)\n"
    )
    conf = "checkpoint_dir=kept,local_dir=near,backoff=0"
    done = run([*AGENT, "--nproc-per-node=1", "--max-restarts=1", f"--rdzv-conf={conf}", "moves.py"], tmp_path)
    assert done.returncode == 0, done.all
    assert re.findall(r"^loaded (.*)$", done.out, re.MULTILINE) == [f"{step} {tmp_path}/kept" for step in (0, 5)]
    assert newest(tmp_path / "kept") == 5
    assert newest(tmp_path / "near") == 5
    assert not list((tmp_path / "sub").iterdir())
