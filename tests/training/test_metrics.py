"""What a script's metrics accept, and what they cost: no system call, no lock of another process, nothing without an agent."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_ext import metrics
from elastic_ext.base import metric_files as layout
from elastic_ext.base.errors import UsageError
from elastic_ext.workers import worker_env


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a script that begins."""
    monkeypatch.delenv(worker_env.WORKER_ENV, raising=False)
    monkeypatch.setattr(metrics, "_registry", metrics._Registry())
    monkeypatch.setattr(metrics.process, "_series", [])
    metrics.process.after_fork()
    yield
    metrics.process.after_fork()


@pytest.fixture
def files(tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the agent that this process is told of."""
    monkeypatch.setenv(worker_env.WORKER_ENV, told_of(tmp_path))
    return tmp_path


def written(directory: Path) -> dict[tuple[str, ...], tuple[float, ...]]:
    """Sums of all files, by name and label values."""
    found: dict[tuple[str, ...], tuple[float, ...]] = {}
    for path in directory.iterdir():
        for key, values in layout.records(path.read_bytes()):
            definition, labels = layout.decoded(key) or pytest.fail(f"{path}: {key!r}")
            name = (definition.name, *labels)
            found[name] = tuple(map(sum, zip(found.get(name, (0.0,) * len(values)), values, strict=True)))
    return found


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: metrics.counter("steps-done", ""), "'steps-done' is not a metric name: expected letters"),
    (lambda: metrics.counter("1st", ""), "no digit first"),
    (lambda: metrics.counter("job:steps", ""), "is not a metric name"),
    (lambda: metrics.counter("_total", ""), "is not a metric name"),
    (lambda: metrics.counter("steps\n", ""), "is not a metric name"),
    (lambda: metrics.gauge("elastic_ext_loss", ""), "names that begin with elastic_ext_ or process_ are the agent's own"),
    (lambda: metrics.gauge("process_threads", ""), "are the agent's own"),
    (lambda: metrics.gauge(3, ""), "expected a name and a help text, got 3"),
    (lambda: metrics.counter("steps", "", "split"), "expected at most 10 different names of labels, in a tuple"),
    (lambda: metrics.counter("steps", "", ("a", "a")), "different names of labels"),
    (lambda: metrics.counter("steps", "", ("__a",)), "'__a' is not a label name"),
    (lambda: metrics.counter("steps", "", ("a b",)), "'a b' is not a label name"),
    (lambda: metrics.gauge("loss", "", ("rank",)), "a gauge gets the label 'rank' from the agent"),
    (lambda: metrics.histogram("s", "", ("le",)), "a histogram gets the label 'le'"),
    (lambda: metrics.histogram("s", "", buckets=(2, 1)), "buckets in increasing order"),
    (lambda: metrics.histogram("s", "", buckets=()), "expected 1 to 50 buckets"),
    (lambda: metrics.histogram("s", "", buckets=(math.nan, 1)), "buckets in increasing order"),
    (lambda: metrics.histogram("s", "", buckets=range(51)), "expected 1 to 50 buckets"),
    (lambda: metrics.histogram("s", "", buckets=3), r"metrics.histogram\(\)"),
    (lambda: metrics.counter("steps", "").inc(-1), "a counter only grows; expected a finite number"),
    (lambda: metrics.counter("steps", "").inc(math.nan), "a counter only grows"),
    (lambda: metrics.counter("steps", "").inc(math.inf), "a counter only grows"),
    (lambda: metrics.counter("seen", "", ("split",)).inc(), "has labels: call .labels"),
    (lambda: metrics.counter("seen", "", ("split",)).labels("a", "b"), "expected a value for each of its labels"),
    (lambda: metrics.counter("seen", "", ("split",)).labels(part="a"), "expected a value for each of its labels"),
    (lambda: metrics.counter("seen", "", ("split",)).labels("a").labels("a"), "expected a value for each of its labels"),
    (lambda: metrics.counter("steps", "").labels(), "expected a value for each of its labels"),
    (lambda: (metrics.counter("x", ""), metrics.gauge("x", "")), "taken by another definition of the counter 'x'"),
    (lambda: (metrics.counter("x", ""), metrics.gauge("x_total", "")), "taken by another definition of the counter 'x'"),
    (lambda: (metrics.histogram("x", ""), metrics.counter("x_count", "")), "taken by another definition of the histogram 'x'"),
    (lambda: (metrics.histogram("x", ""), metrics.histogram("x", "", buckets=(1,))), "the same kind, labels and buckets"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
@pytest.mark.usefixtures("fresh")
def test_prometheus_refusals_are_errors_in_the_script(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_script_counts_as_with_prometheus_client(files, monkeypatch):
    quarters = itertools.count(step=0.25)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(quarters), monotonic=time.monotonic))
    seen = metrics.counter("seen_total", "Samples.", labels=("split", "host"))
    loss, took = metrics.gauge("loss", "Loss."), metrics.histogram("took", "Time.", buckets=(1, 2, math.inf))
    assert metrics.counter("seen", "In other words.", labels=("split", "host")) is seen
    assert written(files) == {("took",): (0, 0, 0, 0), ("loss",): (0, 0)}
    assert seen.labels(host=1, split="a") is seen.labels("a", "1")
    seen.labels("a", 1).inc()
    seen.labels("a", "1").inc(2.5)
    seen.labels("\ud800" + "b" * 300, "").inc()
    loss.set(5)
    loss.inc(2)
    loss.dec()
    for value in (1, 1.5, 3, math.nan, -math.inf):
        took.observe(value)
    with took.time():
        pass

    @took.time()
    def twice(value: int, *, by: int = 2) -> int:
        return value * by

    assert (twice(3), twice(3, by=3)) == (6, 9)
    found = written(files)
    assert found["seen", "a", "1"] == (3.5,)
    assert found["seen", "\\ud800" + "b" * 194, ""] == (1,)
    assert found["loss",][0] == 6
    assert found["took",] == (4, 1, 1, 1 + 1.5 + 3 + 3 * 0.25)
    loss.set(math.nan)
    assert math.isnan(written(files)["loss",][0])


def test_names_and_label_sets_are_bounded(files, caplog, monkeypatch):
    monkeypatch.setattr(layout, "MAX_SERIES", 300)
    seen = metrics.counter("seen", "", ("id",))
    made = {seen.labels(number) for number in range(1000)}
    for number in range(1000):
        seen.labels(number).inc()
        metrics.gauge(f"loss_at_{number}", "").set(1)
    assert len(made) == 301
    assert len(written(files)) == 300
    assert all(written(files)["seen", str(number)] == (1,) for number in range(300))
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "seen and further new ones are not shown" in record.getMessage()


def test_names_alone_are_bounded(files):
    for number in range(layout.MAX_NAMES + 50):
        metrics.counter(f"seen_{number}", "").inc()
    assert len(written(files)) == layout.MAX_NAMES


@pytest.mark.seam
def test_a_full_file_system_costs_only_the_metrics(files, caplog):
    """In holes of a sparse file the writer would get SIGBUS."""
    small = files / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        os.environ[worker_env.WORKER_ENV] = json.dumps({"metrics": str(small / "1.0.0")})
        seen = metrics.counter("seen", "", ("id",))
        for number in range(900):
            seen.labels(f"{number:0200}").inc()
        found = written(small)
        assert 0 < len(found) < 900  # how many depends on the size of a page
        assert {*found.values()} == {(1,)}
    finally:
        metrics.process.after_fork()
        subprocess.run(["umount", "--lazy", small], check=True)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "the agent does not see new metrics of process" in record.getMessage()


def test_threads_lose_nothing(files):
    seen, took = metrics.counter("seen", ""), metrics.histogram("took", "", buckets=(1,))

    def count() -> None:
        for _ in range(5000):
            seen.inc()
            took.observe(2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert written(files) == {("seen",): (20000,), ("took",): (0, 20000, 40000)}


FORKS = """
import os, sys, threading
from elastic_ext import metrics
seen = metrics.counter("seen", "", ("whose",))
stop, counted = threading.Event(), [0, 0]
def count(number):
    while not stop.is_set():
        seen.labels("parent").inc()
        metrics.counter(f"name_{counted[number] % 50}", "")  # adds series, too, while others fork
        counted[number] += 1
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=count, args=(number,)) for number in range(2)]
for each in threads: each.start()
for _ in range(40):
    if not (pid := os.fork()):
        for _ in range(100): seen.labels("child").inc()
        if not os.fork():
            seen.labels("grandchild").inc()
            os._exit(0)
        os.wait()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for each in threads: each.join()
print(sum(counted))
"""


def script(code: str, message: str | None, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it as a worker that has this message from its agent; None: without one."""
    env = {name: value for name, value in os.environ.items() if name != worker_env.WORKER_ENV}
    env |= {} if message is None else {worker_env.WORKER_ENV: message}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def told_of(files: Path) -> str:
    return json.dumps({"metrics": str(files / "1.0.0")})


@pytest.mark.full
def test_forks_amid_counting_threads_count_exactly_once(tmp_path):
    done = script(FORKS, told_of(tmp_path))
    assert done.returncode == 0, done.stderr
    found = written(tmp_path)
    assert found["seen", "parent"] == (int(done.stdout),)
    assert (found["seen", "child"], found["seen", "grandchild"]) == ((4000,), (40,))
    assert len([*tmp_path.iterdir()]) == 81


NO_CALLS = """
import ctypes, gc, os, struct
from elastic_ext import metrics
seen, loss, took = metrics.counter("seen", "", ("split",)), metrics.gauge("loss", ""), metrics.histogram("took", "")
def count():
    for number in range(2000):
        seen.labels("train").inc()
        loss.set(number)
        took.observe(0.3)
libc = ctypes.CDLL(None)
count()
gc.disable()
# A seccomp filter: any system call kills but write, exit, and clock_gettime, which is one where the clock is no TSC.
allowed = [1, 60, 228]
steps = [(0x20, 0, 0, 0), *((0x15, len(allowed) - at, 0, number) for at, number in enumerate(allowed))]
code = b"".join(struct.pack("HBBI", *each) for each in [*steps, (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7fff0000)])
buffer = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
count()
EXTRA
os.write(1, b"counted")
libc.syscall(60, 0)
"""


@pytest.mark.seam
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64")
@pytest.mark.parametrize("has_agent", [True, False])
def test_counting_makes_no_system_call(tmp_path, has_agent):
    where = told_of(tmp_path) if has_agent else None
    done = script(NO_CALLS.replace("EXTRA", ""), where)
    assert (done.returncode, done.stdout) == (0, "counted"), done.stderr
    if has_agent:
        assert written(tmp_path)["seen", "train"] == (4000,)
    assert script(NO_CALLS.replace("EXTRA", "os.getppid()"), where).returncode == -signal.SIGSYS


ALONE = """
import os, sys
def opened(): return sorted(os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if each != "3")
before = opened()
from elastic_ext import metrics
seen = metrics.counter("seen", "", ("split",))
for _ in range(1000): seen.labels("train").inc()
if not (pid := os.fork()):
    seen.labels("train").inc()
    os._exit(opened() != before)
assert os.waitpid(pid, 0)[1] == 0
assert opened() == before, opened()
with open("/proc/self/maps") as maps: mapped = maps.read()
assert "/dev/shm" not in mapped and "1.0.0" not in mapped
assert not {"torch", "prometheus_client", "mmap_dict"} & sys.modules.keys()
"""


@pytest.mark.seam
def test_without_an_agent_nothing_is_opened():
    done = script(ALONE, None, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.seam
def test_a_message_without_a_file_is_no_error():
    for message in ("{}", '{"metrics": null}', '{"metrics": "/proc/no/such/place"}', "rubbish"):
        done = script("from elastic_ext import metrics; metrics.counter('seen', '').inc(); print('counted')", message)
        assert (done.returncode, done.stdout) == (0, "counted\n")
        assert done.stderr.count("the agent does not see new metrics") == int("no/such" in message or message == "rubbish")


def test_counting_in_a_signal_handler_never_deadlocks(files):
    seen = metrics.counter("seen", "")
    before = signal.signal(signal.SIGALRM, lambda *_: seen.inc(1000))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        while written(files)["seen",][0] < 5000:
            for _ in range(1000):
                with metrics.process.lock:
                    ctypes.pythonapi.PyErr_CheckSignals()
                    seen.inc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
