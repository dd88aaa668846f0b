"""A job with the Checkpointer under our agent: killed, told to leave, started again; what it comes to is exact to the bit."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.checkpoints.rank_groups import RankGroups
from tests.jobs import AGENT, SCRIPTS, Job, run

SCRIPT = SCRIPTS / "checkpointed_job.py"


def command(directory: Path | str, out: str, steps: int) -> list[str]:
    """directory: of the checkpoints. out: where the ranks write what they have to say."""
    conf = f"checkpoint_dir={directory},verify=full,backoff=0"
    script = [SCRIPT, directory, f"--out={out}", f"--steps={steps}", "--save-every=2"]
    return [str(part) for part in (*AGENT, "--nproc-per-node=2", "--max-restarts=2", f"--rdzv-conf={conf}", *script)]


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
def test_a_relative_directory_means_the_same_to_a_script_that_has_changed_its_own(tmp_path):
    script = tmp_path / "moves.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist, elastic_ext\nos.makedirs('sub', exist_ok=True)\nos.chdir('sub')\n"
        "dist.init_process_group('gloo')\ncheckpointer = elastic_ext.Checkpointer(model=torch.nn.Linear(1, 1))\n"
        "step = checkpointer.load().step\nprint('loaded', step, os.environ['ELASTIC_EXT_CHECKPOINT_DIR'], flush=True)\n"
        "if step == 0:\n    checkpointer.save(5, wait=True)\n    os._exit(3)\n"
    )
    conf = "checkpoint_dir=kept,local_dir=near,backoff=0"
    done = run([*AGENT, "--nproc-per-node=1", "--max-restarts=1", f"--rdzv-conf={conf}", str(script)], tmp_path)
    assert done.returncode == 0, done.all
    assert re.findall(r"^loaded (.*)$", done.out, re.MULTILINE) == [f"{step} {tmp_path}/kept" for step in (0, 5)]
    assert newest(tmp_path / "kept") == 5
    assert newest(tmp_path / "near") == 5
    assert not list((tmp_path / "sub").iterdir())


@pytest.mark.full
def test_told_to_leave_no_step_is_lost(tmp_path, groups):
    """SIGTERM: one more checkpoint, at the step where they are; started again the job goes on from there."""
    with Job(command(tmp_path / "broken", "broken", 10**6), tmp_path) as job:
        job.wait_for("is at step 6", 2)
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
    assert done.returncode == 75, done.err
    assert "checkpoint before leaving: saved" in done.err
    step = newest(tmp_path / "broken")
    trained = max(int(line.split()[0]) for line in said(tmp_path, "broken", "loss")[0])
    assert trained - 3 <= step <= trained + 1  # training is two steps ahead of a save at most, and in the third
    again = run(command(tmp_path / "broken", "again", step + 3), tmp_path)
    assert again.returncode == 0, again.err
    assert said(tmp_path, "again", "resumed") == [[f"{step} 0"]] * 2
    assert said(tmp_path, "again", "state") == unbroken_state(groups, tmp_path, step + 3)
