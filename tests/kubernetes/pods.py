"""Pods of one Job, simulated: each is a real agent on a host of its own in a network namespace, and what ends is replaced or not
as the rules of a manifest say. A new pod has the old one's name and another address; names are those of /etc/hosts, as of a
headless Service. There is no API server.
"""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ext.own_etcd import folder
from elastic_ext.own_etcd.endpoint import make_plan
from tests.jobs import SCRIPTS, TORCHRUN, Gate, Job
from tests.kubernetes.operators import DISRUPTION_TARGET, FailedPod, JobController
from tests.kubernetes.schemas import Manifest
from tests.networks import Host, network
from tests.own_etcd.hosts import lose

NAMES = Path("/etc/netns")  # `ip netns exec` puts what it finds there in place of the files in /etc
PATIENCE_S = 240.0
CONF = {"lease_ttl": "15", "backoff": "0", "metrics_port": "off"}


@dataclass
class Pod:
    index: int
    host: Host
    agent: Job
    conditions: set[str] = field(default_factory=set)


@dataclass
class Pods:
    """count: of the pods that run. spec: of the Job."""

    folder: Path
    stack: ExitStack
    hosts: Iterator[Host]
    all_hosts: list[Host]
    spec: Manifest
    count: int
    options: tuple[str, ...]
    environ: Mapping[str, str]
    script: tuple[str, ...] = (str(SCRIPTS / "elastic_job.py"),)
    running: dict[int, Pod] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    codes: list[tuple[int, int]] = field(default_factory=list)
    addresses: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = Gate(self.folder / "gate")
        self.controller = JobController(self.spec)
        self.run_id = "pods" + hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]

    def start_all(self) -> None:
        hosts = [next(self.hosts) for _ in range(self.count)]
        self.addresses = dict(enumerate(host.address for host in hosts))
        self._tell_names()
        for index, host in enumerate(hosts):
            self._start(index, host)

    def _start(self, index: int, host: Host) -> None:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name_of(index).partition(".")[0]]
        agent = Job(
            [*host.inside, *named, *TORCHRUN, *self.options, f"--rdzv-id={self.run_id}", *self.script],
            self.folder,
            NODE=name_of(index),
            GATE=str(self.gate.path),
            ELASTIC_EXT_NODE_NAME=f"node-of-{host.address}",
            **{f"ELASTIC_EXT_{key.upper()}": value for key, value in CONF.items()},
            **self.environ,
        )
        self.running[index] = Pod(index, host, self.stack.enter_context(agent))

    def _tell_names(self) -> None:
        """Written in place: each process has the file mounted."""
        named = ((address, name_of(index)) for index, address in self.addresses.items())
        lines = ["127.0.0.1 localhost", *(f"{address} {name} {name.partition('.')[0]}" for address, name in named)]
        for host in self.all_hosts:
            (NAMES / host.inside[-1] / "hosts").write_text("\n".join(lines) + "\n")

    def wait_for(self, pattern: str) -> None:
        """Until each pod that runs has said this."""
        for pod in self.running.values():
            pod.agent.wait_for(pattern)

    # What happens to pods

    def evict(self, index: int) -> None:
        """The API server's eviction: a condition, then SIGTERM and, if need be, SIGKILL after the grace period."""
        self.running[index].conditions.add(DISRUPTION_TARGET)
        os.killpg(self.running[index].agent.process.pid, signal.SIGTERM)

    def lose_node(self, index: int) -> None:
        """No power; the node's object is deleted at last, and with it the pod."""
        self.running[index].conditions.add(DISRUPTION_TARGET)
        lose(self.running[index].host)

    def lose_node_for_long(self, index: int) -> None:
        """There is no place for a new pod yet."""
        self.lose_node(index)
        self.running.pop(index).agent.finish()

    def out_of_memory(self, index: int) -> None:
        """The kernel kills the container: exit code 137, reason OOMKilled, and no condition."""
        for pid in _processes(self.running[index]):
            os.kill(pid, signal.SIGKILL)

    def reconcile(self, ends: int = 1) -> str | None:
        """Wait for so many pods to end, and do what the Job controller would. Return why the Job has failed; None: it has not."""
        for _ in range(ends):
            pod = self._next_end()
            code = pod.agent.finish().returncode
            del self.running[pod.index]
            self.codes.append((pod.index, code := code if code >= 0 else 128 - code))
            if code == 0:
                self.ended.append(pod.index)
                continue
            if (reason := self.controller.failed(FailedPod(pod.index, code, frozenset(pod.conditions)))) is not None:
                return reason
            self._replace(pod)
        return None

    def _next_end(self) -> Pod:
        descriptors = {os.pidfd_open(pod.agent.process.pid): pod for pod in self.running.values()}
        try:
            ready = select.select(list(descriptors), [], [], PATIENCE_S)[0]
        finally:
            for each in descriptors:
                os.close(each)
        assert ready, "no pod has ended: " + "\n".join(pod.agent.err[-2000:] for pod in self.running.values())
        return descriptors[ready[0]]

    def _replace(self, pod: Pod) -> None:
        lose(pod.host)  # whatever the container left behind is gone with it
        self.start_on_new_host(pod.index)

    def start_on_new_host(self, index: int) -> None:
        host = next(self.hosts)
        self.addresses[index] = host.address
        self._tell_names()
        self._start(index, host)


def _processes(pod: Pod) -> list[int]:
    from tests.own_etcd.hosts import pids_in

    return pids_in(pod.host)


def name_of(index: int) -> str:
    return f"train-{index}.train"


@contextmanager
def pods(
    tmp_path: Path,
    spec: Manifest,
    count: int,
    spares: int,
    options: tuple[str, ...],
    environ: Mapping[str, str],
    **more: tuple[str, ...],
) -> Iterator[Pods]:
    """spares: how many pods may be replaced, each on a host that was not used before."""
    with network(count + spares) as made, ExitStack() as stack:
        for host in made.hosts:
            folder_of_names = NAMES / host.inside[-1]
            folder_of_names.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder_of_names)
            (folder_of_names / "hosts").write_text("127.0.0.1 localhost\n")
            # gRPC asks DNS for an IPv6 address whatever this file says: here it hears at once that there is no DNS.
            (folder_of_names / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        job = Pods(tmp_path, stack, iter(made.hosts), made.hosts, spec, count, options, environ, **more)  # type: ignore[arg-type]
        try:
            yield job
        finally:
            for host in made.hosts:
                lose(host)
            _remove_etcd(job)


def _remove_etcd(job: Pods) -> None:
    """The memory of a lost host is this machine's."""
    names = [name_of(index) for index in range(job.count)]
    plan = make_plan("job:" + ",".join(names), job.run_id, ())
    for name in names:
        place = folder.folder_of(job.run_id, plan.hosts, name, {})
        if place.exists():
            folder.remove(place)
