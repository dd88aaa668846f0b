"""A job that saves in local_dir in its own way, under stock torchrun."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory.catalogue import Known, list_checkpoints
from elastic_ext.checkpoints.storage import open_storage
from tests.jobs import EXT, run

JOB = str(Path(__file__).parents[2] / "scripts" / "local_saves.py")


@pytest.mark.seam
@pytest.mark.full("s3")
def test_a_script_saves_in_local_dir(where: str, tmp_path: Path) -> None:
    """It resumes from there; all of it is in checkpoint_dir at the end; and on another machine it resumes from that."""
    local = tmp_path / "local"
    conf = f"--rdzv-conf=checkpoint_dir={where},local_dir={local},events_file={tmp_path}/events"
    command = [*EXT, "--nproc-per-node=2", "--max-restarts=1", conf, JOB]
    job = run([*command, str(local)], tmp_path)
    assert job.returncode == 0, job.all
    assert job.out.count(f"RESUMES {local}/step_6\n") == 2, job.all
    rows = {row.name: (row.known, row.complete) for row in list_checkpoints(open_storage(where))}
    assert rows == {"step_6": (Known.PROVED, True), "final.pt": (Known.PROVED, True)}, job.all
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    saves = [(each["save"], each["step"]) for each in told if each["event"] == "save_recorded"]
    assert saves == [("step_3", 3), ("step_6", 6), ("final.pt", None)]
    shutil.rmtree(local)
    job = run([*command, str(local)], tmp_path)
    assert job.returncode == 0, job.all
    assert job.out.count(f"RESUMES {where}/step_6\n") == 2, job.all
    assert job.out.count(f"SAVES IN {local}\n") == 2, job.all
