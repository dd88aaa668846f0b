"""What an agent checks before it starts anything, and the user's commands about the node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent import launch
from elastic_ext.agent.launch import CommandEnd, run_command, unfit
from elastic_ext.base.errors import UsageError
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.choice import listing
from elastic_ext.cli import OK
from elastic_ext.cli.doctor import check_settings
from elastic_ext.features.resume.watch import Resuming
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Gate, Job, descendants, wait_gone
from tests.jobs import run as run_job
from tests.until import until


def prepared(entrypoint: str, *args: str, **settings: Any) -> WorkerSpec:
    rendezvous: Any = None
    return launch.prepare(
        WorkerSpec("default", 1, rendezvous, entrypoint=entrypoint, args=args, max_restarts=4), Settings(**settings)
    )


@pytest.mark.parametrize("command", [("python", "-u", "ok.py", "--lr", "1"), ("run.sh", "--lr", "1")])
def test_nodes_compare_the_arguments_of_a_program(command):
    rendezvous: Any = None
    spec = WorkerSpec("default", 1, rendezvous, entrypoint=command[0], args=command[1:])
    assert launch.program_of(spec, Settings()).arguments == ("--lr", "1")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("python", "-u", "no_such.py"), "the script 'no_such.py' does not exist in {here}; nothing was started"),
        (("no-such-command",), "the command 'no-such-command' was not found or cannot be executed; nothing was started"),
        (("/no/such/python", "-u", "ok.py"), "the command '/no/such/python' was not found"),
    ],
)
def test_what_cannot_be_started(tmp_path, monkeypatch, command, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.shutil, "which", lambda name: name if name == "python" else None)
    (tmp_path / "ok.py").touch()
    with pytest.raises(UsageError) as error:
        prepared(*command)
    assert said.format(here=tmp_path) in str(error.value)
    prepared("python", "-u", "ok.py")
    prepared("python", "-u", "-m", "no.such.module")


def test_checkpoint_dir_is_no_file(tmp_path):
    (tmp_path / "ok.py").touch()
    with pytest.raises(UsageError, match=r"ok\.py is a file"):
        Resuming.check(Settings(checkpoint_dir=str(tmp_path / "ok.py")))


@pytest.mark.skipif(os.geteuid() != 0, reason="reads as another user, as only root may; permission bits do not bind root itself")
def test_an_unreadable_checkpoint_directory(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o007 == 0:
            folder.chmod(0o711)
    assert listing.newest_complete(str(locked)).resume is None
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match=f"{locked}.* cannot be read"):
            listing.newest_complete(str(locked), listing.Wanted(pattern=""))
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("limit", "in_torch"), [(None, 4), (0, 0), (7, 7), (-1, launch.UNLIMITED)])
def test_the_budget_of_the_settings_replaces_torchs(limit, in_torch):
    spec = prepared("true", max_restarts=limit)
    assert spec.max_restarts == in_torch
    assert launch.max_restarts(spec, Settings(max_restarts=limit)) == (4 if limit is None else limit)


@pytest.mark.parametrize(
    ("workers", "left", "fit"), [(2, 29, None), (2, 30, False), (2, 55, False), (2, 56, True), (32, 96, None)]
)
def test_how_many_descriptors_a_job_needs(workers, left, fit):
    if fit is not None:
        assert launch.extras_fit(workers, left) is fit
        return
    with pytest.raises(UsageError, match=rf"may open {left} more files, but {workers} workers need \d+: raise the hard limit"):
        launch.extras_fit(workers, left)


@pytest.mark.parametrize(
    ("free", "parent"), [({}, "memory"), ({"memory": 23}, "disk"), ({"memory": 24}, "memory"), ({"memory": 1, "disk": 1}, None)]
)
def test_where_the_agent_keeps_its_files(tmp_path, monkeypatch, free, parent):
    """free: inodes, where they are counted at all."""
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(launch, "IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path / "disk"))

    def statvfs(path: str) -> SimpleNamespace:
        left = free.get(os.path.basename(path))
        return SimpleNamespace(f_files=0 if left is None else 100, f_favail=left or 0)

    monkeypatch.setattr(launch.os, "statvfs", statvfs)
    if parent is not None:
        assert os.path.dirname(launch.make_run_dir(1)) == str(tmp_path / parent)
        return
    with pytest.raises(UsageError, match=r"memory: 1 free inodes, 24 needed; .*disk: 1 free inodes.*set TMPDIR"):
        launch.make_run_dir(1)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(launch, "IN_MEMORY", str(folder))
    return folder


def planted(folder: Path) -> Path:
    """What looks like a dead agent's private directory; return the part of a copy in it."""
    part = folder / "memory" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"part")
    (folder / launch.OWNER).touch()
    return part


def test_a_dead_agents_directory_goes_with_the_next(shared_memory):
    """The whole directory, whose lock is free; not those of agents that live, or of which nothing says so."""
    dead, unknown = (shared_memory / f"elastic_ext_{name}" for name in ("dead", "unknown"))
    planted(dead)
    (dead / "progress").touch()
    unknown.mkdir()
    with launch.own_run_dir(1) as (one, _), launch.own_run_dir(1) as (other, _):
        assert sorted(map(str, shared_memory.iterdir())) == sorted([one, other, str(unknown)])
    assert list(shared_memory.iterdir()) == [unknown]


OWNS = """
import os, subprocess, sys
from elastic_ext.agent import launch
launch.IN_MEMORY = sys.argv[1]
with launch.own_run_dir(1) as (path, lock):
    print(path, subprocess.Popen(["sleep", "10000"], pass_fds=lock, stdout=subprocess.DEVNULL).pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.seam
@pytest.mark.parametrize("inside", [[], ["unshare", "--pid", "--fork", "--kill-child"]], ids=["here", "pid namespace"])
def test_a_directory_lives_while_agent_or_reaper_does(shared_memory, inside):
    """Both are killed, at last. A pid says nothing: containers may share this memory."""
    if inside and os.geteuid():
        pytest.skip("only root may make a pid namespace")
    pipe = subprocess.PIPE
    command = [*inside, sys.executable, "-c", OWNS, str(shared_memory)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as agent:
        path, reaper = agent.stdout.readline().split()
        held = [path]
        launch.remove_orphans(str(shared_memory))
        assert list(map(str, shared_memory.iterdir())) == held
        beside = int(reaper) if not inside else 0
        agent.kill()
        agent.wait()
        if beside:
            launch.remove_orphans(str(shared_memory))
            assert list(map(str, shared_memory.iterdir())) == held, "the reaper has not ended"
            os.kill(beside, signal.SIGKILL)
            assert wait_gone([beside]) == []
    until(lambda: launch.remove_orphans(str(shared_memory)) or not list(shared_memory.iterdir()))


def test_planted_files_neither_delay_nor_redirect_an_agent(shared_memory, tmp_path):
    (shared_memory / "elastic_ext_file").touch()
    (shared_memory / "elastic_ext_pipe").mkdir()
    os.mkfifo(shared_memory / "elastic_ext_pipe" / launch.OWNER)
    left = [planted(tmp_path / "elsewhere"), planted(tmp_path / "locked")]
    (shared_memory / "elastic_ext_link").symlink_to(tmp_path / "elsewhere")
    left.append(planted(shared_memory / "elastic_ext_lock"))
    (shared_memory / "elastic_ext_lock" / launch.OWNER).unlink()
    (shared_memory / "elastic_ext_lock" / launch.OWNER).symlink_to(tmp_path / "locked" / launch.OWNER)
    launch.remove_orphans(str(shared_memory))
    assert all(part.exists() for part in left)
    assert len(list(shared_memory.iterdir())) == 4


def test_even_root_leaves_what_another_user_has(shared_memory, monkeypatch):
    part = planted(shared_memory / "elastic_ext_other")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    launch.remove_orphans(str(shared_memory))
    assert part.exists()


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


@pytest.mark.parametrize("given", [{}, {"local_dir": "/nvme"}])
def test_our_check_gets_no_settings_the_agent_accepted(given):
    """Without --shutdown-timeout=15 and --rdzv-conf=bootstrap=on, as the agent has them, these contradict each other."""
    contradict = {"PLATFORM_GRACE": "20", "BOOTSTRAP": "off", "HANG_TIMEOUT": "60"}
    environ = {"PATH": "/bin", **{f"ELASTIC_EXT_{name}": value for name, value in contradict.items()}}
    command, left = launch.own_check(Settings(**given), environ, 8)
    assert command.endswith("doctor --preflight --alone")
    assert (left.pop("PATH"), left.pop("LOCAL_WORLD_SIZE")) == ("/bin", "8")
    read: list[Settings] = []
    assert check_settings("", left, read).state == OK
    assert (read[0].local_dir, len(left)) == (given.get("local_dir"), len(given))


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
    command += ["--nnodes=1:2", "--rdzv-conf=last_call_timeout=60"]

    def start(name: str, health: str) -> Job:
        variables = {"NODE": name, "ELASTIC_EXT_NODE_NAME": name, "GATE": str(gate.path), "ELASTIC_EXT_HEALTH_COMMAND": health}
        return Job([*command, "--max-restarts=3", SCRIPT, "exit9:0"], tmp_path, **variables)

    with start("a", "true") as a, start("b", "test ! -e second && touch second") as b:
        assert b.finish().returncode == 69, b.err
        a.wait_for(r'"world": 1, "attempt": 1')
        gate.open()
        assert a.finish().returncode == 0, a.err
