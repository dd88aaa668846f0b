"""The record of saves below a URL: what goes through fsspec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.test_saves import KILLED, RecordedJob

HEAD = """
import os, signal, sys, fsspec, torch
import torch.distributed.checkpoint as dcp
url, kill = sys.argv[1], sys.argv[2:] == ["kill"]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
filesystem, root = fsspec.core.url_to_fs(url)
def file(name, data=b"data"):
    with filesystem.open(f"{root}/{name}", "wb") as opened:
        opened.write(data)
"""

WAYS: dict[str, str] = {
    "open": """
def save(number):
    file(f"step_{number}/model.bin")
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    file(f"step_{number}/state.json")
""",
    "fsspec.open": """
def save(number):
    for name in ("model.pt", "optimizer.pt"):
        with fsspec.open(f"{url}/step_{number}/{name}", "wb") as opened:
            torch.save({}, opened)
        if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
""",
    "pipe, put": """
open("here", "wb").write(b"data")
def save(number):
    filesystem.pipe(f"{root}/step_{number}/model.bin", b"data")
    filesystem.pipe_file(f"{root}/step_{number}/more.bin", b"data")
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    filesystem.put("here", f"{root}/step_{number}/state.bin")
    filesystem.put_file("here", f"{root}/step_{number}/last.bin")
""",
    "copied into place": """
def save(number):
    file(f"step_{number}/.metadata.tmp")
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    filesystem.rename(f"{root}/step_{number}/.metadata.tmp", f"{root}/step_{number}/.metadata")
""",
    "dcp": """
def save(number):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    dcp.save(model.state_dict(), storage_writer=FsspecWriter(f"{url}/step_{number}"), no_dist=True)
""",
}

LOOP = """
step()
for number in (1, 2, 3):
    save(number)
    step()
filesystem.rm(f"{root}/step_1", recursive=True)
"""


def job_at(folder: Path, url: str) -> RecordedJob:
    return RecordedJob(folder, directories=[url])


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed", [True, False])
def test_each_way_to_save_to_s3(tmp_path: Path, s3: str, way: str, killed: bool) -> None:
    job = job_at(tmp_path, f"{s3}/run")
    (tmp_path / "script.py").write_text(HEAD + WAYS[way] + LOOP)
    job.run("script.py", f"{s3}/run", *(["kill"] if killed else []), code=KILLED if killed else 0)
    assert job.proved() == (["step_1", "step_2"] if killed else ["step_2", "step_3"])
    files = {path for each in job.record().saves if each.entry.path == "step_2" for path in each.files}
    assert len(files) == {"copied into place": 1, "pipe, put": 4}.get(way, 2), files


@pytest.mark.seam
def test_filesystems_without_a_loop(tmp_path: Path) -> None:
    """As those of sftp and SMB."""
    job = job_at(tmp_path, "memory://bucket/run")
    (tmp_path / "script.py").write_text(
        HEAD
        + """
file("old/a")
step()
for number in (1, 2):
    file(f"step_{number}/a")
    filesystem.copy(f"{root}/step_{number}/a", f"{root}/step_{number}/b")
    step()
filesystem.copy(f"{root}/step_1", f"{root}/copy", recursive=True)
step()
with filesystem.open(root + "2/step_9", "wb") as opened: opened.write(b"data")
file(".elastic_ext/saves/x")
with filesystem.open(f"{root}/step_2/a") as opened: opened.read()
"""
    )
    job.run("script.py", "memory://bucket/run")
    saves = {each.entry.path: each for each in job.record().saves}
    assert saves.keys() == {"old", "step_1", "step_2", "copy"}
    assert [name for name, each in saves.items() if each.proved] == ["old", "step_1", "step_2"]
    assert saves["copy"].why == "not all of it was seen to be written"
    assert sorted(saves["step_2"].files) == ["step_2/a", "step_2/b"]


@pytest.mark.seam
@pytest.mark.parametrize("line", ["filesystem.open(root + '/x', 'nonsense')", "filesystem.copy('nowhere/x', root + '/y')"])
def test_errors_of_filesystems_reach_the_script(tmp_path: Path, line: str) -> None:
    job = job_at(tmp_path, "memory://bucket/run")
    (tmp_path / "script.py").write_text(f"{HEAD}\n{line}\n")
    shown = job.run("script.py", "memory://bucket/run", code=1)
    assert "Error" in shown
    assert "no longer recorded" not in shown
