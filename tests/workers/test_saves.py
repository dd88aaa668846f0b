"""The record of saves of real scripts under the bootstrap, and what it proves; many of them are ended by SIGKILL at a write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ext.agent.launch import BOOTSTRAP
from elastic_ext.checkpoints.record.journal import SaveJournal, journal_of, read_journals
from elastic_ext.checkpoints.record.proof import RoundRecord, prove
from elastic_ext.workers import progress_layout

JOB = Path(__file__).parents[1] / "scripts" / "recorded_job.py"
DEADLINE_S = 180.0  # of a child process: reached only by a broken one
KILLED = -signal.SIGKILL


class RecordedJob:
    """A script under the bootstrap, and what it has left."""

    def __init__(self, folder: Path, watched: str = "checkpoints") -> None:
        self.checkpoints, self.folder = folder / "checkpoints", folder
        self.checkpoints.mkdir(exist_ok=True)
        (folder / "progress").write_bytes(b"\0" * progress_layout.ROW_BYTES)
        message = {"slot": 0, "progress": str(folder / "progress"), "stacks": str(folder / "stacks")}
        if watched:
            message |= {"journal": str(folder / "saves"), "saves_below": [str(folder / watched)]}
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
        return read_journals(str(self.folder / "saves"))

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
@pytest.mark.full("single_file", "tensors", "dcp_sync", "in_thread", "in_queue", "staged", "in_place", "copied")
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
    ("forked", [], 0),  # by os.fork: only an agent sees that a child has ended
    ("by_command", [], 0),
]


@pytest.mark.seam
@pytest.mark.full("forked", "by_command", "cut_by_handler")
@pytest.mark.parametrize(("way", "whole", "code"), ENDS, ids=[row[0] for row in ENDS])
def test_the_last_save_before_an_end(job: RecordedJob, way: str, whole: list[str], code: int) -> None:
    job.run(JOB, job.checkpoints, way, code=code)
    assert job.proved() == whole, job.record()
    if way == "forked":
        children = {each.pid for each in job.journals if each.parent}
        assert len(children) == 3
        assert [each.proved for each in job.record(ended=children).saves] == [True] * 3


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
    "hard link": ("put('b'); os.link('b', ck + '/a')", ["w a"]),
    "a database": ("sqlite3.connect(ck + '/a')", ["w a"]),
    "failed open": ("try: put(ck + '/no/a')\nexcept OSError: put(ck + '/b')", ["w no/a", "u no/a", "w b"]),
    "failed rename": (
        "put(ck + '/a')\ntry: os.rename(ck + '/a', ck + '/no/b')\nexcept OSError: put(ck + '/b')",
        ["w a", "m a no/b", "u no/b", "w b"],
    ),
    "reads": ("put(ck + '/a'); open(ck + '/a').read(); open(ck + '/a').read()", ["w a", "r a"]),
    "descriptors closed": (
        "put(ck + '/a'); os.closerange(3, 99); put('b'); put(ck + '/c'); assert open('b').read() == 'x'",
        ["w a", "w c"],
    ),
    "our own": ("os.mkdir(ck + '/.elastic_ext'); put(ck + '/.elastic_ext/a')", []),
    "elsewhere": ("put('a'); os.rename('a', 'b'); os.remove('b'); put(os.devnull)", []),
    "reported": ("put(ck + '/a'); sys.audit('elastic_ext.saved', 3)", ["w a", "k"]),
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
        noted = [f"{each.kind} {each.place.path} {each.to.path}".strip() for each in journal.events if each.kind != "x"]
        assert noted == wanted, name
        assert not job.row[progress_layout.RECORD_BROKEN], name


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
