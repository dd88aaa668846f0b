"""CallChecks at quiet workers: what a stack waits for, and workers that stay in one call or only seem to. On real processes."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from elastic_ext.agent.launch import BOOTSTRAP
from elastic_ext.hangs import detector, process_stats, stacks
from elastic_ext.hangs.detector import WaitFor, WorkerStatus
from elastic_ext.hangs.watch import HangWatch
from elastic_ext.workers import progress_layout as layout
from elastic_ext.workers.progress import Progress, ProgressTable
from elastic_ext.workers.worker_env import ANSWER_SIGNAL
from tests import refusing
from tests.hangs import rows
from tests.until import LIMIT_S, until

# What a stack waits for.

C10D, TORCH = "/torch/distributed/distributed_c10d.py", "/v/site-packages"


def stack(*frames: tuple[str, str], others: tuple[tuple[str, str], ...] = ()) -> str:
    """A dump in faulthandler's format: other threads with one frame each, then the main thread with these frames."""
    threads = [f'Thread 0x7f (most recent call first):\n  File "{path}", line 3 in {function}\n' for path, function in others]
    lines = "".join(f'  File "{path}", line 7 in {function}\n' for path, function in (*frames, ("train.py", "<module>")))
    return "\n".join([*threads, f"Current thread 0x7e (most recent call first):\n{lines}"])


@pytest.mark.parametrize(
    ("armed", "state", "asked"),
    [(True, "S", True), (True, "R", True), (True, "T", False), (True, "D", False), (False, "S", False)],
)
def test_a_worker_that_cannot_dump_is_not_asked(armed, state, asked):
    assert stacks.can_dump(Progress(stacks_armed=armed), process_stats.ProcessStats(state)) == asked


@pytest.mark.parametrize(
    ("frames", "wait"),
    [
        ([(TORCH + C10D, "all_reduce"), (TORCH + "/torch/distributed/c10d_logger.py", "wrapper")], WaitFor.RANKS),
        ([(TORCH + C10D, "monitored_barrier")], WaitFor.RANKS),
        ([(TORCH + "/torch/_ops.py", "__call__"), (TORCH + detector._FUNCTIONAL, "wait_tensor")], WaitFor.RANKS),
        ([(TORCH + "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out")], WaitFor.RANKS),
        ([(TORCH + "/torch/nn/parallel/distributed.py", "_sync_buffers")], WaitFor.RANKS),
        ([(TORCH + "/torch/cuda/__init__.py", "synchronize")], WaitFor.DEVICE),
        ([(TORCH + "/torch/cuda/streams.py", "synchronize")], WaitFor.DEVICE),
        ([(TORCH + C10D, "barrier")], WaitFor.DEVICE),
        ([(TORCH + detector._FSDP_GROUP, "finalize_backward")], WaitFor.DEVICE),
        ([(TORCH + detector._FSDP_GROUP, "wait_for_unshard")], WaitFor.RANKS),
        # Their own part, perhaps.
        ([("train.py", "log_loss")], WaitFor.NOTHING),
        ([(TORCH + C10D, "_object_to_tensor"), (TORCH + C10D, "all_gather_object")], WaitFor.NOTHING),
        ([(TORCH + C10D, "new_group")], WaitFor.NOTHING),
        ([(TORCH + C10D, "_create_process_group_wrapper"), (TORCH + C10D, "new_group")], WaitFor.NOTHING),
        ([(TORCH + C10D, "destroy_process_group")], WaitFor.NOTHING),
        ([("/usr/lib/python3.11/pickle.py", "save"), (TORCH + C10D, "all_gather_object")], WaitFor.NOTHING),
        ([(TORCH + "/torch/_ops.py", "__call__"), ("train.py", "forward")], WaitFor.NOTHING),
        ([(TORCH + "/torch/_ops.py", "__call__"), (TORCH + detector._FUNCTIONAL, "__torch_dispatch__")], WaitFor.NOTHING),
        ([(TORCH + "/torch/autograd/graph.py", "_engine_run_backward")], WaitFor.NOTHING),
        ([(TORCH + "/torch/distributed/tensor/_dispatch.py", "dispatch")], WaitFor.NOTHING),
        ([(TORCH + "/torch/distributed/checkpoint/filesystem.py", "_write_files_from_queue")], WaitFor.NOTHING),
        ([(TORCH + "/torch/cuda/__init__.py", "_lazy_init")], WaitFor.NOTHING),
    ],
)
def test_what_a_stack_waits_for(frames, wait):
    assert detector.wait_of(stack(*frames)) is wait
    assert (
        detector.wait_of(stack(("train.py", "load"), others=tuple(frames[:1]))) is WaitFor.NOTHING
    )  # only the main thread counts


def test_stacks_in_torch_itself(tmp_path, monkeypatch):
    """Its files and functions have the names above: the innermost Python frame of each is torch's own."""
    with (tmp_path / "stack").open("w+") as file:

        def dumped(call: Callable[[], object]) -> str:
            file.truncate(file.seek(0))
            call()
            return file.seek(0) or file.read()

        dump = functools.partial(faulthandler.dump_traceback, file)  # in C, as what waits
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch._C, "_cuda_synchronize", dump, raising=False)
        assert detector.wait_of(dumped(torch.cuda.synchronize)) is WaitFor.DEVICE
        value = torch.ones(1, requires_grad=True)
        value.register_hook(functools.partial(next, iter(dump, "never")))
        backward = dumped((2 * value).sum().backward)
        assert detector.wait_of(backward) is WaitFor.NOTHING
        assert detector.waits_for_others(backward)  # which only orders suspects
        monkeypatch.setattr(os, "fsync", dump)
        save = dumped(lambda: checkpoint.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "checkpoint", no_dist=True))
        assert "torch/distributed/checkpoint/filesystem.py" in save
        assert not detector.waits_for_others(save)


def test_no_stack_waits_for_nothing():
    assert detector.wait_of("") is WaitFor.NOTHING
    assert detector.wait_of("Current thread 0x7e (most recent call first):\n  <no Python frame>\n") is WaitFor.NOTHING


@pytest.mark.seam
def test_a_cut_dump_has_no_main_thread(tmp_path):
    """A real one, of more threads than faulthandler lists. What it lists last is not the main thread, which waits in Python."""
    program = """
import faulthandler, sys, threading
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(120)]
for each in threads:
    each.start()
faulthandler.dump_traceback(open(sys.argv[1], "w"))
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "stacks"], check=True)
    text = (tmp_path / "stacks").read_text()
    assert len(detector.threads(text)) == 101
    assert detector.threads(text)[-1] == ""
    assert detector.wait_of(text) is WaitFor.NOTHING
    assert not detector.waits_for_others(text)
    assert detector.main_thread_first(text, 100).startswith("Thread 0x")


def test_people_see_the_main_thread_first():
    idle, main = stack(others=((f"/usr/lib/{'x' * 2000}/threading.py", "wait"),)), stack()
    shown = detector.main_thread_first(idle, 1000)
    assert shown.startswith(main.rstrip())
    assert len(shown) == 1000
    assert detector.main_thread_first("", 1000) == ""


def test_idle_threads_are_told_from_others():
    library = "/usr/lib/python3.11"
    idle = ((f"{library}/threading.py", "wait"), (f"{library}/selectors.py", "select"))
    assert detector.others_idle(stack(others=idle))
    assert detector.others_idle(stack(others=()) + "\n")
    assert detector.others_idle("Thread 0x7a (most recent call first):\n  <no Python frame>\n\n" + stack())
    assert not detector.others_idle(stack(others=(*idle, ("train.py", "upload"))))


# When it matters.

STEADY = (0,) * 10 + (500,)  # gaps of half a second to a second


def worker(**more) -> WorkerStatus:
    told = {"rank": 0, "steps": 10, "quiet_s": 15.5, "gaps": STEADY, "working": True, "state": "R"}
    return WorkerStatus(**{**told, "wait": WaitFor.RANKS, "stayed_s": 12.1, **more})


@pytest.mark.parametrize(
    ("more", "limit_s"),
    [
        ({}, 15),
        ({"working": False, "state": "S"}, 15),
        ({"wait": WaitFor.DEVICE, "stayed_s": 49.0}, 60),
        ({"wait": WaitFor.QUEUED, "stayed_s": 49.0}, 60),
        ({"wait": WaitFor.BEGUN}, 15),
        ({"gaps": (0,) * 12 + (100,), "stayed_s": 33.0}, 40.96),  # steps of 2 to 4 s: ten times that
        ({"gaps": (0,) * 10 + (500,) + (0,) * 4 + (1,), "stayed_s": 49.0}, 60),  # one of 33 s
        ({"gaps": (0,) * 10 + (500,) + (0,) * 8 + (1,), "stayed_s": 49.0}, 60),  # one of minutes
        ({"gaps": (0,) * 10 + (500,) + (0,) * 6 + (1,), "stayed_s": 210.0, "wait": WaitFor.DEVICE}, 2 * 131.072),
        ({"world": 1500}, 15),
        ({"world": 4096, "stayed_s": 33.0}, 40.96),
        ({"world": 8192, "stayed_s": 66.0, "wait": WaitFor.DEVICE}, 81.92),
        # These keep the limit of work.
        ({"wait": WaitFor.NOTHING}, 1800),
        ({"stayed_s": 11.9}, 1800),
        ({"gaps": (0,) * 10 + (19,)}, 1800),
        ({"asleep_in_kernel": True, "working": False, "wait": WaitFor.NOTHING}, 1800),
        ({"phase": "eval"}, 1800),
    ],
)
def test_limits(more, limit_s):
    one = worker(**more)
    assert not detector.assess([replace(one, quiet_s=limit_s - 0.1)]).stalled
    found = detector.assess([replace(one, quiet_s=limit_s + 0.1)])
    assert found.stalled
    assert found.waiting == (limit_s < 1800)
    assert not found.imminent


def test_one_that_does_its_own_part_is_enough():
    assert detector.assess([worker(), worker(rank=1, wait=WaitFor.DEVICE, quiet_s=61, stayed_s=50)]).waiting
    for more in (
        {"wait": WaitFor.NOTHING},
        {"stayed_s": 1.0},
        {"quiet_s": 1.0},
        {"debugged": True},
        {"known": False},
        {"state": "T"},
    ):
        assert not detector.assess([worker(), worker(rank=1, **more)]).stalled


def test_the_reason_tells_what_they_wait_for():
    assert detector.assess([worker(), worker(rank=1)]).reason.count("waits for other ranks;") == 1
    device = worker(rank=1, wait=WaitFor.DEVICE, quiet_s=61, stayed_s=50)
    assert "each waits for other ranks or its device;" in detector.assess([worker(), device]).reason
    assert "each waits for other ranks or its device;" in detector.assess([device]).reason


def test_a_limit_that_is_set_is_kept():
    assert not detector.assess([worker(quiet_s=99)], 100).stalled
    assert detector.assess([worker(quiet_s=6, stayed_s=0.0)], 5).stalled
    assert not detector.needs_call_checks([worker()], 100)
    assert detector.next_call_check_s([worker()], 100) == float("inf")


def test_the_next_look():
    assert detector.next_call_check_s([worker(quiet_s=1)]) == 2
    assert detector.next_call_check_s([worker(quiet_s=4.0, stayed_s=0.0)]) == 3
    assert detector.next_call_check_s([worker(quiet_s=12.5, stayed_s=9.5)]) == 2.5
    assert detector.next_call_check_s([worker(quiet_s=15), worker(quiet_s=15, stayed_s=11.5)]) == 0.5
    assert detector.next_call_check_s([worker(quiet_s=100)]) == 3  # it stalls: does it still?
    assert detector.next_call_check_s([worker(steps=0)]) == 3
    assert detector.needs_call_checks([worker(quiet_s=3.0)])
    assert detector.needs_call_checks([worker(quiet_s=3.0, wait=WaitFor.DEVICE)])  # the first look must not be forgotten
    for more in ({"quiet_s": 2.9}, {"debugged": True}, {"gaps": ()}):
        assert not detector.needs_call_checks([worker(quiet_s=3.0), worker(rank=1, **more)])


def test_all_nodes_stays_have_a_common_moment():
    """Even where an agent is nine seconds late with its look, and the looks leave time for a stay that long."""
    assert detector.STAY_SHARE * min(detector.WAIT_FLOOR_S.values()) - detector.CALL_CHECK_S >= 9
    assert detector.CALL_CHECK_SHARE + detector.STAY_SHARE <= 1


# Real workers, on a watch with seconds in place of minutes.

COLLECTIVES = """
import ctypes, functools, os, signal, subprocess, sys, threading, time
libc = ctypes.CDLL(None)
at = ctypes.byref(ctypes.c_int())
libc.pthread_spin_init(at, 0)
libc.pthread_spin_lock(at)
spin = functools.partial(libc.pthread_spin_lock, at)  # for ever, without a Python frame
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
sleep = functools.partial(libc.pthread_mutex_lock, mutex)  # the same without processor time
short = functools.partial(libc.usleep, 300_000)
def all_reduce(wait): wait()
def synchronize(wait): wait()
def ready(): print('ready', flush=True)
"""
ANSWERS = "signal.raise_signal(ANSWER_SIGNAL)"  # as at the agent's first question
SPIN = "all_reduce(spin)"
BUSY_CHILD = "subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
BUSY_THREAD = "threading.Thread(target=spin, daemon=True).start()\n"
# A thread that waits, as those of pools do, until somebody opens the pipe `go` and closes it.
LATER = """
import selectors
def later():
    with selectors.DefaultSelector() as selector:
        selector.register(os.open({go!r}, os.O_RDONLY | os.O_NONBLOCK), selectors.EVENT_READ)
        selector.select()
    os.unlink({go!r})
    {then}
threading.Thread(target=later, daemon=True).start()
"""
CONNECTIONS = """
import socket
def connect():
    server, kept = socket.create_server(("127.0.0.1", 0)), []
    while True:
        kept.append(socket.create_connection(server.getsockname()))
        short()
threading.Thread(target=connect, daemon=True).start()
"""
CHILD_CONNECTIONS = """
other = subprocess.Popen([sys.executable, '-c', '''
import socket, threading
server, kept, pause = socket.create_server(("127.0.0.1", 0)), [], threading.Event()
print("ready", flush=True)
while True:
    kept.append(socket.create_connection(server.getsockname()))
    pause.wait(0.3)
'''], stdout=subprocess.PIPE)
other.stdout.readline()
"""
FEWER_CONNECTIONS = """
import socket
server = socket.create_server(("127.0.0.1", 0))
kept = [socket.create_connection(server.getsockname()) for _ in range(100)]
def close():
    while kept:
        kept.pop().close()
        short()
threading.Thread(target=close, daemon=True).start()
"""
BUSY_NATIVE = """
code = ctypes.cast(libc.pthread_spin_lock, ctypes.c_void_p)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, code, at)
"""


@contextmanager
def workers(
    tmp_path: Path, scripts: list[str], path: str = C10D, first: str = ANSWERS
) -> Iterator[tuple[ProgressTable, list[int], dict[int, str]]]:
    """Workers that have done enough steps and then run these scripts.

    path: of the file in which all their functions are. first: runs before they are watched.
    """
    table, files = ProgressTable(str(tmp_path / "table"), len(scripts)), {}
    source = tmp_path / path.lstrip("/")
    source.parent.mkdir(parents=True)
    source.write_text(f"ANSWER_SIGNAL = {int(ANSWER_SIGNAL)}\n{COLLECTIVES}")
    started = []
    try:
        for slot, script in enumerate(scripts):
            files[slot] = str(tmp_path / f"stacks{slot}")
            told = {"slot": slot, "progress": table.path, "progress_version": layout.VERSION, "stacks": files[slot]}
            run = f"exec(compile(open({str(source)!r}).read(), {str(source)!r}, 'exec'))\n{first}\nready()\n{script}\n"
            (tmp_path / f"script{slot}.py").write_text(run)
            environ = {**os.environ, "ELASTIC_EXT_WORKER": json.dumps(told)}
            command = [sys.executable, BOOTSTRAP, str(tmp_path / f"script{slot}.py")]
            started.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, start_new_session=True))
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n"
        for slot in range(len(scripts)):
            rows.write(table.path, slot, {layout.STEPS: 30, layout.GAPS: 30, layout.SIGN_NS: time.monotonic_ns()})
        yield table, [one.pid for one in started], files
    finally:
        for one in started:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "WAIT_FLOOR_S", {WaitFor.RANKS: 2.0, WaitFor.DEVICE: 2.5})
    monkeypatch.setattr(detector, "CALL_CHECK_S", 0.5)
    monkeypatch.setattr(stacks, "FIRST_GAP_S", 0.5)
    monkeypatch.setattr(stacks, "RATES_S", 1.5)  # less than a stay; over less time, what two reads of /proc differ by is work
    monkeypatch.setattr(stacks, "LONGEST_GAP_S", 2.0)  # after a look that a busy machine has spoilt
    monkeypatch.setattr(stacks, "WAIT_S", LIMIT_S)
    monkeypatch.setattr(detector, "LATE_S", LIMIT_S)


def watched(
    table: ProgressTable, pids: list[int], files: dict[int, str], for_s: float = 4.5, world: int = 1
) -> detector.Assessment:
    """Watch until they stall, or for `for_s` seconds: the looks at those that do not stay are after .4, .9, 1.9, 3.9 ... s."""
    watch, pause = HangWatch(table, {slot: slot for slot in range(len(pids))}, None, world), threading.Event()
    deadline, verdict = time.monotonic() + for_s, None
    while verdict is None or (not verdict.stalled and time.monotonic() < deadline):
        pause.wait(min(watch.next_check_s(), max(0.01, deadline - time.monotonic())))
        verdict = watch.check(dict(enumerate(pids)), files) or verdict
    return verdict


@pytest.mark.full
@pytest.mark.parametrize(
    ("scripts", "path"),
    [
        ([SPIN, SPIN], C10D),
        ([SPIN, "all_reduce(sleep)"], C10D),
        ([BUSY_NATIVE + SPIN], C10D),  # NCCL's own threads spin, too
        (["synchronize(spin)"], "/torch/cuda/__init__.py"),
        ([CHILD_CONNECTIONS + SPIN], C10D),  # a logger's process
        ([FEWER_CONNECTIONS + SPIN], C10D),  # those that a storage client kept alive
    ],
    ids=["spin", "spin-sleep", "native-thread", "device", "child-connections", "fewer-connections"],
)
def test_workers_in_calls_that_only_wait_stall(tmp_path, quick, scripts, path):
    with workers(tmp_path, scripts, path) as found:
        verdict = watched(*found, for_s=LIMIT_S)
    assert verdict.stalled, verdict.reason
    assert verdict.waiting


@pytest.mark.full
@pytest.mark.full("thread", "connections", "python", "answers-blocked")
@pytest.mark.parametrize(
    "script",
    [
        "while True: all_reduce(short)",  # the same line, nearly always
        BUSY_CHILD + SPIN,
        BUSY_THREAD + SPIN,
        CONNECTIONS + SPIN,
        "spin()",  # this call is the script's
        "while True: pass",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nall_reduce(spin)",  # cannot answer
        "signal.pthread_sigmask(signal.SIG_BLOCK, [ANSWER_SIGNAL])\nwhile True: all_reduce(short)",
    ],
    ids=["loop", "child", "thread", "connections", "own-call", "python", "blocked", "answers-blocked"],
)
def test_one_worker_with_own_work_keeps_long_limits(tmp_path, quick, script):
    with workers(tmp_path, [SPIN, script]) as found:
        verdict = watched(*found)
        assert all(os.path.exists(f"/proc/{pid}/stat") for pid in found[1])
    assert not verdict.stalled, verdict.reason


@pytest.mark.seam
def test_a_thread_that_computes_later_keeps_long_limits(tmp_path, quick, monkeypatch):
    go = tmp_path / "go"
    os.mkfifo(go)
    look = stacks.CallChecks._check_calls

    def looked(self: stacks.CallChecks, *args: object) -> None:
        look(self, *args)
        if self._stays.keys() >= {0, 1} and go.exists():
            os.close(os.open(go, os.O_WRONLY))
            until(lambda: not go.exists())

    def confirm(self: stacks.CallChecks, *args: object) -> bool:
        confirmed.append(confirmation(self, *args))
        return confirmed[-1]

    confirmed: list[bool] = []
    confirmation = stacks.CallChecks.confirm
    monkeypatch.setattr(stacks.CallChecks, "_check_calls", looked)
    monkeypatch.setattr(stacks.CallChecks, "confirm", confirm)
    with workers(tmp_path, [SPIN, LATER.format(go=str(go), then="spin()") + SPIN]) as (table, pids, files):
        watch = HangWatch(table, {0: 0, 1: 1}, None)
        until(lambda: watch.check(dict(enumerate(pids)), files) and confirmed)
    assert not go.exists()
    assert confirmed == [False]
    assert not watch.stalled


@pytest.mark.full
def test_silence_means_nothing_without_an_earlier_answer(tmp_path, quick):
    replaced = "signal.signal(ANSWER_SIGNAL, lambda *_: None)"
    with workers(tmp_path, ["while True: all_reduce(short)"], first=replaced) as found:
        verdict = watched(*found)
    assert not verdict.stalled, verdict.reason


@pytest.mark.full
def test_each_worker_is_asked_for_a_first_answer(tmp_path, quick):
    with workers(tmp_path, ["for _ in range(5): short()\n" + SPIN], first="") as found:
        assert watched(*found, for_s=LIMIT_S).waiting
        assert found[0].read(0).answers > 1


def wait_for_pause(pid: int) -> None:
    """Wait until the main thread waits for a signal. A question that comes as it begins to may end the call."""
    until(lambda: process_stats.read([pid])[pid].awaits_signal)


@pytest.mark.full
@pytest.mark.parametrize("first", ["", ANSWERS], ids=["first-question", "look"])
def test_a_main_thread_awaiting_a_signal_is_spared(tmp_path, quick, first):
    """It goes on after any signal: most scripts would then end."""
    with workers(tmp_path, ["signal.pause()"], first=first) as found:
        wait_for_pause(found[1][0])
        watched(*found)
        assert process_stats.read(found[1])[found[1][0]].state == "S"


BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, [ANSWER_SIGNAL])"


@pytest.mark.full
def test_a_briefly_blocked_question_is_asked_again(tmp_path, quick):
    go, on = tmp_path / "go", tmp_path / "on"
    script = f"""
while not os.path.exists({str(go)!r}): short()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [ANSWER_SIGNAL])
open({str(on)!r}, 'w')
for _ in range(5): short()
{SPIN}
"""
    with workers(tmp_path, [script], first=BLOCKED) as (table, pids, files):
        watch = HangWatch(table, {0: 0}, None)
        assert watch.check({0: pids[0]}, files) is not None
        assert table.read(0).answers == 1
        go.touch()
        until(on.exists)
        until(lambda: (verdict := watch.check({0: pids[0]}, files)) is not None and verdict.waiting)
        assert table.read(0).answers > 1


@pytest.mark.seam
@pytest.mark.parametrize(("script", "first"), [(SPIN, BLOCKED), ("signal.pause()", "")], ids=["blocked", "pause"])
def test_an_unaskable_worker_costs_less_and_less(tmp_path, monkeypatch, script, first):
    """Each try reads all of /proc. A minute apart at last, for as long as the job lasts."""
    tried: list[int] = []
    read = process_stats.read
    with workers(tmp_path, [script], first=first) as (table, pids, _):
        if script != SPIN:
            wait_for_pause(pids[0])
        answers = stacks.FirstAnswers()
        for second in range(600):
            monkeypatch.setattr(process_stats, "read", lambda pids, at=second: tried.append(at) or read(pids))
            answers.ask({0: pids[0]}, table, float(second))
        assert table.read(0).answers == 1
    assert tried == [0, 5, 15, 35, *range(75, 600, 60)]


@pytest.mark.full
def test_no_worker_is_asked_if_that_might_disturb(tmp_path, quick, monkeypatch, caplog):
    read = process_stats.read
    unknown = functools.partial(replace, awaits_signal=None)
    monkeypatch.setattr(process_stats, "read", lambda pids: {pid: unknown(stats) for pid, stats in read(pids).items()})
    with workers(tmp_path, ["while True: all_reduce(short)"], first="") as found:
        assert not watched(*found).stalled
        assert found[0].read(0).answers == 1
    assert caplog.text.count("neither /proc/PID/syscall nor wchan shows") == 1


@pytest.mark.full
def test_a_large_job_gets_time_to_connect(tmp_path, quick):
    with workers(tmp_path, [SPIN]) as found:
        verdict = watched(*found, world=1000)
    assert not verdict.stalled


@pytest.mark.full
def test_a_worker_that_goes_on_withdraws_the_claim(tmp_path, quick):
    go = tmp_path / "go"
    os.mkfifo(go)
    goes_on = LATER.format(go=str(go), then="libc.pthread_spin_unlock(at)")
    with workers(tmp_path, [f"{goes_on}{SPIN}\nall_reduce(short)\nspin()"]) as (table, pids, files):
        watch = HangWatch(table, {0: 0}, None)

        def stalled() -> bool | None:
            verdict = watch.check({0: pids[0]}, files)
            return verdict.stalled if verdict is not None else None

        until(stalled)
        os.close(os.open(go, os.O_WRONLY))
        until(lambda: stalled() is False)


@pytest.mark.seam
def test_a_worker_gets_few_signals(tmp_path, quick, monkeypatch):
    """One dump where it stays; with what does its own part, ever fewer. No dump is kept."""
    dumps: Counter[int] = Counter()
    looked_at: list[float] = []

    def counted(paths: Mapping[int, str]) -> dict[int, str]:
        found = dump_all(paths)
        dumps.update(pid for pid, text in found.items() if "Current thread" in text)
        return found

    def look(self: stacks.CallChecks, *args: object) -> None:
        looked_at.append(args[-1])
        look_at(self, *args)

    dump_all, look_at = stacks.dump_all, stacks.CallChecks._check_calls
    monkeypatch.setattr(stacks, "RATES_S", LIMIT_S)  # what two reads of /proc differ by is nobody's work
    with workers(tmp_path, [SPIN, "while True: pass"]) as (table, pids, files):
        until(lambda: "in all_reduce" in stacks.dump(pids[0], files[0]))
        monkeypatch.setattr(stacks, "dump_all", counted)
        monkeypatch.setattr(stacks.CallChecks, "_check_calls", look)
        watch = HangWatch(table, {0: 0, 1: 1}, None)
        until(lambda: watch.check(dict(enumerate(pids)), files) and len(looked_at) == 4)
        assert not watch.stalled
        assert [os.path.getsize(file) for file in files.values()] == [0, 0]
        assert "in all_reduce" in stacks.dump(pids[0], files[0])
        assert "in all_reduce" in Path(files[0]).read_text()  # that of the hang is kept
    assert [dumps[pid] for pid in pids] == [2, 4]  # one of the first two is ours
    assert all(after - before >= gap_s for (before, after), gap_s in zip(pairwise(looked_at), (0.5, 1.0, 2.0), strict=True))


@pytest.mark.seam
def test_c_code_does_not_answer_python_code_does(tmp_path, quick):
    with workers(tmp_path, [SPIN, "while True: pass"]) as (table, pids, _):

        def one_answers() -> bool:
            before = [table.read(slot).answers for slot in range(2)]
            for pid in pids:
                os.kill(pid, ANSWER_SIGNAL)
            until(lambda: table.read(1).answers != before[1])
            return table.read(0).answers == before[0]

        until(one_answers)  # when it was first asked, it may not have been in C


MANY_LOOKS = """
import os, subprocess, sys, threading
from elastic_ext.workers import processes
from elastic_ext.hangs import stacks
from elastic_ext.workers.worker_env import ANSWER_SIGNAL, STACKS_SIGNAL
assert processes.why_unavailable()
path = sys.argv[1]
child = subprocess.Popen([sys.executable, "-c", f'''
import faulthandler, signal
faulthandler.register({STACKS_SIGNAL}, file=open({path!r}, "ab"))
signal.signal({ANSWER_SIGNAL}, lambda *_: None)
print("ready", flush=True)
while True:
    signal.pause()
'''], stdout=subprocess.PIPE)
child.stdout.readline()
def kept(): return threading.active_count(), len(os.listdir("/proc/self/fd"))
before = kept()
assert all(stacks.ask(child.pid) and "Current thread" in stacks.dump(child.pid, path) for _ in range(5))
after = kept()
child.kill()
child.wait()
assert not stacks.ask(child.pid) and stacks.dump(child.pid, path) == ""
print(before == after, before, after)
"""


@pytest.mark.seam
@pytest.mark.skipif(not refusing.possible, reason="the numbers of system calls are known for two architectures")
def test_without_pidfds_looks_leave_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "tests.refusing", "pidfd_open=ENOSYS", sys.executable, "-c", MANY_LOOKS, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("True"), done.stdout
