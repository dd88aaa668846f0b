"""The user's commands about a node: its health check before each round, and what runs when it turns out to be bad."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from elastic_ext.agent.launch import CommandEnd, run_command, unfit
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Gate, Job, descendants, wait_gone
from tests.jobs import run as run_job
from tests.until import until

SCRIPT = SCRIPTS / "elastic_job.py"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (0, None),
        (3, "the health check ended with exit code 3"),
        (-6, "the health check was ended by SIGABRT"),
        (-100, "the health check was ended by signal 100"),
        (None, "the health check had not ended after 60 s (health_timeout)"),
    ],
)
def test_what_makes_a_node_unfit(code, why):
    assert unfit(CommandEnd(code, ""), 60) == why


@pytest.mark.full
def test_a_command_is_killed_with_what_it_started(tmp_path, monkeypatch):
    pids, wait = tmp_path / "pids", subprocess.Popen.wait

    def wait_late(process, timeout=None):
        until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_late)  # its time begins once it has come so far
    ended = run_command(f"echo before; sleep 100 & echo $! $$ > {pids}; wait", 0.1, os.environ)
    assert ended == CommandEnd(None, "before")
    assert not wait_gone([int(pid) for pid in pids.read_text().split()])


@pytest.mark.seam
def test_what_outlives_a_command_is_not_waited_for(tmp_path):
    pid = tmp_path / "pid"
    ended = run_command(f"sleep 1000 & echo $! > {pid}; seq 100000", 600, os.environ)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert ended.code == 0
    assert ended.output.endswith("99999\n100000")


@pytest.mark.full
def test_an_unfit_node_starts_no_worker(tmp_path):
    (tmp_path / "job.py").write_text("print('started')")
    done = run_job(
        [*AGENT, "--nproc-per-node=1", "--rdzv-conf=node_name=here", "job.py"],
        tmp_path,
        ELASTIC_EXT_HEALTH_COMMAND="echo is ill; exit 3",
        ELASTIC_EXT_BAD_NODE_COMMAND='echo "$ELASTIC_EXT_NODE: $ELASTIC_EXT_REASON" > told',
        ELASTIC_EXT_VERDICT_FILE="verdict",
    )
    assert done.returncode == 69, done.all
    assert "started" not in done.out
    assert "  is ill" in done.err
    assert (tmp_path / "told").read_text().startswith("here: the health check ")
    decision = json.loads((tmp_path / "verdict").read_text())["decision"]
    assert (decision["kind"], decision["rule"]) == ("hardware", "node-check")


@pytest.mark.full
def test_a_signal_ends_a_health_check(tmp_path):
    """In the second round; before the first one torch has no handlers."""
    (tmp_path / "job.py").write_text("import os; os._exit(1)")
    command = "test ! -e first && touch first || { echo $$ > pid; echo waits > /dev/stderr; sleep 100; }"
    with Job([*AGENT, "--nproc-per-node=1", "--max-restarts=3", "job.py"], tmp_path, ELASTIC_EXT_HEALTH_COMMAND=command) as job:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), job.err)
        started = descendants(int((tmp_path / "pid").read_text()))
        job.process.send_signal(signal.SIGTERM)
        assert job.finish().returncode == 75
    assert not wait_gone(started)


@pytest.mark.seam
def test_the_others_go_on_without_an_unfit_node(tmp_path, server):
    """It was fit in the first round, and is not in the second."""
    gate = Gate(tmp_path / "gate")
    command = [*TORCHRUN, "--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=unfit"]
    command += ["--nnodes=1:2", "--rdzv-conf=last_call=60"]

    def start(name: str, health: str) -> Job:
        variables = {"NODE": name, "ELASTIC_EXT_NODE_NAME": name, "GATE": str(gate.path), "ELASTIC_EXT_HEALTH_COMMAND": health}
        return Job([*command, "--max-restarts=3", SCRIPT, "exit9:0"], tmp_path, **variables)

    with start("a", "true") as a, start("b", "test ! -e second && touch second") as b:
        assert b.finish().returncode == 69, b.err
        a.wait_for(r'"world": 1, "attempt": 1')
        gate.open()
        assert a.finish().returncode == 0, a.err
