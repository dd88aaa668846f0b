"""Every command in the README is run as written; its table of settings is the code's."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from elastic_ext.base.settings import DEFAULT_STOP_GRACE, Settings
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, TORCHRUN, Job, environment

README = (ROOT / "README.md").read_text()
COMMANDS = [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has activated the virtual environment; no port is chosen for them."""
    env = environment()
    del env["ELASTIC_EXT_METRICS_PORT"]
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env


@pytest.fixture
def checkout(tmp_path):
    """What the commands need, in a directory that they may fill."""
    shutil.copytree(ROOT / "entrypoints", tmp_path / "entrypoints", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("command", [command for command in COMMANDS if "train_fsdp" in command])
def test_training_commands(checkout, command):
    with EtcdServer(checkout / "etcd") as server:  # the one command that names a server names this one
        run_training(checkout, command.replace("localhost:2379", server.endpoint))


def run_training(checkout, command):
    done = subprocess.run(
        ["sh", "-c", command], cwd=checkout, env=shell(checkout), capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"done at step \d+", done.stdout)


def test_make_demo():
    """The first command. The environment that runs this test is the one that it would make."""
    assert COMMANDS[0] == "make demo"
    done = subprocess.run(
        ["make", "demo", f"VENV={Path(sys.executable).parent.parent}"],
        cwd=ROOT,
        env=shell(ROOT),
        capture_output=True,
        text=True,
        timeout=175,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "resumed from" in done.stdout
    assert "The job finished." in done.stdout


@pytest.mark.long
def test_the_losses_of_the_demo_are_the_same_to_the_bit():
    """The README says so of what the demo shows: steps that were done twice, before the kill and after it."""
    done = subprocess.run(
        [sys.executable, "entrypoints/demo.py"],
        cwd=ROOT,
        env=shell(ROOT),
        capture_output=True,
        text=True,
        timeout=175,
        check=False,
    )
    steps = re.findall(r"step (\d+) loss \S+ \((\S+)\)", done.stdout)
    twice = {step for step, _ in steps if [other for other, _ in steps].count(step) == 2}
    assert twice, done.stdout + done.stderr
    assert all(len({loss for other, loss in steps if other == step}) == 1 for step in twice)


@pytest.mark.xdist_group("default-port")
def test_curl(tmp_path):
    (command,) = [command for command in COMMANDS if command.startswith("curl")]
    script = tmp_path / "wait.py"
    script.write_text("import signal; print('up', flush=True); signal.pause()")
    with Job([sys.executable, "-m", "elastic_ext.agent", str(script)], tmp_path, ELASTIC_EXT_METRICS_PORT="9401") as job:
        job.wait_for("(?m)^up$")
        if shutil.which("curl"):
            out = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30, check=True).stdout
        else:
            out = urllib.request.urlopen("http://localhost:9401/metrics", timeout=30).read().decode()
        named = set(re.findall(r"`(elastic_ext_\w+)", README.partition("## Metrics")[2]))
        assert named
        # A restart, a failure, a step: shown from the first one on.
        later = {name for name in named if name not in out}
        assert later <= {"elastic_ext_restarts_total", "elastic_ext_failures_total", "elastic_ext_worker_steps_total",
                         "elastic_ext_worker_last_step_age_seconds", "elastic_ext_worker_step_seconds",
                         "elastic_ext_worker_step_skew"}  # fmt: skip


def test_a_save_is_asked_for(server, tmp_path):
    (command,) = [command for command in COMMANDS if command.startswith("elastic-ext checkpoints save")]
    where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job1", "--rdzv-backend=ext_etcd"]
    script = ROOT / "tests" / "scripts" / "saving_job.py"
    with Job([*TORCHRUN, *where, "--nproc-per-node=2", script, tmp_path], tmp_path, STOP=str(tmp_path / "stop")) as job:
        job.wait_for("steps", 2)
        command = command.replace("localhost:2379", server.endpoint)
        done = subprocess.run(
            ["sh", "-c", command], env=shell(tmp_path), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "saved.0.0").read_text() == (tmp_path / "saved.0.1").read_text() == done.stdout
        (tmp_path / "stop").touch()
        assert job.finish().returncode == 0


def test_the_callbacks_are_used_as_shown():
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "integrations" in block]
    shown = [line for block in blocks for line in block.splitlines()]
    jobs = "".join((ROOT / "tests" / "scripts" / name).read_text() for name in ("hf_job.py", "lightning_job.py"))
    assert len(shown) == 8
    assert all(line in jobs for line in shown if line.startswith("from "))
    assert all("resume_from" not in line or line[line.index("elastic_ext") :] in jobs for line in shown)


def test_every_command_is_covered():
    covered = ("make demo", "curl ", "elastic-ext checkpoints save")
    assert all("train_fsdp" in command or command.startswith(covered) for command in COMMANDS)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_table_of_settings():
    rows = {key: (default, what) for key, default, what in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", README, re.MULTILINE)}
    assert {field.name: field.metadata["what"] for field in dataclasses.fields(Settings)} == {
        key: row[1] for key, row in rows.items()
    }
    for field in dataclasses.fields(Settings):
        default = {"True": "on", "False": "off", "None": ""}.get(str(field.default), str(field.default))
        assert rows[field.name][0] == default
    assert f"default {DEFAULT_STOP_GRACE:g}" in rows["stop_grace"][1]
