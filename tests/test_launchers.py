"""A forked launcher is like a started one, in all that a job can see; commands for which it is not are started as written."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs import AGENT, EXT, Gate, Job, environment, launchers, run

pytestmark = pytest.mark.seam

SHOWS = """
import json, os, resource, signal, sys
seen = {
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "environ": dict(os.environ), "session": os.getsid(0) == os.getpid(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "ignored": open("/proc/self/status").read().split("SigIgn:")[1].split()[0],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "open": sorted(os.listdir("/proc/self/fd")),
}
own = {"TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "ELASTIC_EXT_WORKER", "ELASTIC_EXT_LAUNCH"}
own |= {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}  # of builds with NCCL
seen["environ"].update({name: "" for name in own & seen["environ"].keys()})
print("seen", json.dumps(seen), flush=True)
"""  # noqa: E501


@pytest.mark.parametrize("launcher", [EXT, AGENT], ids=["torchrun", "agent"])
def test_workers_see_no_difference(tmp_path: Path, launcher: list[str]) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    done = [run([*launcher, "shows.py", "one", "--two"], tmp_path, forks, OWN="1") for forks in (True, False)]
    assert [each.returncode for each in done] == [0, 0], done[0].err
    forked, started = (json.loads(each.out.partition("seen ")[2].splitlines()[0]) for each in done)
    variables = forked.pop("environ"), started.pop("environ")
    assert forked == started
    assert {name for name in variables[0] | variables[1] if variables[0].get(name) != variables[1].get(name)} == set()


def test_signals_output_and_exit_codes(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    (tmp_path / "waits.py").write_text("import fcntl; print('up', flush=True); fcntl.flock(open('gate'), fcntl.LOCK_SH)")
    (tmp_path / "fails.py").write_text("import missing_module")
    assert run([*AGENT, "fails.py"], tmp_path).returncode == 65
    with Job([*AGENT, "waits.py"], tmp_path) as job:
        job.wait_for("(?m)^up$")
        job.process.send_signal(signal.SIGKILL)
        assert job.finish().returncode == -signal.SIGKILL
    with Job([*AGENT, "waits.py"], tmp_path) as job:
        job.wait_for("(?m)^up$")
        gate.open()
        assert job.finish().returncode == 0


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["sh", "-c", "exit"], {}),
        ([sys.executable, "-c", ""], {}),
        ([sys.executable, "-m", "elastic_ext.cli.main"], {}),
        (EXT, {"PYTHONPATH": "/somewhere"}),
        (EXT, {"OMP_NUM_THREADS": "3"}),
        (EXT, {"LOGLEVEL": "DEBUG"}),
    ],
)
def test_what_is_started_as_written(tmp_path: Path, command: list[str], variables: dict[str, str]) -> None:
    assert launchers().start(command, tmp_path, environment(**variables)) is None
