"""What the host says about a failure: real control groups, a real kernel log, real programs and servers where the test may."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from elastic_ext.base import settings
from elastic_ext.base.settings import Settings
from elastic_ext.failures import commands, host, kubernetes, slurm
from elastic_ext.failures.evidence import Platform
from elastic_ext.failures.host import HostProbe, KernelLog, RecoveryAction, Xid, detect, parse_xid
from tests.jobs import wait_gone
from tests.kubernetes.api_server import TOKEN, ApiServer
from tests.until import LIMIT_S, until


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However long a busy machine takes to start a program."""
    monkeypatch.setattr(host.recovery_actions, "__defaults__", (LIMIT_S,))
    monkeypatch.setattr(slurm.query, "__defaults__", (LIMIT_S,))
    monkeypatch.setattr(slurm.hostnames, "__defaults__", (LIMIT_S,))
    monkeypatch.setattr(host, "READ_S", LIMIT_S)


# ---- memory

EATER = "import sys; sys.stdin.readline(); data = bytearray(256 << 20); print(len(data))"  # every page is touched: calloc is not
SLEEPER = "import sys; sys.stdin.readline(); import signal; signal.pause()"


@pytest.fixture
def small_group():
    """A control group of ours that may hold 48 MB."""
    yield from memory_group(48 << 20)


def memory_group(size):
    own = Path("/proc/self/cgroup").read_text()
    made = next(
        (made for file in host.counting_files(own, Path("/proc/self/mountinfo").read_text()) if (made := _make(file, size))),
        None,
    )
    if made is None:
        pytest.skip("no memory control group may be made here")
    yield made

    def removed() -> bool:
        with contextlib.suppress(OSError):  # the kernel takes a moment to see that its last process has gone
            made.rmdir()
        return not made.exists()

    until(removed)


def _make(file: str, size: int) -> "Path | None":
    group = Path(file).parent / f"elastic_ext_{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError:
        return None
    limits = {"memory.max": size, "memory.swap.max": 0}
    if file.endswith("oom_control"):
        limits = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
    try:
        (group / next(iter(limits))).write_text(str(limits[next(iter(limits))]))
    except OSError:
        group.rmdir()
        return None
    for name, limit in list(limits.items())[1:]:
        if (group / name).exists():
            (group / name).write_text(str(limit))
    return group


def start_in(group: Path, script: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


@pytest.mark.seam
@pytest.mark.parametrize(("script", "kills"), [(EATER, 1), (SLEEPER, 0)], ids=["out of memory", "plain SIGKILL"])
def test_a_memory_kill_differs_from_a_plain_one(small_group, script, kills):
    with start_in(small_group, script) as process:
        before = host.oom_counts([process.pid])
        assert any(str(small_group) in file for file in before), before
        process.stdin.write(b"\n")
        process.stdin.flush()
        if not kills:
            process.kill()
        process.wait(LIMIT_S)
    assert process.returncode == -signal.SIGKILL  # both look the same but for the count
    assert host.oom_kills_since(before) == kills


def test_counts_that_cannot_be_read_are_not_known(tmp_path):
    assert host.oom_kills_since({}) is None
    assert host.oom_kills_since({str(tmp_path / "gone"): 3}) is None
    still, risen = tmp_path / "still", tmp_path / "risen"
    still.write_text("low 0\noom 9\noom_kill 4\noom_group_kill 7\n")
    risen.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    assert host.oom_kills_since({str(still): 4}) == 0
    assert host.oom_kills_since({str(still): 4, str(tmp_path / "gone"): 0}) is None
    assert host.oom_kills_since({str(still): 4, str(risen): 4, str(tmp_path / "gone"): 0}) == 2
    assert host.oom_counts([2**22 + 1]) == host.oom_counts()  # no such process


V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "31 23 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
)


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files"),
    [
        ("0::/system.slice/a.service", V2, ["/sys/fs/cgroup/system.slice/a.service/memory.events"]),
        ("0::/", V2, ["/sys/fs/cgroup/memory.events"]),  # a container with a namespace of its own
        ("4:memory:/docker/1\n3:cpu:/x\n0::/", V1, ["/sys/fs/cgroup/memory/docker/1/memory.oom_control"]),
        ("4:cpu,memory:/a", V1.replace("rw,memory", "rw,cpu,memory"), ["/sys/fs/cgroup/memory/a/memory.oom_control"]),
        ("4:memory:/docker/1/b", V1.replace("0:32 /", "0:32 /docker/1"), ["/sys/fs/cgroup/memory/b/memory.oom_control"]),
        ("4:memory:/docker/12", V1.replace("0:32 /", "0:32 /docker/1"), []),
        ("0::/../other", V2, []),
        ("0::/a", V2.replace("/sys/fs/cgroup", "/with\\040blank"), ["/with blank/a/memory.events"]),
        ("", V2, []),
        ("0::/a", "", []),
        ("nonsense\n::\n0:", "nonsense\n - \n1 2 3 / - cgroup2", []),
    ],
)
def test_where_kills_are_counted(cgroup, mountinfo, files):
    assert host.counting_files(cgroup, mountinfo) == files


# ---- the kernel log


@pytest.mark.parametrize(
    ("line", "xid"),
    [
        (
            "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            Xid(79, "0000:3b:00", 1234),
        ),
        ("NVRM: Xid (PCI:0000:3B:00): 31, pid='<unknown>', name=<unknown>, Ch 00000010", Xid(31, "0000:3b:00")),
        ("NVRM: Xid (PCI:0009:01:00): 95, pid='77', name=python", Xid(95, "0009:01:00", 77)),
        ("NVRM: Xid (0000:03:00): 13, 0001 00000000 0000a097", Xid(13, "0000:03:00")),
        ("[12.3] NVRM: Xid (PCI:0000:3b:00.0): 48, DBE", Xid(48, "0000:3b:00.0")),
        ("nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 12028, Non-fatal", None),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-abc", None),
        ("NVRM: Xid (PCI:0000:3b:00): , pid=1", None),
        ("", None),
    ],
)
def test_xids_in_lines(line, xid):
    assert parse_xid(line) == xid


def test_recent_xids_are_read_from_the_kernels_log():
    def say(line: str) -> None:
        try:
            with open("/dev/kmsg", "w") as log:
                log.write(line)
        except OSError as error:
            pytest.skip(f"the kernel log cannot be written: {error}")

    pci = f"{uuid.uuid4().hex[:8]}:01:00"  # the log is that of all tests of this machine

    def seen() -> list[Xid]:
        return [xid for xid in log.xids() if xid.pci == pci]

    # Numbers that decide nothing: real jobs of other tests may read them now.
    say(f"NVRM: Xid (PCI:{pci}): 43, pid=1, name=before, a test of elastic_ext\n")
    log = KernelLog()
    assert seen() == []
    pid = os.getpid()
    say(f"NVRM: Xid (PCI:{pci}): 37, pid={pid}, name=python, a test of elastic_ext\n")
    say("nothing of interest, a test of elastic_ext\n")
    assert seen() == [Xid(37, pci, pid)]
    say(f"NVRM: Xid (PCI:{pci}): 44, a test of elastic_ext\n")
    assert seen() == [Xid(37, pci, pid), Xid(44, pci)]
    say(f"NVRM: Xid (PCI:{pci}): 43, not read before the next round, a test of elastic_ext\n")
    log.begin()
    assert seen() == []
    say(f"NVRM: Xid (PCI:{pci}): 45, a test of elastic_ext\n")
    assert seen() == [Xid(45, pci)]
    log.close()
    assert log.xids() is None


def test_an_xid_is_no_evidence_next_round():
    host = HostProbe(settings.read({}, {}))
    number = random.SystemRandom().choice([14, 38, 63, 66, 67, 92, 106, 107, 121, 137])  # decide nothing; of no other test
    try:
        with open("/dev/kmsg", "w") as log:
            log.write(f"NVRM: Xid (PCI:0000:01:00): {number}, a test of elastic_ext\n")
        assert number in host.evidence().xids
    except OSError as error:
        pytest.skip(f"the kernel log cannot be written: {error}")
    else:
        host.round_started([])
        assert number not in host.evidence().xids
    finally:
        host.close()


def test_an_unreadable_log_is_not_known(tmp_path):
    assert KernelLog(str(tmp_path / "none")).xids() is None
    before = len(os.listdir("/proc/self/fd"))
    os.mkfifo(tmp_path / "pipe")
    assert KernelLog(str(tmp_path / "pipe")).xids() is None  # cannot be sought in, as no log
    assert len(os.listdir("/proc/self/fd")) == before


# ---- commands


@pytest.mark.full
def test_a_command_is_always_over_in_time(tmp_path, monkeypatch):
    grandchild, read = tmp_path / "pid", commands._read

    def read_late(*args):
        until(lambda: grandchild.exists() and grandchild.read_text().endswith("\n"))
        return read(*args)

    monkeypatch.setattr(commands, "_read", read_late)
    assert commands.output(["sh", "-c", f"sleep 1000 & echo $! > {grandchild}; wait"], 0.1) is None
    assert wait_gone([int(grandchild.read_text())]) == []  # it held the pipe open


@pytest.mark.seam
@pytest.mark.parametrize(
    ("command", "out"),
    [
        (["printf", "fine"], "fine"),
        (["false"], None),
        (["/nonexistent/program"], None),
        (["sh", "-c", "echo said; exit 3"], None),
        (["head", "-c", "2000000", "/dev/zero"], None),
        (["printf", "\\377"], "\ufffd"),
    ],
)
def test_what_a_command_says(command, out):
    assert commands.output(command, LIMIT_S) == out


# ---- GPU

PYNVML = """
import time
NVML_SUCCESS, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 0, 230
class Value: pass
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetFieldValues(device, fields):
    found = Value(); found.value = Value(); found.nvmlReturn, found.value.uiVal = (3, 0) if device == 2 else (0, device)
    return [found]
def nvmlDeviceGetPciInfo(device):
    found = Value(); found.busId = b"00000000:3B:0%d.0" % device
    return found
"""


@pytest.mark.seam
@pytest.mark.parametrize(
    ("init", "actions"),
    [
        ("pass", [("0", "none"), ("1", "gpu_reset"), ("2", None)]),
        ("raise RuntimeError('Driver Not Loaded')", None),
        ("time.sleep(1000)", None),
    ],
)
def test_the_probe_runs_apart_and_in_time(tmp_path, monkeypatch, init, actions):
    """No GPU here: a pynvml of this test stands for the real one; the process, its deadline and its path are real."""
    (tmp_path / "pynvml.py").write_text(PYNVML.format(init=init))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    expected = actions and [RecoveryAction(f"00000000:3B:0{index}.0", action) for index, action in actions]
    assert host.recovery_actions(1.0 if "sleep" in init else LIMIT_S) == expected


def room(**counts: int) -> os.statvfs_result:
    """Of 4 KiB blocks, all free, but for what is given."""
    names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "flag", "namemax")
    whole = {"bsize": 4096, "frsize": 4096, **dict.fromkeys(names[2:5], 1000), **dict.fromkeys(names[5:8], 50), "flag": 0}
    return os.statvfs_result([{**whole, "namemax": 255, **counts}[name] for name in names])


@pytest.mark.parametrize(
    ("counts", "root", "said"),
    [
        ({}, False, ""),
        ({"bavail": 0}, False, "0 bytes are free"),
        ({"bavail": 0}, True, ""),  # the reserve of ext4
        ({"bavail": 3, "bfree": 3}, True, "12288 bytes are free"),
        ({"favail": 0, "ffree": 0}, False, "no inodes are free"),
        ({"blocks": 0, "bavail": 0, "bfree": 0, "files": 0, "favail": 0, "ffree": 0}, True, ""),  # counts nothing
    ],
)
def test_when_a_file_system_is_full(counts, root, said):
    found = host.no_room("/logs", room(**counts), root)
    assert found == (f"the file system of the logs in /logs is full, {said}" if said else "")


def test_a_failed_round_looks_for_room(tmp_path):
    for folder in (str(tmp_path), "/no/such/folder", ""):
        probe = HostProbe(settings.read({}, {}), logs_dir=folder)
        probe.start_asking()
        assert probe.evidence(LIMIT_S).full == ""
        probe.close()


@pytest.mark.seam
def test_a_failed_round_asks_an_existing_driver(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(PYNVML.format(init="pass"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for driver, told in ((str(tmp_path / "none"), ()), (str(tmp_path / "pynvml.py"), ("gpu_reset",))):
        host = HostProbe(settings.read({}, {}), driver)
        host.start_asking()
        assert host.evidence(LIMIT_S).gpu_recovery == told
        host.close()


@pytest.mark.seam
def test_a_hanging_driver_is_unknown_and_not_awaited(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(PYNVML.format(init="time.sleep(1000)"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    host = HostProbe(settings.read({}, {}), str(tmp_path))
    host.start_asking()
    assert host.evidence().gpu_recovery == ()
    host.close()


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        (None, None),
        ("", None),
        ("{}", []),
        ("[[1]]", None),
        ('[["a", "b"]]', None),
        ('[["a", 9]]', [RecoveryAction("a", "action 9")]),
    ],
)
def test_what_the_probe_prints(text, actions):
    assert host.parse_recovery(text) == actions


# ---- Kubernetes

TARGET = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


def ended(reason):
    return {"containerStatuses": [{"name": "main", "state": {"terminated": {"reason": reason}}}]}


@pytest.mark.parametrize(
    ("pod", "reason", "target"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}, TARGET]}}, "PreemptionByScheduler", True),
        ({"conditions": [TARGET]}, "PreemptionByScheduler", True),  # the status alone
        ({"status": {"conditions": [{**TARGET, "status": "False"}]}}, "", False),
        ({"status": {"phase": "Running"}}, "", False),
        ({"status": {"reason": "Evicted"}}, "Evicted", False),
        ({"status": ended("OOMKilled")}, "OOMKilled", False),
        ({"status": ended("Completed")}, "", False),
        ({"status": {}, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "Deleted", False),
        ({"status": {"containerStatuses": [{"lastState": {"terminated": {"reason": "OOMKilled"}}}]}}, "", False),
        ({"status": 7, "metadata": []}, "", False),
        ({"status": {"conditions": [None, 3, {"type": "DisruptionTarget"}], "containerStatuses": {"a": 1}}}, "", False),
        (None, "", None),
    ],
)
def test_what_a_pod_says(pod, reason, target):
    assert kubernetes.platform_of(pod) == Platform("kubernetes", reason, target)


@pytest.fixture
def api(certificates):
    server = ApiServer(certificates)
    yield server
    server.close()


@pytest.mark.seam
def test_the_api_server_names_our_own_pod(api, tmp_path):
    pod = kubernetes.get_pod(api.environ, str(api.account(tmp_path / "account")), LIMIT_S)
    assert kubernetes.platform_of(pod) == Platform("kubernetes", "EvictionByEvictionAPI", True)
    assert api.asked == [("/api/v1/namespaces/team-a/pods/train-0-x7k2p", f"Bearer {TOKEN}")]
    assert detect({"PATH": ""}) == Platform()
    assert len(api.asked) == 1


@pytest.mark.full
def test_an_api_servers_bad_answer_is_not_known(api, certificates, tmp_path):
    account, environ = api.account(tmp_path / "account"), api.environ
    api.status = 403
    assert kubernetes.get_pod(environ, str(account), LIMIT_S) is None
    api.status, api.body = 200, b"no json"
    assert kubernetes.get_pod(environ, str(account), LIMIT_S) is None
    api.released.clear()
    assert kubernetes.get_pod(environ, str(account), 1.0) is None
    asked = len(api.asked)
    (account / "ca.crt").write_text(Path(certificates.path("other-ca.crt")).read_text())
    assert kubernetes.get_pod(environ, str(account), LIMIT_S) is None
    assert len(api.asked) == asked  # the token is not given to a server that cannot show who it is
    (account / "token").unlink()
    assert kubernetes.get_pod(environ, str(account), LIMIT_S) is None
    assert kubernetes.get_pod({}, str(account), LIMIT_S) is None


# ---- Slurm

RUNNING = (
    "JobId=42 JobName=train UserId=ann(1000) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 ExitCode=0:0"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RUNNING, ""),
        (RUNNING.replace("RUNNING", "PREEMPTED"), "PREEMPTED"),
        (RUNNING.replace("RUNNING", "NODE_FAIL"), "NODE_FAIL"),
        (RUNNING.replace("RUNNING", "TIMEOUT").replace("Reason=None", "Reason=TimeLimit"), "DUE TO TIME LIMIT"),
        (RUNNING.replace("RUNNING", "COMPLETING").replace("Reason=None", "Reason=TimeLimit"), "DUE TO TIME LIMIT"),
        (RUNNING.replace("RUNNING", "CANCELLED,COMPLETING"), "CANCELLED"),
        (RUNNING.replace("RUNNING", "CANCELLED+"), "CANCELLED"),
        (RUNNING.replace("RUNNING", "OUT_OF_MEMORY"), "OUT_OF_MEMORY"),
        ("JobId=42 JobName=x\n   JobState=PREEMPTED Reason=None Dependency=(null)\n", "PREEMPTED"),  # without --oneliner
        (RUNNING.replace("JobName=train", "JobName=JobState=TIMEOUT"), ""),
        ("slurm_load_jobs error: Invalid job id specified", ""),
        ("", ""),
    ],
)
def test_what_scontrol_shows(text, reason):
    assert slurm.parse_show_job(text) == reason


COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")


@pytest.mark.parametrize(
    ("text", "restarts", "reason"),
    [
        (COMPLETING, 0, "CANCELLED"),
        (COMPLETING, None, ""),
        (COMPLETING, 1, ""),
        (COMPLETING.replace("Restarts=0", "Restarts=1"), 0, ""),  # it will start again: preempted, or its node was lost
        (COMPLETING.replace("Reason=None", "Reason=TimeLimit"), 0, "DUE TO TIME LIMIT"),
        (RUNNING, 0, ""),
    ],
)
def test_a_job_that_slurm_is_ending(text, restarts, reason):
    """Slurm shows the state CANCELLED only once all processes have ended."""
    assert slurm.parse_show_job(text, restarts) == reason


def test_another_task_of_the_array_says_nothing():
    """As Slurm shows an array whose first task was cancelled, for the id of the last task, which is that of the array."""
    last = RUNNING.replace("JobId=42", "JobId=42 ArrayJobId=42 ArrayTaskId=5")
    first = RUNNING.replace("JobId=42", "JobId=43 ArrayJobId=42 ArrayTaskId=3").replace("RUNNING", "CANCELLED")
    shown = f"{last}\n{first}\n"
    assert slurm.parse_show_job(slurm.without_other_tasks(shown, "42")) == ""
    assert slurm.parse_show_job(slurm.without_other_tasks(shown, "43")) == "CANCELLED"
    components = shown.replace("ArrayJobId", "HetJobId")  # they end together
    assert slurm.parse_show_job(slurm.without_other_tasks(components, "42")) == "CANCELLED"


def scontrol(folder: Path, body: str) -> "dict[str, str]":
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "42", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.seam
def test_scontrol_is_asked_about_our_job(tmp_path):
    """Slurm is not here: a program of its name stands for it."""
    shown = RUNNING.replace("RUNNING", "PREEMPTED")
    environ = scontrol(tmp_path, f'test "$*" = "--oneliner show job 42" && echo "{shown}"')
    assert detect(environ) == Platform("slurm", "PREEMPTED")
    assert detect({**environ, "SLURM_JOB_ID": "--help"}) == Platform("slurm")
    assert detect({**environ, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == Platform("slurm", "PREEMPTED")  # Slinky


@pytest.mark.seam
def test_a_silent_slurm_is_not_known(tmp_path):
    assert slurm.query(scontrol(tmp_path, "sleep 1000"), 0.5) == Platform("slurm")
    assert slurm.query(scontrol(tmp_path, "echo JobState=TIMEOUT; exit 1")) == Platform("slurm")
    assert slurm.query({"SLURM_JOB_ID": "42", "PATH": str(tmp_path / "empty")}) == Platform("slurm")


def test_the_environment_of_slurm(tmp_path):
    environ = {"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "1000", "PATH": str(tmp_path)}
    assert slurm.read_environment(environ) == slurm.SlurmJob("42", 1000)
    assert detect(environ) == Platform("slurm", "DUE TO TIME LIMIT")  # 1970
    assert detect({**environ, "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}) == Platform("slurm")
    assert slurm.read_environment({"SLURM_JOBID": "7", "SLURM_JOB_END_TIME": "x"}) == slurm.SlurmJob("7")
    assert slurm.read_environment({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == slurm.SlurmJob("7", None, 2)
    assert host.slurm_notices({}) == ()
    assert host.slurm_notices({"SLURM_JOB_ID": "7"}) == (signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize(
    ("address", "pattern", "found"),
    [
        ("sh04.sh04-isw-16.n7", "switch.switch.node", "sh04.sh04-isw-16"),
        ("b8.n7", "block.node", "b8"),
        (".ib-core.tors-r1.n7", "switch.switch.switch.node", "ib-core.tors-r1"),
        ("s[0-3].leaf1.n7", "switch.switch.node", "s[0-3].leaf1"),
        ("n7", "node", ""),  # no plugin
        ("leaf1.n8", "switch.node", ""),  # of another node: a copied environment
        ("leaf1.n7", "", ""),
        ("", "switch.node", ""),
    ],
)
def test_where_a_node_is(address, pattern, found):
    """The forms that Slurm's plugins make; the last part is the node. topology/block and empty parts: read in Slurm's source."""
    environ = {"SLURMD_NODENAME": "n7", "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm.location(environ) == found
    assert slurm.location({**environ, "SLURMD_NODENAME": ""}) == ""
    assert slurm.with_location(Settings(), environ).topology == (found or None)
    assert slurm.with_location(Settings(topology="rack 3"), environ).topology == "rack 3"


def test_a_node_name_may_have_dots():
    environ = {"SLURMD_NODENAME": "n7.site.org", "SLURM_TOPOLOGY_ADDR": "leaf1.n7.site.org"}
    assert slurm.location({**environ, "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}) == "leaf1"


@pytest.mark.seam
def test_the_hosts_of_a_job(tmp_path):
    """What a real Slurm says is in tests/slurm."""
    environ = scontrol(tmp_path, 'test "$*" = "show hostnames gpu[1-2],x" && printf "gpu1\\ngpu2\\nx\\n"')
    assert slurm.hostnames({**environ, "SLURM_JOB_NODELIST": "gpu[1-2],x"}) == ("gpu1", "gpu2", "x")
    assert slurm.hostnames({**environ, "SLURM_JOB_NODELIST": "other"}) == ()
    assert slurm.hostnames({**environ, "SLURM_JOB_NODELIST": "--help"}) == ()
    assert slurm.hostnames(environ) == ()
    assert slurm.hostnames({"SLURM_JOB_NODELIST": "gpu[1-2],x", "PATH": str(tmp_path / "empty")}) == ()
