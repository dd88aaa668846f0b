"""Which directory is ours, where others may have made one of that name first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_ext.base import files
from elastic_ext.base.errors import UsageError

NOBODY = 65534


def private(path: Path) -> None:
    path.mkdir(mode=0o700)


def of_another(path: Path) -> None:
    private(path)
    os.chown(path, NOBODY, NOBODY)


def a_link(path: Path) -> None:
    target = path.with_name(f"target_{path.name}")
    target.mkdir(mode=0o700, exist_ok=True)
    path.symlink_to(target)


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


PLANTED = [
    pytest.param(of_another, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")),
    *(a_link, Path.touch, open_to_others, lambda path: path.symlink_to("nowhere")),
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_others_have_made_is_passed_over(tmp_path, plant):
    paths = [tmp_path / each for each in "abc"]
    plant(paths[0])
    assert files.first_private(paths) == paths[1]
    private(paths[1])
    assert files.first_private(paths) == paths[1], "the next process finds the same one"
    paths[0].rename(tmp_path / "away")
    assert files.first_private(paths) == paths[1], "also after the other one is gone"
    plant(paths[2])
    plant(paths[0])
    paths[1].rename(tmp_path / "removed")
    plant(paths[1])
    with pytest.raises(UsageError, match=r"all other names for this directory are taken"):
        files.first_private(paths)
