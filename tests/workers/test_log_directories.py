"""The directories for logs that torch makes and never removes: which agent's they are, and which the next agent removes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from elastic_ext.workers.logs import OWNER, WorkerLogs
from tests.jobs import AGENT, Gate, Job, run

WAITS = """
import fcntl, sys
print("waits", flush=True)
with open(sys.argv[1]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /tmp."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def logs_of(log_dir: str | None = None, redirects: Std = Std.NONE) -> WorkerLogs:
    return WorkerLogs(DefaultLogsSpecs(log_dir=log_dir, redirects=redirects))


def start(logs: WorkerLogs, run_dir: Path, attempt: str = "0") -> None:
    logs.run_dir, logs.messages, logs.variables = str(run_dir), {0: {}}, {"TORCHELASTIC_RESTART_COUNT": attempt}
    logs.reify({0: {"TORCHELASTIC_RUN_ID": "x"}})


def test_the_next_agent_removes_only_killed_ones_leftovers(temporary: Path) -> None:
    (temporary / "torchelastic_dead" / "x_1" / "attempt_0").mkdir(parents=True)
    (temporary / "torchelastic_dead" / OWNER).touch()
    (temporary / "torchelastic_stock" / "x_1").mkdir(parents=True)  # of stock torchrun, or with logs
    first, second = logs_of(), logs_of()
    with first.owned_directory(), second.owned_directory():
        names = {"torchelastic_stock", *(Path(each.root_log_dir).name for each in (first, second))}
        assert {path.name for path in temporary.iterdir()} == names
    assert [path.name for path in temporary.iterdir()] == ["torchelastic_stock"]


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_an_agent_leaves_only_what_its_failure_names(temporary: Path, tmp_path: Path, failed: bool, written: bool) -> None:
    """Torch's message names the error file; a worker that was killed has written none."""
    logs = logs_of()
    with logs.owned_directory():
        for attempt in ("0", "1"):
            start(logs, tmp_path, attempt)
            error_file = Path(logs.error_files[0])
            for name in (error_file.name, "stacks.txt") if written or attempt == "0" else ():
                error_file.with_name(name).touch()
        Path(logs.root_log_dir, "link").symlink_to(tmp_path)
        logs.failed = failed
    with logs_of().owned_directory():
        pass
    assert tmp_path.exists()
    assert [path for path in temporary.rglob("*") if not path.is_dir()] == ([error_file] if failed and written else [])
    assert len(list(temporary.iterdir())) == (failed and written)


def test_logs_that_somebody_wants_stay(temporary: Path, tmp_path: Path) -> None:
    """Also those of an agent that is killed."""
    given = temporary / "torchelastic_given"
    (given / "earlier").mkdir(parents=True)
    for logs in (logs_of(redirects=Std.ALL), logs_of(str(given))):
        with logs.owned_directory():
            start(logs, tmp_path)
            assert not Path(logs.root_log_dir, OWNER).exists()
    with logs_of().owned_directory():
        pass
    assert len(list(temporary.iterdir())) == 2


@pytest.mark.seam
def test_an_agent_that_is_killed(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "job.py").write_text(WAITS)
    gate = Gate(tmp_path / "gate")
    command = [*AGENT, "--nproc-per-node=1", str(tmp_path / "job.py"), str(gate.path)]
    with Job(command, tmp_path, TMPDIR=str(temporary)) as job:
        job.wait_for("waits")
        job.process.kill()
        job.process.wait()
    assert len(list(temporary.glob("torchelastic_*"))) == 1
    gate.open()
    assert run(command, tmp_path, TMPDIR=str(temporary)).returncode == 0
    assert list(temporary.glob("torchelastic_*")) == []


@pytest.mark.seam
def test_what_a_failed_job_leaves(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "job.py").write_text("raise NameError('x')")
    done = run([*AGENT, "--nproc-per-node=1", "--max-restarts=0", str(tmp_path / "job.py")], tmp_path, TMPDIR=str(temporary))
    assert done.returncode == 65, done.err
    found = [path for path in temporary.rglob("torchelastic_*/**/*") if not path.is_dir()]
    assert [path.name for path in found] == ["error.json"]
    assert str(found[0]) in done.err
    assert len(list(temporary.glob("torchelastic_*"))) == 1
