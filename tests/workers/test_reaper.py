"""The reaper, on real processes: nothing that a killed agent started survives it."""

import ast
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_ext.workers import reaper as reaper_program
from elastic_ext.workers.helper_processes import Reaper
from elastic_ext.workers.reaper import kill_marked
from tests.jobs import ROOT, wait_gone
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.seam

AGENT = """
import os, signal, subprocess, sys
from elastic_ext.workers.helper_processes import Reaper
python = sys.executable
sys.executable = os.environ.get("TEST_REAPER_PYTHON", python)
client = Reaper(sys.argv[1], sys.argv[2])
sys.executable = python
code = "import subprocess, sys, signal; p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], \
start_new_session=True); print(p.pid, flush=True); signal.pause()"
marked = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "ELASTIC_EXT_WORKER": sys.argv[1]},
                          start_new_session=True, stdout=subprocess.PIPE)
unmarked = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env={}, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if sys.argv[3] != "before-watch":
    client.watch([marked.pid, unmarked.pid])
print(client._process.pid, marked.pid, int(marked.stdout.readline()), unmarked.pid, flush=True)
if sys.argv[3] == "clean":
    client.close(clean=True)
elif sys.argv[3] == "end":
    client.close(clean=False)
    print(marked.poll(), unmarked.poll(), flush=True)
else:
    signal.pause()
"""


def ended(client):
    assert select.select([client.pidfd], [], [], LIMIT_S)[0], "the reaper has not ended"


@pytest.fixture
def agent():
    started = []

    def _agent(how, stderr=subprocess.PIPE, **env):
        run_dir = tempfile.mkdtemp()
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, os.urandom(16).hex(), run_dir, how],
            stdout=subprocess.PIPE,
            stderr=stderr,
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


@pytest.fixture
def child():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    yield child
    child.kill()
    child.wait()


def test_nothing_outlives_a_killed_agent(agent):
    """Signals to the group of the agent do not end its reaper."""
    process, reaper, workers, run_dir = agent("wait")
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reaper, sig)
    process.kill()
    assert wait_gone([*workers, reaper]) == []
    assert not os.path.exists(run_dir)


def test_a_late_reaper_gets_what_was_sent_before(agent, tmp_path):
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


def test_the_token_finds_a_worker_unknown_to_reapers(agent):
    process, reaper, (marked, grandchild, unmarked), _ = agent("before-watch")
    process.kill()
    assert wait_gone([marked, grandchild, reaper]) == []
    os.kill(unmarked, signal.SIGKILL)  # nobody could know of this one: no token, and never sent


# By an agent: what its worker starts knows nothing of it, whatever its parent, session and descriptors are. argv: whether the
# mark can be set, and how it is started.
LEAVES = """
import os, signal, subprocess, sys
from elastic_ext.workers import reaper
from elastic_ext.workers.helper_processes import Reaper
token, run_dir, mark, *how = sys.argv[1:]
client = Reaper(token, run_dir)
code = "import subprocess, sys, signal; subprocess.Popen(sys.argv[1:]); signal.pause()"
command = [*how, "sh", "-c", sys.stdin.read()]
code = "import sys; sys.stdin.read(); " + code
worker = subprocess.Popen([sys.executable, "-c", code, *command], env={}, start_new_session=True, stdin=subprocess.PIPE)
if mark == "mark":
    reaper.mark(worker.pid, token)
client.watch([worker.pid])
worker.stdin.close()
worker.wait()
"""
CHILD, DAEMON = "echo $$; exec sleep 10000 >&-", "sh -c 'echo $$; exec sleep 10000 >&-' &"


@pytest.mark.parametrize(
    ("mark", "how", "command"),
    [
        ("mark", ["env", "-i"], CHILD),
        ("mark", ["env", "-i", "setsid"], CHILD),
        ("mark", ["env", "-i"], DAEMON),
        ("mark", ["env", "-i", "setsid"], DAEMON),
        ("no mark", ["env", "-i"], CHILD),
        ("no mark", ["env", "-i"], DAEMON),
    ],
)
def test_whatever_workers_start_dies_with_the_agent(tmp_path, mark, how, command):
    """With no mark, as under gVisor, that of the worker's session: another session cannot be found there."""
    arguments = [os.urandom(16).hex(), str(tmp_path / "run"), mark, *how]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LEAVES, *arguments], stdin=pipe, stdout=pipe, text=True) as agent:
        agent.stdin.write(command)
        agent.stdin.close()
        child = int(agent.stdout.readline())
        agent.kill()
        left = wait_gone([child])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_marked_process_shows_nothing_of_it(tmp_path):
    """Not in what it may do, and a reaper of an agent that is itself a worker is not the outer reaper's."""
    code = "import resource; input(); print([resource.getrlimit(each) for each in range(16)]); import signal; signal.pause()"
    token = os.urandom(16).hex()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        reaper_program.mark(process.pid, token)
        process.stdin.write(b"\n")
        process.stdin.close()
        limits = ast.literal_eval(process.stdout.readline().decode())
        others = [resource.getrlimit(each) for each in range(16)]
        assert [each for each, other in zip(limits, others, strict=True) if each != other] == [
            limits[reaper_program.RLIMIT_LOCKS]
        ]
        before = resource.getrlimit(reaper_program.RLIMIT_LOCKS)
        reaper_program.mark(os.getpid(), token)
        try:
            client = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
        finally:
            resource.setrlimit(reaper_program.RLIMIT_LOCKS, before)
        inner = client._process.pid
        until(lambda: inner not in [each.pid for each in reaper_program.marked(token.encode())])
        assert kill_marked(token.encode()) == {process.pid}
        client.close(clean=True)


# A reaper that has found nothing before a forked child calls exec, and looks again only once it has: the order that is rare.
SEARCHES = """#!{python} -IS
import os, sys
sys.path[:0] = {folder!r}, {root!r}
import reaper
from tests.until import until
search = reaper.kill_marked
def searched(token):
    found = search(token)
    reaper.kill_marked = search
    pid, go = open({told!r}).read().split()
    os.close(os.open(go, os.O_WRONLY))
    until(lambda: token in open(f"/proc/{{pid}}/environ", "rb").read())
    return found
reaper.kill_marked = searched
reaper.main(int(sys.argv[4]), *sys.argv[5:])
"""
# By an agent: its child has the token once the reaper has searched.
FORKS = """
import os, subprocess, sys
from elastic_ext.workers.helper_processes import Reaper
token, run_dir, told, go = sys.argv[1:]
python, pause = sys.executable, "import signal; signal.pause()"
sys.executable = f"{told}.py"
client = Reaper(token, run_dir)
sys.executable = python
def fork():
    child = os.fork()
    if child == 0:
        os.open(go, os.O_RDONLY)
        os.execve(python, [python, "-c", pause], {"ELASTIC_EXT_WORKER": token})
    with open(told, "w") as file:
        file.write(f"{child} {go}")
    print(child, flush=True)
"""
DIES = "fork()\nos.kill(os.getpid(), 9)"
LEAVES_A_WORKER = """
client.watch([subprocess.Popen([python, "-c", pause], start_new_session=True).pid])
fork()
client.close(clean=False)
"""


@pytest.mark.parametrize("ends", [DIES, LEAVES_A_WORKER], ids=["killed", "in-order-with-a-worker-left"])
def test_what_is_between_fork_and_exec_is_found(tmp_path, ends):
    """It does not carry the token yet."""
    told, go = tmp_path / "told", tmp_path / "go"
    os.mkfifo(go)
    program = tmp_path / "told.py"
    folder = str(Path(reaper_program.__file__).parent)
    program.write_text(SEARCHES.format(python=sys.executable, folder=folder, root=str(ROOT), told=str(told)))
    program.chmod(0o755)
    command = [sys.executable, "-c", FORKS + ends, os.urandom(16).hex(), str(tmp_path / "run"), str(told), str(go)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        child = int(agent.stdout.readline())
        left = wait_gone([child])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_reaper_without_its_reader_cleans_up(agent):
    """The console of the agent is closed together with the agent: `torchrun ... 2>&1 | head`."""
    reader, writer = os.pipe()
    process, reaper, workers, run_dir = agent("wait", stderr=writer)
    os.close(writer)
    os.close(reader)
    process.kill()
    assert wait_gone([*workers, reaper]) == []
    assert not os.path.exists(run_dir)


def test_the_client_outlives_its_reaper(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_ELASTIC_EXT_TEST", "kept")
    client = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    environ = Path(f"/proc/{client._process.pid}/environ")
    assert until(environ.read_text) == "LD_ELASTIC_EXT_TEST=kept\0"  # during its exec a process has none
    os.kill(client._process.pid, signal.SIGKILL)
    ended(client)
    client.watch([os.getpid()])
    os.kill(client._process.pid, signal.SIGKILL)
    ended(client)
    client.close(clean=True)
    client.close(clean=True)


def test_a_reaper_that_cannot_run_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    client = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    monkeypatch.undo()
    ended(client)
    client.watch([os.getpid()])
    client.watch([os.getpid()])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    client.close(clean=False)


@pytest.mark.parametrize("how", ["clean", "end"])
def test_only_a_good_end_leaves_something_alive(agent, how):
    process, reaper, workers, run_dir = agent(how)
    assert process.wait(LIMIT_S) == 0
    assert wait_gone([reaper, *(workers if how == "end" else ())]) == []
    assert not os.path.exists(run_dir)
    for pid in workers if how == "clean" else ():
        os.kill(pid, signal.SIGKILL)  # raises if it is gone


def test_a_killed_reaper_is_replaced(tmp_path, child):
    client = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    client.watch([child.pid])
    first = client._process.pid
    os.kill(first, signal.SIGKILL)
    ended(client)
    client.revive()
    assert client._process.pid != first
    client.close(clean=False)
    assert child.wait(LIMIT_S) == -signal.SIGKILL


def test_a_signal_during_starts_loses_no_reaper(tmp_path, monkeypatch):
    """Its handler raises only once the agent knows the process, which otherwise would never learn of a clean end."""

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            signal.raise_signal(signal.SIGTERM)  # to this thread

    client = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    os.kill(client._process.pid, signal.SIGKILL)
    ended(client)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        monkeypatch.setattr(subprocess, "Popen", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.revive()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert client.runs()
    client.close(clean=True)


def test_a_stopped_reaper_does_not_delay_the_agent(tmp_path, child, caplog):
    """Its pipe is full after a few hundred rounds; at the end it is continued."""
    client = Reaper(os.urandom(16).hex(), str(tmp_path / "run"))
    first = client._process.pid
    os.kill(first, signal.SIGSTOP)
    os.waitid(os.P_PID, first, os.WSTOPPED)
    client._workers = [child.pid] * 4000
    for _ in range(8):  # 30 KB each
        client._send_round()
    assert "has not read its messages for a long time; starting another" in caplog.text
    assert wait_gone([first]) == []
    client.watch([child.pid])
    os.kill(client._process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, client._process.pid, os.WSTOPPED)
    client.close(clean=False)
    assert child.wait(LIMIT_S) == -signal.SIGKILL
