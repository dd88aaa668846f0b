"""The private names of torch that we use: the torch that is installed has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ext.base import torch_names
from elastic_ext.base.torch_names import NAMES, PrivateNames
from tests.base import renamed_torch
from tests.jobs import environment


@pytest.mark.parametrize("each", NAMES, ids=lambda each: each.names[0])
def test_this_torch_has_them(each: PrivateNames) -> None:
    assert torch_names.missing(each) == ()


@pytest.mark.parametrize(
    ("version", "series"), [("2.15.0+cu130", (2, 15)), ("2.16.0a0+git12", (2, 16)), ("unknown", torch_names.NEWEST_RUN)]
)
def test_the_series_of_a_version(version: str, series: tuple[int, int]) -> None:
    assert torch_names._series(version) == series


@pytest.mark.full
def test_names_of_a_later_torch_are_not_missed(tmp_path: Path) -> None:
    """2.8 has no --shutdown-timeout, and its attribute is not missing there."""
    code = "from elastic_ext.base import torch_names; print(torch_names.missing(torch_names.SHUTDOWN))"
    for version, missing in (("2.11.0", "()"), ("2.12.0", "('SimpleElasticAgent._shutdown_timeout',)")):
        folder = tmp_path / version
        folder.mkdir()
        env = environment(**renamed_torch.environment(folder, ["_shutdown_timeout"], version))
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == f"{missing}\n"
