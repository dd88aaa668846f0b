"""Tests of one xdist_group share what they make, a fixed port or the whole machine: all of them run in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.jobs import run

GROUPED = """
import os, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_it(number):
    with open("by", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


@pytest.mark.full
def test_the_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    """pytest 9.2 ends that for pytest-xdist 3.8, without a word."""
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    options = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = run([sys.executable, "-m", "pytest", "-q", *options, "test_grouped.py"], tmp_path)
    assert done.returncode == 0, done.all
    assert len(set((tmp_path / "by").read_text().split())) == 1
