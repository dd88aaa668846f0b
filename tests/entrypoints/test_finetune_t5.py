"""entrypoints/finetune_t5.py: a T5 with random weights under FSDP, with the arguments of a TrainJob."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.jobs import AGENT, ROOT, STOCK, Job, descendants, run

pytest.importorskip("transformers")

SCRIPT = ROOT / "entrypoints" / "finetune_t5.py"
# 32 examples in batches of 4 on 2 ranks are 4 steps an epoch. No access to the Hub: a download would be an error.
TINY = ["--d_model=32", "--layers=1", "--examples=32"]
OFFLINE = {"HF_HUB_OFFLINE": "1"}
STEP = re.compile(r"\{'loss': '(\S+)', 'grad_norm': '(\S+)', .*'epoch': '(\S+)'\}")


@pytest.mark.full
def test_a_killed_job_resumes_at_another_world_size(tmp_path: Path) -> None:
    """What is trained twice has the same losses and norms, in all the digits that the Trainer prints."""
    agent = [*AGENT, "--nproc_per_node=2", "--max-restarts=3", "--rdzv-conf=checkpoint_dir=checkpoints"]
    arguments = [str(SCRIPT), "--model_id=google-t5/t5-large", "--epochs=10", *TINY]
    with Job([*agent, *arguments], tmp_path, **OFFLINE) as job:
        job.wait_for("'epoch': '2.25'")
        (victim, *_) = [pid for pid in descendants(job.process.pid) if is_rank_1(pid)]
        os.kill(victim, signal.SIGKILL)
        done = job.finish()
    assert done.returncode == 0, done.err
    _, first, again = re.split("starting from random weights|resuming from ", done.out)
    assert re.match(rf"{tmp_path}/checkpoints/checkpoint-({'|'.join(map(str, range(4, 40, 4)))})\n", again), again[:200]
    twice = {epoch: values for *values, epoch in STEP.findall(first)}.items()
    assert [values == twice_of(again, epoch) for epoch, values in twice if twice_of(again, epoch)].count(False) == 0
    assert "done at step 40, epoch 10 (FSDP)" in done.out
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("checkpoint-"))
    assert kept == ["checkpoint-32", "checkpoint-36", "checkpoint-40"]

    more = ["--max_steps=42", "--global_batch=24", "--activation_checkpointing"]  # on 3 ranks, 2 micro-steps
    other = run([*STOCK, "--nproc_per_node=3", *arguments, *more], tmp_path, **OFFLINE)
    assert other.returncode == 0, other.err
    assert f"resuming from {tmp_path}/checkpoints/checkpoint-40\n" in other.out
    assert "done at step 42" in other.out
    assert all(4 < float(loss) < 8 for loss, *_ in STEP.findall(done.out + other.out))  # ln 384 is 5.9: the mean, over everything


def is_rank_1(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it ended meanwhile
        return b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def twice_of(text: str, epoch: str) -> list[str]:
    return next((values for *values, other in STEP.findall(text) if other == epoch), [])
