"""Links, pipes, sockets and devices in a directory of checkpoints: nobody hangs, walks away, or takes them for damage."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.checkpoints.copying.replicate import TARGET
from elastic_ext.checkpoints.directory import catalogue, upkeep
from elastic_ext.checkpoints.storage import files_of, open_storage
from elastic_ext.checkpoints.verifying import Mode, verify
from elastic_ext.cli import main
from tests.checkpoints.choice.scenes import entry_of, plant, resume_in
from tests.checkpoints.copying.test_replicate import complete, copier_of, save
from tests.checkpoints.formats.test_formats import save_own, save_trainer

# Two links to the directory that they are in: 2 ** 40 ways until the kernel has had enough.
ODD = {"up0": "up", "up1": "up", "root": "root", "gone": "dangling", "pipe.pt": "fifo", "pipe.distcp": "fifo"}
ODD |= {"socket.json": "socket"}


def spoil(path: Path) -> None:
    """Put some of each odd thing into a directory."""
    for name, kind in ODD.items():
        plant(path / name, kind)
    (path / "kernel.pt").symlink_to("/proc/kmsg" if os.access("/proc/kmsg", os.R_OK) else "/proc/self/pagemap")
    try:
        os.mknod(path / "zero.bin", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:  # for root only
        (path / "zero.bin").symlink_to("/dev/zero")


def shards(root: Path) -> str:
    dcp.save({"w": torch.arange(100)}, checkpoint_id=root / "step_5", no_dist=True)
    return "step_5"


def trainers(root: Path) -> str:
    return save_trainer(root / "checkpoint-5", 5).name


@pytest.fixture(params=[partial(save_own, step=5), shards, trainers], ids=["own", "shards", "trainers"])
def spoiled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    root = tmp_path / "checkpoints"
    root.mkdir()
    name = request.param(root)
    spoil(root / name)
    spoil(root)
    (root / "latest").symlink_to(name)
    return root, name


@pytest.mark.seam
def test_a_good_checkpoint_among_odd_files_is_good(spoiled: tuple[Path, str], tmp_path: Path) -> None:
    """And commands end."""
    root, name = spoiled
    storage = open_storage(str(root))
    assert resume_in(root).path == str(root / name)
    entry = entry_of(storage, name)
    assert verify(storage, entry, Mode.FULL).faults == ()
    assert not {file.rpartition("/")[2] for file, _ in files_of(storage, name)} & {*ODD, "zero.bin", "kernel.pt"}
    target = open_storage(str(tmp_path / "copy"))
    upkeep.copy(storage, target, entry)
    assert dict.fromkeys(file for file, _ in files_of(storage, name)) == dict.fromkeys(file for file, _ in files_of(target, name))
    assert [row.name for row in catalogue.list_checkpoints(storage) if row.complete] == [name]
    for action, *names in (["ls"], ["verify", name], ["verify", "--all"], ["prune", "--yes"], ["pin", name]):
        assert main.main(["checkpoints", action, str(root), *names]) == 0
    assert main.main(["checkpoints", "cp", str(root), name, f"--to={tmp_path / 'other'}"]) == 0
    assert (root / name).is_dir()
    assert os.path.exists("/proc")


def test_a_link_counts_as_the_file(tmp_path: Path) -> None:
    name = save_own(tmp_path, 5)
    moved = (tmp_path / name / "__0_0.distcp").rename(tmp_path / "blob")
    (tmp_path / name / "__0_0.distcp").symlink_to(moved)
    storage = open_storage(str(tmp_path))
    entry = entry_of(storage, name)
    assert newest_complete(str(tmp_path)).resume is not None
    assert verify(storage, entry, Mode.FULL).sound
    upkeep.copy(storage, open_storage(str(tmp_path / "copy")), entry)
    assert not (tmp_path / "copy" / name / "__0_0.distcp").is_symlink()


def test_a_pipe_instead_of_a_file_is_damage(tmp_path: Path) -> None:
    for step, file in ((5, "manifest.json"), (7, "__0_0.distcp")):
        name = save_own(tmp_path, step)
        (tmp_path / name / file).unlink()
        os.mkfifo(tmp_path / name / file)
    assert newest_complete(str(tmp_path)).resume is None
    good = save_own(tmp_path, 3)
    (tmp_path / ".elastic_ext" / "quarantine").mkdir(parents=True)
    assert newest_complete(str(tmp_path)).resume is not None
    os.mkfifo(tmp_path / ".elastic_ext" / "quarantine" / f"{good}.json")
    with pytest.raises(OSError, match="neither a file nor a directory"):
        newest_complete(str(tmp_path))


@pytest.mark.seam
def test_the_copier_among_odd_files(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    name = save([local], 2)
    spoil(local / name)
    spoil(local)
    os.mkfifo(local / "step_00000009.g0001")
    (remote / ".elastic_ext").mkdir(parents=True)
    os.mkfifo(remote / TARGET)
    copier = copier_of(local, remote)
    assert "neither a file nor a directory" in copier.turn().reason
    (remote / TARGET).unlink()
    assert copier.turn().complete == name
    assert complete(remote, name)
    newer = save([local], 4)
    assert copier.turn().complete == newer
    assert not (local / name).exists()  # pruned, and what its links led to was not
    assert os.path.exists("/proc")
