"""A demonstration: train_fsdp.py runs on two workers, one of them is killed, and training resumes from the last checkpoint.

python entrypoints/demo.py
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
KILL_AT_STEP = 25
STEPS = 60  # the kill must come before the last one, on a busy machine too


def command(checkpoints: str) -> list[str]:
    """The command that a user would type."""
    return [
        *(sys.executable, "-m", "elastic_ext.agent", "--nproc-per-node=2", "--max-restarts=3"),
        f"--rdzv-conf=checkpoint_dir={checkpoints},metrics_port=0",
        *(str(HERE / "train_fsdp.py"), f"--checkpoint-dir={checkpoints}"),
        *("--save-every=10", f"--max-steps={STEPS}", "--log-every=1", "--data-mb=1"),
    ]


def workers(agent: int) -> list[int]:
    """The pids of the agent's workers in rank order: its children that run the script."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"train_fsdp.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def main() -> int:
    with tempfile.TemporaryDirectory() as checkpoints:
        print("$", *command(checkpoints), flush=True)
        agent = subprocess.Popen(
            command(checkpoints), stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        killed_at = resumed_at = None
        assert agent.stdout is not None
        for line in agent.stdout:
            print("   ", line, end="", flush=True)
            step = re.search(r"\bstep (\d+)", line)
            if killed_at is None and step and int(step[1]) >= KILL_AT_STEP:
                victim = workers(agent.pid)[-1]
                print(f"\n>>> kill -9 {victim}  (the worker of rank 1)\n", flush=True)
                os.kill(victim, signal.SIGKILL)
                killed_at = time.monotonic()
            elif killed_at is not None and resumed_at is None and line.startswith("epoch"):
                resumed_at = time.monotonic()
        code = agent.wait()
    if code == 0 and killed_at is not None and resumed_at is not None:
        print(f"\nThe job finished. From the kill to the next training step: {resumed_at - killed_at:.1f} s.")
        return 0
    print(f"\nThe job did not recover (exit code {code}).")
    return 1


if __name__ == "__main__":
    sys.exit(main())
