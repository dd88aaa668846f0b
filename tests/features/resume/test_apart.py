"""Jobs of several nodes that save in their own way, each node in a `local_dir` of its own."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory.catalogue import Known, list_checkpoints
from elastic_ext.checkpoints.storage import open_storage
from tests.jobs import AGENT, Job
from tests.ports import free_port

JOB = str(Path(__file__).parents[2] / "scripts" / "apart_saves.py")


def command(folder: Path, nodes: int = 2, more: str = "") -> list[str]:
    conf = f"--rdzv-conf=checkpoint_dir={folder}/checkpoints,local_dir=local,local_saves=all,last_call_timeout=1{more}"
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", f"--nnodes={nodes}", "--nproc-per-node=1"]
    return [*AGENT, "--rdzv-backend=ext_c10d", "--local-addr=127.0.0.1", "--max-restarts=2", *where, conf, JOB]


def run_nodes(folder: Path, line: list[str], *names: str) -> list[Job]:
    with ExitStack() as stack:
        jobs = []
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            jobs.append(stack.enter_context(Job(line, folder / name, ELASTIC_EXT_NODE_NAME=name)))
        return [job.finish() for job in jobs]


@pytest.mark.seam
def test_nodes_resume_from_their_own_disks(tmp_path: Path) -> None:
    """Each gets what it lacks from the other; at the end everything is in checkpoint_dir, as one save."""
    ended = run_nodes(tmp_path, [*command(tmp_path), "1"], "a", "b")
    said = [each.all for each in ended]
    assert [each.returncode for each in ended] == [0, 0], said
    lines = sorted(line for each in ended for line in each.out.splitlines() if " RESUMES " in line)
    assert len(lines) == 2, said
    for line in lines:
        assert " RESUMES 6 FROM " in line
        assert line.endswith("step_6 WITH model.pt optim_0.pt optim_1.pt")
        assert "/local/" in line
    rows = {row.name: (row.known, row.complete) for row in list_checkpoints(open_storage(str(tmp_path / "checkpoints")))}
    assert rows["step_6"] == (Known.PROVED, True), said
    assert rows["final.pt"] == (Known.PROVED, True), said
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name / "local")
    ended = run_nodes(tmp_path, [*command(tmp_path), "1"], "a", "b")
    assert sum(each.out.count(f" RESUMES 6 FROM {tmp_path}/checkpoints/step_6 ") for each in ended) == 2, [
        each.all for each in ended
    ]


@pytest.mark.full
def test_a_save_outlives_a_node_and_its_disk(tmp_path: Path) -> None:
    """Before its copy is in checkpoint_dir: its replacement, and the node that has stayed, get that part from the mirror."""
    ended = run_nodes(tmp_path, [*command(tmp_path, more=",mirror=on"), "disk"], "a", "b", "c")
    said = [each.all for each in ended]
    assert sorted(each.returncode for each in ended) == [-9, 0, 0], said
    lines = sorted(line for each in ended for line in each.out.splitlines() if " RESUMES " in line)
    assert len(lines) == 2, said
    for line in lines:
        assert " RESUMES 6 FROM " in line
        assert line.endswith("step_6 WITH model.pt optim_0.pt optim_1.pt")
        assert "/local/.elastic_ext/of_nodes/" in line
