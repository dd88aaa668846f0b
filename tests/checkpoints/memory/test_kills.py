"""Kills of every kind, one after another, in one job on three nodes: a step or two are lost, never more, and nothing is torn.

ELASTIC_EXT_TEST_KILLS is the number of kills (`make chaos`: 200), ELASTIC_EXT_TEST_SEED chooses them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.checkpoints.formats.manifest import MANIFEST
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, Job, descendants, environment

KILLS = int(os.environ.get("ELASTIC_EXT_TEST_KILLS", "6"))
SEED = int(os.environ.get("ELASTIC_EXT_TEST_SEED", "1"))
EVERY = 1  # memory_every
NODES = 3
BALLAST = 4 << 20  # bytes of each node's part, at MB_S: most of the time a part is on its way
MB_S = "16"
RECOVERY_S = 300.0  # of all agents and workers, each of which imports torch

KINDS = ("worker", "agent", "node", "node while a part is sent")


def has_begun(memory: Path) -> bool:
    """Whether a copy is being made: as a rule its parts are on their way to other nodes."""
    return any(not (folder / MANIFEST).exists() for folder in memory.glob("step_*"))


@dataclass
class Told:
    """What the ranks have told, through a Unix socket."""

    socket: socket.socket
    all: list[dict[str, Any]]

    def until(self, enough: Callable[[], bool], what: str, logs: Callable[[], str]) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while not enough():
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self.all.append(json.loads(self.socket.recv(1 << 16)))
            except TimeoutError:
                raise AssertionError(f"{what}: not in {RECOVERY_S:g} s\n{logs()}") from None


class Cluster:
    """The agents of the job, each with one worker."""

    def __init__(self, tmp_path: Path, server: EtcdServer, stack: ExitStack) -> None:
        self._tmp_path, self._server, self._stack = tmp_path, server, stack
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        stack.callback(listening.close)
        listening.bind(str(tmp_path / "told"))
        self.told = Told(listening, [])
        self.jobs: dict[str, Job] = {}
        self._started = 0
        stack.callback(self._remove_memory)

    def start(self) -> None:
        name = f"node-{self._started}"
        self._started += 1
        conf = "--rdzv-conf=lease_ttl=10,last_call=0.5,stop_grace=2"
        where = [
            "--rdzv-backend=ext_etcd",
            f"--rdzv-endpoint={self._server.endpoint}",
            "--rdzv-id=job",
            f"--nnodes={NODES}",
            conf,
        ]
        script = [str(SCRIPTS / "memory_kills_job.py"), str(self._tmp_path / "told"), str(BALLAST)]
        settings = {
            "NODE": name,
            "ELASTIC_EXT_NODE_NAME": name,  # a host that is replaced so often by itself would be refused (`max_rejoins`)
            "ELASTIC_EXT_CHECKPOINT_DIR": str(self._tmp_path / "checkpoints"),
            "ELASTIC_EXT_MEMORY_EVERY": str(EVERY),
            "ELASTIC_EXT_MEMORY_LIMIT": "100M",
            "ELASTIC_EXT_MEMORY_MB_S": MB_S,
            "ELASTIC_EXT_BACKOFF": "0",
            "ELASTIC_EXT_STANDBY": "on",
            "PYTHONPATH": str(SCRIPTS.parents[1]),
        }
        command = [*AGENT, *where, f"--nnodes={NODES}", "--nproc-per-node=1", "--max-restarts=-1", *script]
        self.jobs[name] = self._stack.enter_context(Job(command, self._tmp_path, **settings))

    def await_steps(self, old: set[int], count: int) -> list[dict[str, Any]]:
        """Wait until the workers that are not old have done so many steps; return what they said of their load."""

        def trained() -> set[int]:
            steps = Counter(each["pid"] for each in self.told.all if each["what"] == "step" and each["pid"] not in old)
            return {pid for pid, done in steps.items() if done >= count}

        self.told.until(lambda: len(trained()) == NODES, f"{count} steps", self.logs)
        return [each for each in self.told.all if each["what"] == "loaded" and each["pid"] in trained()]

    def await_ends(self, count: int) -> None:
        """Wait until so many ranks have told that they are done."""
        self.told.until(lambda: sum(each["what"] == "done" for each in self.told.all) >= count, "the end", self.logs)

    def await_news(self, count: int) -> None:
        """Wait until ranks have told something so many times."""
        end = len(self.told.all) + count
        self.told.until(lambda: len(self.told.all) >= end, "a step", self.logs)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{job.err[-6000:]}" for name, job in self.jobs.items())

    def kill(self, victim: dict[str, Any], kind: str) -> bool:
        """Kill, and start another agent in place of one; return whether a part was on its way to another node."""
        if kind == "worker":
            os.kill(victim["pid"], signal.SIGKILL)
            return False
        agent = self.jobs.pop(victim["node"]).process
        pids = [agent.pid] if kind == "agent" else [agent.pid, *descendants(agent.pid)]
        folders = {Path(each["memory"]) for each in self.told.all[-2 * NODES :]}

        def send(number: signal.Signals) -> None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        while True:
            send(signal.SIGSTOP)
            comes = any(map(has_begun, folders))
            if comes or kind != KINDS[-1]:
                break
            send(signal.SIGCONT)
            self.await_news(1)  # the next copy begins right before a rank tells of its step
        send(signal.SIGKILL)
        agent.wait()
        self.start()
        return comes

    def _remove_memory(self) -> None:
        """What hosts that were killed whole have left."""
        for folder in {Path(each["memory"]).parent for each in self.told.all if each["memory"]}:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
@pytest.mark.timeout(600 + 60 * KILLS)
def test_whatever_is_killed_a_step_or_two_are_lost(server: EtcdServer, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    kinds = [KINDS[number % len(KINDS)] for number in range(KILLS)]
    draw.shuffle(kinds)
    while_sent, lost = 0, list[int]()
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, server, stack)
        for _ in range(NODES):
            cluster.start()
        loads = cluster.await_steps(set(), 5)
        for kind in kinds:
            cluster.await_news(draw.randrange(1, 2 * NODES))
            old = {each["pid"] for each in cluster.told.all}
            while_sent += cluster.kill(draw.choice(loads), kind)
            loads = cluster.await_steps(old, 5)  # a new node has its first copy after two, and its peer has it, too
            last = max(each["step"] for each in cluster.told.all if each["pid"] in old)
            found = {(each["step"], each["from"], each["torn"]) for each in loads}
            assert found == {(loads[0]["step"], "memory", False)}, f"{kind}, after {len(lost)} kills\n{cluster.logs()}"
            lost.append(last - loads[0]["step"])
        (tmp_path / "stop").touch()
        cluster.await_ends(NODES)  # a rank that tells of its last step waits until there is room for it
        assert [job.finish().returncode for job in cluster.jobs.values()] == [0] * NODES
    check_digests(cluster.told.all)
    print(f"{KILLS} kills, {while_sent} of them while a part was sent; steps lost: {Counter(lost)}")
    assert max(lost) <= EVERY + 1, list(zip(kinds, lost, strict=True))
    assert while_sent >= kinds.count(KINDS[-1])


def check_digests(told: list[dict[str, Any]]) -> None:
    """Every state that any rank has told of is that of an unbroken training, to the bit."""
    steps = max(each["step"] for each in told)
    command = [sys.executable, str(SCRIPTS / "chaos_training.py"), "--alone", str(steps)]
    alone = subprocess.run(command, capture_output=True, check=True, env=environment(OMP_NUM_THREADS="1"))
    unbroken = json.loads(alone.stdout)
    assert {each["step"]: each["digest"] for each in told if each["digest"] != unbroken[each["step"]]} == {}
