"""Worker processes: their ends are events, and nothing that they started survives them. On real processes."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from elastic_ext.base.wakeup import Wakeup, readable
from elastic_ext.workers import processes
from elastic_ext.workers.processes import WorkerProcesses, build_locks, remove_build_locks
from tests.jobs import wait_gone
from tests.until import until

pytestmark = pytest.mark.seam

ON_TERM = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: {}); print('up', flush=True)\nwhile True: signal.pause()"
SLEEPS = "import signal; print('up', flush=True); signal.pause()"
GRACE_S = 3600.0  # nothing here waits for it: who does, times out


class Limit(Wakeup):
    """at: the monotonic time by which the workers must be gone."""

    def __init__(self, at: "float | None" = None) -> None:
        super().__init__()
        self.at = at

    def stop_by(self):
        return self.at


def stop(workers, on_stragglers=lambda ranks: None, limit=None, at_once=()):
    workers.stop(GRACE_S, on_stragglers, limit=limit, at_once=at_once)


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


def test_an_exit_is_known_without_reaping(start):
    children = {0: start("raise SystemExit(3)"), 1: start(SLEEPS), 2: start("import os; os.kill(os.getpid(), 9)")}
    workers = WorkerProcesses({rank: child.pid for rank, child in children.items()}, own_groups=True)
    while len(workers.exits) < 2:
        workers.wait(None)
    assert {rank: exit_.exitcode for rank, exit_ in workers.exits.items()} == {0: 3, 2: -9}
    assert workers.failed
    assert workers.running == [1]
    assert children[0].wait() == 3  # still there to be reaped
    stop(workers)
    assert workers.exits[1].exitcode == -signal.SIGTERM
    assert workers.exits[0].stop_sent_ns is None
    assert not workers.exits[0].ended_by_agent(None)
    assert workers.exits[1].ended_by_agent(None)
    # What it raised before it was told to end is why it ended; what it raised afterwards is how.
    stop_sent_ns = workers.exits[1].stop_sent_ns
    assert not workers.exits[1].ended_by_agent(stop_sent_ns - 1)
    assert workers.exits[1].ended_by_agent(stop_sent_ns + 1)
    workers.close()


def test_one_ending_by_the_same_signal_ended_first(start):
    """The platform has terminated it, and its peers have failed over that first."""
    child = start("import os; os.kill(os.getpid(), 15)")
    until(lambda: processes.is_ending(child.pid))
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    stop(workers)
    assert workers.exits[0].exitcode == -signal.SIGTERM
    assert not workers.exits[0].ended_by_agent(None)
    workers.close()


@pytest.mark.parametrize("slowly", [False, True], ids=["ended", "ending"])
def test_one_already_ending_has_ended_on_its_own(start, slowly):
    """Its exit cannot be seen yet, but its connections are closed: another worker has failed over that, and all are stopped."""
    code = "import os, threading, ctypes, signal; "
    if slowly:  # the main thread has ended, as in a process whose driver takes its time; the process does once it is told to
        code += (
            "signal.pthread_sigmask(signal.SIG_BLOCK, [15]); threading.Thread(target=lambda: (print('up', flush=True), "
            "signal.sigwait([15]), os._exit(14))).start(); ctypes.CDLL(None).pthread_exit(None)"
        )
    else:
        code += "os._exit(14)"
    child = start(code)
    until(lambda: processes.is_ending(child.pid))
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    stop(workers)
    assert workers.exits[0].exitcode == 14
    assert not workers.exits[0].ended_by_agent(None)
    workers.close()


def test_only_some_workers_get_time_to_end(start):
    children = [start(ON_TERM.format("None")), start(ON_TERM.format("os._exit(7)"))]
    workers = WorkerProcesses({rank: child.pid for rank, child in enumerate(children)}, own_groups=True)
    shown = []
    stop(workers, shown.append, at_once={0})
    assert {rank: exit_.exitcode for rank, exit_ in workers.exits.items()} == {0: -signal.SIGKILL, 1: 7}
    assert all(exit_.ended_by_agent(None) for exit_ in workers.exits.values())
    assert shown == []
    workers.close()


DEAF_CHILD = (
    "import subprocess,sys,signal,os; {}; "
    "p = subprocess.Popen([sys.executable,'-c','import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    "signal.pause()'], stdout=subprocess.PIPE); p.stdout.readline(); print('up', flush=True); print(p.pid, flush=True); {}"
)


@pytest.mark.parametrize(
    ("begin", "end", "code"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.pause()", -signal.SIGKILL),
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(0))", "signal.pause()", 0),
        ("pass", "os._exit(1)", 1),
    ],
    ids=["straggler", "told", "failed"],
)
def test_what_a_worker_started_does_not_outlive_it(start, begin, end, code):
    """straggler: it is shown, then killed. failed: its group is killed while the zombie still holds the number."""
    child = start(DEAF_CHILD.format(begin, end))
    grandchild = int(child.stdout.readline())
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    if code == 1:
        workers.wait(None)
        assert workers.failed
    shown = []
    with Limit(at=0.0 if code == -signal.SIGKILL else None) as limit:
        stop(workers, shown.append, limit)
    assert shown == ([[0]] if code == -signal.SIGKILL else [])
    assert workers.exits[0].exitcode == code
    assert wait_gone([grandchild]) == []
    workers.close()


SHARES = (
    "import os, signal; from multiprocessing.shared_memory import SharedMemory; made = [SharedMemory(create=True, size=64) for _ "
    "in range(200)]; {}; print('up', flush=True); print(*(each.name for each in made), flush=True); {}"
)
DEAF_FORK = "os.fork() or (signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.pause())"


@pytest.mark.parametrize("others", ["pass", DEAF_FORK], ids=["alone", "deaf child"])
@pytest.mark.parametrize("end", ["signal.pause()", "os.kill(os.getpid(), 9)"], ids=["told", "killed"])
def test_shared_memory_of_killed_workers_is_gone(start, others, end):
    """multiprocessing's resource tracker unlinks it, once all that hold its pipe have ended. It needs the time for that."""
    children = [start(SHARES.format(others, end)) for _ in range(3)]
    names = [name for child in children for name in child.stdout.readline().decode().split()]
    assert len(names) == 600
    workers = WorkerProcesses({rank: child.pid for rank, child in enumerate(children)}, own_groups=True)
    if end != "signal.pause()":
        while workers.running:
            workers.wait(None)
    stop(workers)
    assert [name for name in names if os.path.exists(f"/dev/shm/{name}")] == []
    workers.close()


BUILDS = (
    "import signal; from torch.utils.file_baton import FileBaton; baton = FileBaton({!r}); assert baton.try_acquire(); "
    "print('up', flush=True); signal.pause()"
)


@pytest.mark.parametrize("taken", [False, True], ids=["left", "taken by another"])
def test_a_build_that_was_stopped_locks_no_other(start, tmp_path, taken):
    (tmp_path / "build.ninja").touch()
    lock = tmp_path / "lock"
    worker, other = start(BUILDS.format(str(lock))), start(SLEEPS)
    workers = WorkerProcesses({0: worker.pid}, own_groups=True)
    held = build_locks([worker.pid, other.pid, 2**22])
    assert list(held) == [str(lock)]
    stop(workers)
    if taken:
        lock.unlink()
        lock.touch()
    remove_build_locks(held)
    assert lock.exists() == taken
    workers.close()


def test_a_signal_from_somebody_else_is_not_ours(start):
    """Told to end with SIGTERM, killed by the kernel's out-of-memory killer: that is a cause."""
    child = start(ON_TERM.format("os.kill(os.getpid(), 9)"))
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    stop(workers)
    assert workers.exits[0].exitcode == -signal.SIGKILL
    assert workers.exits[0].stop_sent_ns is None
    workers.close()


def test_a_gone_and_reaped_process_has_exited(start):
    child = start("pass")
    child.wait()
    workers = WorkerProcesses({0: child.pid}, own_groups=False)
    assert workers.exits[0].exitcode is None
    assert workers.failed
    stop(workers)
    workers.close()


def test_a_stopped_process_is_killed(start):
    child = start(SLEEPS)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    workers = WorkerProcesses({0: child.pid}, own_groups=True)
    with Limit(at=0.0) as limit:
        stop(workers, limit=limit)
    assert workers.exits[0].exitcode == -signal.SIGKILL
    workers.close()


def test_a_wakeup_from_another_thread_is_never_lost(start):
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


def test_an_interrupted_close_can_be_called_again(start, monkeypatch):
    """Torch raises from its signal handler out of any line; what the agent does at its end must still come."""
    child = start(SLEEPS)
    before = os.listdir("/proc/self/fd")
    workers = WorkerProcesses(dict.fromkeys(range(3), child.pid), own_groups=True)
    close = os.close

    def interrupted(descriptor):
        close(descriptor)
        monkeypatch.undo()
        raise InterruptedError

    monkeypatch.setattr(os, "close", interrupted)
    with pytest.raises(InterruptedError):
        workers.close()
    workers.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_grace_period_can_be_shortened_meanwhile(start):
    """With the grace of an hour alone this test would time out."""
    with Limit() as limit:
        child = start(ON_TERM.format("print('told', flush=True)"))
        workers = WorkerProcesses({0: child.pid}, own_groups=True)

        def cut_off():
            child.stdout.readline()  # it was told to end, and does not
            limit.at = time.monotonic()
            limit.set()

        later = threading.Thread(target=cut_off)
        later.start()
        stop(workers, limit=limit)
        later.join()
    assert workers.exits[0].exitcode == -signal.SIGKILL
    workers.close()


@pytest.mark.full
def test_a_wait_may_have_any_length():
    with Wakeup() as wakeup:
        wakeup.set()
        assert readable(wakeup, 1e300)
        workers = WorkerProcesses({}, False)
        workers.wait(1e300, wakeup)
        workers.close()
