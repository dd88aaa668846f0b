"""Programs that tests need from the system, and what happens where one is missing."""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRE = "REQUIRE_TEST_PROGRAMS"  # 1: a missing program is a failure; the continuous integration sets it


def needs(*names: str) -> None:
    """Skip the test that calls this if one of these programs is missing, or fail it where all are required."""
    missing = [name for name in names if shutil.which(name) is None]
    required(not missing, f"{', '.join(missing)}: not found on PATH; `make system` installs what the tests need")


def required(there: bool, why: str) -> None:
    """The same for anything else. why: what is missing, and where it comes from."""
    if there:
        return
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)
