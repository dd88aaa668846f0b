"""Jobs of Hugging Face's Trainer and of Lightning under the agent: killed, told to leave, and resumed where the agent says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ext.checkpoints.choice import discovery
from tests.jobs import AGENT, SCRIPTS, Finished, Job, environment

HUGGING_FACE, LIGHTNING = [SCRIPTS / "hf_job.py"], [SCRIPTS / "lightning_job.py"]
KINDS = pytest.mark.parametrize(
    ("script", "library"),
    [
        pytest.param(HUGGING_FACE, [], id="hugging-face"),
        pytest.param(LIGHTNING, ["lightning.pytorch"], id="lightning"),
        pytest.param(LIGHTNING, ["pytorch_lightning"], id="pytorch_lightning"),
    ],
)
VARIABLES = {"HF_HUB_OFFLINE": "1", "TORCHELASTIC_LOG_LEVEL": "INFO", "LOGLEVEL": "INFO"}
SLOW_S = 250  # these libraries take long to import, the more so beside other tests
pytestmark = pytest.mark.timeout(3 * SLOW_S)


def job(folder: Path, script: list[Path], steps: int, library: list[str], **variables: str) -> Job:
    pytest.importorskip("transformers" if script is HUGGING_FACE else library[0].partition(".")[0])
    checkpoints = folder / "checkpoints"
    conf = f"--rdzv-conf=checkpoint_dir={checkpoints},stop_grace=1,platform_grace=60"
    # Lightning's workers do not end on SIGTERM, so their grace is waited for.
    command = [
        *AGENT,
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--shutdown-timeout=3",
        conf,
        *script,
        checkpoints,
        str(steps),
        *library,
    ]
    return Job(command, folder, **VARIABLES, **variables)


def chosen(done: Finished) -> list[int]:
    """The steps that the agent has chosen, in its own words."""
    return [int(step) for step in re.findall(r"resuming from \S+, step (\d+)", done.err)]


def ends(done: Finished) -> set[tuple[int, str, int, int]]:
    """Of each rank: the attempt, the step that it was told, the library's own first and last step."""
    found = re.findall(r"rank \d attempt (\d+) told (\w+) went (\S+) to (\d+)", done.out)
    assert len(found) == 2, done.all
    return {(int(attempt), told, int(first), int(last)) for attempt, told, first, last in found}


@pytest.mark.full
@KINDS
def test_a_rank_is_killed_and_all_go_on_where_the_agent_says(tmp_path, script, library):
    with job(tmp_path, script, 12, library, KILL="1:8") as running:
        done = running.finish(SLOW_S)
    assert done.returncode == 0, done.all
    assert len(chosen(done)) == 1, done.all
    (step,) = chosen(done)
    assert step in (3, 6)  # rank 0 may still have been writing the second one
    assert ends(done) == {(1, str(step), step, 12)}


def saved_before_leaving(running: Job, folder: Path) -> int:
    """Tell the agent to leave; the step that its job has saved before."""
    running.wait_for("under way", 2, SLOW_S)
    running.process.send_signal(signal.SIGTERM)
    done = running.finish(SLOW_S)
    assert done.returncode == 75, done.all
    assert "checkpoint before leaving: saved" in done.err
    newest = discovery.newest_complete(str(folder / "checkpoints")).resume
    assert newest is not None
    assert newest.step is not None
    return newest.step


@pytest.mark.full
@KINDS
def test_told_to_leave_it_saves_and_comes_back_at_that_step(tmp_path, script, library):
    with job(tmp_path, script, 1_000_000, library) as running:
        step = saved_before_leaving(running, tmp_path)
    with job(tmp_path, script, step + 3, library) as running:
        done = running.finish(SLOW_S)
    assert done.returncode == 0, done.all
    assert chosen(done) == [step]
    assert ends(done) == {(0, str(step), step, step + 3)}


@pytest.mark.full
def test_the_trainer_saves_on_demand_what_is_not_the_best(tmp_path):
    """save_strategy="best" says no to a save at a step at which it evaluates, and it does at each second one."""
    with job(tmp_path, HUGGING_FACE, 1_000_000, [], BEST="1") as running:
        saved_before_leaving(running, tmp_path)


@pytest.mark.full
def test_lightning_saves_at_once_what_it_saves_in_the_background_else(tmp_path):
    with job(tmp_path, LIGHTNING, 1_000_000, ["lightning.pytorch"], ASYNC="1") as running:
        assert saved_before_leaving(running, tmp_path) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "missing"),
    [("huggingface", ["transformers"]), ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"])],
)
def test_without_the_library_it_says_so(module, missing):
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        f"from elastic_ext.training.{module} import SaveOnDemand\nSaveOnDemand()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    assert f"ImportError: elastic_ext.training.{module} needs the package" in done.stderr
