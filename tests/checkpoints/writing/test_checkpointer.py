"""`elastic_ext.Checkpointer` with real ranks over gloo, on local disk and on an S3 server."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from elastic_ext import Checkpointer
from elastic_ext.checkpoints.directory.generations import StaleGroup
from elastic_ext.checkpoints.directory.own_files import MANIFEST, decode
from elastic_ext.checkpoints.directory.tiers import own_checkpoints
from elastic_ext.checkpoints.formats.candidates import order_of
from elastic_ext.checkpoints.ranks import CheckpointError
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.choice.scenes import flip
from tests.checkpoints.rank_groups import RankGroups, complete, drawn_kill, last_told

pytest.importorskip("torchdata")

KILLS = int(os.environ.get("ELASTIC_EXT_TEST_KILLS", "6"))  # 200: make chaos
SEED = int(os.environ.get("ELASTIC_EXT_TEST_SEED", "5"))
pytestmark = [pytest.mark.timeout(max(600, 10 * KILLS))]


@pytest.mark.full
@pytest.mark.seam("4:2")
@pytest.mark.parametrize(("wrap", "at"), [("ddp --no-sync", "4:2"), ("fsdp", "4:1"), ("fsdp", "0:2"), ("ddp --workers 1", "3:0")])
def test_resume_is_exact_to_the_bit(tmp_path: Path, groups: RankGroups, wrap: str, at: str) -> None:
    """In mid-epoch, in mid-accumulation and over the ends of later epochs."""
    common = [str(tmp_path / "checkpoints"), "--wrap", *wrap.split(), "--steps", "8"]
    for words in (["--out", str(tmp_path / "whole"), "--save", at], ["--out", str(tmp_path / "resumed")]):
        groups.run("checkpointed", 2, {"words": [*common, *words]})
    for rank in range(2):
        whole = (tmp_path / f"whole.{rank}").read_text().splitlines()
        [resumed, _loaded, *rest] = (tmp_path / f"resumed.{rank}").read_text().splitlines()
        assert resumed == f"resumed {at.replace(':', ' ')}"
        assert len(rest) > 10
        assert rest == whole[-len(rest) :]


@pytest.mark.full
def test_other_wrappers_and_world_sizes_load_equal_state(tmp_path: Path, groups: RankGroups) -> None:
    """Trained by 2 under FSDP2, loaded by 3 under FSDP2, by 2 under DDP and by one process."""

    def lines(world: int, *words: str) -> list[str]:
        common = [str(tmp_path / "checkpoints"), "--steps=4", f"--out={tmp_path}/{world}{words[0]}", *words]
        return list(groups.run("checkpointed", world, {"words": common})[0])

    trained = lines(2, "--wrap=fsdp", "--save=4:0")[-1].split()[-1]
    for world, wrap in ((3, "fsdp"), (2, "ddp"), (1, "plain")):
        assert f"loaded {trained}" in lines(world, f"--wrap={wrap}")


@pytest.mark.seam
@pytest.mark.full("s3")
def test_4_then_2_then_3_ranks(groups: RankGroups, where: str) -> None:
    """Every parameter and moment is equal after each load. What is each rank's own is not taken for another's; that is told."""
    step = 0
    for world in (4, 2, 3):
        results = groups.run("train", world, {"directory": where, "steps": 2}, env=of_s3())
        assert [(result["step"], result["wrong"], result["error"], result["dataloader"]) for result in results] == [
            (step, [], None, False)
        ] * world
        step += 2
    assert "random generators are reseeded" in groups.stderr.read_text()
    assert "the data loader starts from the beginning" in groups.stderr.read_text()


@pytest.mark.seam
def test_gradients_that_cannot_be_saved_are_refused(directory: str, groups: RankGroups) -> None:
    """On all ranks, and the next save is done."""
    for result in groups.run("unsharded_gradients", 2, {"directory": directory}):
        assert "save between optimizer steps" in result["raised"]
        assert "save between optimizer steps" in result["told"]
        assert result["saved"] == 1


def test_going_back_in_a_process_opens_a_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's choice is for the first load; what is trained again afterwards is newer than what was there."""
    model = torch.nn.Linear(1, 1)

    def save(checkpointer: Checkpointer, *steps: int) -> None:
        for step in steps:
            torch.nn.init.constant_(model.weight, step)
            checkpointer.save(step, wait=True)

    with Checkpointer(tmp_path, model=model) as checkpointer:
        save(checkpointer, 1, 2)
    monkeypatch.setenv("ELASTIC_EXT_RESUME_FROM", f"{tmp_path}/step_00000001.g0001")
    with Checkpointer(tmp_path, model=model, keep_last=9) as checkpointer:
        assert (checkpointer.load().step, model.weight.item()) == (1, 1)
        save(checkpointer, 2, 3)
        assert (checkpointer.load().step, model.weight.item()) == (3, 3)
        save(checkpointer, 4)
    assert [order_of(name) for name in complete(str(tmp_path))] == [(3, 4), (2, 3), (2, 2), (1, 2), (1, 1)]


def of_s3() -> dict[str, str]:
    """For ranks, which were forked from an older process; empty without a test's own server."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@pytest.mark.seam
@pytest.mark.full("s3")
@pytest.mark.timeout(3600)
def test_killed_writers_lose_nothing_that_was_committed(tmp_path: Path, groups: RankGroups, where: str) -> None:
    """After each kill the newest complete one is loaded, it is exactly the state of its step, and no told commit is lost."""
    kind, env = "s3" if "://" in where else "local", of_s3()
    draw = random.Random(f"{SEED} {kind}")
    told = tmp_path / "told"
    losses: list[str] = []
    killed = torn = 0
    kills = KILLS if kind == "local" else 2 * KILLS
    for turn in range(kills):
        args = {"directory": where, "steps": 400, "told": str(told), "options": {"keep_last": 2}}
        at, kill = drawn_kill(draw, turn, 4000)
        killed += None in groups.run("train", 2, {**args, **at}, env=env, **kill)
        torn += len(own_checkpoints(open_storage(where))) - len(complete(where))
        found = groups.run("train", 2, {"directory": where, "steps": 0}, env=env)
        newest = complete(where)
        wanted = (order_of(newest[0]) or (0, 0))[1] if newest else 0
        for result in found:
            assert result is not None, groups.stderr.read_text()[-3000:]
            assert result["wrong"] == []
            assert result["step"] == wanted
            if result["step"] < last_told(told):
                losses.append(f"turn {turn}: step {last_told(told)} was told, {result['step']} loaded")
    print(f"{kind}: {killed} of {kills} groups killed, {torn} torn checkpoints seen, losses: {len(losses)}")
    assert losses == []
    assert killed > kills // 2
    assert torn > 0 or kills < 12  # a few kills may all come between writes


@pytest.mark.seam
@pytest.mark.xdist_group("successor")
def test_stale_group_may_not_commit(directory: str, groups: RankGroups, successor: RankGroups) -> None:
    """Stopped in the middle of writing, continued when another group has opened the directory and saved."""
    stop = {"signal": signal.SIGSTOP, "signal_at": 2000, "signal_ranks": [0]}
    groups.start("train", 2, {"directory": directory, "steps": 50, "wait": True, **stop})
    first_stopped = groups.answer()
    [other_pid] = first_stopped["others"]
    os.kill(other_pid, signal.SIGSTOP)
    stopped = [first_stopped["pid"], groups.answer()["pid"]]
    before = complete(directory)
    first = successor.run("train", 2, {"directory": directory, "steps": 2})
    assert all(result["error"] is None and result["wrong"] == [] for result in first)
    after = complete(directory)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    results = groups.results()
    for result in results:
        assert result["raised"].startswith("StaleGroup")
        assert "generation 2 has opened" in result["raised"]
    assert complete(directory) == after  # nothing committed, nothing pruned
    assert set(before) & set(after)
    again = successor.run("train", 2, {"directory": directory, "steps": 2})
    assert all(result["step"] == first[0]["saved"] and result["wrong"] == [] for result in again)


def test_stale_group_may_not_prune(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=torch.nn.Linear(3, 3), keep_last=1) as stale:
        stale.save(1, wait=True)
        with Checkpointer(tmp_path, model=torch.nn.Linear(3, 3)) as newer:
            newer.save(2, wait=True)
        found = complete(str(tmp_path))
        with pytest.raises(StaleGroup, match="generation 2 has opened"):
            list(stale._retention.prune("step_00000001.g0001"))
    assert complete(str(tmp_path)) == found == ["step_00000002.g0002", "step_00000001.g0001"]


@pytest.mark.seam
def test_older_restart_of_a_launch_may_not_open(directory: str, groups: RankGroups) -> None:
    """But the same job, launched again, counts its restarts from 0 again and may."""
    args = {"directory": directory, "steps": 1}
    env = {"TORCHELASTIC_RUN_ID": "job", "ELASTIC_EXT_LAUNCH": "a", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert groups.run("train", 1, args, env=env)[0]["saved"] == 1
    assert groups.run("train", 1, args, env={**env, "TORCHELASTIC_RESTART_COUNT": "2"}) == [None]
    assert "these workers belong to a round that is over" in groups.stderr.read_text()
    anew = {**env, "ELASTIC_EXT_LAUNCH": "b", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert groups.run("train", 1, args, env=anew)[0]["saved"] == 2


# Storage that fails. Every rank is told, none hangs, training goes on.


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.seam
def test_disk_full_then_not(tmp_path: Path, groups: RankGroups) -> None:
    """Saves fail and free what they wrote; once there is room the next save succeeds, without a restart."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(14 << 20))
        args = {"directory": str(disk / "checkpoints"), "steps": 3, "wait": True, "elements": 200_000, "ballast": str(ballast)}
        results = groups.run("train", 2, args)
        for result in results:
            assert [kind for kind, _, _ in result["events"] if kind != "pruned"] == ["failed", "failed", "saved"]
            assert "full: " in result["events"][0][2]
            assert "No space left" in result["events"][0][2]
            assert (result["error"], result["saved"], result["raised"]) == (None, 3, "")
        assert complete(args["directory"]) == ["step_00000003.g0001"]
        assert [path.name for path in Path(args["directory"]).glob("step_*")] == complete(args["directory"])


@pytest.mark.seam
def test_file_too_large_raises_the_alarm(directory: str, groups: RankGroups) -> None:
    args = {"directory": directory, "steps": 3, "wait": True, "elements": 200_000}
    results = groups.run("train", 2, args, file_limit=1 << 20)
    for result in results:
        assert [kind for kind, _, _ in result["events"]] == ["failed", "failed", "failed", "alarm"]
        assert "full: " in result["error"]
        assert (result["saved"], result["raised"]) == (None, "")


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user")
def test_no_permission_is_told(groups: RankGroups) -> None:
    with tempfile.TemporaryDirectory() as reachable:  # unlike tmp_path, for another user
        os.chmod(reachable, 0o755)
        directory = f"{reachable}/checkpoints"
        assert groups.run("train", 2, {"directory": directory, "steps": 1})[0]["saved"] == 1
        for result in groups.run("train", 2, {"directory": directory, "steps": 2}, user=65534):
            assert result["step"] == 1  # it is loaded all the same
            assert "permission: " in result["error"]
            assert (result["wrong"], result["saved"], result["raised"]) == ([], None, "")


def test_a_flipped_bit_is_found_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 3)
    draw = random.Random(SEED)

    def loaded() -> int:
        with Checkpointer(tmp_path, model=model, keep_last=2) as checkpointer:
            return checkpointer.load().step

    with Checkpointer(tmp_path, model=model, keep_last=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, wait=True)
    newest = tmp_path / complete(str(tmp_path))[0]
    files = [newest / MANIFEST, *(newest / file.name for file in decode((newest / MANIFEST).read_bytes()).files)]
    assert len(files) == 5  # of which one holds tensors, one is torch's, one is the rank's own
    for file in files:
        good = file.read_bytes()
        flip(file, draw.randrange(len(good)))
        assert loaded() == 1, file.name  # the one before it
        monkeypatch.setenv("ELASTIC_EXT_RESUME_FROM", str(newest))
        with pytest.raises(CheckpointError):
            loaded()
        monkeypatch.delenv("ELASTIC_EXT_RESUME_FROM")
        file.write_bytes(good)
    assert loaded() == 2
    monkeypatch.setenv("ELASTIC_EXT_RESUME_FROM", "")  # the agent has found none
    assert loaded() == 0


def test_newest_few_stay(tmp_path: Path) -> None:
    (tmp_path / ".elastic_ext" / "pin").mkdir(parents=True)
    (tmp_path / ".elastic_ext" / "pin" / "step_00000002.g0001.json").write_text(json.dumps({"by": "a test"}))
    with Checkpointer(tmp_path, model=torch.nn.Linear(3, 3), keep_last=2, keep_every=4) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step, wait=True)
    assert [order_of(name) for name in complete(str(tmp_path))] == [(1, 8), (1, 7), (1, 4), (1, 2)]
