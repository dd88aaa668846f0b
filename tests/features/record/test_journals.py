"""The agent's part in the record of saves: it gives each worker a journal in its own memory, and the directories to watch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_ext.checkpoints.record.journal import journal_of
from elastic_ext.checkpoints.record.proof import prove
from tests.jobs import EXT, run

SCRIPT = """
import glob, json, os, signal, torch
message = json.loads(os.environ.get("ELASTIC_EXT_WORKER", "{}"))
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.1)
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
optimizer.step()
torch.save(optimizer.state_dict(), f"checkpoints/step_{attempt}_{rank}")
optimizer.step()
found = [open(path).read() for path in glob.glob(glob.escape(message.get("journal", "none")) + ".*")]
os.write(1, f"FOUND {json.dumps([attempt, rank, found])}\\n".encode())  # in one write, so that two ranks' lines do not mix
if attempt == "0" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.seam
@pytest.mark.full("remote")
@pytest.mark.parametrize(
    ("conf", "recorded"),
    [
        ("checkpoint_dir=checkpoints", True),
        ("checkpoint_dir=memory://x", False),
    ],
    ids=["local", "remote"],
)
def test_each_worker_gets_a_journal(tmp_path: Path, conf: str, recorded: bool) -> None:
    """Also after a restart, whose workers were warm standbys."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--nproc-per-node=2", "--max-restarts=2", f"--rdzv-conf={conf},last_call_timeout=0.5"]
    job = run([*EXT, *options, "script.py"], tmp_path)
    assert job.returncode == 0, job.all
    told = [line.partition("FOUND ")[2] for line in job.out.splitlines() if "FOUND " in line]
    names = set()
    for each in told:
        for text in re.findall(r'"(elastic_ext-saves.*?)"', each):
            journal = journal_of(text.encode().decode("unicode_escape").encode())
            assert journal is not None
            (save,) = prove([journal], {}).saves
            assert save.proved, save
            names.add(save.entry.path)
    assert {"step_0_1", "step_1_0", "step_1_1"} <= names if recorded else not names
    assert len(told) >= 3
