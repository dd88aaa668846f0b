"""Copies in memory under our agent: workers, or the agent itself, are killed; what training comes to is the same to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.formats.candidates import order_of
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.rank_groups import RankGroups
from tests.jobs import AGENT, SCRIPTS, Finished, Gate, Job, wait_gone
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

STEPS = 12
SCRIPT = [str(SCRIPTS / "memory_job.py"), str(STEPS)]
MEMORY = r"(?m)^memory (/\S+)$"  # the agents' logs, too, have words that follow "memory"


def start(tmp_path: Path, act: dict | None = None, *options: str, save_every: int = 5, **variables: str) -> Job:
    """options: of torchrun."""
    settings = {
        "ELASTIC_EXT_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "ELASTIC_EXT_MEMORY_EVERY": "1",
        "ELASTIC_EXT_BACKOFF": "0",
        "PYTHONPATH": str(SCRIPTS.parents[1]),
        "ACT": json.dumps(act or {}),
    }
    command = [*AGENT, *options, "--nproc-per-node=2", "--max-restarts=3", *SCRIPT, str(save_every)]
    return Job(command, tmp_path, **settings, **variables)


def loaded(job: Job | Finished) -> list[tuple[int, str, str]]:
    """(step, digest, directory) of each load of rank 0."""
    found = re.findall(r"^loaded 0 (\d+) (\w+) (\w+)", job.out, re.MULTILINE)
    return [(int(step), digest, directory) for step, digest, directory in found]


def check(done: Finished, unbroken: list[str]) -> None:
    """Every state that was told, after loads and steps, is that of an unbroken training."""
    assert done.returncode == 0, done.err
    for _, step, digest in re.findall(r"^(loaded \d|step \d|done \d) (\d+) (\w+)", done.out, re.MULTILINE):
        assert digest == unbroken[int(step)], f"step {step}"
    assert re.search(rf"^done 0 {STEPS} ", done.out, re.MULTILINE)


@pytest.fixture(scope="module")
def unbroken(forking: RankGroups) -> list[str]:
    """In a process of its own, which has torch already."""
    with forking.lent() as groups:
        (states,) = groups.run("alone", 1, {"steps": STEPS})
        assert states is not None, groups.stderr.read_text()
    return list(states)


@pytest.mark.parametrize("times", [1, 2])
def test_nan_goes_back_from_copies_to_checkpoints(tmp_path, unbroken, times):
    """Checkpoints of 3 and 6, NaN in 8 and in the copy of 8; copies of 7 and 8 are refused, too."""
    with start(tmp_path, {"at": "nan", "step": 8, "times": times}, save_every=3) as job:
        done = job.finish()
    check(done, unbroken)
    assert [(step, where) for step, _, where in loaded(done)] == [(0, "none"), (6, "checkpoints"), (3, "checkpoints")][
        : times + 1
    ]
    newest = r"refused, and the newest checkpoint \(step 6\) is tried"
    assert len(re.findall(rf"elastic_ext: restart: .*the copies in memory \(up to step [78]\) are {newest}", done.err)) == 1
    assert done.err.count("the newest checkpoint (step 6) was tried before, so the one before it is tried") == times - 1
    marked = own_files.quarantined_names(open_storage(str(tmp_path / "checkpoints")))
    assert [order_of(name)[1] for name in marked] == [6] * (times - 1)


def test_killed_between_copies_with_warm_standbys(tmp_path, unbroken):
    """And nothing is left after the good end."""
    gate = Gate(tmp_path / "gate")
    with start(tmp_path, {"at": "hold", "step": 8, "rank": 0}, ELASTIC_EXT_STANDBY="on") as job:
        memory = Path(job.wait_for(MEMORY)[0][1])
        pid = job.wait_for(r"step 0 8 \w+ (\d+)")[0][1]
        os.kill(int(pid), signal.SIGKILL)
        done = job.finish()
        gate.open()
    assert not memory.parent.exists()
    check(done, unbroken)
    first, (step, digest, tier) = loaded(done)
    assert first == (0, unbroken[0], "none")
    assert (step in (7, 8), digest, tier) == (True, unbroken[step], "memory")  # the thread may have committed step 8
    assert "has changed since the standbys were started" not in done.err


def test_a_killed_agents_memory_goes_with_it(tmp_path, unbroken):
    gate = Gate(tmp_path / "gate")
    with start(tmp_path, {"at": "hold", "step": 8, "rank": 0}) as job:
        memory = Path(job.wait_for(MEMORY)[0][1])
        pids = [int(found[1]) for found in job.wait_for(r"step \d 8 \w+ (\d+)", 2)]
        assert list(memory.glob("step_*/rank_*.mem"))
        job.process.kill()
        job.process.wait()
        assert wait_gone(pids, LIMIT_S) == []
        until(lambda: not memory.parent.exists(), "the reaper removes it once the workers are gone")
    gate.open()
    with start(tmp_path) as job:
        done = job.finish()
    check(done, unbroken)
    assert loaded(done)[0][::2] == (5, "checkpoints")
