"""What the agents record of the saves of their workers, and what the next round resumes from."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory.catalogue import Known, list_checkpoints
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.features.record.watch import open_entries
from tests.checkpoints.choice.scenes import TRAINING, saved
from tests.jobs import AGENT, EXT, Job, run
from tests.ports import free_port

JOB = str(Path(__file__).parents[2] / "scripts" / "recorded_saves.py")


@pytest.mark.seam
@pytest.mark.full("s3", "in_place")
@pytest.mark.parametrize("way", ["new", "in_place"])
def test_a_save_that_was_cut_is_passed_over(where: str, tmp_path: Path, way: str) -> None:
    conf = f"--rdzv-conf=checkpoint_dir={where},last_call_timeout=0.5"
    job = run([*EXT, "--nproc-per-node=2", "--max-restarts=2", conf, JOB, way, where], tmp_path)
    assert job.returncode == 0, job.all
    assert job.out.count("RESUMES step_3\n") == 2, job.all
    assert "checkpoint passed over" in job.all
    rows = {row.name: (row.known, row.complete) for row in list_checkpoints(open_storage(where))}
    assert rows["step_3"] == (Known.PROVED, True)


@pytest.mark.full
def test_two_agents_record_together(tmp_path: Path) -> None:
    """A rank each. The first has not written to the last save, and the second one knows of both."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=2", "--nproc-per-node=1"]
    conf = "--rdzv-conf=checkpoint_dir=checkpoints,last_call_timeout=1"
    command = [
        *AGENT,
        "--rdzv-backend=ext_c10d",
        "--local-addr=127.0.0.1",
        "--max-restarts=2",
        *where,
        conf,
        JOB,
        "new",
        str(checkpoints),
    ]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(command, tmp_path, ELASTIC_EXT_NODE_NAME=name)) for name in ("a", "b")]
        ended = [job.finish() for job in jobs]
    assert [each.returncode for each in ended] == [0, 0], [each.all for each in ended]
    assert "".join(each.out for each in ended).count("RESUMES step_3\n") == 2, [each.all for each in ended]
    (row,) = [each for each in list_checkpoints(open_storage(str(checkpoints))) if each.name == "step_3"]
    assert (row.known, row.ranks) == (Known.PROVED, 2)


ASKS = """
import os
import elastic_ext
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    elastic_ext.resume_from() if os.environ["ASKS"] == "yes" else None
    os.abort()
print("BEGINS", flush=True)
"""


@pytest.mark.full("asks")
@pytest.mark.seam
@pytest.mark.parametrize("asks", [True, False], ids=["asks", "resumes on its own"])
def test_a_question_ends_a_job_that_asks(tmp_path: Path, asks: bool) -> None:
    for name in ("G_100.pt", "D_100.pt"):
        saved(tmp_path / "checkpoints" / name, TRAINING)
    (tmp_path / "script.py").write_text(ASKS)
    conf = "--rdzv-conf=checkpoint_dir=checkpoints,last_call_timeout=0.5,backoff=0"
    job = run([*EXT, "--max-restarts=2", conf, "script.py"], tmp_path, ASKS="yes" if asks else "no")
    question = "only you can say from which checkpoint to go on: D_100.pt, G_100.pt belong together"
    assert question in job.err
    assert (job.returncode, "BEGINS" in job.out) == ((78, False) if asks else (0, True)), job.all


@pytest.mark.seam
def test_open_files_are_seen(tmp_path: Path) -> None:
    """Those that are open for writing, or mapped; what is only read is not."""
    for name in ("written", "read", "mapped"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(bytes(4096))
    code = """
import mmap, signal, sys
written, read = open(sys.argv[1] + "/written/x", "w"), open(sys.argv[1] + "/read/x")
with open(sys.argv[1] + "/mapped/x", "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
signal.pause()
"""
    with Job([sys.executable, "-c", code, str(tmp_path)], tmp_path, forks=False) as job:
        job.wait_for("ready")
        assert open_entries([job.process.pid], str(tmp_path)) == {"written", "mapped"}
    assert open_entries([job.process.pid], str(tmp_path)) == frozenset()
    assert os.path.isdir(tmp_path / "read")
