"""Warm standbys in real jobs: what comes back warm, what is started cold and why, and that nothing is left."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent import launch
from elastic_ext.base.settings import Settings
from elastic_ext.features.hangs import flight_recorder
from elastic_ext.workers import limits, processes
from elastic_ext.workers.standby import client, import_checks, rules
from elastic_ext.workers.standby.client import ServerProcess
from elastic_ext.workers.standby.modules import PreloadedModules, StandbySpec
from elastic_ext.workers.standby.rules import ColdReason, Learned
from tests import jobs
from tests.embedded_server import EmbeddedServer
from tests.failures.test_sources import memory_group
from tests.jobs import PATIENT_AGENT as AGENT
from tests.jobs import SCRIPTS, Finished, Gate, Job, children, command_of, open_files, wait_gone
from tests.ports import free_port
from tests.until import LIMIT_S, until

JOB = SCRIPTS / "standby_job.py"
VERBOSE = {"LOGLEVEL": "INFO", "ELASTIC_EXT_BACKOFF": "0"}
FREE = '[[rule]]\nname = "free"\nsignal = "SIGKILL"\nkind = "preemption"\ndecision = "restart_free"\n'
RESTARTS = int(os.environ.get("ELASTIC_EXT_TEST_RESTARTS", "6"))  # 200 for the long form


@pytest.fixture(autouse=True)
def standbys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.DEFAULTS, "ELASTIC_EXT_STANDBY", "on")


def reports(text: str) -> "list[dict]":
    return [json.loads(line) for line in re.findall(r"^up (\{.*\})$", text, re.MULTILINE)]


def of_attempt(text: str, attempt: int) -> "list[dict]":
    return [each for each in reports(text) if each["attempt"] == attempt]


def up(attempt: int) -> str:
    return rf'(?m)^up \{{"attempt": {attempt},'


def ready(workers: int, times: int = 1) -> "tuple[str, int]":
    """What the agent logs each time that so many standbys wait."""
    return f"{workers} warm standbys wait", times


# ---- warm


@pytest.mark.full
def test_a_node_joins_once_its_workers_are_warm(tmp_path):
    """Until then the others train on."""
    with EmbeddedServer() as store:
        where = [*store.options, f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job", "--nnodes=1:2", "--nproc-per-node=1"]
        command = [*AGENT, *where, str(JOB), "plain", "1"]
        with Job(command, tmp_path, **VERBOSE) as first:
            first.wait_for(up(0))
            with Job(command, tmp_path, **VERBOSE) as second:
                assert [job.finish().returncode for job in (first, second)] == [0, 0], first.err + second.err
                assert [each["warm"] for each in of_attempt(second.out, 1)] == [True]


FAILS_AT_START = """
import json, os, signal
import torch
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt > 1 or (attempt == 1 and os.environ["ELASTIC_EXT_NODE_NAME"] == "a"):
    undefined_name
print("up", json.dumps({"attempt": attempt, "pid": os.getpid()}), flush=True)
signal.pause()
"""


@pytest.mark.seam
def test_a_cold_start_is_one_of_all_nodes(tmp_path):
    """Else the other node's warm worker fails first, and is tried cold in its turn: a bug would restart without end."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS_AT_START)
    with EmbeddedServer() as store, ExitStack() as stack:
        where = [*store.options, f"--rdzv-endpoint={store.endpoint}", "--rdzv-id=job", "--nnodes=2", "--nproc-per-node=1"]
        command = [*AGENT, *where, "--max-restarts=9", str(script)]
        both = [stack.enter_context(Job(command, tmp_path, ELASTIC_EXT_NODE_NAME=name, **VERBOSE)) for name in "ab"]
        for job in both:
            job.wait_for(*ready(1))
        os.kill(of_attempt(both[0].out, 0)[0]["pid"], signal.SIGKILL)
        assert [job.finish().returncode for job in both] == [65, 65]
    assert ["without a warm standby: the last round failed before its first step" in job.err for job in both] == [True, True]
    assert not any("restart 3 of 9" in job.err for job in both)


@pytest.mark.seam
@pytest.mark.full("ddp-fsdp")
@pytest.mark.parametrize("kinds", ["plain", "ddp-fsdp"])
def test_a_killed_worker_comes_back_by_a_standby(tmp_path, kinds):
    """And nothing survives the end of the job."""
    with Job([*AGENT, "--nproc-per-node=2", "--max-restarts=2", str(JOB), kinds, "1"], tmp_path, **VERBOSE) as job:
        job.wait_for(up(0), 2)
        # Twice: what the workers have imported is there too.
        job.wait_for(r"(?s)warm standbys are ready.*warm standbys are ready.*2 warm standbys wait")
        pids = children(job.process.pid)
        os.kill(of_attempt(job.out, 0)[-1]["pid"], signal.SIGKILL)
        done = job.finish()
        assert wait_gone(pids) == []
    assert done.returncode == 0, done.all
    assert [each["warm"] for each in of_attempt(done.out, 1)] == [True, True], done.all


@pytest.fixture
def numactl(tmp_path, monkeypatch):
    """The real one; where it is not installed, a few lines that make the same system call."""
    pytest.importorskip("torch.numa.binding", reason="torch binds to processors since 2.9")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor: nothing can be bound to another one")
    if shutil.which("numactl") is None:
        stand_in = tmp_path / "bin" / "numactl"
        stand_in.parent.mkdir()
        bound = "{int(each) for each in sys.argv[1].removeprefix('--physcpubind=').split(',')}"
        run_it = f"import os, sys\nos.sched_setaffinity(0, {bound})\nos.execvp(sys.argv[2], sys.argv[2:])\n"
        stand_in.write_text(f"#!{sys.executable} -I\n{run_it}")
        stand_in.chmod(0o755)
        monkeypatch.setenv("PATH", str(stand_in.parent), prepend=os.pathsep)


@pytest.mark.seam
def test_a_standby_looks_like_a_new_process(tmp_path):
    assert_alike(tmp_path, jobs.AGENT)  # which lowers the priority of the server


@pytest.mark.full
def test_a_standby_is_bound_as_numactl_does(tmp_path, numactl):
    agent = [sys.executable, str(SCRIPTS / "agent_with_gpus.py"), "--numa-binding=exclusive"]
    used = [each["state"]["priority"][2] for each in assert_alike(tmp_path, agent)]
    assert len(used) == 2
    assert used[0]
    assert used[1]
    assert not set(used[0]) & set(used[1])


OF_A_JOB = frozenset({
    *("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHINDUCTOR_CACHE_DIR", "ELASTIC_EXT_WORKER"),
    *("ELASTIC_EXT_LAUNCH", "ELASTIC_EXT_STANDBY", flight_recorder.PIPE_FILE, *flight_recorder.DUMP_FILES),
})  # fmt: skip
"""Variables whose values no two jobs have in common."""


def comparable(state: "dict") -> "dict":
    """Return what a worker sees of its process (standby_state.py) without what is of its job."""
    return {
        part: {name: value for name, value in found.items() if name not in OF_A_JOB} if part in ("env", "shown") else found
        for part, found in state.items()
    }


def test_what_nccl_builds_add_belongs_to_the_job(tmp_path):
    added = [flight_recorder.FlightRecorder(str(tmp_path / job), {}) for job in ("on", "off")]
    assert len(added[0].variables) == 3
    assert added[0].variables.keys() <= import_checks.PER_WORKER
    on, off = (comparable({"env": {"A": "b", **each.variables}, "shown": each.variables}) for each in added)
    assert on == off == {"env": {"A": "b"}, "shown": {}}
    for each in added:
        each.close()


def assert_alike(tmp_path: Path, agent: "list[str]") -> "list[dict]":
    """What two workers see that were started by standbys, which is what they see when they were not."""
    found = {}
    for setting in ("on", "off"):
        gate = Gate(tmp_path / "gate")
        command = [*agent, "--nproc-per-node=2", "--max-restarts=2", str(SCRIPTS / "standby_state.py"), "a", "--b"]
        with Job(command, tmp_path, ELASTIC_EXT_STANDBY=setting, **VERBOSE) as job:
            job.wait_for('(?m)^state .*"attempt": 0', 2)
            if setting == "on":
                job.wait_for(*ready(2))
            gate.open()
            done = job.finish()
        assert done.returncode == 0, done.all
        told = [json.loads(line) for line in re.findall(r"^state (\{.*\})$", done.out, re.MULTILINE)]
        found[setting] = sorted((each for each in told if each["attempt"] == 1), key=lambda each: each["state"]["env"]["RANK"])
    for warm, cold in zip(found["on"], found["off"], strict=True):
        assert (warm["many"], cold["many"]) == (True, False)
        one, other = comparable(warm["state"]), comparable(cold["state"])
        for part in other:
            assert one[part] == other[part], part
    for one, other in zip(found["on"][0]["chance"], found["on"][1]["chance"], strict=True):
        assert one != other
    return found["on"]


# ---- cold, and why

HIDES = "beside the script would shadow a module that the standby server has imported"


@pytest.mark.parametrize(
    ("entrypoint", "settings", "why"),
    [
        (sys.executable, Settings(standby=False), "off"),
        ("true", Settings(), "not a Python program"),
        (sys.executable, Settings(), None),
    ],
)
def test_settings_and_programs_without_standbys(entrypoint, settings, why):
    prepared = launch.prepare(WorkerSpec("", 2, rdzv_handler=None, entrypoint=entrypoint, args=("-u", str(JOB))), settings)
    assert launch.standby_spec(prepared, settings, "token") == why or why is None


def make(folder: Path, body: str) -> Path:
    script = folder / "script.py"
    script.write_text(body)
    return script


WAITS = """
import sys
warm = "ctypes" in sys.modules
import fcntl, os
{begin}
print("warm", warm, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open("gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
    os._exit(9)
"""


def gated(folder: Path, script: Path, first: str, until: str, **variables: str) -> Finished:
    """A job of one worker, run to its good end; its gate opens once it has said `first`, and the agent `until`."""
    gate = Gate(folder / "gate")
    with Job([*AGENT, "--nproc-per-node=1", "--max-restarts=1", str(script)], folder, **{**VERBOSE, **variables}) as job:
        job.wait_for(first)
        job.wait_for(until)
        gate.open()
        done = job.finish()
    assert done.returncode == 0, done.all
    return done


def restarted(
    tmp_path: Path, until: str, begin: str = "", script: "Path | None" = None, **variables: str
) -> "tuple[str, str, str]":
    """A job whose only worker fails once the agent has said `until`: "True" if its second start was warm, and its output.

    Its standbys do not import torch, which takes its time, unless the variables say so.
    """
    variables = {"ELASTIC_EXT_PRELOAD_EXCLUDE": "torch", **variables}
    done = gated(tmp_path, script or make(tmp_path, WAITS.format(begin=begin)), r"warm \w+ 0", until, **variables)
    (warm,) = re.findall(r"warm (\w+) 1", done.out)
    return warm, done.out, done.err


@pytest.mark.full
def test_a_module_beside_the_script_hides_another(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "shelve.py").write_text("")  # nobody imports it
    (folder / "ctypes.py").write_text("")
    warm, _, said = restarted(tmp_path, "warm standbys are ready", script=make(folder, WAITS.format(begin="")))
    assert warm == "False"
    assert said.count(f"workers are started without a warm standby: ctypes.py {HIDES}") == 1


def test_a_variable_set_before_importing_torch(tmp_path):
    script = make(tmp_path, 'import os\nos.environ["TORCH_LOGS"] = "+dynamo"\nimport torch')
    modules = PreloadedModules(StandbySpec(("python",), "bootstrap", (str(script),), 1, (), dict, "token"), str(tmp_path))
    ready = {"unsafe": {}, "absent": {}, "threads": 1, "read": {"torch": ["TORCH_LOGS"]}, "changed": []}
    assert modules.check(ready).hopeless == "torch: it reads TORCH_LOGS when it is imported, which the script sets later"
    assert modules.check({**ready, "changed": ["TORCH_LOGS"]}).hopeless is None


@pytest.mark.full
def test_a_variable_that_a_script_module_sets(tmp_path):
    """The text of the script does not tell; the worker does, at its end."""
    (tmp_path / "sets.py").write_text('import os\nos.environ["OMP_PLACES"] = "cores"')
    gate = Gate(tmp_path / "gate")
    body = WAITS.format(begin="import sets").replace("os._exit(9)", "sys.exit(9)")
    body += '\nwith open("second") as second: fcntl.flock(second, fcntl.LOCK_SH)'
    second = Gate(tmp_path / "second")
    command = [*AGENT, "--nproc-per-node=1", "--max-restarts=1", str(make(tmp_path, body))]
    with Job(command, tmp_path, ELASTIC_EXT_PRELOAD_EXCLUDE="torch", **VERBOSE) as job:
        job.wait_for(r"warm \w+ 0")
        job.wait_for("1 warm standbys wait")
        gate.open()
        job.wait_for("without a warm standby: a library: it reads OMP_PLACES when it is imported, which the script sets later")
        second.open()
        assert job.finish().returncode == 0


IMPORTS = {  # modules, and why they are unsafe
    "import os, queue\nlevel = os.environ.get('MY_LEVEL')": None,
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()": "it starts a thread when",
    "import os\nrank = int(os.environ.get('LOCAL_RANK', 0))": "it reads LOCAL_RANK when",
    "import socket\nlistening = socket.socket()": "it opens socket:.* which workers would share",
    "files = [open(each) for each in ('/proc/self/stat', '/dev/full')]": "it opens /dev/full when",
    "import subprocess\nchild = subprocess.Popen(['sleep', '100'])": "it starts a process when",
    "import os\nos.chdir('/')": "it changes the current directory when",
    "import sys\nsys.path.insert(0, '/nowhere')": "it changes sys.path when",
    "import os\nkept = dict(os.environ)": "looked_at reads all variables when",
    "import os\nkept = {key.lower(): value for key, value in os.environb.items()}": "looked_at reads all variables when",
    "import random\nrandom.seed(1)": "it seeds random when",
    "import tempfile\nkept = tempfile.TemporaryDirectory()": "it makes a temporary file or directory when",
    # as torch 2.8 does
    "import sys, tempfile, types\nmade = sys.modules['torch.distributed.nn.jit.instantiator'] = types.ModuleType('made')\n"
    "made.kept = tempfile.TemporaryDirectory()\nmade.INSTANTIATED_TEMPLATE_DIR_PATH = made.kept.name\n"
    "sys.path.append(made.kept.name)": None,
    "from multiprocessing import get_context\nlock = get_context('fork').Lock()": "it maps .* a lock or memory that workers",
    # the default since Python 3.14; it starts a process that looks after the lock
    "from multiprocessing import get_context\nlock = get_context('forkserver').Lock()": "it opens pipe:.* which workers would",
}
CHECKS = """
import json, os, signal, sys
from elastic_ext.workers.standby import import_checks
import_checks.DEVICES = ("/dev/full",)
for code in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.setpgid(0, 0)
        checks = import_checks.ImportChecks()
        checks.begin()
        checks.before()
        module = {"__name__": "looked_at"}
        exec(code, module)
        print(json.dumps([checks.why_unsafe("looked_at"), sorted(checks.read["looked_at"])]), flush=True)
        os.killpg(0, signal.SIGKILL)
    os.wait()
"""


@pytest.mark.full
def test_modules_that_cannot_be_imported_before():
    command = [sys.executable, "-c", CHECKS, json.dumps(list(IMPORTS))]
    done = subprocess.run(command, cwd=jobs.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (code, expected), (why, _) in zip(IMPORTS.items(), found, strict=True):
        assert why is None if expected is None else re.search(expected, why or ""), (code, why)
    assert [read for _, read in found][:3] == [["MY_LEVEL"], [], ["LOCAL_RANK"]]


LEARNS = """
import sys
warm = "ctypes" in sys.modules
import fcntl, os
{begin}
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("warm", warm, attempt, flush=True)
if attempt == "1":
    with open("gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
if attempt != "2":
    sys.exit(9)
"""
FREE_EXIT = FREE.replace('signal = "SIGKILL"', "exit_code = 9")


def learned(tmp_path: Path, until: str, begin: str, **variables: str) -> "tuple[str, str, str]":
    """A worker that fails twice: what the first has imported is learned, and `until` waited for before the third starts.

    "True" if the third was warm, what all printed, and what was logged. What counts as installed is in tmp_path / "lib".
    """
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "rules.toml").write_text(FREE_EXIT)
    given = {"ELASTIC_EXT_RULES": "rules.toml", "PYTHONPATH": str(tmp_path / "lib"), **variables}
    done = gated(folder, make(folder, LEARNS.format(begin=begin)), r"warm \w+ 1", until, **given)
    (warm,) = re.findall(r"warm (\w+) 2", done.out)
    return warm, done.out, done.err


@pytest.fixture
def lib(tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    return folder


READY_TWICE = "(?s)standbys are ready.*standbys are ready.*1 warm standbys wait"


@pytest.mark.full
def test_a_preimported_module_sees_the_command_line(tmp_path, lib):
    (lib / "looks.py").write_text("import random, sys, __main__\nfound = sys.argv[:], __main__.__file__, random.random()")
    begin = "print('looks', 'looks' in sys.modules)\nimport looks\nassert looks.found[:2] == (sys.argv, __file__), looks.found"
    warm, out, said = learned(tmp_path, READY_TWICE, begin, ELASTIC_EXT_PRELOAD_EXCLUDE="torch")
    assert (warm, out.count("looks True")) == ("True", 1)
    assert "looks is not preloaded" not in said


@pytest.mark.full
def test_what_is_excluded_is_not_imported(tmp_path, lib):
    for name, text in {"brings": "import banned", "banned": "", "plain": ""}.items():
        (lib / f"{name}.py").write_text(text)
    begin = "print('plain' in sys.modules, 'banned' in sys.modules)\nimport brings, plain"
    warm, out, said = learned(tmp_path, READY_TWICE, begin, ELASTIC_EXT_PRELOAD_EXCLUDE="torch banned")
    assert warm == "True"
    assert "True False" in out
    assert "brings is not preloaded: it imports banned, which must not be imported" in said


@pytest.mark.full
def test_a_module_that_the_script_takes_from_elsewhere(tmp_path, lib):
    """As where a package is installed, and the repository is put first on sys.path."""
    (lib / "packed.py").write_text("version = 'installed'")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "packed.py").write_text("version = 'repository'")
    begin = f"sys.path.insert(0, {str(tmp_path / 'source')!r})\nimport packed\nprint(packed.version)"
    warm, out, said = learned(tmp_path, READY_TWICE, begin, ELASTIC_EXT_PRELOAD_EXCLUDE="torch")
    assert warm == "True"
    assert (out.count("repository"), out.count("installed")) == (3, 0)
    assert "packed is not preloaded: workers import it from" in said


@pytest.mark.full
def test_a_package_reading_its_rank_is_left_out(tmp_path, lib):
    """As Lightning does. Each of its parts brings in all of it: to leave them out one by one would take as many servers."""
    (lib / "wide").mkdir()
    parts = [f"part{number}" for number in range(12)]
    for part in parts:
        (lib / "wide" / f"{part}.py").write_text("")
    (lib / "wide" / "__init__.py").write_text(f"import os\nrank = os.environ['LOCAL_RANK']\nfrom . import {', '.join(parts)}\n")
    (lib / "plain.py").write_text("")
    begin = "print('plain' in sys.modules, 'wide' in sys.modules)\nimport plain, wide"
    warm, out, said = learned(tmp_path, READY_TWICE, begin, ELASTIC_EXT_PRELOAD_EXCLUDE="torch")
    assert warm == "True"
    assert "True False" in out
    assert "wide is not preloaded: it reads LOCAL_RANK" in said


@pytest.mark.full
def test_a_module_before_torch_raises_no_metric(tmp_path, lib):
    """The workers start cold. The metrics are for everybody; the log shows what a module says but for secret values."""
    planted = "hunter2-planted"
    says = "f\"no database at db://me:{os.environ['DB_PASSWORD']}@host {os.environ['DB_PASSWORD']}\""
    (lib / "first.py").write_text(f"import os, sys\nif 'torch' in sys.modules: print({says}); raise ImportError({says})")
    port = free_port()
    scrape = f"print(urllib.request.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    begin = f"if {CALLED} != '1': import first\nimport torch, urllib.request\nif {CALLED} == '2': {scrape}"
    until = "first, which the workers import, cannot be imported after torch: ImportError: no database at"
    warm, out, said = learned(tmp_path, until, begin, DB_PASSWORD=planted, ELASTIC_EXT_METRICS_PORT=str(port))
    assert warm == "False"
    assert said.count(f"without a warm standby: {until}") == 1
    assert planted not in out + said
    reasons = dict(re.findall('elastic_ext_worker_starts_total.*how="cold",reason="([^"]*)"} ([0-9]+)', out))
    assert int(reasons["unsafe_import"]) > 0
    assert reasons.keys() == {each.value for each in ColdReason}


CALLED = "os.environ['TORCHELASTIC_RESTART_COUNT']"


@pytest.mark.full
def test_a_standbys_own_failure_is_retried_once_without(tmp_path):
    """Whatever the reason: a wrong end of the job is worse than a slow start."""
    (tmp_path / "rules.toml").write_text(FREE_EXIT)
    script = make(tmp_path, "import sys\nif 'torch' in sys.modules: raise KeyError('after torch')\n" + WAITS.format(begin=""))
    done = gated(tmp_path, script, r"warm \w+ 0", "1 warm standbys wait", ELASTIC_EXT_RULES="rules.toml")
    assert re.findall(r"warm (\w+) (\d)", done.out) == [("False", "0"), ("False", "2")]
    assert "but its process was a warm standby: one cold start is tried" in done.err
    assert done.err.count("without a warm standby: the last round failed before its first step") == 1


@pytest.mark.full
def test_an_interpreter_that_reads_variables_before_anything_else(tmp_path, lib):
    (lib / "sitecustomize.py").write_text(
        "import os\nif 'LOCAL_RANK' in os.environ: os.environ['PINNED'] = os.environ['LOCAL_RANK']"
    )
    begin = "assert os.environ['PINNED'] == os.environ['LOCAL_RANK']"
    warm, _, said = restarted(tmp_path, "sitecustomize.py reads variables in each process", begin, PYTHONPATH=str(lib))
    assert warm == "False"
    assert said.count("workers are started without a warm standby: a library: ") == 1


@pytest.mark.full
def test_a_silent_standby_is_not_taken(tmp_path):
    gate = Gate(tmp_path / "gate")
    script = make(tmp_path, WAITS.format(begin=""))
    command = [*AGENT, "--nproc-per-node=1", "--max-restarts=1", str(script)]
    with Job(command, tmp_path, ELASTIC_EXT_PRELOAD_EXCLUDE="torch", **VERBOSE) as job:
        job.wait_for(r"warm \w+ 0")
        job.wait_for("1 warm standbys wait")
        (standby,) = waiting_standbys(job.process.pid, 1)
        os.kill(standby, signal.SIGSTOP)
        until(lambda: processes.state(standby) == "T")
        gate.open()
        done = job.finish()
        assert wait_gone([standby]) == []
    assert done.returncode == 0, done.all
    assert "warm False 1" in done.out
    assert f"cannot release a standby (pid {standby})" in done.err


@pytest.mark.full
def test_standbys_give_their_memory_to_the_training(tmp_path, large_group):
    enter = f'echo $$ > {large_group}/cgroup.procs && exec "$@"'
    gate = Gate(tmp_path / "gate")
    script = make(tmp_path, WAITS.format(begin=""))
    command = ["sh", "-c", enter, "sh", *AGENT, "--nproc-per-node=1", "--max-restarts=1", str(script)]
    with Job(command, tmp_path, ELASTIC_EXT_PRELOAD_EXCLUDE="torch", **VERBOSE) as job:
        job.wait_for("1 warm standbys wait")
        (limit,) = [path for name in ("memory.max", "memory.limit_in_bytes") if (path := large_group / name).exists()]
        used = large_group / ("memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes")
        standbys = [pid for pid in children(job.process.pid) if "standby/server" in command_of(pid)]
        limit.write_text(str(int(used.read_text()) + (300 << 20)))
        job.wait_for(r"without a warm standby: \d+ MB of memory are free, but standbys need 512 MB")
        assert standbys
        assert wait_gone(standbys) == []
        gate.open()
        assert job.finish().returncode == 0


@pytest.fixture
def large_group():
    yield from memory_group(4 << 30)


# ---- nothing is left


@pytest.mark.seam
def test_nothing_survives_a_killed_agent(tmp_path):
    script = make(tmp_path, "import os, signal\nos.write(1, b'up\\n')\nsignal.pause()")
    with Job([*AGENT, "--nproc-per-node=2", str(script)], tmp_path, ELASTIC_EXT_PRELOAD_EXCLUDE="torch", **VERBOSE) as job:
        job.wait_for("(?m)^up$", 2)
        job.wait_for(*ready(2))
        # Workers, the server, standbys, the reaper, the relay. While some come and go the kernel may leave out others: proc(5).
        pids: set[int] = set()
        until(lambda: pids.update(children(job.process.pid)) or len(pids) >= 2 + 1 + 2 + 1 + 1)
        assert any("workers/relay.py" in command_of(pid) for pid in pids)
        job.process.kill()
        assert wait_gone(list(pids)) == []


@pytest.mark.full
def test_a_killed_server_or_standby_is_replaced(tmp_path):
    with Job([*AGENT, "--nproc-per-node=2", "--max-restarts=1", str(JOB), "plain", "1"], tmp_path, **VERBOSE) as job:
        job.wait_for(up(0), 2)
        job.wait_for(r"(?s)warm standbys are ready.*warm standbys are ready.*2 warm standbys wait")
        assert len(waiting_standbys(job.process.pid, 2)) == 2
        (server,) = [pid for pid in children(job.process.pid) if "standby/server" in command_of(pid) and children(pid) == []
                     and os.getsid(pid) == pid and not waits(pid)]  # fmt: skip
        seen = len(re.findall("2 warm standbys wait", job.err))
        os.kill(server, signal.SIGKILL)
        job.wait_for("2 warm standbys wait", seen + 1)
        standby = waiting_standbys(job.process.pid, 2)[0]
        os.kill(standby, signal.SIGKILL)
        job.wait_for("2 warm standbys wait", seen + 2)
        os.kill(of_attempt(job.out, 0)[0]["pid"], signal.SIGKILL)
        done = job.finish()
    assert done.returncode == 0, done.all
    assert [each["warm"] for each in of_attempt(done.out, 1)] == [True, True]


def waiting_standbys(agent: int, count: int) -> "list[int]":
    """Their pids, once there are `count`: a standby closes its server's control socket just after it has been reported."""
    return until(lambda: found if len(found := [pid for pid in children(agent) if waits(pid)]) >= count else [])


def waits(pid: int) -> bool:
    """Whether it is a standby: its server holds the control socket, a standby only the one it waits at."""
    command = command_of(pid)
    return "standby/server" in command and not os.path.exists(f"/proc/{pid}/fd/{command.split(chr(0))[-2]}")


@pytest.mark.full
@pytest.mark.timeout(120 + 30 * RESTARTS)
def test_many_warm_restarts_leave_nothing_behind(tmp_path):
    """200 with ELASTIC_EXT_TEST_RESTARTS=200."""
    (tmp_path / "rules.toml").write_text(FREE)
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=1", str(JOB), "plain", str(RESTARTS)]
    with Job(command, tmp_path, ELASTIC_EXT_RULES="rules.toml", **VERBOSE) as job:
        job.wait_for("(?s)standbys are ready.*standbys are ready.*2 warm standbys wait")  # from then on once a restart
        # A set: the agent holds both ends of the pipe.
        (run_dir,) = {Path(link).parent for link in open_files(job.process.pid) if link.endswith("/wake")}
        waited = len(re.findall("2 warm standbys wait", job.err))
        most: dict[str, int] = {}

        def no_more() -> bool:
            return all(count <= most[what] for what, count in used(job.process.pid, run_dir).items())

        for attempt in range(RESTARTS):
            job.wait_for(up(attempt), 2)
            job.wait_for("2 warm standbys wait", waited + attempt)
            if attempt < 2:
                most = settled(lambda: used(job.process.pid, run_dir))
            else:
                until(no_more, f"no more than {most}")  # some of it is open for a moment: a leak stays
            os.kill(of_attempt(job.out, attempt)[attempt % 2]["pid"], signal.SIGKILL)
        done = job.finish()
    assert done.returncode == 0, done.all
    assert all(each["warm"] for each in reports(done.out) if each["attempt"]), done.all
    assert not run_dir.exists()


def settled(look: "Callable[[], dict[str, int]]") -> "dict[str, int]":
    """What is seen 20 times in a row."""
    seen: list[dict[str, int]] = []
    until(lambda: seen.append(look()) or seen[-20:] == seen[-1:] * 20)
    return seen[-1]


def used(agent: int, run_dir: Path) -> "dict[str, int]":
    """Children, descriptors, threads, listening ports of the agent, and its files in shared memory."""
    links = open_files(agent)
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/{agent}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line for table in tables for line in table if line.split()[3] == "0A" and line.split()[9] in inodes]
    return {
        "children": len(children(agent)),
        "descriptors": len(links),
        "threads": len(os.listdir(f"/proc/{agent}/task")),
        "ports": len(listening),
        "files": sum(len(files) for _, _, files in os.walk(run_dir)),
    }


# ---- the parts


@pytest.mark.seam
def test_a_standby_ends_when_nobody_holds_its_socket(tmp_path, monkeypatch):
    nothing = tmp_path / "modules"
    nothing.write_text(json.dumps({"modules": [], "excluded": [], "script_dir": ".", "program": ["x"], "origins": {}}))
    monkeypatch.setattr(client, "PARK_S", LIMIT_S)
    server = ServerProcess([sys.executable, "-u"], dict(os.environ), str(tmp_path / "output"))
    server.preload(str(nothing))
    assert server.receive_ready() is not None
    one, other = server.park(2)
    server.end()
    assert one.alive
    one._waiting.shutdown(socket.SHUT_RDWR)
    assert wait_gone([one.pid]) == []
    one.end()
    other.end()


DIES_FORKING = """
import os, signal, socket, sys

socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1 << 16, 1)
if os.fork() == 0:
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.seam
def test_a_killed_servers_fork_leaves_no_zombie(tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text(DIES_FORKING)
    monkeypatch.setattr(client, "SERVER", str(tmp_path / "server.py"))
    monkeypatch.setattr(client, "PARK_S", LIMIT_S)
    before = children(os.getpid())
    server = ServerProcess([sys.executable], dict(os.environ), str(tmp_path / "output"))
    assert server.park(1) == []
    server.end()
    assert children(os.getpid()) == before


LEAVES = """
import os, sys
sys.stdin.read()
os.setsid()
"""


@pytest.mark.seam
@pytest.mark.parametrize("when", ["before it is killed", "while it is waited for"])
def test_a_late_standby_may_leave_its_servers_group(monkeypatch, when):
    leader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=os.setpgrp)
    late = subprocess.Popen([sys.executable, "-c", LEAVES], stdin=subprocess.PIPE, preexec_fn=lambda: os.setpgid(0, leader.pid))
    leader.kill()
    leader.wait()
    kill_group = os.killpg

    def killpg(group: int, number: int) -> None:
        late.stdin.close()  # now it leaves
        if when == "before it is killed":
            assert wait_gone([late.pid]) == []
            kill_group(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    monkeypatch.setattr(client, "END_S", 3600.0)
    client._reap_group(leader.pid)
    assert late.wait() == 0


@pytest.mark.seam
def test_a_server_can_be_ended_without_descriptors(tmp_path):
    server = ServerProcess([sys.executable, "-u"], dict(os.environ), str(tmp_path / "output"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        server.end()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert server.pid not in children(os.getpid())


@pytest.mark.seam
def test_a_hurried_server_answers_once_torch_is_there(tmp_path):
    """The rest is imported when it is asked for again."""
    (tmp_path / "rest.py").write_text("raise ImportError('was tried')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    request = {"modules": ["torch", "rest"], "excluded": [], "script_dir": str(tmp_path), "program": ["x"]}
    (tmp_path / "modules").write_text(json.dumps({**request, "origins": {}}))
    server = ServerProcess([sys.executable, "-u"], environ, str(tmp_path / "output"))
    answers = []
    for hurries in (True, False):
        server.preload(str(tmp_path / "modules"))
        if hurries:
            server.hurry()
        answers.append(server.receive_ready())
    server.end()
    assert [each and ("torch" in each["names"], each["absent"]) for each in answers] == [
        (True, {}),
        (True, {"rest": "ImportError: was tried"}),
    ]


@pytest.mark.seam
def test_a_server_that_cannot_run_says_why(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no luck >&2\nexit 7\n")
    broken.chmod(0o755)
    server = ServerProcess([str(broken), "-u"], {}, str(tmp_path / "output"))
    assert server.receive_ready() is None
    ended = server.how_it_ended()
    assert (ended.exitcode, ended.output, str(ended)) == (7, "no luck", "exit code 7: no luck")
    assert not ended.killed
    server.end()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['A'] = '1'\nos.environ.setdefault('B', '2')\nos.putenv('C', '3')", {"A", "B", "2", "C", "3"}),
        ("from os import environ\nenviron.update(A='1', **{'B': '2'})", {"A", "1", "B", "2"}),
        ("import os\nfor k, v in {'A_B': 'x', 'small': '2'}.items():\n    os.environ[k] = v", {"A_B"}),
        ("import os\nos.environ |= {'A': '1'}\nprint('C')", {"A", "1"}),
        ("from os import putenv\nputenv('A', '1')", {"A", "1"}),
        ("import os\nALL = {'A': 'b'}\nos.environ.update(ALL)", {"A"}),
        ("import os\ndel os.environ['A']\nx = os.environ['B']\ny = os.environ.get('C')\nprint('D')", {"A"}),
        ("this is no Python", set()),
    ],
)
def test_variables_that_a_script_sets(source, expected):
    assert rules.variables_set(source) == expected


def test_who_has_read_a_variable_too_early():
    read = {"torch": ["TORCH_LOGS", "HOME"], "hub": ["HF_HOME"]}
    assert rules.read_too_early({"HF_HOME", "X"}, read, ()) == {"hub": "HF_HOME"}
    assert rules.read_too_early({"TORCH_LOGS", "RANK"}, read, ["TORCH_LOGS"]) == {}
    assert rules.read_too_early({"OMP_NUM_THREADS"}, read, ()) == {"": "OMP_NUM_THREADS"}


def test_what_is_worth_preloading():
    modules = (
        ("__main__", "/job/train.py"),
        ("sys", None),
        ("json", "/usr/lib/python3/json/__init__.py"),
        ("model", "/job/model.py"),
        ("numpy", "/job/.venv/lib/site-packages/numpy/__init__.py"),
        ("numpy.random", "/job/.venv/lib/site-packages/numpy/random/__init__.py"),
        ("time", "built-in"),
    )
    assert rules.worth_preloading(Learned(modules), ["/job"], ()) == ["json", "numpy", "numpy.random"]
    assert rules.worth_preloading(Learned(modules), ["/job"], {"numpy"}) == ["json"]


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ([("json.py", False)], "json.py"),
        ([("torch", True)], "torch"),
        ([("torch", False), ("datasets", False), ("my_json.py", False), ("json.txt", False)], None),
        ([("json.cpython-311-x86_64-linux-gnu.so", False), ("json.so", False)], "json.so"),
    ],
)
def test_what_hides_a_module(beside, expected):
    assert rules.shadowing_file(beside[-1:], {"json", "torch"}) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-u", "x.py"], (["python", "-u", "x.py"], None)),
        (["numactl", "--physcpubind=0-2,8", "python", "x.py"], (["python", "x.py"], frozenset({0, 1, 2, 8}))),
        (["numactl", "--physcpubind=all", "python"], (["numactl", "--physcpubind=all", "python"], None)),
        (["numactl", "--membind=0", "python"], (["numactl", "--membind=0", "python"], None)),
    ],
)
def test_what_numactl_was_to_do(command, expected):
    assert rules.split_numactl(command) == expected


@pytest.mark.parametrize(
    ("processors", "environ", "expected"),
    [
        (None, {}, None),
        (frozenset({1}), {"OMP_NUM_THREADS": "2"}, None),
        (frozenset({1}), {}, "set OMP_NUM_THREADS"),
        (frozenset({1, 9}), {"OMP_NUM_THREADS": "2"}, "the agent may not use"),
    ],
)
def test_when_a_standby_cannot_be_bound(processors, environ, expected):
    found = rules.why_unbindable(processors, {0, 1}, environ)
    assert found is None if expected is None else found is not None and expected in found


def test_room():
    enough = rules.RESERVE_BYTES + rules.SERVER_BYTES + 2 * rules.STANDBY_BYTES
    assert rules.memory_shortage(enough, 2, server_runs=False) is None
    assert rules.memory_shortage(enough - 1, 2, server_runs=False) is not None
    assert rules.memory_shortage(enough - 1, 2, server_runs=True) is None


@pytest.mark.seam
def test_shared_pages_are_counted_once(tmp_path):
    code = "import os, sys; x = b'x' * (64 << 20); pid = os.fork(); pid and print(os.getpid(), pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert 64 << 20 < limits.proportional_set_size(pids) < 110 << 20
        process.communicate(b"")
    assert limits.proportional_set_size(pids) == 0
    assert limits.memory_left() > 0
