"""Modules in the job's directory and in PYTHONPATH that have the names of Python's own: only the user's code may find them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import AGENT, Job, environment, run

# Saves once to the local tier, then fails, so that the copier, a standby and the relay of stderr are all of use.
SAVING = """
import os, sys
import torch
import torch.distributed as dist
from elastic_ext import Checkpointer
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
with Checkpointer({remote!r}, model=model) as checkpointer:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        checkpointer.save(1)
        checkpointer.wait()
        print("saved", flush=True)
        open({gate!r}).close()  # a named pipe: until the test opens it, too
        os._exit(9)
print("second", file=sys.stderr, flush=True)
dist.destroy_process_group()
"""


def hostile(directory: Path, names: set[str]) -> Path:
    """A directory in which every import leaves a mark and fails; the marks' directory."""
    directory.mkdir()
    marks = directory.with_name("marks")
    marks.mkdir()
    for name in names:
        (directory / f"{name}.py").write_text(
            f"import os, sys\nopen({str(marks)!r} + '/{name}.' + str(os.getpid()), 'w').write(repr(sys.orig_argv))\n"
            f"raise RuntimeError('the wrong {name} was imported')\n"
        )
    return marks


def imported_by(code: str, *options: str) -> set[str]:
    """Modules that an interpreter has after `code`."""
    done = subprocess.run(
        [sys.executable, *options, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        env=environment(), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def left(marks: Path) -> dict[str, str]:
    return {mark.name: mark.read_text() for mark in marks.iterdir()}


@pytest.mark.seam
def test_no_helper_imports_from_the_working_directory(tmp_path):
    """`python -m` itself imports a few modules from there before it gets to ours; those are left out."""
    marks = hostile(tmp_path / "work", set(sys.stdlib_module_names) - imported_by("import runpy, importlib.util"))
    script, gate, remote = tmp_path / "code" / "train.py", tmp_path / "gate", tmp_path / "remote"
    script.parent.mkdir()
    script.write_text(SAVING.format(remote=str(remote), gate=str(gate)))
    subprocess.run(["mkfifo", str(gate)], check=True)
    conf = f"--rdzv-conf=local_dir={tmp_path / 'local'},checkpoint_dir={remote}"
    with Job([*AGENT, "--max-restarts=1", conf, str(script)], tmp_path / "work", forks=False, ELASTIC_EXT_STANDBY="on") as job:
        job.wait_for("saved")
        job.wait_for("1 warm standbys wait")
        job.wait_for("complete in .*: step_")  # the copier has done its work
        gate.open("w").close()
        done = job.finish()
    assert done.returncode == 0, done.err
    assert "second" in done.err
    assert "resuming from" in done.err
    assert left(marks) == {}


@pytest.mark.full
def test_no_helper_imports_what_the_jobs_pythonpath_holds(tmp_path):
    """The agent itself is out of its reach here, and the workers import nothing of it."""
    needed = imported_by("import elastic_ext.checkpoints.copying.replicate, socket, ctypes, mmap, array, random, contextlib")
    at_start = imported_by("import json")  # the bootstrap, which runs as the user's code does, tells of a failure with it
    marks = hostile(tmp_path / "path", (needed & sys.stdlib_module_names) - at_start - {"__main__"})
    assert len(left(tmp_path / "path")) > 20
    (tmp_path / "train.py").write_text(
        "import os\n"
        "os.write(2, b'worker says\\n')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        f"    open({str(tmp_path / 'gate')!r}).close()\n"
        "    os._exit(9)\n"
    )
    subprocess.run(["mkfifo", str(tmp_path / "gate")], check=True)
    agent = [sys.executable, "-I", "-c", "import sys; from elastic_ext.agent.__main__ import main; sys.exit(main(sys.argv[1:]))"]
    conf = f"--rdzv-conf=local_dir={tmp_path / 'local'},checkpoint_dir={tmp_path / 'remote'}"
    with Job(
        [*agent, "--max-restarts=1", conf, "train.py"], tmp_path, ELASTIC_EXT_STANDBY="on", PYTHONPATH=str(tmp_path / "path")
    ) as job:
        job.wait_for("worker says")
        (said,) = job.wait_for("workers are started without a warm standby: a library: (.*)")
        (tmp_path / "gate").open("w").close()
        done = job.finish()
    assert done.returncode == 0, done.err
    assert f"from {tmp_path / 'path'}" in said[1], said[1]  # a warm worker would have another module than a cold one
    assert "process that copies checkpoints ended" not in done.err
    assert left(marks) == {}


@pytest.mark.seam
@pytest.mark.parametrize("where", ["PYTHONPATH", "checkout"])
def test_helpers_find_a_package_on_the_agents_path(tmp_path, where):
    """elastic_ext is not installed for this interpreter: a link to it lies in PYTHONPATH, or in the working directory."""
    import elastic_ext

    work, holds = tmp_path / "work", tmp_path / ("work" if where == "checkout" else "holds")
    for directory in {work, holds}:
        directory.mkdir()
    (holds / "elastic_ext").symlink_to(Path(elastic_ext.__file__).parent)
    # As if there were no editable install: the finder that it has made is taken off, in the agent only.
    (holds / "start.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        "from elastic_ext.base import isolated\n"
        "print(isolated.__file__)\n"
        "print(*isolated.command('x')[isolated.command('x').index('x') + 2:], sep='\\n')\n"
    )
    path = str(holds) if where == "PYTHONPATH" else ""
    done = run([sys.executable, "-m", "start"], work, forks=False, PYTHONPATH=path)
    assert done.returncode == 0, done.err
    module, *entries = done.out.split()
    assert module.startswith(str(holds))
    assert str(holds) in entries
