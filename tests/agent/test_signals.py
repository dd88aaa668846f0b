"""Signals that come at a bad moment: what an agent has to do as it leaves is done all the same, and its exit code says why."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import EXT, SCRIPTS, Job, run

pytestmark = pytest.mark.full

FINISH, LEAVE, COPIES = (
    "agent.companions:JobCompanions.finish",
    "agent.companions:JobCompanions.leave",
    "checkpoints.copying.copier:Copier.close",
)


def agent(at: str, number: signal.Signals, *watched: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "signal_at.py"), at, number.name, ",".join(watched), "--", "--nproc-per-node=1"]


@pytest.mark.parametrize(
    ("at", "watched"),
    [("agent.round:RunningRound.close", FINISH), ("agent.companions:WarmStarts.close", COPIES)],
    ids=["round", "standbys"],
)
def test_while_a_job_that_is_done_is_closed(tmp_path: Path, at: str, watched: str) -> None:
    """What is not copied yet is at least named."""
    (tmp_path / "job.py").write_text("print('trains')")
    where = {"ELASTIC_EXT_CHECKPOINT_DIR": str(tmp_path / "remote"), "ELASTIC_EXT_LOCAL_DIR": str(tmp_path / "local")}
    done = run([*agent(at, signal.SIGTERM, watched), "job.py"], tmp_path, **where)
    assert done.returncode == 75, done.all
    assert f"enters {watched}" in done.out


def test_a_second_signal_while_the_agent_explains_itself(tmp_path: Path) -> None:
    """The others learn at once that this node is gone, and not only when its lease expires."""
    (tmp_path / "job.py").write_text("import signal; print('trains', flush=True); signal.pause()")
    command = [*agent("agent.verdicts:Verdicts.publish_leaving", signal.SIGQUIT, LEAVE, FINISH), "job.py"]
    with Job(command, tmp_path) as job:
        job.wait_for("trains")
        job.process.send_signal(signal.SIGINT)
        done = job.finish()
    assert done.returncode == 130, done.all
    assert f"enters {LEAVE}\nenters {FINISH}\n" in done.out


def test_a_second_notice_at_once_costs_no_checkpoint(tmp_path: Path) -> None:
    """timeout(1) sends SIGTERM to its child and to its child's group."""
    command = [*agent("agent.leaving:take_as_one", signal.SIGTERM, LEAVE), str(SCRIPTS / "saving_job.py"), str(tmp_path)]
    with Job(command, tmp_path, STOP=str(tmp_path / "stop"), ELASTIC_EXT_PLATFORM_GRACE="600") as job:
        job.wait_for("steps 0")
        job.process.send_signal(signal.SIGTERM)
        done = job.finish()
    assert done.returncode == 75, done.all
    assert "checkpoint before leaving: saved" in done.err
    assert f"enters {LEAVE}" in done.out


def test_a_script_starts_with_sigint_unblocked(tmp_path: Path) -> None:
    """The agent has blocked it, so that Ctrl-C at the first instruction of our file shows no traceback of that."""
    seen = "[signal.pthread_sigmask(signal.SIG_BLOCK, ()), json.loads(os.environ['ELASTIC_EXT_WORKER'])['interrupts_held']]"
    (tmp_path / "job.py").write_text(f"import json, os, signal; print(*{seen}, flush=True)")
    done = run([*EXT, "--nproc-per-node=1", "job.py"], tmp_path)
    assert "set() True\n" in done.out, done.all
