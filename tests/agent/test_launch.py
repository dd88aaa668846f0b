"""What an agent checks before it starts anything. Pure."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent import launch
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import discovery


def prepared(entrypoint: str, *args: str, **settings: Any) -> WorkerSpec:
    rendezvous: Any = None
    return launch.prepare(
        WorkerSpec("default", 1, rendezvous, entrypoint=entrypoint, args=args, max_restarts=4), Settings(**settings)
    )


@pytest.mark.parametrize(
    ("command", "settings", "said"),
    [
        (("python", "-u", "no_such.py"), {}, "the script 'no_such.py' does not exist in {here}; nothing was started"),
        (("no-such-command",), {}, "the command 'no-such-command' was not found or cannot be executed; nothing was started"),
        (("/no/such/python", "-u", "ok.py"), {}, "the command '/no/such/python' was not found"),
        (("python", "-u", "ok.py"), {"checkpoint_dir": "ok.py"}, "ok.py is a file"),
    ],
)
def test_what_cannot_be_started(tmp_path, monkeypatch, command, settings, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.shutil, "which", lambda name: name if name == "python" else None)
    (tmp_path / "ok.py").touch()
    with pytest.raises(UsageError) as error:
        prepared(*command, **settings)
    assert said.format(here=tmp_path) in str(error.value)
    prepared("python", "-u", "ok.py")
    prepared("python", "-u", "-m", "no.such.module")


@pytest.mark.skipif(os.geteuid() != 0, reason="reads as another user, as only root may; permission bits do not bind root itself")
def test_an_unreadable_checkpoint_directory(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o007 == 0:
            folder.chmod(0o711)
    assert discovery.newest_complete(str(locked)).resume is None
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match=f"{locked}.* cannot be read"):
            discovery.newest_complete(str(locked), discovery.Wanted(pattern=""))
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("limit", "in_torch"), [(None, 4), (0, 0), (7, 7), (-1, launch.UNLIMITED)])
def test_the_budget_of_the_settings_replaces_torchs(limit, in_torch):
    spec = prepared("true", max_restarts=limit)
    assert spec.max_restarts == in_torch
    assert launch.max_restarts(spec, Settings(max_restarts=limit)) == (4 if limit is None else limit)


@pytest.mark.parametrize(
    ("workers", "left", "fit"), [(2, 29, None), (2, 30, False), (2, 55, False), (2, 56, True), (32, 96, None)]
)
def test_how_many_descriptors_a_job_needs(workers, left, fit):
    if fit is not None:
        assert launch.extras_fit(workers, left) is fit
        return
    with pytest.raises(UsageError, match=rf"may open {left} more files, but {workers} workers need \d+: raise the hard limit"):
        launch.extras_fit(workers, left)


@pytest.mark.parametrize(
    ("free", "parent"), [({}, "memory"), ({"memory": 23}, "disk"), ({"memory": 24}, "memory"), ({"memory": 1, "disk": 1}, None)]
)
def test_where_the_agent_keeps_its_files(tmp_path, monkeypatch, free, parent):
    """free: inodes, where they are counted at all."""
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(launch, "IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path / "disk"))

    def statvfs(path: str) -> SimpleNamespace:
        left = free.get(os.path.basename(path))
        return SimpleNamespace(f_files=0 if left is None else 100, f_favail=left or 0)

    monkeypatch.setattr(launch.os, "statvfs", statvfs)
    if parent is not None:
        assert os.path.dirname(launch.make_run_dir(1)) == str(tmp_path / parent)
        return
    with pytest.raises(UsageError, match=r"memory: 1 free inodes, 24 needed; .*disk: 1 free inodes.*set TMPDIR"):
        launch.make_run_dir(1)
