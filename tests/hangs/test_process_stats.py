"""Process stats, and what the hang watch concludes from them. On real processes."""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.hangs import detector, process_stats
from elastic_ext.hangs.detector import WorkerStatus
from elastic_ext.hangs.process_stats import ProcessStats, Rates, StatFields
from elastic_ext.hangs.watch import HangWatch, Stall
from elastic_ext.workers import progress_layout as layout
from elastic_ext.workers.progress import ProgressTable
from tests.hangs import rows
from tests.until import LIMIT_S, until

PTRACE_ATTACH, PTRACE_DETACH = 16, 17  # linux/ptrace.h
BEGIN = """
import os, select, selectors, signal, socket, subprocess, sys, threading, time
def ready(): print('ready', flush=True)
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """A process of its own group that has run `code` up to its `ready()`."""
    command = [sys.executable, "-c", BEGIN + code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"ready\n"
            yield started
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def of(pid: int) -> ProcessStats:
    return process_stats.read([pid])[pid]


@pytest.mark.seam
@pytest.mark.parametrize(
    ("call", "awaits"),
    [
        ("import signal; ready(); signal.pause()", True),
        ("import ctypes; ready(); ctypes.CDLL(None).sigsuspend(ctypes.create_string_buffer(128))", True),
        ("poll = select.poll(); poll.register(os.pipe()[0]); ready(); poll.poll()", False),  # Python retries it
        ("import signal; ready(); signal.sigwait([40])", False),
        ("ready(); __import__('threading').Event().wait()", False),
    ],
)
def test_a_wait_for_a_signal(call, awaits):
    with process(call) as started:
        until(lambda: of(started.pid).state == "S")
        until(lambda: of(started.pid).awaits_signal is awaits)


@pytest.mark.seam
@pytest.mark.parametrize(
    ("call", "awaits"),
    [
        ("ready(); signal.pause()", True if process_stats._HAS_PAUSE else None),
        ("ready(); signal.sigwait([40])", False),
        ("ready()\nwhile True: pass", False),
    ],
)
def test_waiting_for_a_signal_without_tracing_rights(monkeypatch, call, awaits):
    optional = process_stats._optional
    hidden = ["syscall"]
    monkeypatch.setattr(process_stats, "_optional", lambda pid, name: "" if name in hidden else optional(pid, name))
    with process(call) as started:
        until(lambda: of(started.pid).awaits_signal is awaits)
        hidden.append("wchan")
        until(lambda: of(started.pid).awaits_signal is (None if "while" not in call else False))


@pytest.mark.seam
def test_own_sockets_are_those_of_the_worker_itself():
    code = """
s = socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(s.getsockname())
if not os.fork():
    d = socket.create_connection(s.getsockname())
    ready()
time.sleep(100)
"""
    with process(code) as started:
        stats = of(started.pid)
    assert stats.own_sockets < set(stats.sockets)


# Families.


@pytest.mark.full
def test_stats_of_a_group():
    """The child works, and writes; its parent sleeps."""
    code = """
if os.fork() == 0:
    while time.process_time() < 0.3: pass
    with open('/dev/null', 'w') as null: null.write('x' * 3_000_000)
    ready()
time.sleep(100)
"""
    with process(code) as one:
        found = of(one.pid)
    assert found.state in "SR"
    assert 0.25 <= found.cpu_s < 5
    assert found.io_bytes is not None
    assert found.io_bytes >= 3_000_000
    assert found.sockets == {}
    assert not found.debugged
    assert not found.asleep_in_kernel
    assert process_stats.read([one.pid]) == {}


HELPER = "import time\nwhile time.process_time() < 0.3: pass\n"


@pytest.mark.full
def test_the_work_of_passing_helpers_is_not_lost():
    with process(f"[subprocess.run([sys.executable, '-c', {HELPER!r}]) for _ in range(3)]\nready()\ntime.sleep(100)") as one:
        assert of(one.pid).cpu_s >= 0.9


def test_a_family_is_by_parent_group_and_session():
    processes = {
        1: StatFields(0, 1, 1),
        10: StatFields(1, 10, 10),  # the agent
        20: StatFields(10, 20, 20),
        21: StatFields(20, 20, 20),
        22: StatFields(21, 22, 22),  # in a session of its own
        23: StatFields(22, 23, 22),
        24: StatFields(1, 20, 20),  # its parent has ended
        25: StatFields(1, 25, 20),
        26: StatFields(1, 26, 26),  # a daemon
        30: StatFields(10, 30, 30),
        31: StatFields(30, 31, 31),
        40: StatFields(41, 40, 40),  # numbers that were used again
        41: StatFields(40, 41, 41),
    }
    assert process_stats.members(processes, {20, 30}) == {20: [20, 21, 22, 23, 24, 25], 30: [30, 31]}
    assert process_stats.members({}, {20}) == {20: []}


@pytest.mark.parametrize(
    ("before", "now", "rates"),
    [
        (ProcessStats("S"), ProcessStats("S"), Rates(0.0, 0.0, 0.0, 0.0, 0.0)),
        (
            ProcessStats("S", cpu_s=10.0, own_cpu_s=8.0, main_cpu_s=5.0),
            ProcessStats("S", cpu_s=22.0, own_cpu_s=16.0, main_cpu_s=11.0),
            Rates(3.0, 0.0, 0.0, 1.0, 0.5),
        ),
        (ProcessStats("S", 1.0, 2.0, 100), ProcessStats("S", 3.0, 3.0, 500), Rates(0.5, 0.25, 100.0)),
        (ProcessStats("S", sockets={1: 100, 2: 7}), ProcessStats("S", sockets={1: 500, 3: 400}), Rates(0.0, 0.0, 200.0)),
        (ProcessStats("S", io_bytes=None), ProcessStats("S"), Rates(0.0, 0.0, None)),
        (ProcessStats("S"), ProcessStats("S", io_bytes=None), Rates(0.0, 0.0, None)),
        (ProcessStats("S"), ProcessStats("S", sockets=None), Rates(0.0, 0.0, None)),
        (ProcessStats("S", cpu_s=9.0), ProcessStats("S", cpu_s=8.0), Rates(None, 0.0, 0.0)),  # somebody has ended unseen
        (ProcessStats("S", io_bytes=9), ProcessStats("S", io_bytes=8), Rates(0.0, 0.0, None)),
    ],
)
def test_rates(before, now, rates):
    found = process_stats.rates(before, now, 4.0)
    assert found == replace(rates, children_share=found.children_share, threads_share=found.threads_share)
    if rates.children_share is not None:
        assert found == rates
    assert (found.children_share is None) == (found.cpu_share is None)


# Unknown is not idle.

SHUT = """
import ctypes
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: its counts are root's to read
ready()
time.sleep(100)
"""
STRANGER = """
import os, sys
from elastic_ext.hangs import process_stats
if os.geteuid() == 0: os.setuid(65534)
found = process_stats.read([int(sys.argv[1])])[int(sys.argv[1])]
print(found.state, found.io_bytes, found.sockets)
"""


def python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.seam
def test_counts_without_permission_are_not_known():
    with process(SHUT) as one:
        assert python(STRANGER, str(one.pid)).split()[1:] == ["None", "None"]


# The first call gets what it caches; the descriptors run out afterwards.
POOR = """
import resource, sys
from elastic_ext.hangs import process_stats
pid = int(sys.argv[1])
seen = len(process_stats.read([pid]))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(seen, process_stats.read([pid]), process_stats.open_sockets([pid]))
"""


@pytest.mark.seam
@pytest.mark.parametrize(("asked", "known"), [("stat", []), ("io", [None])])
def test_a_family_is_never_known_in_part(monkeypatch, asked, known):
    """The worker sleeps, and its child may work."""
    with process("child = subprocess.Popen(['sleep', '100']); ready(); print(child.pid, flush=True); child.wait()") as one:
        assert one.stdout is not None
        child = int(one.stdout.readline())
        text, run_out = process_stats._text, False

        def refused(pid: int | str, name: str) -> str:
            nonlocal run_out
            run_out = run_out or (int(pid), name) == (child, asked)
            if run_out and int(pid) == child:
                raise OSError(errno.EMFILE, "too many open files")
            return text(pid, name)

        assert of(one.pid).io_bytes is not None
        monkeypatch.setattr(process_stats, "_text", refused)
        found = process_stats.read([one.pid])
    assert [each.io_bytes for each in found.values()] == known


@pytest.mark.seam
def test_without_a_descriptor_left_nothing_is_known():
    with process(SHUT) as one:
        assert python(POOR, str(one.pid)).split(maxsplit=1) == ["1", f"{{}} {{{one.pid}: set()}}\n"]


# A filter as container runtimes have it: socket(AF_NETLINK, ...) is refused (linux/filter.h, linux/seccomp.h).


@pytest.mark.seam
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_sockets_bytes_count_at_both_ends(family, address):
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address, 0), family=family))
        client = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
        peer = stack.enter_context(server.accept()[0])
        inodes = [os.fstat(each.fileno()).st_ino for each in (client, peer)]
        assert set(inodes) <= process_stats.inodes_of(os.getpid())
        before = process_stats.moved_by_inode()
        assert before is not None
        sender = threading.Thread(target=client.sendall, args=(bytes(3_000_000),))
        sender.start()
        assert len(peer.recv(3_000_000, socket.MSG_WAITALL)) == 3_000_000
        sender.join()

        def counted() -> bool:
            now = process_stats.moved_by_inode() or {}
            return [now.get(inode, 0) - before.get(inode, 0) for inode in inodes] == [3_000_000] * 2

        until(counted)  # the last bytes have to be acknowledged


# Debuggers.


@pytest.mark.full
def test_who_is_traced_is_in_a_debugger():
    libc = ctypes.CDLL(None, use_errno=True)
    with process("ready()\ntime.sleep(100)") as one:
        assert libc.ptrace(PTRACE_ATTACH, one.pid, None, None) == 0, os.strerror(ctypes.get_errno())
        os.waitid(os.P_PID, one.pid, os.WSTOPPED)
        assert of(one.pid).debugged
        assert libc.ptrace(PTRACE_DETACH, one.pid, None, None) == 0, os.strerror(ctypes.get_errno())
        assert not of(one.pid).debugged


@pytest.mark.seam
def test_who_is_stopped():
    with process("ready()\ntime.sleep(100)") as one:
        os.kill(one.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, one.pid, os.WSTOPPED)
        assert of(one.pid).state == "T"


PDB = "import pdb, sys\nsys.stdin = open(0)\npdb.set_trace()\n"
# As prompt_toolkit does it for ipdb: an event loop in another thread watches the terminal and a pipe of its own.
PROMPT = """
import os, selectors, threading
def prompt():
    with selectors.EpollSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(os.pipe()[0], selectors.EVENT_READ)
        print("(Pdb)", flush=True)
        while not selector.select(0.5): pass
one = threading.Thread(target=prompt)
one.start()
one.join()
"""


NO_PROMPT = PROMPT.replace("selector.register(0, selectors.EVENT_READ)", "")


@pytest.mark.seam
@pytest.mark.parametrize(("code", "debugged"), [(PDB, True), (PROMPT, True), (NO_PROMPT, False)])
def test_a_process_waiting_for_its_user_is_debugged(code, debugged):
    """An event loop that has nothing to do with the terminal is none."""
    controller, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as one:
        try:
            text = b""
            while b"(Pdb)" not in text:
                text += os.read(controller, 1000)
            until(lambda: all(state == "S" for state in process_stats._thread_states(one.pid)))
            until(lambda: of(one.pid).debugged is debugged)  # from the prompt to the wait for an answer
        finally:
            one.kill()
            os.close(controller)
            os.close(terminal)


# The watch, on workers whose progress rows say that they stopped after three steps.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of minutes."""
    monkeypatch.setattr(detector, "IDLE_FLOOR_S", 2.0)
    monkeypatch.setattr(detector, "START_FLOOR_S", 3.0)
    monkeypatch.setattr(detector, "LATE_S", LIMIT_S)  # a busy machine lets the watch wait


def watched(
    tmp_path: Path, pids: list[int], for_s: float, fixed_s: float | None = None, up: int | None = None
) -> detector.Assessment:
    """Watch these workers until they stall, or for `for_s` seconds. up: how many of them have come up; None: all."""
    board = ProgressTable(str(tmp_path / "progress"), len(pids))
    note_steps(board, pids[:up], 3)
    return watched_until(HangWatch(board, {slot: slot for slot in range(len(pids))}, fixed_s), pids, True, for_s)


def note_steps(board: ProgressTable, pids: list[int], steps: int) -> None:
    """Write progress rows as of workers that have just made their last step."""
    sign_ns = time.monotonic_ns() if steps else 0
    for slot, pid in enumerate(pids):
        rows.write(board.path, slot, {layout.PID: pid, layout.STEPS: steps, layout.SIGN_NS: sign_ns})


def watched_until(watch: HangWatch, pids: list[int], stalled: bool, for_s: float) -> detector.Assessment:
    """Watch these workers until they stall, or no longer do, or for `for_s` seconds."""
    deadline, pause = time.monotonic() + for_s, threading.Event()
    verdict = None
    while verdict is None or (verdict.stalled is not stalled and time.monotonic() < deadline):
        pause.wait(min(watch.next_check_s(), max(0.01, deadline - time.monotonic())))
        verdict = watch.check(dict(enumerate(pids)), {}) or verdict
    return verdict


PAUSE = "ready()\nsignal.pause()"
HEARTBEAT = """
one, other = socket.create_connection(("127.0.0.1", int(sys.argv[1]))), None
ready()
while True:
    one.sendall(bytes(1000))
    time.sleep(0.1)
"""
UPLOAD = HEARTBEAT.replace('"127.0.0.1"', "sys.argv[2]").replace("1000", "1 << 20").replace("0.1)", "0.25)")
# Like vfork(2), posix_spawn sleeps in state D until its child has opened a pipe, which nobody writes to.
IN_KERNEL = """
def spawn():
    ready()
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""
MAIN_THREAD, OTHER_THREAD = "spawn()", "threading.Thread(target=spawn).start()"


@contextmanager
def sink(family: socket.AddressFamily, address: str) -> Iterator[int]:
    """Run a server that reads everything; yields its port."""
    with (
        socket.create_server((address, 0), family=family) as server,
        selectors.DefaultSelector() as selector,
        ExitStack() as stack,
    ):
        closing = os.pipe()

        def take() -> None:
            selector.register(closing[0], selectors.EVENT_READ)
            selector.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == closing[0]:
                        return
                    if key.fileobj is server:
                        selector.register(stack.enter_context(server.accept()[0]), selectors.EVENT_READ)
                    elif not key.fileobj.recv(1 << 20):  # type: ignore[union-attr]
                        selector.unregister(key.fileobj)

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            os.write(closing[1], b"\0")
            thread.join()
            for descriptor in closing:
                os.close(descriptor)


@pytest.mark.full
def test_workers_that_do_nothing_stall(tmp_path, quick):
    with sink(socket.AF_INET, "127.0.0.1") as port, process(HEARTBEAT, str(port)) as one, process(PAUSE) as other:
        verdict = watched(tmp_path, [one.pid, other.pid], LIMIT_S)
    assert verdict.stalled, verdict.reason


@pytest.mark.full
@pytest.mark.full("::1")
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_an_upload_from_memory_is_work(tmp_path, quick, monkeypatch, family, address):
    monkeypatch.setattr(detector, "WORKING_SHARE", float("inf"))  # whatever processor time it takes here
    with sink(family, address) as port, process(UPLOAD, str(port), address) as one, process(PAUSE) as other:
        before = of(one.pid)
        verdict = watched(tmp_path, [one.pid, other.pid], 5)
        found = of(one.pid)
    assert not verdict.stalled, verdict.reason
    assert found.io_bytes == before.io_bytes is not None  # these bytes are no files'


@pytest.mark.full
@pytest.mark.full("threading.Thread")
@pytest.mark.parametrize("thread", [MAIN_THREAD, OTHER_THREAD])
def test_a_kernel_sleep_may_last_as_work_may(tmp_path, quick, thread):
    os.mkfifo(tmp_path / "server")
    with process(IN_KERNEL + thread, str(tmp_path / "server")) as one, process(PAUSE) as other:
        until(lambda: of(one.pid).asleep_in_kernel)
        verdict = watched(tmp_path, [one.pid, other.pid], 5)
        assert not verdict.stalled, verdict.reason
        (tmp_path / "progress").unlink()
        assert watched(tmp_path, [one.pid, other.pid], LIMIT_S, fixed_s=2.0).stalled  # the user's limit applies


@pytest.mark.full
def test_an_unstarted_worker_does_not_hide_a_hang(tmp_path, quick, monkeypatch):
    """It sleeps in the kernel before its bootstrap, because its interpreter is on a file server that does not answer."""
    monkeypatch.setattr(detector, "WORKING_FLOOR_S", 3.0)
    os.mkfifo(tmp_path / "server")
    with process(IN_KERNEL + MAIN_THREAD, str(tmp_path / "server")) as one, process(PAUSE) as other:
        begin = time.monotonic()
        verdict = watched(tmp_path, [other.pid, one.pid], LIMIT_S, up=1)
        took_s = time.monotonic() - begin
    assert (verdict.stalled, verdict.culprits) == (True, (1,)), verdict.reason
    assert took_s >= 3


# While a node claims a stall.


@pytest.mark.parametrize(
    ("cpu_s", "seen_at"),
    [
        (lambda s: s, 63),  # at the first look
        (lambda s: 0.1 * s, 69),  # at the third
        (lambda s: 0.025 * s, 87),  # once it fills the window
        (lambda s: 0.005 * s, None),
        (lambda s: 0.06 * (s // 20), None),  # 2 % of the time between two looks
    ],
    ids=["computes", "a-tenth", "barely", "noise", "bursts"],
)
def test_work_is_soon_seen_noise_is_none(cpu_s, seen_at):
    """Read at half of the limit, at three quarters, at the limit, and then at each look; something begins a second later."""
    stall, seen = Stall(detector.window_s()), []
    for at in [30.0, 45.0, *(60 + look * detector.CALL_CHECK_S for look in range(100))]:
        stall.record({0: ProcessStats("S", cpu_s=5 + cpu_s(max(0.0, at - 61)))}, at)
        one = stall.complete(WorkerStatus(0, 10, at), 0, detector.IDLE_FLOOR_S)
        if one.working and at >= 60:
            seen.append(at)
        elif not seen and at >= 60:
            assert one.idle_s == at - 30
    assert seen[:1] == ([seen_at] if seen_at is not None else [])


@pytest.mark.parametrize(
    "work", [{"cpu_s": 0.03 * 14}, {"cpu_s": 0.5}, {"io_bytes": 14 * 190_000}], ids=["a-little", "just-begun", "bytes"]
)
def test_new_work_is_seen_before_the_first_claim(work):
    """That claim may be the last one, and end the round: no look comes after it."""
    stall = Stall(detector.window_s())
    for at, stats in ((30.0, ProcessStats("S")), (45.0, ProcessStats("S")), (60.0, ProcessStats("S", **work))):
        stall.record({0: stats}, at)
    assert stall.complete(WorkerStatus(0, 10, 60.0), 0, detector.IDLE_FLOOR_S).working


def test_a_long_hang_timeout_keeps_few_samples():
    assert detector.window_s(86400) == detector.window_s()


def test_work_outside_the_window_leaves_a_worker_idle():
    stall = Stall(detector.window_s())
    for look in range(24):  # every 3 s; it computes from 6 to 9 s
        at = look * detector.CALL_CHECK_S
        stall.record({0: ProcessStats("S", cpu_s=min(max(0.0, at - 6), 3.0))}, at)
    one = stall.complete(WorkerStatus(0, 10, at), 0, detector.IDLE_FLOOR_S)
    assert (at, one.idle_s, one.working) == (69, 69 - 33, False)  # the last window with it is from 6 to 33 s


# Does a little in each second after one SIGUSR1, and computes after another.
LATER = """
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
ready()
signal.sigwait([signal.SIGUSR1])
while not signal.sigtimedwait([signal.SIGUSR1], 1): burn(0.01)
burn(1000)
"""


@pytest.mark.full
def test_a_claim_outlasts_noise_but_not_computing(tmp_path, monkeypatch):
    """The checks for new claims stay half a minute apart, so they cannot see it."""
    monkeypatch.setattr(detector, "START_FLOOR_S", 2.0)
    monkeypatch.setattr(detector, "CALL_CHECK_S", 0.3)
    with process(LATER) as one:
        board = ProgressTable(str(tmp_path / "progress"), 1)
        note_steps(board, [one.pid], 0)
        watch = HangWatch(board, {0: 0}, None)
        assert watched_until(watch, [one.pid], True, LIMIT_S).stalled
        before_s = of(one.pid).cpu_s
        one.send_signal(signal.SIGUSR1)
        assert watched_until(watch, [one.pid], False, 3).stalled
        while of(one.pid).cpu_s <= before_s:  # until it has done a little
            assert watched_until(watch, [one.pid], False, 1).stalled
        one.send_signal(signal.SIGUSR1)
        verdict = watched_until(watch, [one.pid], False, LIMIT_S)
    assert not verdict.stalled, verdict.reason
    assert not watch.stalled


@pytest.mark.full
def test_a_step_soon_withdraws_a_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(detector, "START_FACTOR", 0.02)
    monkeypatch.setattr(detector, "CALL_CHECK_S", 0.3)
    with process(PAUSE) as one:
        board = ProgressTable(str(tmp_path / "progress"), 1)
        note_steps(board, [one.pid], 0)
        watch = HangWatch(board, {0: 0}, 100.0)
        assert watched_until(watch, [one.pid], True, LIMIT_S).stalled
        note_steps(board, [one.pid], 1)
        verdict = watched_until(watch, [one.pid], False, LIMIT_S)
    assert not verdict.stalled, verdict.reason
