"""The bootstrap on real processes: everything is compared with what `python -u` does with the same script."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.agent.launch import BOOTSTRAP
from elastic_ext.failures.evidence import Wrapped, read_error_file
from elastic_ext.workers import progress_layout
from elastic_ext.workers.progress_layout import ROW_BYTES
from elastic_ext.workers.reaper import mark_of
from elastic_ext.workers.standby import client
from elastic_ext.workers.standby.client import ServerProcess, WarmPopen
from elastic_ext.workers.standby.import_checks import PER_WORKER
from elastic_ext.workers.worker_env import STACKS_SIGNAL
from tests.scripts.bootstrap_samples import ENDS, SAFE_WAYS, SCRIPTS, SHOW, STANDBY_ENDS, STANDBY_WAYS, WAYS

ROOT = str(Path(__file__).resolve().parents[2])
DEADLINE_S = 120.0  # of a child process: reached only by a broken one


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all scripts, and the other ways to hold one."""
    here = tmp_path_factory.mktemp("bootstrap").resolve()
    for name, text in {**SCRIPTS, "__main__.py": SHOW}.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(text.encode() if isinstance(text, str) else text)
    (here / "relative_link.py").symlink_to("sub/show.py")
    (here / "linked_folder").symlink_to("sub")
    (here / "linked_app").symlink_to("app")
    with zipfile.ZipFile(here / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    for name in ("compiled.pyc", "compiled_without_suffix"):
        code = f"import py_compile; py_compile.compile('show.py', cfile={name!r})"
        subprocess.run([sys.executable, "-c", code], cwd=here, check=True, timeout=DEADLINE_S)
    return here


FIELDS = ROW_BYTES // 8


class Worker:
    """What an agent gives to one worker: slot 1 of a progress file, a stacks file, an error file."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.progress, self.stacks, self.error_file = folder / "progress", folder / "stacks", folder / "error.json"
        self.error_file.unlink(missing_ok=True)
        self.progress.write_bytes(b"\xff" * ROW_BYTES * 3)
        wanted = {"slot": 1, "progress": str(self.progress), "stacks": str(self.stacks), "agent": "token", **settings}
        self.environ = {"ELASTIC_EXT_WORKER": json.dumps(wanted), "TORCHELASTIC_ERROR_FILE": str(self.error_file)}

    def row(self, slot: int = 1) -> "list[int]":
        """A worker's row: the fields that the worker writes."""
        return list(
            memoryview(self.progress.read_bytes()).cast("Q")[slot * FIELDS : slot * FIELDS + progress_layout.AGENT_FIELDS]
        )

    @property
    def error(self) -> "dict":
        return json.loads(self.error_file.read_text())


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def environ(more: "dict[str, str] | None" = None) -> "dict[str, str]":
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ELASTIC_EXT", "TORCHELASTIC"))}
    return {**mine, **(more or {})}


_standby = False


@pytest.fixture(autouse=True, params=["cold", "standby"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How what the bootstrap runs is started. Standbys of these tests have imported nothing for the script."""
    monkeypatch.setattr(sys.modules[__name__], "_standby", request.param == "standby")
    monkeypatch.setattr(client, "PARK_S", DEADLINE_S)
    monkeypatch.setattr(client, "RELEASE_S", DEADLINE_S)
    return request.param


@contextlib.contextmanager
def start(
    argv: "list[str]", cwd: Path, env: "dict[str, str]", flags: "tuple[str, ...]" = (BOOTSTRAP,)
) -> "Iterator[subprocess.Popen[str]]":
    """`python -u FLAGS... ARGV...`; it does not outlive the block."""
    streams = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True, "errors": "backslashreplace"}
    with contextlib.ExitStack() as stack:
        if _standby and flags == (BOOTSTRAP,):
            process = stack.enter_context(released(argv, cwd, environ(env), streams))
        else:
            command = [sys.executable, "-u", *flags, *argv]
            process = stack.enter_context(subprocess.Popen(command, cwd=cwd, env=environ(env), **streams))
        stack.callback(process.kill)
        yield process


def released(argv: "list[str]", cwd: Path, env: "dict[str, str]", streams: "dict[str, object]") -> "subprocess.Popen[str]":
    """A standby, forked by a server of its own, that runs this now."""
    shared = {name: value for name, value in env.items() if name not in PER_WORKER}
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess([sys.executable, "-u"], shared, os.path.join(folder, "output"), str(cwd))
        try:
            nothing = Path(folder, "modules")
            told = {"modules": [], "excluded": [], "script_dir": str(cwd), "program": list(argv), "origins": {}}
            nothing.write_text(json.dumps(told))
            server.preload(str(nothing))
            assert server.receive_ready() is not None, server.how_it_ended()
            (standby,) = server.park(1)
        finally:
            server.end()
    return WarmPopen(standby, [sys.executable, "-u", BOOTSTRAP, *argv], argv, env, **streams)


def run(argv: "list[str]", cwd: Path, env: "dict[str, str]", flags: "tuple[str, ...]" = (BOOTSTRAP,)) -> "tuple[int, str, str]":
    """Exit status, stdout and stderr, without addresses and pids."""
    with start(argv, cwd, env, flags) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, *(re.sub(r"0x[0-9a-f]+|(?<=process )\d+", "N", text) for text in (out, err))


def run_text(tmp_path: Path, script: str, env: "dict[str, str]") -> "tuple[int, str, str]":
    (tmp_path / "script.py").write_text(script)
    return run(["script.py"], tmp_path, env)


# ---- as python does

once = pytest.mark.parametrize("how", ["cold"], indirect=True)  # which these tests see to themselves


@pytest.mark.full
@once
@pytest.mark.parametrize(("way", "safe"), [*((way, "") for way in WAYS), *((way, "1") for way in SAFE_WAYS)])
def test_a_script_sees_the_same_without_the_bootstrap(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, safe: str
) -> None:
    argv = [*way.format(here=here).split(","), "first", "-m", "--last"]
    code, out, err = run(argv, here, {"PYTHONSAFEPATH": safe}, flags=())
    assert code == 0 or (safe and argv[0] == "-m" and sys.version_info >= (3, 11))  # then nothing of this folder is found
    for standby in (False, True) if way in STANDBY_WAYS else (False,):
        monkeypatch.setattr(sys.modules[__name__], "_standby", standby)
        worker = Worker(tmp_path)
        ours = run(argv, here, {**worker.environ, "PYTHONSAFEPATH": safe})
        shown = [re.sub("^modules .*", "", text, flags=re.MULTILINE) if standby else text for text in (out, ours[1])]
        assert ours == (code, ours[1], err)
        assert shown[0] == shown[1]  # but for the server's own modules
        assert worker.row()[progress_layout.PID] != 0


@pytest.mark.full
@once
@pytest.mark.parametrize("way", ENDS)
def test_a_script_ends_as_without_the_bootstrap(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    argv = [*way.split(","), "first"]
    native = run(argv, here, {}, flags=())
    for standby in (False, True) if way in STANDBY_ENDS else (False,):
        monkeypatch.setattr(sys.modules[__name__], "_standby", standby)
        assert run(argv, here, Worker(tmp_path).environ) == native


MAINS = """
import atexit, gc
is_main = lambda each: isinstance(each, type(gc)) and each.__name__ == "__main__"
atexit.register(lambda: print(sum(map(is_main, gc.get_objects()))))
"""


@pytest.mark.seam
@once
def test_the_interpreters_main_module_outlives_the_script(tmp_path: Path, worker: Worker) -> None:
    """Python 3.10 uses it once more after an error, without a reference: a syntax error of the script ended by SIGSEGV."""
    assert run_text(tmp_path, MAINS, worker.environ) == (0, "2\n", "")


MARKED = """
import subprocess, sys
print("resource" in sys.modules)
print(subprocess.check_output(["env", "-i", "grep", "file locks", "/proc/self/limits"], text=True).split()[3])
"""


@pytest.mark.seam
def test_a_script_is_marked_before_it_runs(tmp_path: Path) -> None:
    """Whatever it starts carries the mark, however late the agent comes to set it; and the script finds no module of ours."""
    limit, mark = mark_of("c0ffee0123456789")
    marked = Worker(tmp_path, mark=[limit, mark])
    assert run_text(tmp_path, MARKED, marked.environ) == (0, f"False\n{mark}\n", "")


@pytest.mark.seam
def test_development_mode_finds_nothing_to_complain_about(here: Path, worker: Worker) -> None:
    env = {**worker.environ, "PYTHONDEVMODE": "1"}
    assert run(["cause.py"], here, env) == run(["cause.py"], here, env, flags=())


@pytest.mark.seam
@once
def test_absent_torch_is_absent(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "script.py").write_text("import torch")
    native = run(["script.py"], tmp_path, worker.environ, flags=("-S",))
    assert native[0] == 1
    assert "No module named 'torch'" in native[2]
    assert run(["script.py"], tmp_path, worker.environ, flags=("-S", BOOTSTRAP)) == native


@pytest.mark.seam
@pytest.mark.parametrize("flags", [(), (BOOTSTRAP,)], ids=["native", "bootstrap"])
def test_ctrl_c_ends_by_sigint(tmp_path: Path, worker: Worker, flags: "tuple[str, ...]") -> None:
    # Python leaves SIGINT alone where it was ignored before, as in a shell's background job.
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nprint('waiting')\nwhile True: signal.pause()"
    )
    (tmp_path / "script.py").write_text(script)
    with start(["script.py"], tmp_path, worker.environ, flags) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")
    assert "bootstrap" not in err
    assert not flags or worker.error["elastic_ext"]["type"] == "KeyboardInterrupt"


# SIGINT as an import calls our finder, which looks at this module: in the script, then while its end is noted.
INTERRUPTED_IMPORT = """
import signal, sys
class Module(int):
    register_optimizer_step_post_hook = property(signal.raise_signal)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["torch.optim.optimizer"] = Module(signal.SIGINT)
import wave
"""


@pytest.mark.seam
def test_ctrl_c_shows_the_script_alone(tmp_path: Path, worker: Worker) -> None:
    code, _, err = run_text(tmp_path, INTERRUPTED_IMPORT, worker.environ)
    assert (code, re.findall("(?m)^  File .*", err)[0]) == (-signal.SIGINT, f'  File "{tmp_path}/script.py", line 7, in <module>')
    assert not re.search("File .*/elastic_ext/", err), err
    assert not re.search(r"runner\.py|elastic_ext/", str(worker.error)), worker.error


# SIGINT as soon as one of our files is loaded.
INTERRUPTED_LOAD = """
from _frozen_importlib_external import SourceFileLoader
def get_code(self, name, load=SourceFileLoader.get_code):
    if self.path.endswith("{name}.py"):
        raise KeyboardInterrupt
    return load(self, name)
SourceFileLoader.get_code = get_code
"""


@pytest.mark.seam
@once
@pytest.mark.parametrize("name", ["runner", "worker_env", "saves"])
def test_ctrl_c_before_the_script_shows_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_LOAD.format(name=name))
    worker = Worker(tmp_path, journal=str(tmp_path / "journal"), saves_below=[str(tmp_path)])
    code, out, err = run_text(tmp_path, "print(1)", {**worker.environ, "PYTHONPATH": str(tmp_path)})
    assert (code, out) == (-signal.SIGINT, "")
    assert not re.search("File .*/elastic_ext/", err), err


@pytest.mark.seam
@once
def test_ctrl_c_waits_for_a_starting_script(tmp_path: Path) -> None:
    """It comes before the first instruction of our file, whose traceback would name that file."""
    worker = Worker(tmp_path, interrupts_held=True)
    (tmp_path / "script.py").write_text("print(1)")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    try:
        with start(["script.py"], tmp_path, worker.environ) as process:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (process.returncode, out) == (-signal.SIGINT, "")
    assert err == "KeyboardInterrupt\n"


@pytest.mark.seam
@once
def test_importing_it_does_nothing() -> None:
    code = """if True:
        import sys
        before = list(sys.argv), list(sys.path), list(sys.meta_path), sys.excepthook, sys.modules["__main__"]
        import elastic_ext.workers.bootstrap.bootstrap, elastic_ext.workers.bootstrap.runner
        assert before == (sys.argv, sys.path, sys.meta_path, sys.excepthook, sys.modules["__main__"])
        assert not {"torch", "json", "signal", "traceback"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, env=environ(), check=True, timeout=DEADLINE_S)


HARMLESS = ["", '{"slot": null}', '{"quiet_traceback": 7}']
USELESS = ["{", "[]", "x", "{} x", '{"version": 2, "slot": 0}', '{"stacks": "missing/file"}', '{"stacks": 1.5}'] + [
    json.dumps({"slot": slot, "progress": progress})
    for slot, progress in [("a", "progress"), (0, "missing"), (9, "progress"), (-1, "progress"), (10**24, "progress"), (0, 1)]
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "settings"), [*(("cold", each) for each in HARMLESS + USELESS), ("standby", USELESS[0])], indirect=["how"]
)
def test_unusable_settings_do_not_touch_the_script(tmp_path: Path, settings: str) -> None:
    Worker(tmp_path)
    code, out, err = run_text(tmp_path, "print('runs')\nraise SystemExit(3)", {"ELASTIC_EXT_WORKER": settings})
    assert (code, out) == (3, "runs\n")
    assert re.fullmatch(r"(elastic_ext: [^\n]*\n)?", err)
    assert bool(err) == (settings in USELESS)


@pytest.mark.seam
def test_another_versions_progress_table_is_not_touched(tmp_path: Path) -> None:
    worker = Worker(tmp_path, progress_version=progress_layout.VERSION + 1)
    code, out, err = run_text(tmp_path, "print('runs')", worker.environ)
    assert (code, out) == (0, "runs\n")
    version = progress_layout.VERSION
    assert f"expected version {version} of the progress table, got version {version + 1}" in err
    assert worker.row() == [2**64 - 1] * progress_layout.AGENT_FIELDS


def test_a_row_has_room_for_all_fields() -> None:
    assert (progress_layout.SAVE_WANTED + 1) * 8 <= progress_layout.ROW_BYTES


# ---- the error file

FAILS = "def step(x):\n    raise KeyError(x)\n\nstep('lr')\n"


@pytest.mark.seam
def test_a_frame_shows_whose_file_it_is(tmp_path: Path, worker: Worker) -> None:
    """By its bare name an installed file could be one of the script's."""
    run_text(tmp_path, "import yaml\nyaml.safe_load(3)\n", worker.environ)
    frames = worker.error["elastic_ext"]["frames"]
    assert frames[0] == "script.py:2 in <module>"
    assert frames[1].startswith(".../site-packages/yaml/__init__.py:")


@pytest.mark.seam
def test_the_error_file_says_what_left_the_script(tmp_path: Path, worker: Worker) -> None:
    before = time.monotonic_ns()
    code, out, err = run_text(tmp_path, FAILS, worker.environ)
    assert (code, out) == (1, "")
    message, ours = worker.error["message"], worker.error["elastic_ext"]
    assert message["message"] == "KeyError: 'lr'"
    assert message["extraInfo"]["py_callstack"] == err
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < DEADLINE_S
    assert before < ours.pop("monotonic_ns") < time.monotonic_ns()
    frames = ["script.py:4 in <module>", "script.py:2 in step"]
    assert ours == {
        "type": "KeyError",
        "message": "'lr'",
        "frames": frames,
        "bases": ["LookupError"],
        "errno": None,
        "causes": [],
        "wrapped": [],
        "first_step_done": None,
    }
    assert [path.name for path in tmp_path.iterdir() if "error" in path.name] == ["error.json"]


@pytest.mark.seam
@pytest.mark.parametrize(
    ("end", "causes"),
    [
        ("raise ValueError('b') from error", ["pkg.A: two", "KeyError: 'one'"]),
        ("raise ValueError('b')", ["pkg.A: two", "KeyError: 'one'"]),
        ("raise ValueError('b') from None", []),
        ("raise error from error.__context__", ["KeyError: 'one'"]),
        ("error.__context__.__cause__ = b = ValueError('b'); raise b from error", ["pkg.A: two", "KeyError: 'one'"]),
    ],
)
def test_the_error_file_has_an_exceptions_causes(tmp_path: Path, worker: Worker, end: str, causes: "list[str]") -> None:
    begin = "class A(Exception):\n    __module__ = 'pkg'\n\ntry:\n    try:\n        {}['one']\n    except KeyError:\n"
    begin += f"        raise A('two')\nexcept A as error:\n    {end}\n"
    assert run_text(tmp_path, begin, worker.environ)[0] == 1
    assert worker.error["elastic_ext"]["causes"] == causes


@pytest.mark.seam
def test_the_error_file_has_what_was_being_handled(tmp_path: Path, worker: Worker) -> None:
    script = "import sys\ntry:\n    {}['x']\nexcept KeyError as error:\n    sys.exit(f'training failed: {error}')\n"
    code, _, err = run_text(tmp_path, script, worker.environ)
    assert (code, err) == (1, "training failed: 'x'\n")
    ours = worker.error["elastic_ext"]
    assert (ours["type"], ours["message"]) == ("SystemExit", "training failed: 'x'")
    assert [each["type"] for each in ours["wrapped"]] == ["KeyError"]


RAISES_GROUP = """
class Odd(KeyError):
    __module__ = "pkg"
group = {group}
try:
    raise OSError(28, "voll")
except OSError as error:
    raise group("two", [Odd("one"), group("inner", [ValueError("three")])]) from error
"""


@pytest.mark.seam
@pytest.mark.parametrize("builtin", [True, False])
def test_the_error_file_has_what_exceptions_stand_for(tmp_path: Path, worker: Worker, builtin: bool) -> None:
    """Python 3.10 has groups from a package only."""
    if builtin and sys.version_info < (3, 11):
        pytest.skip("no groups in this Python")
    own = "type('MyExceptionGroup', (Exception,), {'__init__': lambda self, _, each: setattr(self, 'exceptions', each)})"
    script = RAISES_GROUP.replace("{group}", "ExceptionGroup" if builtin else own)
    assert run_text(tmp_path, script, worker.environ)[0] == 1
    wrapped = worker.error["elastic_ext"]["wrapped"]
    kinds = [(each["type"], each["bases"], each["errno"]) for each in wrapped]
    group = kinds.pop(2)
    assert kinds == [("OSError", [], 28), ("pkg.Odd", ["KeyError", "LookupError"], None), ("ValueError", [], None)]
    assert group[0].endswith("ExceptionGroup")
    exception = read_error_file(str(worker.error_file)).exception
    assert exception is not None
    assert exception.wrapped[0] == Wrapped("OSError", "[Errno 28] voll", (), 28)
    assert exception.wrapped[1].bases == ("KeyError", "LookupError")


@pytest.mark.seam
@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        ("own_type.py", "A.B", "q"),
        ("interrupt.py", "KeyboardInterrupt", "x"),
        ("bad_utf8.py", "SyntaxError", None),
        ("str_raises.py", "E", "<exception str() failed>"),
        ("torch_breaks.py", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("-m,missing", "ModuleNotFoundError", "No module named missing"),
        ("-m,plain", "ModuleNotFoundError", None),
        ("-m,missing.module", "ModuleNotFoundError", None),
        ("-m,broken", "ModuleNotFoundError", "No module named 'no_such_module'"),
        ("empty", "ImportError", None),
        ("exit_7.py", None, None),
        ("exit_text.py", "SystemExit", None),
        ("missing.py", None, None),
        ("pickles.py", None, None),
        ("multiprocess.py", None, None),  # its children fail
        ("fork.py", None, None),
    ],
)
def test_types_in_the_error_file(here: Path, worker: Worker, way: str, kind: "str | None", message: "str | None") -> None:
    run(way.split(","), here, worker.environ)
    assert worker.error_file.exists() == (kind is not None)
    if kind is not None:
        ours = worker.error["elastic_ext"]
        assert ours["type"] == kind
        assert message in (None, ours["message"])


@pytest.mark.seam
def test_the_error_file_is_bounded(tmp_path: Path, worker: Worker) -> None:
    run_text(tmp_path, "def f(n):\n    if n: f(n - 1)\n    raise ValueError('a' * 10**6 + 'z' * 10**6)\nf(200)", worker.environ)
    message, ours = worker.error["message"], worker.error["elastic_ext"]
    for text, limit in (
        (message["message"], 16 * 1024),
        (ours["message"], 16 * 1024),
        (message["extraInfo"]["py_callstack"], 128 * 1024),
    ):
        assert limit * 0.9 < len(text) <= limit
        assert text.rstrip().endswith("zzz")
    assert ours["frames"] == ["script.py:4 in <module>"] + ["script.py:2 in f"] * 62 + ["script.py:3 in f"]


LATE = """
import {module}
def late():
    print("late")
    input()
{begin}
raise ValueError("x")
"""
THREAD_BEGINS = "threading.Thread(target=lambda: [threading.main_thread().join(), late()]).start()"


@pytest.mark.seam
@pytest.mark.parametrize(("module", "begin"), [("atexit", "atexit.register(late)"), ("threading", THREAD_BEGINS)])
def test_the_error_file_precedes_the_processs_end(tmp_path: Path, worker: Worker, module: str, begin: str) -> None:
    (tmp_path / "script.py").write_text(LATE.format(module=module, begin=begin))
    with start(["script.py"], tmp_path, worker.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "late\n"
        assert worker.error["elastic_ext"]["message"] == "x"
        assert process.poll() is None
        process.communicate("go on\n", timeout=DEADLINE_S)
    assert process.returncode == 1


@pytest.mark.full
def test_record_was_first(tmp_path: Path, worker: Worker) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main(): raise KeyError('lr')\nmain()"
    )
    assert run_text(tmp_path, script, worker.environ)[0] == 1
    assert worker.error["message"]["message"] == "KeyError: 'lr'"
    assert "wrapper" in worker.error["message"]["extraInfo"]["py_callstack"]
    assert worker.error["elastic_ext"]["type"] == "KeyError"
    assert worker.error["elastic_ext"]["frames"][-1] == "script.py:3 in main"


@pytest.mark.seam
@pytest.mark.parametrize("present", ['{"message": {"mess', "[1]"])
def test_a_bad_error_file_stays_with_traceback_printed(tmp_path: Path, present: str) -> None:
    worker = Worker(tmp_path, quiet_traceback=True)
    worker.error_file.write_text(present)
    assert "KeyError" in run_text(tmp_path, FAILS, worker.environ)[2]
    assert worker.error_file.read_text() == present


FULL_DISK = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"


@pytest.mark.seam
@pytest.mark.parametrize(("path", "before"), [("missing/error.json", ""), (".", ""), ("error.json", FULL_DISK)])
def test_an_unwritable_error_file_costs_one_line(tmp_path: Path, path: str, before: str) -> None:
    worker = Worker(tmp_path, quiet_traceback=True)
    code, _, err = run_text(tmp_path, before + FAILS, {**worker.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / path)})
    warning, _, rest = err.partition("\n")
    assert code == 1
    assert warning.startswith("elastic_ext: cannot write the error file ")
    assert rest.startswith("Traceback")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress", "script.py", "stacks"]


# ---- quiet_traceback


@pytest.mark.seam
def test_a_quiet_worker_leaves_errors_to_the_agent(tmp_path: Path) -> None:
    worker = Worker(tmp_path, quiet_traceback=True)
    assert run_text(tmp_path, FAILS, worker.environ) == (1, "", "")
    assert run_text(tmp_path, "raise KeyboardInterrupt", worker.environ) == (-signal.SIGINT, "", "")
    assert run_text(tmp_path, "import sys\nsys.exit('bye')", worker.environ) == (1, "", "bye\n")
    assert "KeyError" in run_text(tmp_path, FAILS, {**worker.environ, "TORCHELASTIC_ERROR_FILE": ""})[2]


@pytest.mark.seam
def test_a_scripts_hook_is_called_when_quiet(here: Path, tmp_path: Path) -> None:
    worker = Worker(tmp_path, quiet_traceback=True)
    for script in ("hook.py", "hook_raises.py"):
        assert run([script], here, worker.environ) == run([script], here, {}, flags=())


GROUP = """
import sys
import torch.distributed as dist
{before}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise ValueError("x")
"""


@pytest.mark.full
def test_torchs_hook_is_no_hook_of_scripts(tmp_path: Path) -> None:
    worker = Worker(tmp_path, quiet_traceback=True)
    assert "[rank0]: ValueError" in run_text(tmp_path, GROUP.format(before=""), {})[2]
    code, _, err = run_text(tmp_path, GROUP.format(before=""), worker.environ)
    assert (code, "ValueError" in err) == (1, False)
    assert (
        "HOOK x"
        in run_text(tmp_path, GROUP.format(before="sys.excepthook = lambda t, e, tb: print('HOOK', e)"), worker.environ)[1]
    )


# ---- progress and stacks

STEPS = """
import os, sys
finders = len(sys.meta_path)
import torch
assert len(sys.meta_path) <= finders and not any("StepCounter" in repr(finder) for finder in sys.meta_path)
layer = torch.nn.Linear(2, 2)
one, two = (torch.optim.SGD([parameter], lr=0.1) for parameter in layer.parameters())
def train(steps):
    for _ in range(steps):
        layer(torch.ones(1, 2)).sum().backward()
        one.step(); two.step()
if len(sys.argv) > 1:
    train(3)
    child = os.fork()
    if child == 0:
        one.step()
        os._exit(0)
    os.waitpid(child, 0)
raise torch.OutOfMemoryError("x")
"""


@pytest.mark.seam
@pytest.mark.full("False")
@pytest.mark.parametrize("train", [False, True])
def test_optimizer_steps_are_counted(tmp_path: Path, worker: Worker, train: bool) -> None:
    (tmp_path / "script.py").write_text(STEPS)
    before = time.monotonic_ns()
    with start(["script.py", *["train"] * train], tmp_path, worker.environ) as process:
        err = process.communicate(timeout=DEADLINE_S)[1]
    assert err.splitlines()[-1] == "torch.OutOfMemoryError: x"
    pid, steps, last_ns, first_ns, *rest = worker.row()
    assert (pid, steps, rest[:2]) == (process.pid, 6 if train else 0, [1, 1])
    assert rest[2:10] == [*[0] * 6, 1, 1]  # nothing has been saved; exit code 1, all exit handlers done
    assert (before < first_ns < last_ns < time.monotonic_ns()) if train else (first_ns, last_ns) == (0, 0)
    assert worker.row(0) == worker.row(2) == [2**64 - 1] * progress_layout.AGENT_FIELDS
    assert worker.error["elastic_ext"]["type"] == "torch.OutOfMemoryError"
    assert worker.error["elastic_ext"]["first_step_done"] is train


SAVED_STATES = """
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
model = torch.nn.Linear(2, 2)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
late = torch.optim.Adam(model.parameters())
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    plain.step(lambda: None)
    model.zero_grad()
    get_state_dict(model, [plain, late])
"""


@pytest.mark.seam
@once
def test_a_saves_own_steps_are_not_counted(tmp_path: Path, worker: Worker) -> None:
    """Torch steps an optimizer without state as it saves: plain SGD each time, another the first time."""
    code, _, err = run_text(tmp_path, SAVED_STATES, worker.environ)
    assert (code, worker.row()[progress_layout.STEPS]) == (0, 3), err


SAVES = """
import os, torch
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.AdamW([weight])
train = torch.compile(optimizer.step, backend="eager")
optimizer.step()
torch.save(weight, "saves/a")
train(); train()
"""


@pytest.mark.seam
def test_saves_are_recorded_whoever_started_the_worker(tmp_path: Path) -> None:
    """In a standby, the message comes late; torch.compile must not trace the hook."""
    worker = Worker(tmp_path, journal=str(tmp_path / "journal"), saves_below=[str(tmp_path / "saves")])
    (tmp_path / "saves").mkdir()
    code, _, err = run_text(tmp_path, SAVES, worker.environ)
    (journal,) = tmp_path.glob("journal.*")
    lines = [line.split("\t")[:2] + line.split("\t")[4:] for line in journal.read_text().splitlines()[1:]]
    assert (code, lines[:3]) == (0, [["w", "1", "0", "a"], ["s", "2", "1"], ["x", "3"]]), err


HANDLERS = """
import json, os, signal, sys, torch
from transformers.trainer_jit_checkpoint import CheckpointManager
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.1)
message = json.loads(os.environ["ELASTIC_EXT_WORKER"])
def reported():
    optimizer.step()
    with open(message["progress"], "rb") as file:
        return memoryview(file.read()).cast("Q")[int(sys.argv[1])]
class Another(CheckpointManager):
    def _sigterm_handler(self, signum, frame):
        super()._sigterm_handler(signum, frame)
    def __call__(self, *args):
        self._sigterm_handler(*args)
found = [reported()]
theirs, other = CheckpointManager(None), Another(None)
theirs.setup_signal_handler()
found.append(reported())
for handler in (lambda *args: theirs._sigterm_handler(*args), other._sigterm_handler, other, signal.SIG_IGN, signal.SIG_DFL):
    signal.signal(signal.SIGTERM, handler)
    found.append(reported())
theirs.setup_signal_handler()
print(*found, reported())
"""


@pytest.mark.seam("cold")
@pytest.mark.full
def test_the_agent_knows_of_transformers_own_handler(tmp_path: Path, worker: Worker) -> None:
    """At each step, and only while it is installed itself: one that calls it may do more."""
    pytest.importorskip("transformers", "5.0")
    (tmp_path / "script.py").write_text(HANDLERS)
    at = FIELDS + progress_layout.JIT_SAVES
    code, out, err = run(["script.py", str(at)], tmp_path, worker.environ)
    assert (code, out.split()) == (0, ["0", "1", "0", "0", "0", "0", "0", "1"]), err
    assert worker.row()[progress_layout.JIT_SAVES] == 0  # the script is over: what is left to do gets its time


NO_MORE_THREADS = """
import threading, torch
def start(self): raise RuntimeError("can't start new thread")
threading.Thread.start = start
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight], lr=0.1).step()
print("stepped")
"""


@pytest.mark.full
def test_an_unreadable_recorder_fails_no_step(tmp_path: Path, worker: Worker) -> None:
    code, out, err = run_text(tmp_path, NO_MORE_THREADS, worker.environ)
    assert (code, out) == (0, "stepped\n"), err
    assert "flight recorder is not read: can't start new thread" in err
    assert worker.row()[progress_layout.STEPS] == 1


READS_AS_IT_ENDS = """
import atexit, threading, time, torch
weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
torch.optim.SGD([weight], lr=0.1).step()
begun, ending = threading.Event(), threading.Event()
def read():
    begun.set()
    ending.wait()
    time.sleep(0.2)  # like C++ code that takes the GIL again as it returns
    print("read", flush=True)
    return {}
watch = next(each for each in threading.enumerate() if each.name == "elastic_ext flight recorder")
watch.run.__globals__["read"] = read
watch._publish.__globals__["RECORDER_END_S"] = 600.0
watch.wake.set()
begun.wait()
atexit.register(ending.set)
"""


@pytest.mark.full
def test_an_ending_interpreter_does_not_read_the_recorder(tmp_path: Path, worker: Worker) -> None:
    """Torch's C++ code, which it would return from, aborts the process then: a worker that had done all its work failed."""
    assert run_text(tmp_path, READS_AS_IT_ENDS, worker.environ) == (0, "read\n", "")


COMPILED_STEPS = """
import torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
@torch.compile(backend="eager")
def train():
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
for _ in range(3):
    train()
"""


@pytest.mark.full
def test_compiled_optimizer_steps_are_counted(tmp_path: Path, worker: Worker) -> None:
    (tmp_path / "script.py").write_text(COMPILED_STEPS)
    with start(["script.py"], tmp_path, worker.environ) as process:
        err = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 0, err
    assert worker.row()[progress_layout.STEPS] == 3
    assert "bootstrap" not in err  # torch.compile does not warn of what it finds in there


STUCK = """
import sys, threading
def stuck_thread(): threading.Event().wait()
threading.Thread(target=stuck_thread, daemon=True).start()
def stuck_main():
    print("stuck")
    {stuck}
stuck_main()
"""


@pytest.mark.seam
@pytest.mark.parametrize("stuck", ["threading.Event().wait()", "while True: pass"], ids=["lock", "busy"])
def test_stacks_are_dumped_on_the_signal(tmp_path: Path, stuck: str) -> None:
    worker = Worker(tmp_path)
    os.mkfifo(worker.stacks)  # so that the dump is an event for this process
    stacks = os.open(worker.stacks, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "script.py").write_text(STUCK.format(stuck=stuck))
    with start(["script.py"], tmp_path, worker.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        began = worker.row()[progress_layout.BEGAN_NS]
        unused = [0] * (progress_layout.BEGAN_NS - progress_layout.ANSWERS - 1)
        told = [began, began, *[0] * (progress_layout.AGENT_FIELDS - progress_layout.SPENT)]
        assert 0 < began < time.monotonic_ns()
        assert worker.row() == [process.pid, 0, 0, 0, 0, 1, *[0] * (progress_layout.ANSWERS - 6), 1, *unused, *told]
        process.send_signal(STACKS_SIGNAL)
        dump = b""
        while b"in run_as_main" not in dump:  # the outermost frames come last
            assert select.select([stacks], [], [], DEADLINE_S)[0], dump
            dump += os.read(stacks, 65536)
        assert process.poll() is None
    os.close(stacks)
    assert b"in stuck_thread" in dump
    assert b"in stuck_main" in dump


@pytest.mark.full
def test_dumps_are_appended_to_the_stacks_file(tmp_path: Path, worker: Worker) -> None:
    worker.stacks.write_text("before\n")
    script = f"import os\nfor _ in range(2): os.kill(os.getpid(), {int(STACKS_SIGNAL)})"
    assert run_text(tmp_path, script, worker.environ)[0] == 0
    text = worker.stacks.read_text()
    assert text.startswith("before\n")
    assert text.count('script.py", line 2 in <module>') == 2


_LEFT = """
import sys, threading, time
from elastic_ext.training import progress
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True)
other = TCPStore("127.0.0.1", store.port, is_master=False)

class Late:
    def __del__(self, set=store.set, sleep=time.sleep):
        set("the other ranks", "end")
        sleep(5)

late = Late()
threading.Thread(target=other.get, args=["the other ranks"], name=progress.MEMORY_THREAD + "end", daemon=True).start()
print("done", end="")
sys.exit(3)
"""


@pytest.mark.full
def test_a_waiting_thread_aborts_no_ending_worker(tmp_path: Path) -> None:
    """It would, once they end, too: it returns from torch's C++ code while the interpreter ends."""
    code, out, err = run_text(tmp_path, _LEFT, {"PYTHONPATH": ROOT})
    assert (code, out) == (3, "done"), err
