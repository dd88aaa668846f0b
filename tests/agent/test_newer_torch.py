"""A torch without a private name that we use: a job runs without what needs it, and says so in one line, or does not begin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from elastic_ext.base import torch_names
from elastic_ext.base.torch_names import NAMES, PrivateNames
from tests.base import renamed_torch
from tests.jobs import AGENT, EXT, Finished, run

NEWER = "2.99.1"
TRAIN = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 1 and dist.get_rank() == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
os.write(1, b"trained\\n")
"""


def job(tmp_path: Path, names: Sequence[str], version: str = "", **variables: str) -> Finished:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=1", "train.py"]
    return run(command, tmp_path, forks=False, **renamed_torch.environment(tmp_path, names, version), **variables)


def ours(done: Finished) -> list[str]:
    """The lines of the log about torch."""
    return [line.partition("elastic_ext: ")[2] for line in done.err.splitlines() if "elastic_ext: torch " in line]


def last(name: str) -> str:
    return name.rpartition(".")[2]


def by_name(each: PrivateNames) -> str:
    return last(each.names[0])


def lines_without(gone: Sequence[PrivateNames]) -> list[str]:
    """Of a newer torch; an older one that passes for it also lacks what came later."""
    lacking = [each for each in OTHERS if each in gone or each.since > torch_names._series(torch.__version__)]
    listed = {each: " and ".join(f"{each.module}.{name}" for name in each.names) for each in lacking}
    newest = ".".join(map(str, torch_names.NEWEST_RUN))
    newer = f"torch {NEWER} is newer than {newest}, the newest that elastic_ext was tested with"
    return [newer, *(f"torch {NEWER} has no {names}: {each.lost}" for each, names in listed.items())]


NEEDED = [each for each in NAMES if each.needed]
HERE = [each for each in NAMES if not each.beside or hasattr(torch._C._distributed_c10d, each.beside)]
OTHERS = [each for each in HERE if not each.needed]  # a newer torch is this one by another number: it lacks what this one does


@pytest.mark.seam
def test_a_newer_torch_without_what_is_not_needed(tmp_path: Path) -> None:
    """All at once, in the agent and in the workers."""
    done = job(tmp_path, [last(name) for each in OTHERS for name in each.names], NEWER, ELASTIC_EXT_STANDBY="on")
    assert done.returncode == 0, done.all
    assert done.out.count("trained") == 2
    assert ours(done) == lines_without(OTHERS)


@pytest.mark.full
@pytest.mark.parametrize("each", OTHERS, ids=by_name)
def test_a_job_runs_without_it(each: PrivateNames, tmp_path: Path) -> None:
    done = job(tmp_path, [last(name) for name in each.names], NEWER)
    assert done.returncode == 0, done.all
    assert done.out.count("trained") == 2
    assert ours(done) == lines_without([each])


@pytest.mark.full
@pytest.mark.parametrize("each", NEEDED, ids=by_name)
def test_no_job_begins_without_it(each: PrivateNames, tmp_path: Path) -> None:
    done = job(tmp_path, [last(each.names[0])])
    assert done.returncode == 78, done.all
    (line,) = ours(done)
    assert f"has no {each.module}.{each.names[0]}, which elastic_ext needs: {each.lost}; expected torch" in line
    assert "Traceback" not in done.err
    assert "trained" not in done.out


@pytest.mark.full
def test_one_name_alone_switches_standbys_off(tmp_path: Path) -> None:
    done = job(tmp_path, ["_stdout"], ELASTIC_EXT_STANDBY="on")
    assert done.returncode == 0, done.all
    name = f"{torch_names.HANDLER.module}.SubprocessHandler._stdout"
    assert ours(done) == [f"torch {torch.__version__} has no {name}: {torch_names.HANDLER.lost}"]


@pytest.mark.full
def test_function_results_are_asked_for_each_second(tmp_path: Path) -> None:
    """Each is larger than its pipe: the process ends only once it is read."""
    (tmp_path / "launch.py").write_text(
        "import torch.distributed.launcher.api as api\n"
        "def work(): return 'x' * 10**6\n"
        "if __name__ == '__main__':\n"
        "    config = api.LaunchConfig(1, 1, 2, run_id='r', rdzv_backend='ext_c10d', rdzv_endpoint='localhost:0')\n"
        "    results = api.elastic_launch(config, work)()\n"
        "    print(sorted(len(each) for each in results.values()))\n"
    )
    names = renamed_torch.environment(tmp_path, ["_ret_vals"])
    done = run([sys.executable, "launch.py"], tmp_path, forks=False, **names)
    assert done.out == "[1000000, 1000000]\n", done.err
    (line,) = ours(done)
    assert line.endswith(f": {torch_names.RESULTS.lost}")


@pytest.mark.full
def test_torchrun_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("")
    done = run([*EXT, "ok.py"], tmp_path, forks=False, **renamed_torch.environment(tmp_path, [], NEWER))
    assert done.returncode == 0, done.all
    assert ours(done) == lines_without([])
