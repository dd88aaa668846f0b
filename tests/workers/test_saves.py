"""The record of saves of real scripts under the bootstrap, and what it proves; many of them are ended by SIGKILL at a write."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_ext.agent.launch import BOOTSTRAP
from elastic_ext.checkpoints.record.journal import SaveJournal, journal_of
from elastic_ext.checkpoints.record.proof import RoundRecord, prove
from elastic_ext.workers import progress_layout
from elastic_ext.workers.bootstrap.writers import MOST_ENDED, SaveWriters

JOB = Path(__file__).parents[1] / "scripts" / "recorded_job.py"
DEADLINE_S = 180.0  # of a child process: reached only by a broken one
KILLED = -signal.SIGKILL


class RecordedJob:
    """A script under the bootstrap, and what it has left."""

    def __init__(self, folder: Path, watched: str = "checkpoints", directories: Sequence[str] = ()) -> None:
        """directories: of checkpoints, in place of that below the folder."""
        self.checkpoints, self.folder = folder / "checkpoints", folder
        self.checkpoints.mkdir(exist_ok=True)
        (folder / "progress").write_bytes(b"\0" * progress_layout.ROW_BYTES)
        message = {"slot": 0, "progress": str(folder / "progress"), "stacks": str(folder / "stacks")}
        if watched:
            message |= {"journal": str(folder / "saves"), "saves_below": [*directories] or [str(folder / watched)]}
        mine = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ELASTIC_EXT", "TORCHELASTIC"))
        }
        self.environ = {**mine, "ELASTIC_EXT_WORKER": json.dumps(message), "RANK": "0"}

    def run(self, *argv: object, code: int = 0) -> str:
        command = [sys.executable, "-u", BOOTSTRAP, *map(str, argv)]
        ran = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=DEADLINE_S)
        assert ran.returncode == code, ran.stderr
        return ran.stdout + ran.stderr

    def run_text(self, script: str, code: int = 0) -> str:
        (self.folder / "script.py").write_text(script)
        return self.run("script.py", code=code)

    @property
    def row(self) -> memoryview:
        return memoryview((self.folder / "progress").read_bytes()).cast("Q")

    @property
    def journals(self) -> list[SaveJournal]:
        found = (journal_of(each.read_bytes()) for each in sorted(self.folder.glob("saves.*")))
        return [each for each in found if each is not None]

    def record(self, **more: object) -> RoundRecord:
        assert not self.row[progress_layout.RECORD_BROKEN]
        return prove(self.journals, {0: self.row[progress_layout.STEPS]}, **more)  # type: ignore[arg-type]

    def proved(self) -> list[str]:
        return [each.entry.path for each in self.record().saves if each.proved and not each.gone]


@pytest.fixture
def job(tmp_path: Path) -> RecordedJob:
    return RecordedJob(tmp_path)


TWO = ["step_3", "step_6"]
ALL = [*TWO, "step_9"]
# Each way to save: which are proved at the end, and if the third save is killed after its first write.
WAYS = [
    ("plain", ALL, TWO),
    ("single_file", [f"{each}.pt" for each in ALL], [f"{each}.pt" for each in TWO]),
    ("tensors", ALL, TWO),
    ("dcp_sync", ALL, TWO),
    ("dcp_async", ALL, TWO),
    ("in_thread", ALL, TWO),
    ("in_pool", ALL, TWO),
    ("in_queue", TWO, TWO),
    ("staged", ALL, TWO),
    ("in_place", ["last"], []),
    ("copied", ALL, TWO),
]


@pytest.mark.seam
@pytest.mark.full("single_file", "tensors", "dcp_sync", "in_thread", "in_pool", "in_queue", "staged", "in_place", "copied")
@pytest.mark.parametrize(("way", "whole", "killed"), WAYS, ids=[row[0] for row in WAYS])
def test_whole_saves_are_proved_torn_ones_not(
    job: RecordedJob, tmp_path: Path, way: str, whole: list[str], killed: list[str]
) -> None:
    job.run(JOB, job.checkpoints, way)
    assert job.proved() == whole, job.record()
    (tmp_path / "killed").mkdir()
    other = RecordedJob(tmp_path / "killed")
    other.run(JOB, other.checkpoints, way, 3, code=KILLED)
    assert other.proved() == killed, other.record()
    written = {each.place.path for journal in other.journals for each in journal.events if each.kind == "w"}
    inside = {path.relative_to(other.checkpoints).as_posix() for path in other.checkpoints.rglob("*") if path.is_file()}
    renamed = {each.to.path for journal in other.journals for each in journal.events if each.kind == "m"}
    assert way == "staged" or inside <= written | renamed  # the last write, too, is in the journal


# Other ways: which are proved at the end, and the exit code.
ENDS = [
    ("rotated", ["step_9"], KILLED),  # before a step: the removal of step_6 proves it
    ("on_sigterm", ALL, 143),
    ("cut_by_handler", TWO, 143),
    ("forked", [], 0),  # by os.fork: how a child has ended, nothing here knows
    ("by_command", [], 0),
]


@pytest.mark.seam
@pytest.mark.full("forked", "by_command", "cut_by_handler")
@pytest.mark.parametrize(("way", "whole", "code"), ENDS, ids=[row[0] for row in ENDS])
def test_the_last_save_before_an_end(job: RecordedJob, way: str, whole: list[str], code: int) -> None:
    job.run(JOB, job.checkpoints, way, code=code)
    assert job.proved() == whole, job.record()
    if way == "forked":
        assert len({each.pid for each in job.journals if each.parent}) == 3
        assert all("child of rank 0" in each.why for each in job.record().saves)


@pytest.mark.full
def test_checkpoints_of_the_trainer_are_proved(job: RecordedJob) -> None:
    pytest.importorskip("transformers")
    job.run(JOB, job.checkpoints, "by_trainer")
    assert job.proved()[-2:] == ["checkpoint-9", "checkpoint-10"], job.record()
    found = {each.entry.path: each for each in job.record().saves}["checkpoint-9"]
    on_disk = {path.relative_to(job.checkpoints).as_posix() for path in (job.checkpoints / "checkpoint-9").rglob("*")}
    assert set(found.files) == on_disk


WRITES = """
import json, os, shutil, sqlite3, sys, threading
import multiprocessing
ck = os.path.join(os.getcwd(), "checkpoints")
def put(path):
    with open(path, "w") as file:
        file.write("x")
"""
HOWS = {
    "relative": ("os.chdir('checkpoints/..'); put('checkpoints/./x/../a')", ["w a"]),
    "bytes": ("put(os.fsencode(ck) + b'/a')", ["w a"]),
    "odd name": ("put(ck + '/a\\tb\\n\\\\c\\udce9')", ["w a\tb\n\\c\udce9"]),
    "through a link": (
        "os.mkdir(ck + '/s_1'); os.symlink('s_1', ck + '/latest'); put(ck + '/latest/a')",
        ["w latest", "w s_1/a"],
    ),
    "dir_fd": ("f = os.open(ck, os.O_RDONLY); os.open('a', os.O_WRONLY | os.O_CREAT, dir_fd=f)", ["w a"]),
    "removed by dir_fd": ("os.makedirs(ck + '/s'); put(ck + '/s/a'); shutil.rmtree(ck + '/s')", ["w s/a", "d s/a", "d s"]),
    "truncated": ("put(ck + '/a'); os.truncate(ck + '/a', 0)", ["w a", "w a"]),
    "hard link": ("put('b'); os.link('b', ck + '/a')", ["l a"]),
    "failed links": (
        "put(ck + '/a')\nfor link in (os.link, os.symlink):\n  try: link(ck + '/a', ck + '/a')\n  except OSError: pass",
        ["w a"],
    ),
    "a database": ("sqlite3.connect(ck + '/a')", ["w a"]),
    "failed open": ("try: put(ck + '/no/a')\nexcept OSError: put(ck + '/b')", ["w no/a", "u no/a", "w b"]),
    "failed rename": (
        "put(ck + '/a')\ntry: os.rename(ck + '/a', ck + '/no/b')\nexcept OSError: put(ck + '/b')",
        ["w a", "m a no/b", "u no/b", "w b"],
    ),
    "reads": ("put(ck + '/a'); open(ck + '/a').read(); open(ck + '/a').read()", ["w a", "r a"]),
    "reads of two": (
        "for n in 'abcd': os.makedirs(ck + '/' + n, exist_ok=True); put(f'{ck}/{n}/m')\n"
        "os.symlink('../b/m', ck + '/a/n'); os.symlink('c', ck + '/l')\n"
        "def look(path): open(path).read()\n"
        "for _ in '12': look(ck + '/a/m'); look('checkpoints/a/m'); look(ck + '/a/n'); look(ck + '/l/m')\n"
        "os.symlink('d', ck + '/k'); os.replace(ck + '/k', ck + '/l'); look(ck + '/l/m')\n"
        "put(ck + '/a/o'); look(ck + '/a/m'); look(ck + '/a/m')",
        [
            *(f"w {n}/m" for n in "abcd"),
            *("w a/n", "w l", "r a/m", "r b/m", "r c/m"),
            *("w k", "m k l", "r d/m", "w a/o", "r a/m"),
        ],
    ),
    "links from elsewhere": (
        "put('a'); os.symlink(ck + '/b', 'l'); put('l'); put('./a'); os.replace('l', 'a'); put('a')",
        ["w b"] * 2,
    ),
    "directory gone": (
        "os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); put(ck + '/a')\n"
        "for mode in 'rw':\n  try: open('b', mode)\n  except FileNotFoundError: pass\n"
        "try: os.remove('b', dir_fd=99)\nexcept OSError: pass\n"
        "f = os.open(ck, os.O_RDONLY); os.close(os.open('c', os.O_WRONLY | os.O_CREAT, dir_fd=f))",
        ["w a", "w c"],
    ),
    "source made again": (
        "os.mkdir(ck + '/t'); put(ck + '/t/a'); os.rename(ck + '/t', ck + '/s')\n"
        "if not os.fork(): os.mkdir(ck + '/t'); os._exit(0)\n"
        "os.wait(); put(ck + '/b')",
        ["w t/a", "m t s", "w b"],
    ),
    "descriptors closed": (
        "put(ck + '/a'); os.closerange(3, 99); put('b'); put(ck + '/c'); assert open('b').read() == 'x'",
        ["w a", "w c"],
    ),
    "our own": ("os.mkdir(ck + '/.elastic_ext'); put(ck + '/.elastic_ext/a')", []),
    "elsewhere": ("put('a'); os.rename('a', 'b'); os.remove('b'); put(os.devnull)", []),
    "reported": ("put(ck + '/a'); sys.audit('elastic_ext.saved', 3); sys.audit('elastic_ext.saved')", ["w a", "k3", "k-1"]),
}


@pytest.mark.seam
def test_what_is_noted(tmp_path: Path) -> None:
    """One process after the other, all without torch."""
    for name, (script, wanted) in HOWS.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        job = RecordedJob(folder)
        (job.checkpoints / "x").mkdir()
        assert job.run_text(WRITES + script) == "", name
        (journal,) = job.journals or [SaveJournal(0, 0)]
        noted = [
            f"{each.kind}{each.number if each.kind == 'k' else ''} {each.place.path} {each.to.path}".strip()
            for each in journal.events
            if each.kind != "x"
        ]
        assert noted == wanted, name
        assert not job.row[progress_layout.RECORD_BROKEN], name


EXITS = [
    ("try: 1 / 0\nexcept ArithmeticError: sys.exit(0)", 0, False),
    ("try: 1 / 0\nexcept ArithmeticError as error: raise SystemExit(0) from error", 0, False),
    ("try: 1 / 0\nexcept ArithmeticError: raise SystemExit(143) from None", 143, True),
    ("sys.exit(2)", 2, False),
    ("sys.exit('no more room')", 1, False),
    ("sys.exit(75)", 75, True),
    ("import typer\ntyper.run(lambda: None)", 0, True),
]


@pytest.mark.seam
def test_an_error_that_is_left_proves_nothing(tmp_path: Path) -> None:
    for number, (script, code, is_good) in enumerate(EXITS):
        if "typer" in script and importlib.util.find_spec("typer") is None:
            continue
        (tmp_path / str(number)).mkdir()
        job = RecordedJob(tmp_path / str(number))
        job.run_text(f"{WRITES}put(ck + '/a')\n{script}", code=code)
        assert job.proved() == (["a"] if is_good else []), script


FORKS = (
    WRITES
    + """
import signal
def child(fails):
    put(f"{ck}/s_{fails}")
    if fails:
        raise SystemExit(1)
for fails in (0, 1):
    process = multiprocessing.get_context("fork").Process(target=child, args=(fails,))
    process.start()
    process.join()
"""
)


@pytest.mark.seam
def test_a_forked_child_has_its_own_journal(job: RecordedJob) -> None:
    """That of multiprocessing notes how it ended."""
    job.run_text(FORKS)
    worker, *_ = [each.pid for each in job.journals if not each.parent]
    children = [each for each in job.journals if each.parent == worker]
    ends = {each.events[0].place.path: each.events[-1].kind for each in children}
    assert ends == {"s_0": "x", "s_1": "w"}


THREADS = (
    WRITES
    + """
from concurrent.futures import ThreadPoolExecutor
import weakref
class State: pass
def save(state, path, done):
    put(path)
    del state
state, pool = State(), ThreadPoolExecutor(1)
gone = weakref.ref(state)
pool.submit(save, state, ck + "/a", None).result()
del state
pool.submit(int).result()
print(gone() is None)
def idents():
    thread = threading.Thread(target=put, args=(ck + "/b",))
    thread.start()
    thread.join()
    return thread.ident
print(len({idents() for _ in range(20)}) < 20)
def cut_off():
    put(ck + "/c")
    ready.set()
    threading.Event().wait()
ready = threading.Event()
threading.Thread(target=cut_off, daemon=True).start()
ready.wait()
"""
)


@pytest.mark.seam
def test_threads_are_told_apart_and_keep_nothing(job: RecordedJob) -> None:
    """Idents are used again; a pool's thread must not hold a saved state; a daemon thread is cut off at the end."""
    assert job.run_text(THREADS) == "True\nTrue\n"
    (journal,) = job.journals
    writers = {each.place.path: each.who for each in journal.events if each.kind == "w"}
    assert len({each.who for each in journal.events if each.place.path == "b"}) == 20
    ended = {each.who for each in journal.events if each.kind == "e"}
    assert {writers["a"], writers["b"]} <= ended
    assert writers["c"] not in ended


RAISING = (
    WRITES
    + """
import _thread, atexit, time
def fails(path):
    put(path)
    raise OSError(28, "no room")
def leaves(path):
    put(path)
    raise SystemExit(0)
threading.excepthook = lambda args: print("seen", args.exc_type.__name__)
sys.unraisablehook = lambda args: None
for name, function in (("a", fails), ("b", leaves), ("c", put)):
    thread = threading.Thread(target=function, args=(f"{ck}/{name}",))
    thread.start()
    thread.join()
_thread.start_new_thread(fails, (ck + "/d",))
while not os.path.exists(ck + "/d") or _thread._count():
    time.sleep(0.01)
put(ck + "/e")
atexit.register(fails, ck + "/f")
"""
)


@pytest.mark.seam
def test_threads_and_exit_handlers_that_raise(job: RecordedJob) -> None:
    assert job.run_text(RAISING) == "seen OSError\nseen SystemExit\n"
    assert job.proved() == ["b", "c", "e"], job.record()
    (journal,) = job.journals
    assert [each.kind for each in journal.events if each.kind in "efx"] == ["f", "e", "e", "f", "x"]


CROWDED = (
    WRITES
    + """
import signal
def write(number):
    barrier.wait()
    put(f"{ck}/{number}")
signal.signal(signal.SIGALRM, lambda *_: put(ck + "/h"))
for _ in range(16):
    if not os.fork():
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        os._exit(0)
    os.wait()
for number in range(64):
    if not os.fork():
        signal.setitimer(signal.ITIMER_REAL, 0.00002 + number * 0.000005)
        put(ck + "/a")
        os._exit(0)
    os.wait()
"""
)


@pytest.mark.seam
def test_several_begin_a_journal_at_once(job: RecordedJob) -> None:
    """Threads, and a signal handler."""
    job.run_text(CROWDED)
    assert len(job.journals) == len(list(job.folder.glob("saves.*"))) == 1 + 16 + 64
    assert not any(each.damaged for each in job.journals)
    assert sum(each.kind == "w" for journal in job.journals for each in journal.events if each.place.path.isdigit()) == 16 * 8


HANDLED = (
    WRITES
    + """
import functools, signal
class Saver:
    def method(self, number=0, frame=None):
        number = signal.Signals(number) if number else 0
        self.frame = frame
        del frame
        put(f"{ck}/{name}")
        os.remove(f"{ck}/{name}")
    def __call__(self, *args):
        self.method()
saver = Saver()
def plain(state, number=None, *, more=None):
    put(f"{ck}/{name}")
def varied(*_):
    put(f"{ck}/{name}")
for name, handler, called in (
    ("method", saver.method, saver.method),
    ("object", saver, saver),
    ("partial", functools.partial(varied, "state"), lambda: varied("state", 3)),
    ("varied", varied, lambda: varied(3)),
    ("lambda", lambda number, frame: put(ck + "/lambda"), None),
):
    signal.signal(signal.SIGTERM, handler)
    signal.raise_signal(signal.SIGTERM)
    if called is not None:
        called()
"""
)


@pytest.mark.seam
def test_a_handler_is_known_by_its_arguments(job: RecordedJob) -> None:
    """The script itself may call the same function."""
    job.run_text(HANDLED)
    (journal,) = job.journals
    noted = {each.place.path: "" for each in journal.events if each.place.path}
    for each in journal.events:
        noted[each.place.path] = noted.get(each.place.path, "") + each.kind + "h" * each.in_handler
    del noted[""]
    assert noted == {"method": "whdhwd", "object": "whdhwd", "partial": "whw", "varied": "whw", "lambda": "wh"}


REPLACED = (
    WRITES
    + """
program = [sys.executable, "-c", "print('other')"]
if not os.fork():
    os.execv(program[0], program)
os.wait()
put(ck + "/a")
try:
    os.execv("absent", program)
except OSError:
    print("goes on")
if len(sys.argv) > 1:
    os.execv(program[0], program)
"""
)


@pytest.mark.seam
def test_another_program_in_the_worker_breaks_it(job: RecordedJob) -> None:
    """One in a child does not, nor one that is not there."""
    assert job.run_text(REPLACED) == "other\ngoes on\n"
    assert job.proved() == ["a"]
    said = job.run("script.py", "replace")
    assert "saves are no longer recorded in this round: the script replaces its process (os.exec)" in said
    assert job.row[progress_layout.RECORD_BROKEN] == 1


FULL = (
    WRITES
    + """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
put(ck + "/a")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))
put(ck + "/b"); put(ck + "/c")
print("goes on")
"""
)


@pytest.mark.seam
def test_a_journal_without_room_breaks_the_record(job: RecordedJob) -> None:
    said = job.run_text(FULL)
    assert said.startswith("goes on\n")
    assert said.count("saves are no longer recorded in this round: OSError") == 1
    assert job.row[progress_layout.RECORD_BROKEN] == 1


RAISES = (
    WRITES
    + """
import signal, time
class Preempted(OSError): pass
def handler(*_):
    fired.append(1)
    raise Preempted("x")
signal.signal(signal.SIGALRM, handler)
caught = 0
for number in range(1, 301):
    fired = []
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 10 * 0.00001)
        while not fired:
            open(ck + "/a", "w").close()
    except Preempted:
        caught += 1
print(caught)
"""
)


@pytest.mark.seam
def test_a_handlers_exception_reaches_the_script(job: RecordedJob) -> None:
    """Also one that comes while a line is written."""
    assert job.run_text(RAISES) == "300\n"
    assert not job.row[progress_layout.RECORD_BROKEN]


SENT = (
    WRITES
    + """
import ctypes, time
main, go, lost = ctypes.c_ulong(threading.get_ident()), threading.Semaphore(0), 0
def send():
    for number in range(200):
        go.acquire()
        time.sleep(0.0001 + number % 10 * 0.00003)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(TimeoutError))
        sent.append(number)
threading.Thread(target=send).start()
for _ in range(200):
    sent = []
    try:
        go.release()
        while not sent:
            os.close(os.open(ck + "/a", os.O_WRONLY | os.O_CREAT))
        time.sleep(0)
        lost += 1
    except TimeoutError:
        pass
print(lost)
"""
)


@pytest.mark.seam
def test_an_exception_of_another_thread_arrives(job: RecordedJob) -> None:
    assert job.run_text(SENT) == "0\n"
    assert not job.row[progress_layout.RECORD_BROKEN]


IN_BACKWARD = (
    WRITES
    + """
import _thread, queue, signal
import torch
def optimizer():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)
work = queue.Queue()
def serve(optimizer):
    while True:
        work.get()
        optimizer.step()
        work.task_done()
threading.Thread(target=serve, args=(optimizer(),), daemon=True).start()
def step_there():
    work.put(1)
    work.join()
own = optimizer()
step_there(); own.step(); put(ck + "/s_3"); step_there(); own.step()
torch_like = {}  # autograd starts such threads on a GPU only
exec(compile("def backward(lock): lock.acquire()", "x/torch/autograd/__init__.py", "exec"), torch_like)
def step_in_backward(optimizer):
    lock = _thread.allocate_lock()
    lock.acquire()
    def run():
        optimizer.step()
        lock.release()
    _thread.start_new_thread(run, ())
    torch_like["backward"](lock)
late = optimizer()
for number in (6, 9, 12):
    step_in_backward(late)
    put(f"{ck}/s_{number}")
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@pytest.mark.seam
def test_steps_of_other_threads(job: RecordedJob) -> None:
    """One does not stand for that of the main thread, unless this waits for it in backward()."""
    job.run_text(IN_BACKWARD, code=KILLED)
    assert job.proved() == ["s_3", "s_6", "s_9"], job.record()


def test_ends_that_wait_are_bounded() -> None:
    noted: list[str] = []
    writers, over = SaveWriters(lambda kind, who: noted.append(kind)), threading.Event()

    def work(waits: bool) -> None:
        writers.this()
        if waits:
            over.wait()

    lasting = threading.Thread(target=work, args=(True,), daemon=True)
    lasting.start()
    for _ in range(100):
        thread = threading.Thread(target=work, args=(False,))
        thread.start()
        thread.join()
    writers.note_ends(looks=2)
    assert (len(writers.ended), noted) == (MOST_ENDED, [])
    over.set()
    lasting.join()
    writers.note_ends(looks=2)
    assert (len(writers.ended), noted) == (0, ["e"] * MOST_ENDED)


@pytest.mark.seam
def test_without_directories_nothing_is_noted(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path, watched="")
    job.run_text("open('checkpoints/a', 'w')")
    assert job.journals == []
    assert not job.row[progress_layout.RECORD_BROKEN]


def test_a_torn_last_line_is_left_out() -> None:
    whole = b"elastic_ext-saves 1 3 77 0\nw\t4\t5\t0\t0\ta/b\n"
    journal = journal_of(whole + b"w\t4\t5\t0\t0\ta/")
    assert journal is not None
    assert (journal.rank, journal.pid, journal.damaged) == (3, 77, False)
    assert [each.place.path for each in journal.events] == ["a/b"]
    damaged = journal_of(whole + b"something else\n" + whole)
    assert damaged is not None
    assert damaged.damaged
    assert journal_of(b"elastic_ext-saves 1 3") is None
    assert journal_of(b"another file\n") is None
