"""Every command in the README and the reference is run as written, and what they show is what comes."""

import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import elastic_ext
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, TORCHRUN, Job, environment

README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "elastic_ext" / "REFERENCE.md").read_text()


def blocks(language: str) -> list[str]:
    """The blocks of code in both pages, each once."""
    return list(
        dict.fromkeys(block.strip("\n") for block in re.findall(rf"```{language}\n(.*?)```", README + REFERENCE, re.DOTALL))
    )


COMMANDS = blocks("sh")
TRAINING = [command for command in COMMANDS if "train_fsdp" in command]


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


@pytest.mark.long("command1", "command2")
@pytest.mark.parametrize("command", TRAINING, ids=[f"command{number}" for number in range(len(TRAINING))])
def test_training_commands(checkout, command):
    with EtcdServer(checkout / "etcd") as server:  # the one command that names a server names this one
        run_training(checkout, command.replace("localhost:2379", server.endpoint))


def run_training(checkout, command):
    done = subprocess.run(
        ["sh", "-c", command], cwd=checkout, env=shell(checkout), capture_output=True, text=True, timeout=300, check=False
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
    (shown,) = blocks("text")
    assert len(shown.splitlines()) == 6
    came = {varying(line) for line in (done.stdout + done.stderr).splitlines()}
    assert not [line for line in shown.splitlines() if varying(line) not in came], done.stdout + done.stderr


def varying(line: str) -> str:
    """A line of the demo's output without what differs from run to run, and the last digits, which differ between processors."""
    line = re.sub(r"/tmp/\w+/", "/tmp/", line.strip())
    line = re.sub(r"(loss \d+\.\d{3})\d* \(\S+\)", r"\1", line)
    return re.sub(r"\b\d+(?= +\(the worker)|(?<=tokens/s )\d+|\d+\.\d+ s\b|\d{4}-\d\d-\d\d [\d:,]+", "#", line)


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
        named = set(re.findall(r"^\| `(elastic_ext_\w+)`", REFERENCE, re.MULTILINE))
        assert len(named) > 20
        assert {name for name in named if name not in out} == {name for name in named if name.startswith("elastic_ext_etcd_")}


def test_doctor(tmp_path):
    assert "elastic-ext doctor" in COMMANDS
    done = subprocess.run(
        ["sh", "-c", "elastic-ext doctor"],
        cwd=tmp_path,
        env=shell(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(?m)^ok +torch ", done.stdout)


def test_timeline(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'elastic_ext[timeline]'")
    (commands,) = [command for command in COMMANDS if command.startswith("elastic-ext timeline")]
    shutil.copy(ROOT / "tests" / "data" / "timeline_events.jsonl", tmp_path / "n0.jsonl")
    command = commands.splitlines()[0].replace("/shared/events", str(tmp_path))
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=shell(tmp_path), timeout=60, check=True)
    assert "was killed by SIGKILL" in (tmp_path / "life.html").read_text()


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
    shown = [line for block in blocks("python") if "SaveOnDemand" in block for line in block.splitlines()]
    jobs = "".join((ROOT / "tests" / "scripts" / name).read_text() for name in ("hf_job.py", "lightning_job.py"))
    assert len(shown) == 8
    assert all(line in jobs for line in shown if line.startswith("from "))
    assert all("resume_from" not in line or line[line.index("elastic_ext") :] in jobs for line in shown)


def test_what_scripts_may_call_is_there():
    named = set(re.findall(r"\belastic_ext\.([a-zA-Z]\w+)", README + REFERENCE))
    groups = {"agent", "rules", "formats", "training", "run_id"}  # packages, entry-point groups, attributes of spans
    assert named - groups
    assert all(hasattr(elastic_ext, name) for name in named - groups)


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "elastic_ext" / "REFERENCE.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_command_is_covered():
    commands = ("checkpoints save", "doctor", "drain", "status", "timeline")
    covered = ("make demo", "curl ", *(f"elastic-ext {each}" for each in commands))
    assert all("train_fsdp" in command or command.startswith(covered) for command in COMMANDS)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert len(README.splitlines()) < 200
