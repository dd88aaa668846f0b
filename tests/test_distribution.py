"""What is published: the sdist and the wheel, what is in them, and the demonstration from the wheel alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import elastic_ext
from tests.jobs import ROOT, environment

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("distribution")]

NAME = f"elastic_ext-{elastic_ext.__version__}"


def run(*command: str | Path, cwd: Path, timeout_s: float = 300, **variables: str) -> str:
    """What a command prints."""
    env = environment(**variables)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that is built from it. The tools are there; no index is asked."""
    folder = tmp_path_factory.mktemp("distribution")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", ".matrix", "build", "*cache*", "*.egg-info"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and what it requires: torch and the rest are linked, not installed."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    beside = linked(required("elastic_ext"), folder / "beside")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{beside}\n")
    run(*pip(folder / "venv" / "bin"), "install", "--no-index", dist / f"{NAME}-py3-none-any.whl", cwd=folder)
    return folder / "venv" / "bin"


def pip(programs: Path) -> list[str | Path]:
    """This environment's pip for another one, which has none."""
    return [sys.executable, "-m", "pip", "--python", programs / "python"]


def required(name: str) -> set[str]:
    """The distributions that one requires here, and those that they require."""
    found, left = set[str](), [name]
    while left:
        wanted = [Requirement(each) for each in importlib.metadata.requires(left.pop()) or ()]
        new = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})} - found
        found |= new
        left += new
    return found


def linked(names: set[str], folder: Path) -> Path:
    """Make a folder with links to the folders and modules of distributions of this environment."""
    folder.mkdir()
    for name in names:
        site = Path(str(importlib.metadata.distribution(name).locate_file("")))
        for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {".."}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(site / top)
    return folder


def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_holds_the_package_alone(dist: Path) -> None:
    """No tests and no pages."""
    package = ROOT / "elastic_ext"
    code = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc")}
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    expected = {str(path.relative_to(ROOT)) for path in code} | {f"{NAME}.dist-info/{each}" for each in about}
    wheel = dist / f"{NAME}-py3-none-any.whl"
    assert in_wheel(wheel) ^ expected == set()


def test_the_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    """`build` makes its wheel from the sdist; here is that of the checkout."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "elastic_ext", source / "elastic_ext", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path)
    assert in_wheel(tmp_path / f"{NAME}-py3-none-any.whl") == in_wheel(dist / f"{NAME}-py3-none-any.whl")


def test_the_sdist_holds_no_tests(dist: Path) -> None:
    """Some alone would not run."""
    with tarfile.open(dist / f"{NAME}.tar.gz") as file:
        found = {name.split("/")[1] for name in file.getnames() if "/" in name}
    assert found == {
        *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "elastic_ext", "elastic_ext.egg-info", "pyproject.toml", "setup.cfg")
    }


def test_both_may_be_uploaded(dist: Path) -> None:
    files = sorted(dist.iterdir())
    assert [path.name for path in files] == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]
    assert run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist).count("PASSED") == 2


def test_the_wheel_brings_all_it_names(installed: Path, tmp_path: Path) -> None:
    """With what it requires and no more: no extra, and nothing of the checkout."""
    assert "No broken requirements" in run(*pip(installed), "check", cwd=tmp_path)
    found = run(installed / "python", "-c", "import elastic_ext; print(elastic_ext.__file__)", cwd=tmp_path).strip()
    assert Path(found).is_relative_to(installed.parent)
    assert run(installed / "elastic-ext", "--version", cwd=tmp_path).strip() == f"elastic_ext {elastic_ext.__version__}"
    assert re.search(r"(?m)^ok +torch ", run(installed / "elastic-ext", "doctor", cwd=tmp_path))


@pytest.mark.timeout(660)
def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Two files of the checkout, in a folder of their own. The script needs a data loader."""
    for name in ("demo.py", "train_fsdp.py"):
        shutil.copy(ROOT / "entrypoints" / name, tmp_path)
    needed = linked({"torchdata"} | required("torchdata"), tmp_path / "needed")
    shown = run(installed / "python", "demo.py", cwd=tmp_path, timeout_s=600, PYTHONPATH=str(needed))
    assert "The job finished. From the kill to the next training step" in shown
    assert str(ROOT) + os.sep not in shown
