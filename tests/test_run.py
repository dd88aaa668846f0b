"""What fails is run once more, alone: who passes then is flaky and named, and no more than two are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import run
from tests.jobs import ROOT

pytestmark = pytest.mark.seam

ONCE = """
def test_{name}():
    import pathlib
    seen = pathlib.Path("seen-{name}")
    first, _ = not seen.exists(), seen.touch()
    assert not first, "the first time"
"""
ALONE = "--processes=0"  # in the process of pytest itself: an interpreter less to start
ALWAYS = "\ndef test_always():\n    assert 'always' == 'never'\n"


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tests, in a checkout of its own."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("from tests.conftest import *\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [each for each in os.environ if each.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    return tmp_path / "tests" / "test_it.py"


def test_one_that_passes_alone_is_named(tests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests.write_text(ONCE.format(name="it"))
    assert run.main(["check", "--processes=1"]) == 0
    end = capfd.readouterr().out.partition("\nflaky: ")[2]
    assert end.startswith("tests/test_it.py::test_it failed")
    assert "AssertionError: the first time" in end


def test_one_that_fails_again_fails_the_run(tests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests.write_text(ONCE.format(name="it") + ALWAYS)
    assert run.main(["check", ALONE]) == 1
    out = capfd.readouterr().out
    assert out.count("\nonce more, alone") == 2
    assert "\nflaky: tests/test_it.py::test_it failed" in out


def test_three_are_too_many(tests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests.write_text("".join(ONCE.format(name=name) for name in ("a", "b", "c")))
    assert run.main(["check", ALONE]) == 1
    assert "once more, alone" not in capfd.readouterr().out


def test_a_test_without_a_mark_may_start_nothing(tests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests.write_text("import subprocess, time\ndef test_it():\n    subprocess.run(['true'])\n    time.sleep(0)\n")
    assert run.main(["check", ALONE]) == 1
    out = capfd.readouterr().out
    assert "sleeps (time.sleep), starts a process (subprocess.Popen): mark it seam or full" in out
