"""A real Slurm for tests: munged, slurmctld, and nodes that are hosts of their own. Debian's packages slurm-wlm and munge; root.

Each node has its own network, hostname, process ids and /dev/shm, as a host has; the file system is shared by all, as a cluster's
is. The controller, munged and what a test calls are on the router that joins them. Everything is reaped, whatever happens.

The process tracking is Slurm's default, proctrack/cgroup, where control groups of version 1 are mounted. Elsewhere it is
proctrack/linuxproc, with which a signal for a step reaches every process of it, not its tasks alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import Job
from tests.networks import SERVER, Host, network
from tests.programs import needs
from tests.until import until

READY_S = 180.0
FREEZER = Path("/sys/fs/cgroup/freezer")

# Times are as short as Slurm takes them. cred_expire is the time until a requeued job may start again: 5 s is the least.
CONF = """
ClusterName=tiny
SlurmctldHost=ctl({server})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,ttl=60,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=20
MessageTimeout=15
TCPTimeout=5
UnkillableStepTimeout=60
MinJobAge=300
"""


@dataclass
class Node:
    name: str
    host: Host
    process: Job | None = None

    @property
    def address(self) -> str:
        return self.host.address


class SlurmCluster:
    """nodes: n1, n2, ... of 4 processors each. switches: topology.conf. settings: lines of slurm.conf for a test."""

    def __init__(self, nodes: int = 3, switches: str = "", **settings: str) -> None:
        needs("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "unshare")
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: it holds sockets
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._count, self._switches, self._settings = nodes, switches, {"KillWait": "40", **settings}
        self.nodes: dict[str, Node] = {}
        self.router: list[str] = []
        self.controller: Job | None = None
        self.cgroups = os.access(FREEZER / "cgroup.procs", os.W_OK)

    # Its life.

    def __enter__(self) -> SlurmCluster:
        with ExitStack() as stack:
            stack.callback(self._stack.close)
            net = self._stack.enter_context(network(self._count))
            self.router = _enter(net.inside)
            self.nodes = {f"n{number}": Node(f"n{number}", host) for number, host in enumerate(net.hosts, 1)}
            self._write_files()
            self._start_munged()
            self.start_controller("-c")
            for name in self.nodes:
                self.start_node(name, wait=False)
            self.await_nodes(*self.nodes)
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _write_files(self) -> None:
        for each in ("munge", "spool", "state"):
            (self.folder / each).mkdir(mode=0o755)
        os.chmod(self.folder, 0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        conf = CONF.format(folder=self.folder, server=SERVER, proctrack="cgroup" if self.cgroups else "linuxproc")
        lines = [*conf.splitlines(), *(f"{key}={value}" for key, value in self._settings.items())]
        lines += [f"NodeName={each.name} NodeAddr={each.address} CPUs=4 RealMemory=1000" for each in self.nodes.values()]
        everything = ",".join(self.nodes)
        lines += [
            f"PartitionName=low Nodes={everything} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}",
            f"PartitionName=high Nodes={everything} PriorityTier=10 PreemptMode=OFF",
        ]
        (self.folder / "topology.conf").write_text(self._switches)
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        cgroup = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n" if self.cgroups else "CgroupPlugin=cgroup/v1\n"
        (self.folder / "cgroup.conf").write_text(cgroup)
        hosts = [f"127.0.0.1 localhost\n{SERVER} ctl", *(f"{each.address} {each.name}" for each in self.nodes.values())]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _start_munged(self) -> None:
        munge = self.folder / "munge"
        job = self._daemon(
            ["munged", "--foreground", "--force", f"--socket={munge}/sock", f"--key-file={munge}/key", f"--pid-file={munge}/pid",
             f"--seed-file={munge}/seed"]
        )  # fmt: skip
        job.wait_for("Starting .* daemon|Created .* work thread", timeout_s=READY_S)

    def start_controller(self, *options: str) -> None:
        """options: -c to forget what it knew."""
        inside = f"mount --bind {self.folder}/hosts /etc/hosts; hostname ctl; exec slurmctld -D -vv {' '.join(options)}"
        self.controller = self._daemon([*self.router, *_HOST, "sh", "-ec", inside])
        self.controller.wait_for("Running as primary controller", timeout_s=READY_S)

    def kill_controller(self) -> None:
        assert self.controller is not None
        self.controller.process.kill()
        self.controller.finish()

    def await_state_saved(self, job: SlurmJob) -> None:
        """Wait until the controller has written what it knows of this job now; it does so some seconds after a change."""
        saved = self.folder / "state" / "job_state"

        def written() -> int:
            return saved.stat().st_mtime_ns if saved.exists() else 0

        before = written()
        self.call("scontrol", "update", f"JobId={job.id}", "Comment=changed")
        _wait(lambda: written() > before, READY_S, lambda: f"{saved} has not been written")

    def start_node(self, name: str, wait: bool = True) -> None:
        node = self.nodes[name]
        self.call("ip", "link", "set", f"to{name[1:]}", "up")
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        inside = [
            "mount --make-rprivate /",
            "mount -t proc proc /proc",
            f"mount --bind {self.folder}/hosts /etc/hosts",
            "mount --bind /dev/null /etc/resolv.conf",  # no name server: it answers at once, and not after seconds
            "mount -t tmpfs tmpfs /dev/shm",
            f"hostname {name}",
        ]
        if self.cgroups:
            own = FREEZER / f"{self.folder.name}.{name}"
            own.mkdir(exist_ok=True)
            self._stack.callback(_remove_cgroups, own)
            inside += [f"mount --bind {own} {FREEZER}"]
        # The shell is the init of the node: it reaps what loses its parent.
        inside += [f"slurmd -D -v -N {name} & wait"]
        node.process = self._daemon([*_enter(node.host.inside), *_HOST, "sh", "-ec", "\n".join(inside)])
        if wait:
            self.await_nodes(name)

    def kill_node(self, name: str) -> None:
        """All its processes end at one instant, as when a host does."""
        process = self.nodes[name].process
        assert process is not None
        process.process.kill()  # with it its child, the init of the node
        process.finish()
        self.call("ip", "link", "set", f"to{name[1:]}", "down")  # nor does it answer any more

    def await_nodes(self, *names: str) -> None:
        """Wait until these nodes may run jobs."""

        def ready() -> bool:
            shown = self.call("sinfo", "--Node", "--noheader", f"--nodes={','.join(names)}", "--format=%N %T")
            return all(line.endswith((" idle", " mixed", " allocated")) for line in shown.splitlines()) and bool(shown)

        _wait(ready, READY_S, lambda: self.call("scontrol", "show", "nodes"))

    def logs(self, lines: int = 20) -> str:
        """The end of what the daemons have logged."""
        daemons = {"slurmctld": self.controller, **{name: node.process for name, node in self.nodes.items()}}
        ends = {name: job.err.splitlines()[-lines:] for name, job in daemons.items() if job is not None}
        return "\n".join(f"--{name}\n" + "\n".join(end) for name, end in ends.items())

    def _daemon(self, command: list[str]) -> Job:
        pdeathsig = ["setpriv", "--pdeathsig", "KILL"]
        job = Job([*pdeathsig, *command], self.folder, **self.environ)
        self._stack.callback(_end, job)
        return job

    @property
    def environ(self) -> dict[str, str]:
        bin_ = os.path.dirname(sys.executable)
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{bin_}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }

    # What users do.

    def call(self, *command: str, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            [*self.router, *command],
            cwd=cwd or self.folder,
            env={**os.environ, **self.environ, **variables},
            capture_output=True,
            text=True,
            timeout=READY_S,
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def on_node(self, name: str, *command: str) -> str:
        """What a command prints on a node, whatever its exit code."""
        process = self.nodes[name].process
        assert process is not None
        (init,) = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
        inside = ["nsenter", f"--target={init}", "--net", "--uts", "--ipc", "--mount", "--pid"]
        return subprocess.run([*inside, *command], capture_output=True, text=True, timeout=READY_S).stdout

    def await_on_node(self, name: str, *command: str) -> None:
        """Wait until a command prints something on a node."""
        _wait(lambda: bool(self.on_node(name, *command)), READY_S, lambda: f"{' '.join(command)} prints nothing on {name}")

    def submit(self, cwd: Path, *arguments: str, **variables: str) -> SlurmJob:
        """sbatch with these arguments."""
        printed = self.call("sbatch", "--parsable", *arguments, cwd=cwd, **variables)
        return SlurmJob(self, printed.strip(), cwd)

    def completions(self, job_id: str) -> list[dict[str, str]]:
        """What jobcomp has of a job: one record for each end of it, as `sacct --duplicates` shows with accounting."""
        try:
            text = (self.folder / "jobcomp.txt").read_text()
        except FileNotFoundError:
            return []
        records = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
        return [each for each in records if each["JobId"] == job_id]


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
GRACE_S = 40  # between the notice to a job that it is preempted and its end


@dataclass(frozen=True)
class SlurmJob:
    cluster: SlurmCluster
    id: str
    cwd: Path

    @property
    def out(self) -> str:
        """Its %j.out, over all its runs."""
        try:
            return (self.cwd / f"{self.id}.out").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def show(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.cluster.call("scontrol", "--oneliner", "show", "job", self.id)))

    @property
    def state(self) -> str:
        return self.show()["JobState"]

    def await_state(self, *states: str, timeout_s: float = 240) -> dict[str, str]:
        shown: dict[str, str] = {}

        def reached() -> bool:
            nonlocal shown
            shown = self.show()
            return shown["JobState"] in states

        _wait(reached, timeout_s, lambda: f"expected {states}: {self._state_of_things(shown)}")
        return shown

    def await_array_ended(self, tasks: int, timeout_s: float = 240) -> None:
        """Wait until this many tasks of the array have ended."""
        command = ("scontrol", "--oneliner", "show", "job", self.id)

        def ended() -> bool:
            return len(re.findall(rf"JobState=(?:{'|'.join(ENDED)}) ", self.cluster.call(*command))) >= tasks

        _wait(ended, timeout_s, lambda: self.cluster.call(*command))

    def await_out(self, pattern: str, count: int = 1, timeout_s: float = 240) -> list[re.Match[str]]:
        """Wait until its output has `count` matches; return them."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            nonlocal found
            found = list(re.finditer(pattern, self.out))
            return len(found) >= count

        _wait(enough, timeout_s, lambda: f"{pattern!r} seen {len(found)} times, expected {count}: {self._state_of_things()}")
        return found

    def _state_of_things(self, shown: dict[str, str] | None = None) -> str:
        names = ("JobState", "Reason", "ExitCode", "Restarts", "NodeList", "StartTime", "EndTime")
        fields = {name: value for name, value in (shown or self.show()).items() if name in names}
        return f"{fields}\n{self.out}\n{self.cluster.logs()}"


def _wait(reached: Callable[[], bool], timeout_s: float, why: Callable[[], str]) -> None:
    try:
        until(reached, limit_s=timeout_s)  # Slurm tells of no change
    except AssertionError as error:
        raise AssertionError(f"{error}: {why()}") from None


# A host of its own: with its first process all others end.
_HOST = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")


def _enter(inside: list[str]) -> list[str]:
    """From `ip netns exec NAME`, which hides /sys/fs/cgroup."""
    return ["nsenter", f"--net=/run/netns/{inside[-1]}"]


def _end(job: Job) -> None:
    job.process.kill()
    job.finish()
    job.__exit__()


def _remove_cgroups(folder: Path) -> None:
    def gone(path: str) -> bool:
        with contextlib.suppress(OSError):  # what was killed is still leaving
            os.rmdir(path)
        return not os.path.isdir(path)

    for path, _, _ in list(os.walk(folder, topdown=False)):
        until(lambda path=path: gone(path), path)  # type: ignore[misc]
