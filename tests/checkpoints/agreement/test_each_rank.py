"""A checkpoint of a file per rank: all nodes agree on it, and each rank finds its own file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import messages, nodes
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.agreement.quarantine import quarantine
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.features.resume.watch import ResumePoint
from tests.checkpoints.choice.scenes import ranks, resumed
from tests.jobs import AGENT, run


def test_each_rank_is_told_its_own(tmp_path: Path) -> None:
    for step in (1, 2):
        ranks(tmp_path, f"s_{step}_rank{{:02}}.pt", 2)
    found = resumed(tmp_path)
    assert (found.path, found.step) == (str(tmp_path / "s_2_rank*.pt"), 2)
    assert [found.variables_of(rank)["ELASTIC_EXT_RESUME_FROM"] for rank in (0, 1)] == [
        str(tmp_path / f"s_2_rank0{rank}.pt") for rank in (0, 1)
    ]
    assert found.variables_of(1)["ELASTIC_EXT_RESUME_STEP"] == "2"
    point = ResumePoint(Settings(checkpoint_dir=str(tmp_path)), found)
    assert point.own_variables(1) == found.variables_of(1)


def test_a_rank_without_a_file_finds_the_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks(tmp_path, "s_2_rank{}.pt", 2)
    point = ResumePoint(Settings(checkpoint_dir=str(tmp_path)), resumed(tmp_path))
    assert point.own_variables(2) == {}
    assert "has no file of rank 2" in caplog.text
    assert point.variables()["ELASTIC_EXT_RESUME_FROM"] == str(tmp_path / "s_2_rank*.pt")


@pytest.mark.parametrize("name", ["s_2.pt", "s_2_tp0_pp{}.pt", "s_2-{}-of-2.pt"])
def test_without_own_files_all_ranks_find_the_same(tmp_path: Path, name: str) -> None:
    ranks(tmp_path, name, 2)
    assert resumed(tmp_path).files == {}
    assert ResumePoint(Settings(checkpoint_dir=str(tmp_path)), resumed(tmp_path)).own_variables(0) == {}


def test_the_other_nodes_find_theirs_by_the_name(tmp_path: Path) -> None:
    ranks(tmp_path, "s_2_rank{}.pt", 4)
    sent = messages.read_agreement(messages.encode(messages.Agreement("s_2_rank*.pt", 2, "newest")))
    settings = Settings(checkpoint_dir=str(tmp_path))
    node = nodes._NodeSide(settings, str(tmp_path), "run", NodeInRound(1, 2))
    assert node.seen(sent, 0.0).files[3] == str(tmp_path / "s_2_rank3.pt")


def test_the_blamed_one_is_quarantined_with_its_files(tmp_path: Path) -> None:
    for step in (1, 2):
        ranks(tmp_path, f"s_{step}_rank{{}}.pt", 2)
    assert quarantine(Settings(checkpoint_dir=str(tmp_path)), resumed(tmp_path).path, False, "bad") == "s_2_rank*.pt"
    assert own_files.quarantined_names(open_storage(str(tmp_path))) == {"s_2_rank*.pt"}
    assert resumed(tmp_path).step == 1


SCRIPT = """
import os, pathlib, signal, sys, time, torch
import elastic_ext
rank, folder = os.environ["RANK"], pathlib.Path(os.environ["ELASTIC_EXT_CHECKPOINT_DIR"])
came_from = elastic_ext.resume_from()
print("rank", rank, "from", came_from and os.path.basename(came_from), elastic_ext.resume_step(), flush=True)
if came_from:
    assert torch.load(came_from)["rank"] == rank
    sys.exit()
torch.save({"rank": rank, "step": 5, "model": {}, "optimizer": {}}, folder / f"ep0-ba5-rank{rank}.pt")
torch.save({}, folder / "training_args.bin")
while len(list(folder.glob("ep0-*"))) < 2:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_a_job_restarts_from_a_file_per_rank(tmp_path: Path) -> None:
    script, directory = tmp_path / "job.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    directory.mkdir()
    conf = f"checkpoint_dir={directory},backoff=0"
    done = run([*AGENT, "--nproc-per-node=2", "--max-restarts=3", f"--rdzv-conf={conf}", str(script)], tmp_path)
    assert done.returncode == 0, done.err
    assert sorted(re.findall(r"rank (\d) from (\S+) (\S+)", done.out)) == [
        ("0", "None", "None"),
        ("0", "ep0-ba5-rank0.pt", "5"),
        ("1", "None", "None"),
        ("1", "ep0-ba5-rank1.pt", "5"),
    ]
