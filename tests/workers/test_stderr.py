"""The workers' stderr reaches the console unchanged, and its end is known. On real pipes, relays and workers."""

import fcntl
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading

import pytest

from elastic_ext.agent.launch import BOOTSTRAP
from elastic_ext.workers import logs, processes
from elastic_ext.workers.logs import TAIL_BYTES, StderrTails
from tests.jobs import EXT, STOCK, environment, run, wait_gone
from tests.until import LIMIT_S, until

CONSOLE_BYTES = 1 << 16
MUCH = 2 * CONSOLE_BYTES
HOUR_S = 3600.0  # who waits for it, times out


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may need longer than a recovery waits. These tests are about the answer, not the time."""
    monkeypatch.setattr(logs, "FLUSH_S", LIMIT_S)
    monkeypatch.setattr(logs, "RETRY_S", LIMIT_S)
    monkeypatch.setattr(logs, "END_S", LIMIT_S)


class Console:
    """Takes the place of fd 2, and collects what arrives there while it reads."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, CONSOLE_BYTES)  # else it takes 16 pages, whose size is the machine's
        self._before = os.dup(2)
        self.take()
        self.data = b""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def full(self) -> bool:
        return not select.select([], [self._writer], [], 0)[1]

    def take(self) -> None:
        """Call this again in a test that starts relays: between a fixture and its test pytest replaces fd 2."""
        os.dup2(self._writer, 2)

    def read(self) -> "Console":
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        while chunk := os.read(self.reader, 1 << 16):
            with self._changed:
                self.data += chunk
                self._changed.notify_all()

    def wait_for(self, enough) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.data), LIMIT_S), self.data[-1000:]

    def gone(self) -> None:
        os.close(self.reader)
        self.reader = -1

    def restore(self) -> None:
        """Close fd 2, so that the console ends when the last writer does."""
        if self._before >= 0:
            os.dup2(self._before, 2)
            os.close(self._before)
            os.close(self._writer)
            self._before = -1

    def rest(self) -> bytes:
        self.restore()
        if self._thread is None:
            self.read()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "somebody holds the console open"
        return self.data


@pytest.fixture
def console():
    console = Console()
    yield console
    console.restore()
    if console._thread is not None:
        console._thread.join(LIMIT_S)
    if console.reader >= 0:
        os.close(console.reader)


@pytest.fixture
def tails(console):
    tails = StderrTails(enabled=True)
    tails.begin_round()
    yield tails
    tails.close()


@pytest.fixture
def worker(tails, tmp_path):
    """Start a worker as an agent does: `worker(script)`. Send its standard input with `go`."""
    started = []

    def _worker(script: str, local_rank: int = 0, destination: str = "") -> "subprocess.Popen[bytes]":
        folder = tmp_path / f"{len(started)}"
        folder.mkdir()
        (folder / "script.py").write_text("import os, sys\n" + script)
        settings = {"agent": "token"}
        if (path := tails.connect(local_rank, destination, str(folder))) is not None:
            settings["stderr"] = path
        process = subprocess.Popen(
            [sys.executable, "-u", BOOTSTRAP, str(folder / "script.py")],
            env=environment(ELASTIC_EXT_WORKER=json.dumps(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield _worker
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def go(process: "subprocess.Popen[bytes]") -> None:
    process.stdin.write(b"\n")
    process.stdin.flush()


def relay_pid(tails: StderrTails) -> int:
    assert tails._relay is not None
    assert tails._relay.pid is not None
    return tails._relay.pid


def assert_same(got: bytes, expected: bytes) -> None:
    """Compare without printing megabytes."""
    assert (len(got), got[-200:]) == (len(expected), expected[-200:])
    assert hashlib.sha256(got).digest() == hashlib.sha256(expected).digest()


@pytest.mark.seam
def test_bytes_come_at_once_and_unchanged(console, tails, worker):
    console.read()
    process = worker("os.write(2, b' 42%\\r'); sys.stdin.readline(); os.write(2, b'\\xff\\0 no newline')")
    console.wait_for(lambda data: data == b" 42%\r")  # while it waits: no newline, no end
    go(process)
    assert process.wait(LIMIT_S) == 0
    assert tails.tail(0) == " 42%\r\ufffd\0 no newline"
    tails.close()
    assert_same(console.rest(), b" 42%\r\xff\0 no newline")


@pytest.mark.seam
def test_it_holds_what_c_code_and_children_say(console, tails, worker):
    console.read()
    process = worker(
        "import ctypes, subprocess\n"
        "ctypes.CDLL(None).perror(b'terminate called')\n"
        "subprocess.run(['sh', '-c', 'echo from a child >&2'])\n"
        "os.abort()\n"
    )
    assert process.wait(LIMIT_S) == -signal.SIGABRT
    assert re.fullmatch(r"terminate called: .*\nfrom a child\n", tails.tail(0))


@pytest.mark.seam
def test_much_is_carried_whole_the_end_kept(console, tails, worker):
    console.read()
    process = worker("for n in range(200_000): os.write(2, b'%07d %s\\n' % (n, b'x' * (n % 50)))")
    assert process.wait(LIMIT_S) == 0
    expected = b"".join(b"%07d %s\n" % (n, b"x" * (n % 50)) for n in range(200_000))
    assert tails.tail(0) == expected[-TAIL_BYTES:].decode()
    tails.close()
    assert_same(console.rest(), expected)


@pytest.mark.seam
def test_lines_of_many_workers_stay_whole(console, tails, worker):
    console.read()
    script = "for n in range(3000): os.write(2, b'{0} %05d {1}\\n' % n)"
    workers = [worker(script.format(rank, "y" * 10 * rank), local_rank=rank) for rank in range(4)]
    assert [process.wait(LIMIT_S) for process in workers] == [0] * 4
    tails.close()
    lines = console.rest().decode().splitlines()
    for rank in range(4):
        assert [line for line in lines if line[0] == str(rank)] == [f"{rank} {n:05} {'y' * 10 * rank}" for n in range(3000)]


@pytest.mark.seam
def test_a_killed_relay_loses_only_what_it_held(console, tails, worker, caplog):
    console.read()
    process = worker("os.write(2, b'before\\n'); sys.stdin.readline(); os.write(2, b'z' * 1_000_000); os.write(2, b'after\\n')")
    console.wait_for(lambda data: data == b"before\n")
    assert tails._relay.flush(LIMIT_S) is not None  # killed between the write and its mark, it would write twice
    first = relay_pid(tails)
    os.kill(first, signal.SIGKILL)
    go(process)
    assert process.wait(LIMIT_S) == 0
    assert relay_pid(tails) != first
    tails.flush()
    assert tails.tail(0) == ("z" * TAIL_BYTES + "after\n")[-TAIL_BYTES:]
    tails.close()
    assert_same(console.rest(), b"before\n" + b"z" * 1_000_000 + b"after\n")
    assert "was killed from outside; starting another" in caplog.text


@pytest.mark.full
def test_repeatedly_killed_relays_never_hurt_a_writer(console, tails, worker):
    console.read()
    process = worker("for n in range(40_000): os.write(2, b'%06d\\n' % n)\nsys.stdin.readline()\nos.write(2, b'end\\n')")
    for part in range(1, 6):
        console.wait_for(lambda data, part=part: len(data) > part * 20_000)
        tails._relay._process.kill()  # nothing happens if the one before has not been replaced yet
    go(process)
    assert process.wait(LIMIT_S) == 0
    console.wait_for(lambda data: data.endswith(b"end\n"))


@pytest.mark.full
def test_the_next_relay_writes_a_killed_ones_rest(console, tails, worker):
    # More than the console's pipe takes: the relay has some of it, the worker's pipe the rest.
    process = worker(f"os.write(2, b'a' * {MUCH} + b'b')")
    until(lambda: console.full)
    until(lambda: processes.state(relay_pid(tails)) == "S")  # killed between the write and its mark, it would write twice
    os.kill(relay_pid(tails), signal.SIGKILL)
    console.read()
    assert process.wait(LIMIT_S) == 0
    assert tails._relay.flush(LIMIT_S) is not None
    tails.close()
    assert_same(console.rest(), b"a" * MUCH + b"b")


@pytest.mark.seam
def test_a_dead_workers_tail_outlives_the_relay(console, tails, worker):
    console.read()
    process = worker("os.write(2, b'x'); sys.stdin.readline(); os.write(2, b'last words')")
    console.wait_for(lambda data: data == b"x")
    os.kill(relay_pid(tails), signal.SIGSTOP)
    go(process)
    assert process.wait(LIMIT_S) == 0
    os.kill(relay_pid(tails), signal.SIGKILL)
    tails._relay.flush(LIMIT_S)  # as settle(), with the time that a loaded machine takes to start a process
    assert tails.tail(0) == "xlast words"


@pytest.mark.seam
def test_a_grandchild_holding_the_pipe_delays_nothing(console, tails, worker, monkeypatch):
    console.read()
    process = worker(
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', 'read line; echo I go on >&2'], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid, os.dup(child.stdin.fileno()))\n"
        "os.write(2, b'worker ends')\n"
        "sys.stdin.readline()\n"
    )
    child, held = map(int, process.stdout.readline().split())
    held_open = os.open(f"/proc/{process.pid}/fd/{held}", os.O_WRONLY)
    helper = relay_pid(tails)
    go(process)
    assert process.wait(LIMIT_S) == 0
    assert tails.tail(0) == "worker ends"
    with monkeypatch.context() as patch:
        patch.setattr(logs, "END_S", HOUR_S)  # so long close() waits for a relay that is about to end
        tails.close()
    assert wait_gone([helper], 0) == [helper]
    os.write(held_open, b"\n")
    os.close(held_open)
    assert_same(console.rest(), b"worker endsI go on\n")
    assert wait_gone([child, helper]) == []


@pytest.mark.full
def test_a_stuck_console_neither_delays_nor_loses_anything(console, tails, worker, monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_S", 0.5)
    more = CONSOLE_BYTES + CONSOLE_BYTES // 2  # the rest fits into the worker's pipe: it ends, however busy the machine is
    process = worker(f"os.write(2, b'a' * {more} + b'the end')")  # nobody reads
    until(lambda: console.full)
    assert process.wait(LIMIT_S) == 0
    with monkeypatch.context() as patch:
        patch.setattr(logs, "END_S", HOUR_S)  # what the end of a job waits for, and the tail does not
        assert tails.tail(0) is not None
        patch.setattr(logs, "FLUSH_S", HOUR_S)  # it waits for this console once, and not again
        until(lambda: tails.tail(0).endswith("athe end"))  # the relay was asked for all of it; a busy machine lets it wait
    console.read()
    tails.close()
    assert_same(console.rest(), b"a" * more + b"the end")


@pytest.mark.full
def test_a_full_console_holds_the_writer_as_usual(console, tails, worker):
    process = worker("os.write(2, b'a' * 5_000_000); print('through')")
    until(lambda: console.full and {processes.state(relay_pid(tails)), processes.state(process.pid)} == {"S"})
    assert select.select([process.stdout], [], [], 0)[0] == []
    console.read()
    assert process.stdout.readline() == b"through\n"
    assert process.wait(LIMIT_S) == 0


@pytest.mark.seam
def test_a_gone_console_costs_only_the_output(console, tails, worker):
    console.gone()
    process = worker("os.write(2, b'a' * 1_000_000 + b'still here')")
    assert process.wait(LIMIT_S) == 0
    assert tails.tail(0).endswith("astill here")


@pytest.mark.seam
def test_unknown_is_not_empty(console, tails, worker, tmp_path):
    console.read()
    silent = worker("pass", local_rank=0)
    assert silent.wait(LIMIT_S) == 0
    assert tails.connect(1, "", str(tmp_path)) is not None  # its worker never comes
    assert tails.tail(0) == ""
    assert tails.tail(1) is None
    assert tails.tail(2) is None
    alive = worker("sys.stdin.readline()", local_rank=3)
    alive.stdout.close()
    os.write(2, b"")
    until(lambda: tails.tail(3) is not None)
    assert tails.tail(3) == ""


@pytest.mark.seam
def test_only_the_agent_hears_a_muted_worker(console, tails, worker):
    console.read()
    assert worker("os.write(2, b'NCCL WARN')", destination=os.devnull).wait(LIMIT_S) == 0
    assert tails.tail(0) == "NCCL WARN"
    tails.close()
    assert_same(console.rest(), b"")


@pytest.mark.seam
def test_a_file_is_read_from_its_end(console, tails, tmp_path):
    path = tmp_path / "stderr.log"
    path.write_bytes(b"b" * 100_000 + b"end")
    assert tails.connect(0, str(path), str(tmp_path)) is None
    assert tails.connect(1, str(tmp_path / "absent"), str(tmp_path)) is None
    assert tails.tail(0) == "b" * (TAIL_BYTES - 3) + "end"
    assert tails.tail(1) is None


@pytest.mark.full
def test_rounds_follow_each_other(console, tails, worker):
    console.read()
    for number in range(20):
        tails.begin_round()
        assert worker(f"os.write(2, b'round {number};')").wait(LIMIT_S) == 0
        assert tails.tail(0) == f"round {number};"
    tails.close()
    assert_same(console.rest(), b"".join(b"round %d;" % number for number in range(20)))


def test_a_terminal_stays_the_workers_terminal(tmp_path):
    controller, terminal = os.openpty()
    before = os.dup(2)
    os.dup2(terminal, 2)
    try:
        tails = StderrTails(enabled=True)
        assert tails.connect(0, "", str(tmp_path)) is None
        assert tails.tail(0) is None
        tails.close()
    finally:
        os.dup2(before, 2)
        for descriptor in (controller, terminal, before):
            os.close(descriptor)


@pytest.mark.seam
def test_the_agent_replaces_an_unrunnable_relay(console, monkeypatch, request, caplog, tmp_path):
    console.take()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        tails = StderrTails(enabled=True)
    request.addfinalizer(tails.close)
    console.read()
    path = tails.connect(0, "", str(tmp_path))
    assert path is not None
    with open(path, "wb", buffering=0) as pipe:
        pipe.write(b"c" * 100_000)
    console.wait_for(lambda data: data.endswith(b"c" * 100_000))
    assert console.data[:-100_000] == b""
    assert tails.tail(0) == "c" * TAIL_BYTES
    assert "the relay process cannot run: it ended with exit code 1" in caplog.text


@pytest.mark.full
def test_nothing_is_left_open(console, tmp_path):
    console.take()
    console.read()
    before = os.listdir("/proc/self/fd")
    pids = []
    for number in range(10):
        tails = StderrTails(enabled=True)
        tails.begin_round()
        (tmp_path / str(number)).mkdir()
        tails.connect(0, "", str(tmp_path / str(number)))
        pids.append(relay_pid(tails))
        tails.close()
        tails.close()
    assert wait_gone(pids) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("elastic_ext_stderr")]


CHATTY = """
import os, sys
for n in range(5000):
    os.write(2, b"W%s %05d %s\\n" % (os.environ["RANK"].encode(), n, bytes(range(128, 255)) * (n % 7)))
"""


@pytest.mark.full
def test_a_chatty_job_looks_as_under_stock(tmp_path):
    (tmp_path / "chatty.py").write_text(CHATTY)
    seen = []
    without_bootstrap = [*EXT, "--nproc-per-node=2", "--no-python", sys.executable]
    for command in ([*STOCK, "--nproc-per-node=2"], [*EXT, "--nproc-per-node=2"], without_bootstrap):
        done = subprocess.run(
            [*command, "chatty.py"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            check=True,
        )
        lines = done.stderr.split(b"\n")
        seen.append([[line for line in lines if line.startswith(b"W%d " % rank)] for rank in range(2)])
    assert seen[0] == seen[1] == seen[2]
    assert [len(lines) for lines in seen[0]] == [5000, 5000]


FAILS_AT_START = """
import os, sys
print("loading", os.isatty(2), file=sys.stderr)
config = {}
config["lr"]
"""


@pytest.mark.seam
@pytest.mark.full("off")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--no-python", "bash", "-c", f"{sys.executable} fails.py"], id="command"),
        pytest.param(["--no-python", sys.executable, "-X", "dev", "fails.py"], id="other-options-off"),
    ],
)
def test_programs_without_bootstrap_leave_their_traceback(tmp_path, how):
    """It is evidence, and the screen shows it once, before the agent's own line."""
    (tmp_path / "fails.py").write_text(FAILS_AT_START)
    job = run([*EXT, "--nproc-per-node=1", "--max-restarts=0", *how], tmp_path, ELASTIC_EXT_VERDICT_FILE="verdict")
    assert job.returncode != 0
    assert "rank 0 raised KeyError: 'lr' at " in json.loads((tmp_path / "verdict").read_text())["decision"]["reason"]
    lines = job.err.splitlines()
    first, last = lines.index("loading False"), lines.index("KeyError: 'lr'")
    assert lines[first + 1] == "Traceback (most recent call last):"
    assert '    config["lr"]' in lines[first:last]
    assert "elastic_ext: stop: " in lines[last + 1]
    assert lines.count("KeyError: 'lr'") == 1


@pytest.mark.seam
@pytest.mark.full("a-bug")
@pytest.mark.parametrize(
    ("command", "starts", "code", "rule"),
    [
        pytest.param("echo no route; exit 1", 3, 1, "progress-unknown", id="unknown"),
        pytest.param(f"exec {sys.executable} fails.py", 2, 65, "repeated", id="a-bug"),
    ],
)
def test_a_command_that_fails_alike_ends(tmp_path, command, starts, code, rule):
    """Nothing shows the progress of a command. So the same failure ends the job, however many restarts are left."""
    (tmp_path / "fails.py").write_text(FAILS_AT_START)
    options = ["--nproc-per-node=1", "--max-restarts=9", "--no-python", "sh", "-c", f"echo started; {command}"]
    job = run([*EXT, *options], tmp_path, ELASTIC_EXT_VERDICT_FILE="verdict", ELASTIC_EXT_BACKOFF="0")
    assert (job.out.count("started"), job.returncode) == (starts, code), job.all
    assert json.loads((tmp_path / "verdict").read_text())["decision"]["rule"] == rule


@pytest.mark.full
def test_a_command_keeps_its_terminal(tmp_path):
    """On a terminal nothing stands between: colours and progress bars depend on it."""
    controller, terminal = os.openpty()
    command = [*EXT, "--nproc-per-node=1", "--no-python", "bash", "-c", "test -t 2 && echo on a terminal"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=terminal, timeout=LIMIT_S)
    os.close(terminal)
    os.close(controller)
    assert (done.returncode, done.stdout) == (0, b"on a terminal\n")


@pytest.mark.full
def test_without_stderr_tail_no_relay_stands_between(tmp_path):
    (tmp_path / "who.py").write_text("import os; print('stderr is', os.readlink('/proc/self/fd/2'))")
    job = run([*EXT, "--rdzv-conf=stderr_tail=off", "--nproc-per-node=1", "who.py"], tmp_path)
    assert job.returncode == 0, job.all
    assert "elastic_ext_" not in re.search(r"stderr is (.*)", job.out)[1]
