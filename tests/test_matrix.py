"""What `make matrix` installs and writes; what it could not run is said, and fails it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from elastic_ext.base.torch_names import NEWEST_RUN
from tests import matrix, run, versions
from tests.jobs import ROOT
from tests.matrix import NotRun, Pair
from tests.versions import Ran

INDEX = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.1, 2.13.1+cpu, 2.13.0+cpu, 2.13.0, 2.1.3+cpu\n"
RAN = Ran("suite", "2.15.0+cu130", "3.13.0", "2026-11-29", "abc", passed=98)


@pytest.mark.parametrize(
    ("torch", "build"),
    [("2.13", "torch==2.13.1+cpu"), ("2.13.0", "torch==2.13.0+cpu"), ("2.15", "torch==2.15.*"), ("2.15.0", "torch==2.15.0")],
)
def test_builds_for_cpus_come_first(torch: str, build: str) -> None:
    assert matrix.cpu_build(Pair(torch, "3.13"), INDEX) == build


def test_what_an_import_does_not_need() -> None:
    torchs = """Requires-Dist: sympy>=1.13.3
Requires-Dist: cuda-toolkit[cublas,cudart,cusolver,cusparse,nvrtc,nvtx]==13.2.2; platform_system == "Linux"
Requires-Dist: cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"
Requires-Dist: triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"
"""
    assert (
        matrix.lightened(torchs)
        == """Requires-Dist: sympy>=1.13.3
Requires-Dist: cuda-toolkit[cublas,cudart,cusparse,nvrtc]==13.2.2; platform_system == "Linux"
"""
    )
    assert "cuda-toolkit[cublas]==" in matrix.lightened("Requires-Dist: cuda-toolkit[cusolver,cublas]==13\n")


def test_a_row_has_the_versions_that_ran() -> None:
    seam = dataclasses.replace(RAN, what="seam", passed=300, failed=2, skipped=1, parts=("tests/agent",))
    rows = [row for row in versions.rows([RAN, seam]) if row[0].startswith("2.15")]
    assert rows == [
        ("2.15.0+cu130", "3.13.0", "98 passed, 2026-11-29", "300 passed, 2 failed, 1 skipped of agent, 2026-11-29", "not run"),
        ("2.15", "3.10, 3.11, 3.12, 3.14", "not run", "not run", "not run"),
    ]


def test_each_torch_has_a_row() -> None:
    assert [row[0] for row in versions.rows([])] == list(versions.TORCH)
    assert versions.rows([dataclasses.replace(RAN, torch="2.16.0")])[-2][0] == "2.16.0"


def test_a_result_is_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    ran = dataclasses.replace(RAN, flaky=("tests/test_it.py::test_it",))
    ran.write()
    assert ran in versions.read()
    assert [path.name for path in tmp_path.iterdir()] == ["2.15-3.13-suite.json"]


def test_newest_that_passed_counts_suites_alone() -> None:
    failed = dataclasses.replace(RAN, torch="2.16.0", failed=1)
    seam = dataclasses.replace(RAN, torch="2.17.0", what="seam")
    assert versions.newest_that_passed([RAN, failed, seam, dataclasses.replace(RAN, torch="2.9.1")]) == (2, 15)


def test_the_agent_knows_the_newest_that_passed() -> None:
    assert versions.newest_that_passed(versions.read()) == NEWEST_RUN


@pytest.mark.parametrize(
    ("changes", "holds"),
    [({}, True), ({"torch": "2.15.1"}, False), ({"parts": ("tests/agent",)}, False), ({"what": "seam"}, False)],
)
def test_a_result_holds_for_its_versions(
    changes: dict[str, object], holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "unchanged", lambda commit: commit == "abc")
    RAN.write()
    assert (matrix.still_holds(dataclasses.replace(RAN, **changes)) is not None) is holds


@pytest.mark.parametrize("known", [{"failed": 1}, {"commit": "older"}, {"commit": ""}])
def test_a_failed_or_old_result_runs_again(known: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "unchanged", lambda commit: commit == "abc")
    dataclasses.replace(RAN, **known).write()
    assert matrix.still_holds(RAN) is None


def test_a_test_fails_once(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        "<testsuites><testcase classname='a' name='b'><failure/></testcase><testcase classname='a' name='b'><error/></testcase>"
        "<testcase classname='a' name='c'/><testcase classname='a' name='d'><skipped/></testcase></testsuites>"
    )
    assert run.counted(tmp_path / "report.xml") == {"failed": 1, "passed": 1, "skipped": 1}


@pytest.mark.seam
def test_a_python_that_is_missing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MATRIX_DIR", str(tmp_path))
    assert matrix.main(["2.8:3.99"]) == 1
    assert "2.8:3.99: not run: python3.99: No such file or directory" in capfd.readouterr().out


@pytest.mark.seam
def test_another_python_does_not_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3.99"
    fake.write_text("#!/bin/sh\necho 3.12.1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("MATRIX_DIR", str(tmp_path))
    with pytest.raises(NotRun, match=r"python3\.99 is Python 3\.12\.1"):
        matrix.environment(Pair("2.8", "3.99"))


@pytest.mark.seam
def test_an_environment_of_another_checkout_changes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIX_DIR", str(tmp_path))
    python = tmp_path / "2.8-3.99" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\n")
    python.chmod(0o755)
    ready = tmp_path / "2.8-3.99" / ".ready"
    ready.write_text("elsewhere")
    for _ in range(2):
        assert matrix.environment(Pair("2.8", "3.99")) == python
    assert (tmp_path / "asked").read_text() == "-m pip install --quiet --no-deps --editable .\n"


@pytest.mark.seam
def test_counts_of_a_run_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "tests" / "test_one.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    (tmp_path / "tests" / "test_two.py").write_text("def test_c(): assert 0\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    counts = tmp_path / "counts"
    assert run.main(["check", "--processes=0", f"--counts={counts}", "--paths", "tests/test_one.py"]) == 1
    assert json.loads(counts.read_text()) == {"passed": 1, "failed": 1, "skipped": 0, "flaky": []}
