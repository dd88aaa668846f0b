"""Jobs whose ranks wait in collectives: the short limit, and what looks like it but is healthy. No setting, as installed."""

import json
from pathlib import Path

import pytest

from tests import jobs
from tests.jobs import AGENT, SCRIPTS, Job

JOB = SCRIPTS / "spin_job.py"


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.DEFAULTS, "ELASTIC_EXT_HANG", "on")


def start(tmp_path: Path, group: str, *faults: str) -> Job:
    env = {"STOP": str(tmp_path / "stop"), "GROUP": group, "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / "verdict")}
    return Job([*AGENT, "--nproc-per-node=2", "--max-restarts=0", JOB, *faults], tmp_path, **env)


@pytest.mark.long
@pytest.mark.parametrize("group", ["spinning", "gloo"])
def test_ranks_in_different_collectives_are_a_hang_by_the_short_limit(tmp_path, group):
    """With waits that spin, nothing else would end it for half an hour."""
    with start(tmp_path, group, "mismatch:1") as job:
        done = job.finish()
    assert done.returncode == 1, done.err
    assert "each stays in a call that waits for other ranks" in done.err
    verdict = json.loads((tmp_path / "verdict").read_text())
    assert verdict["decision"]["kind"] == "hang"
    assert verdict["stacks"].count("in all_reduce") == 2
    if group == "spinning":
        assert "of a processor used, waits for other ranks" in verdict["decision"]["reason"]


HEALTHY = [
    ("spinning", "own_part:1"),  # the other spins
    ("gloo", "own_part:1"),  # the other sleeps
    ("spinning", "evaluate"),
    ("spinning", "synchronise"),
    ("spinning", "backward"),
    ("gloo", "helper:0", "helped:1"),
]


@pytest.mark.long
@pytest.mark.parametrize("faults", HEALTHY, ids=lambda faults: "-".join(faults))
def test_what_takes_longer_than_the_short_limit_is_no_hang(tmp_path, faults):
    with start(tmp_path, *faults) as job:
        job.wait_for("is over at", 1 if faults[1] == "own_part:1" else 2)
        (tmp_path / "stop").touch()
        done = job.finish()
    assert done.returncode == 0, done.err
    assert "no progress" not in done.err
    assert "made progress" not in done.err
    assert done.out.count("finished") == 2
