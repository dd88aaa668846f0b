"""The hosts of a run: network namespaces with a disk each, members of etcd, and an agent each that is started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from elastic_ext.checkpoints.directory.own_files import MANIFEST
from elastic_ext.checkpoints.formats.candidates import order_of
from tests.chaos import processes
from tests.chaos.processes import Process
from tests.chaos.seeded.history import History, Told
from tests.chaos.seeded.members import Brought, Embedded, Members, Ours
from tests.chaos.seeded.object_store import ObjectStore
from tests.chaos.seeded.schedule import HOSTS, LEASE_S, SPARE, TRY_AGAIN, Plan
from tests.chaos.seeded.surroundings import Surroundings, slow, slow_device, unavailable
from tests.jobs import AGENT, SCRIPTS, environment
from tests.lossy_network import CLEAN, DEVICE, LossyNetwork, Way

RUN_ID = "chaos"
SCRIPT = SCRIPTS / "chaos_training.py"
DISK_MB, STORE_MB = 4, 16
SLOW_MORE_MB = 8  # what ext4 needs for itself
END = "end"  # the file that ends the training
STORE = "store"  # the host that an object store is on
CUT = Way(loss=1.0)


class Hosts:
    def __init__(self, plan: Plan, folder: Path, history: History, stack: ExitStack) -> None:
        self.plan, self.folder, self.history = plan, folder, history
        members = ("e0", "e1", "e2") if plan.apart else HOSTS
        more = [*(members if plan.apart else ()), *([STORE] if plan.s3 else [])]
        self.network = stack.enter_context(LossyNetwork([*plan.hosts, *more]))
        self._parted: set[tuple[str, str]] = set()
        self.surroundings = Surroundings(plan, folder, stack)
        kinds = {fault.kind for fault in plan.faults if not unavailable(fault.kind)}
        self.store = _disk(folder / "store", STORE_MB, "store slow" in kinds)
        self.disks = {host: _disk(folder / f"disk-{host}", DISK_MB, "disk slow" in kinds) for host in plan.hosts}
        for path in (self.store, *self.disks.values()):
            if path.with_suffix(".image").exists():
                stack.callback(slow, path, 0, 0)  # the limit would stay with the device's number
        self.object_store: ObjectStore | None = None
        if plan.s3:
            self.object_store = ObjectStore(
                self.inside(STORE), self.network.addresses[STORE], folder / "store.log", self._put, stack
            )
        stack.callback(processes.kill_all, os.getpid())
        self.etcd: Members
        if plan.etcd == "job:":
            self.etcd = Brought(RUN_ID, self.network.addresses, members, self.pids)
        elif plan.embedded:
            visitor = folder / "visitor" if plan.secret else None
            self.etcd = Embedded(RUN_ID, HOSTS[0], self.network.addresses[HOSTS[0]], self.pids, visitor)
        else:
            self.etcd = Ours(folder, self.network.addresses, members, self.inside, stack)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}  # of those that left for good
        self.down: set[str] = set()
        self.done = False  # an agent has left with 0
        self.dismissed: set[str] = set()  # hosts whose agents came too late, and were told to end
        stack.callback(self._no_more)

    def start(self) -> None:
        if isinstance(self.etcd, Ours):
            self.etcd.await_ready()
        if any(fault.kind == "spare comes" for fault in self.plan.faults):
            self.down.add(SPARE)
        for host in self.running:
            self.start_agent(host)

    def _no_more(self) -> None:
        with self.history.changed:
            self.down = set(self.plan.hosts)

    def train_on(self) -> bool:
        """Whether the training has not been told to end."""
        return not (self.folder / END).exists()

    def end(self) -> None:
        """Let the training end with its next step."""
        (self.folder / END).touch()

    def inside(self, host: str) -> list[str]:
        """The start of a command line that runs on a host. /sys stays: agents look for their memory limits there."""
        return ["nsenter", f"--net=/var/run/netns/{self.network.namespaces[host]}"]

    # Agents.

    def start_agent(self, host: str) -> None:
        tmp = self.folder / f"tmp-{host}"
        tmp.mkdir(exist_ok=True)
        with (self.folder / f"agent-{host}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.inside(host), *self.surroundings.inside(host), *self._command(host)],
                cwd=self.folder,
                env=self._environment(host, tmp),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.agents[host] = process
        self.history.record("started", host=host, pid=process.pid)
        threading.Thread(target=self._wait, args=(host, process), daemon=True).start()

    def _command(self, host: str) -> list[str]:
        conf = {
            "checkpoint_dir": self.object_store.url if self.object_store else self.store,
            "backoff": 0,
            "lease_ttl": LEASE_S,
            "last_call_timeout": 1,
            "refuse_node": 2,
            "verify": "full",
            "metrics_port": "off",
            "standby": "on" if self.plan.standby else "off",
            "events_file": self.folder / f"events-{host}.jsonl",
            **({"local_dir": self.disks[host]} if self.plan.local else {}),
            **({"ledger_file": self.disks[host] / "ledger"} if self.plan.local and self.plan.embedded else {}),
        }
        options = [
            *(
                f"--rdzv-backend={'ext_c10d' if self.plan.embedded else 'ext_etcd'}",
                f"--rdzv-endpoint={self.etcd.endpoint}",
                f"--rdzv-id={RUN_ID}",
                f"--nnodes={self.plan.nnodes}",
            ),
            *("--nproc-per-node=1", "--max-restarts=-1", f"--local-addr={self.network.addresses[host]}"),
            *(f"--log-dir={self.folder / f'logs-{host}'}", "--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in conf.items())),
        ]
        return [*AGENT, *options, str(SCRIPT), str(self.history.pipe), str(self.plan.steps), str(self.folder / END)]

    def _environment(self, host: str, tmp: Path) -> dict[str, str]:
        env = environment(CHAOS_HOST=host, ELASTIC_EXT_NODE_NAME=host, GLOO_SOCKET_IFNAME=DEVICE, TMPDIR=str(tmp))
        del env["ELASTIC_EXT_STANDBY"], env["ELASTIC_EXT_METRICS_PORT"]
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # each of the many processes would compile all of elastic_ext again
        env |= self.etcd.environ
        return {**env, **self.surroundings.environ(host), **(self.object_store.environ if self.object_store else {})}

    def _put(self, path: str) -> None:
        """An object is in the object store."""
        name, _, file = path.rpartition("/")
        name = name.rpartition("/")[2]
        order = order_of(name)
        if order and file == MANIFEST:
            self.history.record("published", name=name, step=order[1])

    def _wait(self, host: str, process: subprocess.Popen[bytes]) -> None:
        """As a scheduler: what a signal has ended, or left with a code that asks for it, is started again."""
        code = process.wait()
        self.history.record("exit", host=host, pid=process.pid, code=code)
        with self.history.changed:
            if self.agents[host] is not process:
                return
            self.done = self.done or code == 0
            if host in self.dismissed:
                self.codes[host] = code
            elif host not in self.down:
                if code >= 0 and code not in TRY_AGAIN:
                    self.codes[host] = code
                else:
                    self.start_agent(host)
            self.history.changed.notify_all()

    @property
    def running(self) -> list[str]:
        return [host for host in self.plan.hosts if host not in self.codes and host not in self.down]

    @property
    def enough(self) -> bool:
        """Whether as many agents have left with 0 as trained at last."""
        last = max(self.history.workers.values(), key=lambda each: each["t"], default=None)
        return last is not None and sum(code == 0 for code in self.codes.values()) >= last["world"]

    def dismiss(self) -> None:
        """As a scheduler that ends what is left of a job that is done. Who trained to its end must leave by itself."""
        since = {each["host"]: each["t"] for each in self.history.events if each["what"] == "started"}
        for host in set(self.running) - self.dismissed - finishers(self.history.workers, since):
            self.dismissed.add(host)
            self.history.record("dismissed", host=host)
            self.agents[host].send_signal(signal.SIGTERM)

    # Whole hosts.

    def pids(self, host: str) -> list[Process]:
        namespace = os.stat(f"/var/run/netns/{self.network.namespaces[host]}").st_ino
        return [each for each in processes.descendants(os.getpid()) if _namespace(each.pid) == namespace]

    def of_role(self, host: str, role: str) -> Iterator[Process]:
        """The host's agent, its worker that told something last, or one of the agent's helpers. A keeper outlives its agent."""
        if host not in self.agents:
            return  # a spare that has not come yet
        agent, worker = self.agents[host].pid, self.history.workers.get(host, {}).get("pid")
        for each in self.pids(host):
            found = "agent" if each.pid == agent else "worker" if each.pid == worker else each.role
            if found == role and (role == "keeper" or agent in (each.pid, each.parent)):
                yield each

    def kill(self, host: str) -> list[int]:
        """All that runs there, and an agent that is about to."""
        with self.history.changed:
            self.down.add(host)
            agent = self.agents[host]
        killed = {agent.pid}
        if agent.pid not in {each.pid for each in self.pids(host)}:  # it has not entered its namespace yet, or has ended
            agent.kill()
        while found := self.pids(host):
            for each in found:
                each.send(signal.SIGCONT)
                each.send(signal.SIGKILL)
            killed |= {each.pid for each in found}
            processes.reap_orphans(self.waited_for)
            agent.wait()
            self.etcd.kill(host)
        return sorted(killed)

    def replace(self, host: str) -> None:
        """Another machine under the same address: its disk is empty, but for the data of etcd, which is on a volume."""
        self.link(host, CLEAN, CLEAN)
        subprocess.run(["mount", "-o", "remount,rw", str(self.disks[host])], capture_output=True, check=True)
        for each in self.disks[host].iterdir():
            if each.is_file():  # of a fault that fills it
                each.unlink()
            elif each.name != "lost+found":
                shutil.rmtree(each)
        self.history.record("emptied", host=host)
        self.etcd.replace(host)
        self.bring(host)

    def bring(self, host: str) -> None:
        """Start an agent on a host that was down, unless the job is done."""
        with self.history.changed:
            if not self.done:
                self.down.discard(host)
                self.start_agent(host)

    def link(self, host: str, out: Way, into: Way) -> None:
        self.network.change({host: (out, into)})

    def part(self, one: str, other: str, apart: bool) -> None:
        """These two do not reach each other, or do so again."""
        (self._parted.add if apart else self._parted.discard)((one, other))
        self.network.part(*self._parted)

    @property
    def servers(self) -> set[int]:
        """What carries the packets, and the object store."""
        return {self.network.pid} | ({self.object_store.pid} if self.object_store else set())

    @property
    def waited_for(self) -> set[int]:
        """Children of ours that something here waits for."""
        members = set(self.etcd.running().values()) if isinstance(self.etcd, Ours) else set()
        return members | self.servers | {process.pid for process in self.agents.values()}


def finishers(workers: Mapping[str, Told], since: Mapping[str, float]) -> set[str]:
    """Hosts whose workers are of the last group, and done. workers: what each host's told last. since: when its agent started."""
    last = max((each["restart"] for each in workers.values()), default=0)
    done = {host: each["t"] for host, each in workers.items() if each["what"] == "done" and each["restart"] == last}
    return {host for host, t in done.items() if t > since[host]}


def _namespace(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def _disk(path: Path, size_mb: int, can_be_slow: bool) -> Path:
    """A file system of its own, so that it can be full or read-only; gone with this process's mount namespace."""
    path.mkdir()
    if can_be_slow:
        slow_device(path, path.with_suffix(".image"), size_mb + SLOW_MORE_MB)
        return path
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(path)], check=True, capture_output=True)
    return path
