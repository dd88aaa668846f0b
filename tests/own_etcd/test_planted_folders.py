"""What another user has put where a keeper has its files is passed over: not opened, not signalled, not removed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.own_etcd import folder
from tests.own_etcd.hosts import OwnEtcdJob

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the planted directories must be another user's, which takes root")

STRANGER = 65533


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of /dev/shm and of /tmp."""
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o1777)
    monkeypatch.setattr(folder, "MAX_PARENT", 1000)
    monkeypatch.setattr(folder, "IN_MEMORY", str(made))
    monkeypatch.setattr(folder.tempfile, "tempdir", str(made))
    return made


def place(run_id: str = "job", restarts: str = "0") -> Path:
    return folder.folder_of(run_id, ("localhost",), "localhost", {"SLURM_RESTART_COUNT": restarts})


def planted(path: Path) -> Path:
    path.mkdir(mode=0o700)
    os.chown(path, STRANGER, STRANGER)
    return path


def test_a_taken_name_is_passed_over(shared: Path) -> None:
    taken = planted(place())
    mine = place()
    assert mine != taken
    folder.make(mine)
    assert place() == mine
    assert folder.run_of(mine) == folder.run_of(taken), "the hosts of a run may have names of different numbers"
    assert len(mine.with_name(mine.name.replace(".1_", f".{folder.NAMES - 1}_")).name) <= 60


def test_data_on_disk_is_in_a_private_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if little memory was left. The guessed name is the one that was used once."""
    usage = shutil.disk_usage(shared)._replace(free=folder.DATA_BYTES - 1)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage)
    mine = place()
    guessed = planted(shared / f"{mine.name}_data")
    folder.make(mine)
    data = folder.data_of(mine)
    data.mkdir(0o700)
    assert data.parent.parent == shared
    assert (data.parent.stat().st_uid, data.parent.stat().st_mode & 0o777) == (0, 0o700)
    assert folder.data_of(mine) == data, "the next keeper finds it"
    folder.remove(mine)
    assert list(shared.iterdir()) == [guessed]


def test_a_strangers_folder_is_never_cleaned_up(shared: Path) -> None:
    """Its links would have root make a file anywhere, and remove one."""
    victim = shared.parent / "victim"
    victim.mkdir()
    theirs = planted(place("another"))
    for name in ("start.lock", "lock"):
        (theirs / name).touch()
    (theirs / "agents").symlink_to(shared.parent / "made")
    (theirs / "data").symlink_to(victim)
    folder.remove_abandoned(place())
    assert theirs.exists()
    assert victim.exists()
    assert not (shared.parent / "made").exists()


def test_a_strangers_folder_is_no_predecessor(shared: Path) -> None:
    """Its socket may be a link to that of a keeper of ours, which would get a signal to end."""
    before = place(restarts="0")
    folder.make(before)
    mine = place(restarts="1")
    planted(place(restarts="2"))
    assert folder.predecessors(mine) == [before]
    stem, _, run = before.name.rpartition("_")
    renamed = before.rename(before.with_name(f"{stem}.7_{run}"))
    assert folder.predecessors(mine) == [renamed], "a run that found the first names taken"


@pytest.mark.seam
def test_a_stranger_keeps_no_job_from_starting(tmp_path: Path) -> None:
    """Nor gets its etcd to listen in a directory of his: he has made the first name, as himself, in the real place."""
    with ExitStack() as stack:
        job = OwnEtcdJob(tmp_path, stack, ["localhost"], Path())
        taken = job.folder_of("localhost")
        as_stranger = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
        subprocess.run([*as_stranger, "mkdir", "-m", "0777", str(taken)], check=True)
        stack.callback(shutil.rmtree, taken)
        agent = job.start("1")
        agent.wait_for("runs a member of the job's etcd")
        (mine,) = job.folders()
        with socket.socket(socket.AF_UNIX) as keeper:
            keeper.connect(str(mine / "socket"))
        assert mine != taken
        assert list(taken.iterdir()) == []
        job.finish([agent])
        assert not mine.exists()
        assert taken.exists()
