"""Worker processes and the reaper, on real processes."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from elastic_ext.base.wakeup import Wakeup, readable
from elastic_ext.workers.processes import WorkerProcesses
from elastic_ext.workers.reaper.client import Reaper
from elastic_ext.workers.reaper.reaper import kill_marked
from tests.jobs import wait_gone

IGNORES_TERM = "import signal,sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
SLEEPS = "import signal; print('up', flush=True); signal.pause()"


@pytest.fixture
def start():
    started = []

    def _start(code, **kwargs):
        kwargs.setdefault("start_new_session", True)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **kwargs)
        started.append(process)
        if "up" in code:
            assert process.stdout.readline() == b"up\n"
        return process

    yield _start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_exit_is_an_event_and_its_code_is_known_without_reaping(start):
    children = {0: start("raise SystemExit(3)"), 1: start(SLEEPS), 2: start("import os; os.kill(os.getpid(), 9)")}
    workers = WorkerProcesses({rank: child.pid for rank, child in children.items()}, own_groups=True)
    while len(workers.exits) < 2:
        workers.wait(20)
    assert {rank: exit_.exitcode for rank, exit_ in workers.exits.items()} == {0: 3, 2: -9}
    assert workers.failed
    assert workers.running == [1]
    assert children[0].wait() == 3  # still there to be reaped
    workers.stop(5, on_stragglers=lambda ranks: None)
    assert workers.exits[1].exitcode == -signal.SIGTERM
    assert workers.exits[0].asked_ns is None
    assert not workers.exits[0].was_asked(None)
    assert workers.exits[1].was_asked(None)
    # What it raised before it was told to end is why it ended; what it raised afterwards is how.
    asked_ns = workers.exits[1].asked_ns
    assert not workers.exits[1].was_asked(asked_ns - 1)
    assert workers.exits[1].was_asked(asked_ns + 1)
    workers.close()


def test_a_straggler_is_shown_and_then_killed_with_all_that_it_started(start):
    child = start(
        "import subprocess,sys,signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen([sys.executable,'-c','import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
        "signal.pause()'], stdout=subprocess.PIPE); "
        "p.stdout.readline(); print('up', flush=True); print(p.pid, flush=True); signal.pause()"
    )
    grandchild = int(child.stdout.readline())
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    shown = []
    workers.stop(0.2, on_stragglers=shown.append)
    assert shown == [[0]]
    assert workers.exits[0].exitcode == -signal.SIGKILL
    assert wait_gone([grandchild]) == []
    workers.close()


def test_what_a_failed_worker_started_does_not_outlive_it(start):
    """The worker is dead already, its child is not: the group is killed while the zombie still holds the number."""
    child = start(
        "import subprocess,sys,os; p = subprocess.Popen([sys.executable,'-c','import signal; signal.pause()'],"
        " stdout=subprocess.DEVNULL); print(p.pid, flush=True); os._exit(1)"
    )
    grandchild = int(child.stdout.readline())
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    workers.wait(20)
    assert workers.failed
    workers.stop(5, on_stragglers=lambda ranks: None)
    assert wait_gone([grandchild]) == []
    workers.close()


def test_a_signal_from_somebody_else_is_not_ours(start):
    """Told to end with SIGTERM, killed by the kernel's out-of-memory killer: that is a cause."""
    child = start(IGNORES_TERM)
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    threading.Timer(0.1, child.kill).start()
    workers.stop(30, on_stragglers=lambda ranks: None)
    assert workers.exits[0].exitcode == -signal.SIGKILL
    assert workers.exits[0].asked_ns is None
    workers.close()


def test_what_a_survivor_started_is_killed_though_it_ended_well_when_told(start):
    child = start(
        "import subprocess,sys,signal,os; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); "
        "p = subprocess.Popen([sys.executable,'-c','import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
        "signal.pause()'], stdout=subprocess.PIPE); p.stdout.readline(); print('up', flush=True); print(p.pid, flush=True); "
        "signal.pause()"
    )
    grandchild = int(child.stdout.readline())
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    workers.stop(20, on_stragglers=lambda ranks: None)
    assert workers.exits[0].exitcode == 0
    assert wait_gone([grandchild]) == []
    workers.close()


def test_a_process_that_is_gone_and_reaped_is_an_exit(start):
    child = start("pass")
    child.wait()
    workers = WorkerProcesses({0: child.pid}, own_groups=False)
    assert workers.exits[0].exitcode is None
    assert workers.failed
    workers.stop(1, on_stragglers=lambda ranks: None)
    workers.close()


def test_a_stopped_process_is_killed(start):
    child = start(SLEEPS)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    workers.stop(0.2, on_stragglers=lambda ranks: None)
    assert workers.exits[0].exitcode == -signal.SIGKILL
    workers.close()


def test_wakeup_ends_a_wait_from_another_thread_and_is_not_lost(start):
    child = start(SLEEPS)
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    with Wakeup() as wakeup:
        wakeup.set()  # before the wait
        workers.wait(None, wakeup)
        wakeup.clear()
        threading.Thread(target=wakeup.set).start()
        workers.wait(None, wakeup)
    workers.close()


def test_a_signal_just_before_the_wait_ends_it(start):
    """The handler has run, and poll(2) would sleep on: the file descriptor remembers the signal."""
    child = start(SLEEPS)
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        with Wakeup() as wakeup:
            os.kill(os.getpid(), signal.SIGUSR1)
            workers.wait(None, wakeup)
            assert seen == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
        workers.close()


def test_no_descriptor_is_left_open(start):
    child = start(SLEEPS)
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        WorkerProcesses({0: child.pid}, own_groups=True).close()
        with Wakeup():
            pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


AGENT = """
import os, signal, subprocess, sys
from elastic_ext.workers.reaper.client import Reaper
python = sys.executable
sys.executable = os.environ.get("TEST_REAPER_PYTHON", python)
guard = Reaper(sys.argv[1], sys.argv[2])
sys.executable = python
code = "import subprocess, sys, signal; p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], \
start_new_session=True); print(p.pid, flush=True); signal.pause()"
marked = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "ELASTIC_EXT_WORKER": sys.argv[1]},
                          start_new_session=True, stdout=subprocess.PIPE)
unmarked = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env={}, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if sys.argv[3] != "before-watch":
    guard.watch([marked.pid, unmarked.pid])
print(guard._process.pid, marked.pid, int(marked.stdout.readline()), unmarked.pid, flush=True)
if sys.argv[3] == "clean":
    guard.close(clean=True)
elif sys.argv[3] == "end":
    guard.close(clean=False)
    print(marked.poll(), unmarked.poll(), flush=True)
else:
    signal.pause()
"""


@pytest.fixture
def agent():
    started = []

    def _agent(how, **env):
        run_dir = tempfile.mkdtemp()
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, os.urandom(16).hex(), run_dir, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        started.append(process)
        reaper, *workers = map(int, process.stdout.readline().split())
        return process, reaper, workers, run_dir

    yield _agent
    for process in started:
        process.kill()
        process.wait()
        kill_marked(process.args[3].encode())  # it may hold the pipes open
        process.communicate()


def test_nothing_outlives_a_killed_agent(agent):
    process, reaper, workers, run_dir = agent("wait")
    process.kill()
    assert wait_gone([*workers, reaper]) == []
    assert not os.path.exists(run_dir)


def test_what_the_agent_said_before_it_died_is_heard_by_a_warden_that_was_not_up_yet(agent, tmp_path):
    late = tmp_path / "late"
    late.write_text(
        f"#!{sys.executable}\n"
        "import os, select, sys\n"
        "select.select([os.pidfd_open(int(sys.argv[4]))], [], [])\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
    )
    late.chmod(0o755)
    process, reaper, workers, _ = agent("wait", TEST_REAPER_PYTHON=str(late))
    process.kill()
    assert wait_gone([*workers, reaper]) == []


def test_a_worker_that_the_warden_was_not_told_of_is_found_by_its_token(agent):
    process, reaper, (marked, grandchild, unmarked), _ = agent("before-watch")
    process.kill()
    assert wait_gone([marked, grandchild, reaper]) == []
    os.kill(unmarked, signal.SIGKILL)  # nobody could know of this one: no token, not told


def test_a_worker_between_fork_and_exec_is_found(tmp_path):
    """When the agent dies its child has not called exec yet, so it does not carry the token."""
    code = (
        "import os, select, sys\n"
        "from elastic_ext.workers.reaper.client import Reaper\n"
        "guard = Reaper(sys.argv[1], sys.argv[2])\n"
        "agent = os.pidfd_open(os.getpid())\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    select.select([agent], [], [])\n"
        "    code = 'import signal; signal.pause()'\n"
        "    os.execve(sys.executable, [sys.executable, '-c', code], {'ELASTIC_EXT_WORKER': sys.argv[1]})\n"
        "import signal; signal.pause()\n"
    )
    token = os.urandom(16).hex()
    agent = subprocess.Popen([sys.executable, "-c", code, token, str(tmp_path / "run")], stdout=subprocess.PIPE)
    child = int(agent.stdout.readline())
    agent.kill()
    agent.wait()
    try:
        assert wait_gone([child]) == []
    finally:
        agent.stdout.close()


def test_a_warden_whose_reader_is_gone_still_cleans_up(tmp_path):
    """The console of the agent is closed together with the agent: `torchrun ... 2>&1 | head`."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, os.urandom(16).hex(), str(run_dir), "wait"],
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
    )
    os.close(writer)
    reaper, *workers = map(int, process.stdout.readline().split())
    os.close(reader)
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_gone([*workers, reaper]) == []
    assert not run_dir.exists()


def test_a_guard_outlives_its_reaper(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_ELASTIC_EXT_TEST", "kept")
    guard = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    environ = Path(f"/proc/{guard._process.pid}/environ")
    deadline = time.monotonic() + 20
    while not environ.read_text() and time.monotonic() < deadline:
        pass  # in the middle of its exec a process has none, and nothing tells when it does
    assert environ.read_text() == "LD_ELASTIC_EXT_TEST=kept\0"
    os.kill(guard._process.pid, signal.SIGKILL)
    select.select([guard.pidfd], [], [], 20)
    guard.watch([os.getpid()])
    os.kill(guard._process.pid, signal.SIGKILL)
    select.select([guard.pidfd], [], [], 20)
    guard.close(clean=True)
    guard.close(clean=True)


def test_a_warden_that_cannot_run_is_said_once_and_not_started_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    guard = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    monkeypatch.undo()
    select.select([guard.pidfd], [], [], 20)
    guard.watch([os.getpid()])
    guard.watch([os.getpid()])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    guard.close(clean=False)


def test_an_agent_that_ends_well_leaves_alive_what_is_alive(agent):
    process, reaper, workers, run_dir = agent("clean")
    assert process.wait(20) == 0
    assert wait_gone([reaper]) == []
    assert not os.path.exists(run_dir)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)  # raises if it is gone


def test_an_agent_that_ends_otherwise_leaves_nothing(agent):
    process, reaper, workers, _ = agent("end")
    assert process.wait(20) == 0
    assert wait_gone([*workers, reaper]) == []


def test_signals_to_the_agents_group_do_not_reach_the_reaper(agent):
    process, reaper, workers, _ = agent("wait")
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reaper, sig)
    process.kill()
    assert wait_gone([*workers, reaper]) == []


def test_a_killed_warden_is_replaced(tmp_path):
    guard = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        guard.watch([child.pid])
        first = guard._process.pid
        os.kill(first, signal.SIGKILL)
        select.select([guard.pidfd], [], [], 20)
        guard.revive()
        assert guard._process.pid != first
        guard.close(clean=False)
        assert child.wait(20) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_a_stopped_warden_neither_holds_up_the_agent_nor_its_end(tmp_path, caplog):
    """What it is told no longer goes into its pipe after some hundred rounds; at the end it is told to go on."""
    guard = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        first = guard._process.pid
        os.kill(first, signal.SIGSTOP)
        os.waitid(os.P_PID, first, os.WSTOPPED)
        guard._workers = [child.pid] * 4000
        for _ in range(8):  # 30 KB each
            guard._tell()
        assert "has not read for long; another one takes its place" in caplog.text
        assert wait_gone([first]) == []
        guard.watch([child.pid])
        os.kill(guard._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, guard._process.pid, os.WSTOPPED)
        guard.close(clean=False)
        assert child.wait(20) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_stop_does_not_wait_for_the_grace_when_all_have_ended(start):
    """The wait ends with the last exit: with a grace of an hour this test would time out otherwise."""
    workers = WorkerProcesses({rank: start(SLEEPS).pid for rank in range(3)}, own_groups=True)
    workers.stop(3600, on_stragglers=lambda ranks: None)
    assert workers.running == []
    assert max(exit_.seen_ns for exit_ in workers.exits.values()) <= time.monotonic_ns()
    workers.close()


def test_a_wait_of_any_length_can_be_asked_for():
    with Wakeup() as wakeup:
        wakeup.set()
        assert readable(wakeup, 1e300)
        processes = WorkerProcesses({}, False)
        processes.wait(1e300, wakeup)
        processes.close()
