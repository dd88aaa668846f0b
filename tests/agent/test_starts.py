"""Jobs on hosts that refuse or lack something: each runs without it, or ends at once with one line and 78."""

import contextlib
import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from elastic_ext.agent import round
from elastic_ext.base.errors import UsageError
from elastic_ext.rendezvous import address
from elastic_ext.rendezvous.address import HostName
from elastic_ext.workers import limits
from elastic_ext.workers.helper_processes import REAPER_END_S
from elastic_ext.workers.logs import WorkerLogs
from tests import refusing
from tests.jobs import AGENT, ROOT, SCRIPTS, Gate, Job, children, command_of, run, wait_gone
from tests.ports import free_port
from tests.until import LIMIT_S

PLAIN = str(SCRIPTS / "plain_job.py")
ELASTIC = str(SCRIPTS / "elastic_job.py")
REPOSITORY = ROOT
NO_PIDFD = "pidfd_open=ENOSYS"
NOTHING = "pidfd_open=EPERM,pidfd_send_signal=EPERM,mknod=EPERM,mknodat=EPERM,memfd_create=ENOSYS,prlimit64=EPERM"

as_root = pytest.mark.skipif(os.getuid() != 0, reason="makes namespaces, which only root may")
with_a_filter = pytest.mark.skipif(not refusing.possible, reason="the numbers of system calls are known for two architectures")


def under(calls: str, command: list[str]) -> list[str]:
    return [sys.executable, "-m", "tests.refusing", calls, *command]


def refusing_job(calls: str, command: list[str], tmp_path: Path, **variables: str) -> Job:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return Job(under(calls, command), tmp_path, PYTHONPATH=path, **variables)


BUILDS = """
import os, signal
from torch.utils.file_baton import FileBaton
baton, rank = FileBaton("build/lock"), int(os.environ["RANK"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == 0:
        assert baton.try_acquire()
        open("began", "w").close()
        signal.pause()
    open("began").read()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    assert baton.try_acquire(), "the lock of the build that was stopped is still there"
    baton.release()
"""


@pytest.mark.seam
def test_a_stopped_build_leaves_no_lock(tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "build.ninja").touch()
    os.mkfifo(tmp_path / "began")
    (tmp_path / "builds.py").write_text(BUILDS)
    done = run([*AGENT, "--nproc-per-node=2", "--max-restarts=1", "builds.py"], tmp_path)
    assert done.returncode == 0, done.all
    assert "the lock file of a build" in done.err


@pytest.mark.full
@with_a_filter
def test_a_job_restarts_where_system_calls_are_refused(tmp_path):
    """Without pidfds and named pipes, too, what a worker says on stderr is kept and shown."""
    (tmp_path / "says.py").write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if os.environ['RANK'] == '0': signal.pause()\n"
        "    os.write(2, b'NCCL WARN something of a library\\n')\n"
        "    raise RuntimeError('flaky')\n"
    )
    with refusing_job(NOTHING, [*AGENT, "--nproc-per-node=2", "--max-restarts=1", "says.py"], tmp_path) as job:
        done = job.finish()
    assert done.returncode == 0, done.all
    assert "restart: rank 1 raised RuntimeError: flaky at says.py:" in done.err
    assert (done.err.count("NCCL WARN something of a library"), done.err.count("Traceback")) == (1, 1)


@pytest.mark.full
@with_a_filter
def test_nothing_outlives_a_killed_agent_without_pidfds(tmp_path):
    command = [*AGENT, "--nproc-per-node=2", PLAIN, "hang:0", "hang:1"]
    with refusing_job(NO_PIDFD, command, tmp_path) as job:
        pids = [int(each[1]) for each in job.wait_for(r'"pid": (\d+)', 2)]
        job.process.kill()
        assert wait_gone(pids) == []


@pytest.mark.full
@with_a_filter
def test_standbys_without_pidfds(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import fcntl, os, sys\n"
        "warm = any('standby/server' in each for each in sys.orig_argv) or 'torch' in sys.modules\n"
        "n = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('warm', warm, n, flush=True)\n"
        "if n == '0':\n"
        "    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH)\n"
        "    os._exit(3)\n"
    )
    gate = Gate(tmp_path / "gate")
    command = [*AGENT, "--nproc-per-node=1", "--max-restarts=1", "waits.py", str(gate.path)]
    with refusing_job(NO_PIDFD, command, tmp_path, ELASTIC_EXT_STANDBY="on", LOGLEVEL="INFO") as job:
        job.wait_for("warm False 0")
        job.wait_for("1 warm standbys wait")
        gate.open()
        done = job.finish()
    assert done.returncode == 0, done.all
    assert "warm True 1" in done.out


# Open files.

MANY = """
import os, resource, sys
from elastic_ext.agent import __main__ as agent
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(2000)]
sys.exit(agent.main(sys.argv[1:]))
"""
HANGS = """
import os, resource, signal, sys, time
import elastic_ext
while (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) != 2500:  # the agent sets it once it has started the process
    time.sleep(0.01)
print("limit", limit, flush=True)
with open(f"/proc/{os.getppid()}/limits") as limits:
    print("agent's", next(line.split()[3] for line in limits if line.startswith("Max open files")), flush=True)
elastic_ext.report_progress()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pause()
"""


@pytest.mark.full
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3000, reason="the hard limit of open files is below 3,000")
def test_two_thousand_open_files_and_the_users_limit(tmp_path):
    """The first workers start without standbys."""
    (tmp_path / "many.py").write_text(MANY)
    (tmp_path / "hangs.py").write_text(HANGS)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = [sys.executable, str(tmp_path / "many.py"), "--nproc-per-node=1", "--max-restarts=1", "hangs.py"]
    job = run(
        ["sh", "-c", 'ulimit -Sn 2500; exec "$@"', "sh", *command],
        tmp_path,
        ELASTIC_EXT_HANG_TIMEOUT="5",
        ELASTIC_EXT_STANDBY="on",
        ELASTIC_EXT_PRELOAD_EXCLUDE="torch",
    )
    assert job.returncode == 0, job.all
    assert "signal.pause" in job.err or "hangs.py" in job.err  # its stacks were asked for, which takes a descriptor above 1,023
    assert re.findall(r"limit (\d+)", job.out) == ["2500", "2500"]
    assert set(re.findall(r"agent's (\d+)", job.out)) == {str(min(hard, limits.MAX_FILES))}


@pytest.mark.full
def test_programs_and_functions_keep_the_users_limit_too(tmp_path):
    job = run(
        ["sh", "-c", 'ulimit -Sn 500; exec "$@"', "sh", *AGENT, "--no-python", "--nproc-per-node=2", "sh", "-c",
         "until test $(ulimit -n) = 500; do sleep 0.01; done; ulimit -n"],
        tmp_path,
    )  # fmt: skip
    assert job.returncode == 0, job.all
    assert re.findall(r"(?m)^\d+$", job.out) == ["500", "500"]
    (tmp_path / "api.py").write_text(
        "import resource, time\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "def limit():\n"
        "    while (found := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) != 500: time.sleep(0.01)\n"
        "    return found\n"
        "if __name__ == '__main__':\n"
        "    where = dict(run_id='x', rdzv_backend='ext_c10d', rdzv_endpoint='localhost:0')\n"
        "    config = LaunchConfig(1, 1, 1, start_method='spawn', **where)\n"
        "    print('limits', elastic_launch(config, limit)()[0], limit())\n"
    )
    job = run(["sh", "-c", 'ulimit -Sn 500; exec "$@"', "sh", sys.executable, "api.py"], tmp_path)
    assert "limits 500 500" in job.out, job.all  # the caller has its own back, too


def limited(most: int, *arguments: str) -> list[str]:
    return ["sh", "-c", 'ulimit -n "$1"; shift; exec "$@"', "sh", str(most), *AGENT, *arguments]


@pytest.mark.full
def test_few_descriptors_run_a_job_without_extras(tmp_path):
    job = run(limited(48, "--nproc-per-node=2", "--max-restarts=1", PLAIN, "kill:1"), tmp_path, ELASTIC_EXT_STANDBY="on")
    assert job.returncode == 0, job.all
    assert job.err.count("the limit on open files is low") == 1
    assert "restart 1 of 1" in job.err
    assert len(re.findall(r"finished \d", job.out)) == 2


@pytest.mark.full
def test_too_few_descriptors_are_said_in_one_line(tmp_path):
    job = run(limited(30, "--nproc-per-node=2", PLAIN), tmp_path)
    assert job.returncode == 78, job.all
    (line,) = job.err.splitlines()
    assert re.search(r"elastic_ext: .*more files, but 2 workers need \d+: raise the hard limit", line)


# Shared memory, addresses.


@pytest.mark.full
@as_root
def test_shared_memory_without_inodes(tmp_path):
    command = [*AGENT, "--nproc-per-node=1", "--max-restarts=1", PLAIN, "kill:0"]
    shell = f"mount -t tmpfs -o nr_inodes=1 none /dev/shm; exec {' '.join(command)}"
    other = tmp_path / "tmp"
    other.mkdir()
    job = run(["unshare", "-m", "sh", "-c", shell], tmp_path, TMPDIR=str(other))
    assert job.returncode == 0, job.all
    assert "Traceback" not in job.err
    assert list(other.glob("elastic_ext_*")) == []


def test_files_beyond_shared_memory_are_on_disk(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "full").write_text("")
    logs = WorkerLogs(DefaultLogsSpecs())
    logs.run_dir, logs.messages, logs.variables = str(tmp_path / "full"), {0: {}}, {"TORCHELASTIC_RESTART_COUNT": "0"}
    for _ in range(2):
        logs.reify({0: {"TORCHELASTIC_RUN_ID": "x"}})
        assert Path(logs.error_files[0]).parent.is_dir()
        assert len(list(tmp_path.glob("elastic_ext_*"))) == 1  # that of the round before has gone
    logs.remove()
    assert list(tmp_path.glob("elastic_ext_*")) == []


@pytest.mark.parametrize(
    ("found", "given", "expected", "said"),
    [
        (
            HostName("n1", ("127.0.1.1",), True, "eth0"),
            "",
            {"GLOO_SOCKET_IFNAME": "eth0"},
            "n1 resolves to 127.0.1.1: the workers get",
        ),
        (HostName("n1", ("127.0.1.1",), True, "eth0"), "ib0", {}, ""),  # the user's own
        (HostName("n1", ("10.0.0.5",), False, "eth0"), "", {}, ""),
        (HostName("n1", (), True, ""), "", {}, "n1 resolves to no address, and no interface has the address 10.0.0.5"),
    ],
)
def test_gloo_gets_an_interface_for_a_loopback_name(monkeypatch, caplog, found, given, expected, said):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    monkeypatch.setattr(round, "look_up", lambda address: found)
    round.gloo_interface.cache_clear()
    assert round.gloo_interface("10.0.0.5") == round.gloo_interface("10.0.0.5") == expected
    assert round.gloo_interface("127.0.0.1") == {}, "all nodes are on this machine"
    round.gloo_interface.cache_clear()
    assert [record.getMessage().startswith(f"the host name {said}") for record in caplog.records] == [True] * bool(said)


def refused(command: list[str], tmp_path: Path, said: str) -> None:
    job = run([*command, PLAIN], tmp_path)  # torch's store would try for 300 s, longer than `run` waits
    assert job.returncode == 78, job.all
    (line,) = job.err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("given", "found", "lo", "said"),
    [
        ("192.0.2.1", ["192.0.2.1"], True, "--local-addr=192.0.2.1: this host cannot reach itself at this address (No route)"),
        ("no.such", None, True, "--local-addr=no.such: this host cannot reach itself at this address (unknown)"),
        ("none", [], True, "--local-addr=none: this host cannot reach itself at this address (it resolves to no address)"),
        (None, ["127.0.0.1"], False, "127.0.0.1: this host cannot reach itself at this address (No route); the interface lo"),
        ("two", ["192.0.2.1", "127.0.0.2"], True, None),
    ],
)
def test_which_address_of_ones_own_is_refused(monkeypatch, given, found, lo, said):
    def resolve(host: str, *_: object, **__: object) -> list:
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in found]

    def reach(family: int, host: str, deadline: float) -> None:
        if host != "127.0.0.2":
            raise OSError(errno.EHOSTUNREACH, "No route")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(address, "_reach", reach)
    monkeypatch.setattr(address, "_loopback_is_up", lambda: lo)
    if said is None:
        address.check_own(given, "127.0.0.1")
        return
    with pytest.raises(UsageError) as error:
        address.check_own(given, "127.0.0.1")
    assert str(error.value).startswith(said)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ext_c10d", "ext_etcd"])
def test_a_local_address_of_another_host_is_reported(tmp_path, server, backend):
    where = server.endpoint if backend == "ext_etcd" else f"localhost:{free_port()}"
    command = [*AGENT, f"--rdzv-backend={backend}", "--nnodes=1:2", f"--rdzv-endpoint={where}", "--rdzv-id=x"]
    refused(
        [*command, "--local-addr=192.0.2.1"], tmp_path, "--local-addr=192.0.2.1: this host cannot reach itself at this address"
    )


@pytest.mark.full
@as_root
def test_a_host_without_a_loopback(tmp_path):
    refused(["unshare", "-n", *AGENT], tmp_path, "the interface lo is not up: `ip link set lo up`")


# Helper processes that somebody stops, or that cannot be started now.

REAPER = """
import os, resource, signal, subprocess, sys
from elastic_ext.workers.helper_processes import Reaper
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
few = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
reaper = Reaper(sys.argv[1], sys.argv[2])
print("without", reaper.pidfd, flush=True)
reaper.watch([1])
resource.setrlimit(resource.RLIMIT_NOFILE, (few + 20, hard))
reaper.watch([1])
print("with", reaper.pidfd is not None, flush=True)
reaper.close(clean=True)
"""


@pytest.mark.seam
def test_an_agent_runs_reaperless_until_it_has_descriptors(tmp_path):
    job = subprocess.run(
        [sys.executable, "-c", REAPER, os.urandom(16).hex(), str(tmp_path / "run")], capture_output=True, text=True, timeout=60
    )
    assert job.stdout.split("\n")[:2] == ["without None", "with True"], job.stderr
    assert job.stderr.count("cannot start the reaper: ") == 1
    assert "Traceback" not in job.stderr


@pytest.mark.seam
def test_a_node_without_descriptors_leaves_rounds_to_others(tmp_path, server):
    gate = Gate(tmp_path / "gate")
    where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=1:2"]
    command = [*AGENT, *where, "--rdzv-conf=last_call_timeout=60", "--max-restarts=3", ELASTIC]
    with (
        Job(command, tmp_path, NODE="a", GATE=str(gate.path)) as poor,
        Job(command, tmp_path, NODE="b", GATE=str(gate.path)) as other,
    ):
        worker = json.loads(poor.wait_for(r'(\{"rank".*"world": 2.*\})')[0][1])["pid"]
        other.wait_for('"world": 2')
        agent = poor.process.pid
        hard = resource.prlimit(agent, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{agent}/fd")) - 20, hard))
        os.kill(worker, signal.SIGKILL)
        left = poor.finish()
        other.wait_for('"world": 1')
        gate.open()
        went_on = other.finish()
    assert left.returncode == 75, left.all
    assert "Traceback" not in left.err
    assert re.search(r"this host lacks what the next round needs: \[Errno 24\].*rule host-exhausted.*exit code 75", left.err)
    assert went_on.returncode == 0, went_on.all


@pytest.mark.full
def test_a_passing_lack_of_descriptors_costs_standbys(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import fcntl, os, sys\n"
        "print('up', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH)\n"
    )
    gate = Gate(tmp_path / "gate")
    command = [*AGENT, "--nproc-per-node=1", "waits.py", str(gate.path)]
    variables = {"ELASTIC_EXT_STANDBY": "on", "ELASTIC_EXT_PRELOAD_EXCLUDE": "torch", "LOGLEVEL": "INFO"}
    with Job(command, tmp_path, **variables) as job:
        job.wait_for("up 0")
        job.wait_for("1 warm standbys wait")
        agent = job.process.pid
        forked = [pid for pid in children(agent) if "standby/server" in command_of(pid)]
        before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            pidfds = [stack.enter_context(os.fdopen(os.pidfd_open(pid))) for pid in forked]
            resource.prlimit(agent, resource.RLIMIT_NOFILE, (8, before[1]))
            for pidfd in pidfds:
                with contextlib.suppress(ProcessLookupError):  # the agent has just ended it itself, for lack of a descriptor
                    signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
        job.wait_for("a resource has run out")
        resource.prlimit(agent, resource.RLIMIT_NOFILE, before)
        job.wait_for("warm standbys are ready again")
        gate.open()
        done = job.finish()
    assert done.returncode == 0, done.all
    assert len(re.findall("started without a warm standby: a resource has run out", done.err)) == 1
    assert "Traceback" not in done.err


@pytest.mark.full
def test_helpers_that_are_stopped_do_not_delay_ends(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import fcntl, sys; print('up', flush=True); fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH); sys.exit(3)"
    )
    gate = Gate(tmp_path / "gate")
    with Job([*AGENT, "--nproc-per-node=1", "waits.py", str(gate.path)], tmp_path) as job:
        job.wait_for("(?m)^up$")
        helpers = [pid for pid in children(job.process.pid) if re.search(r"(reaper|relay)\.py", command_of(pid))]
        assert len(helpers) == 2
        for helper in helpers:
            os.kill(helper, signal.SIGSTOP)
        begin = time.monotonic()
        gate.open()
        job.process.wait(LIMIT_S)
        took_s = time.monotonic() - begin
        done = job.finish()
        assert wait_gone(helpers) == []
    assert done.returncode == 1, done.all
    for helper in helpers:
        assert f"(pid {helper}) was stopped from outside; resuming it" in done.err
    assert took_s < REAPER_END_S  # for which it would wait
