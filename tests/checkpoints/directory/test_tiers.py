"""Jobs of two nodes with a disk of their own each, under our agents: what they resume from, exact to the bit; what reaches S3."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory.tiers import own_checkpoints
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.choice.scenes import flip
from tests.checkpoints.copying.test_replicate import copier_of
from tests.checkpoints.rank_groups import RankGroups
from tests.checkpoints.writing.test_checkpointer import small_disk
from tests.checkpoints.writing.test_under_the_agent import said, unbroken_state
from tests.jobs import AGENT, SCRIPTS, TIMEOUT_S, Job, children, command_of
from tests.until import until

pytestmark = pytest.mark.full

SCRIPT = SCRIPTS / "checkpointed_job.py"
NO_COPIES = "0.000001"  # megabytes a second: nothing is complete in the remote directory while the test lasts
SHORT = ["--shutdown-timeout=2"]
IMPATIENT = {"ELASTIC_EXT_PLATFORM_GRACE": "3"}


class Nodes:
    """Two agents, each with a local directory of its own; they meet in an etcd."""

    def __init__(self, endpoint: str, remote: str, tmp_path: Path, stack: ExitStack) -> None:
        self.remote, self.tmp_path = remote, tmp_path
        self._endpoint, self._stack = endpoint, stack

    def local(self, name: str) -> Path:
        return self.tmp_path / f"disk-{name}"

    def start(self, name: str, steps: int, *more: str, **env: str) -> Job:
        conf = f"checkpoint_dir={self.remote},verify=full,backoff=0,lease_ttl=30"
        where = [f"--rdzv-endpoint={self._endpoint}", "--rdzv-backend=ext_etcd", "--rdzv-id=job", f"--rdzv-conf={conf}"]
        script = [SCRIPT, self.remote, "--out=tiers", f"--steps={steps}", "--save-every=2"]
        command = [*AGENT, *where, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", *more, *script]
        env = {"ELASTIC_EXT_LOCAL_DIR": str(self.local(name)), "ELASTIC_EXT_NODE_NAME": name, **env}
        return self._stack.enter_context(Job([str(part) for part in command], self.tmp_path, **env))

    def by_rank(self, step: int) -> list[str]:
        """The nodes, by the rank that saved this step there."""
        found = {
            name: rank for name in "ab" for rank in (0, 1) if any(self.local(name).glob(f"step_{step:08}.*/rank_0000{rank}.pt"))
        }
        return sorted(found, key=lambda name: found[name])

    def complete(self) -> list[int]:
        return complete_in(self.remote)


def complete_in(directory: str) -> list[int]:
    """Steps."""
    storage = open_storage(directory)
    found = [storage.stat(name) for name in own_checkpoints(storage)]
    return [int(entry.name[5:13]) for entry in found if entry is not None and detect.check(storage, entry).complete]


@pytest.fixture
def nodes(server, s3, tmp_path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(server.endpoint, f"{s3}/job", tmp_path, stack)


def test_a_restarted_agent_finds_its_disk(nodes, tmp_path, groups):
    """It comes back as the other rank, and nothing is in the remote directory: each node sends what the other one needs now."""
    slow = {"ELASTIC_EXT_COPY_MB_S": NO_COPIES, **IMPATIENT}
    jobs = {name: nodes.start(name, 14, *SHORT, **slow, HOLD="1") for name in "ab"}
    jobs["a"].wait_for("is at step 6")
    first, other = nodes.by_rank(4)
    jobs[first].process.kill()
    jobs[first].process.wait()
    jobs[first] = nodes.start(first, 14, *SHORT, **slow)
    for name, job in jobs.items():
        job.wait_for("waiting until all checkpoints are copied to")
        (path,) = re.findall(r"resuming from (\S+), step", job.err)
        assert path.startswith(str(nodes.local(name)))
        assert "newest with all its parts in the nodes' local_dir" in job.err
        assert not (nodes.local(name) / ".elastic_ext" / "fetched").exists()
    assert nodes.by_rank(14) == [other, first]
    assert nodes.complete() == []
    assert said(tmp_path, "tiers", "state") == unbroken_state(groups, tmp_path, 14)


class Ranks:
    """Ranks on nodes of their own, without any agent."""

    def __init__(self, tmp_path: Path, groups: RankGroups) -> None:
        self.tmp_path, self.remote, self.groups = tmp_path, tmp_path / "remote", groups

    def disk(self, name: str) -> Path:
        return self.tmp_path / f"disk-{name}"

    def run(self, disks: str, out: str, *args: str, resume_from: str | None = None) -> list[list[str]]:
        """One node for each disk, in this order; return what each rank has said."""
        each = []
        for rank, name in enumerate(disks):
            chosen = {} if resume_from is None else {"ELASTIC_EXT_RESUME_FROM": str(self.disk(name) / resume_from)}
            each.append({"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "ELASTIC_EXT_LOCAL_DIR": str(self.disk(name)), **chosen})
        words = [str(self.remote), f"--out={self.tmp_path / out}", *args]
        env = {"ELASTIC_EXT_CHECKPOINT_DIR": str(self.remote)}
        return self.groups.run("checkpointed", len(disks), {"words": words}, each=each, env=env)


@pytest.fixture(scope="module")
def original(tmp_path_factory, forking) -> Path:
    """Two nodes have saved step 4, to their own disks only. For copies."""
    with forking.lent() as groups:
        ranks = Ranks(tmp_path_factory.mktemp("original"), groups)
        assert None not in ranks.run("ab", "saved", "--steps=4", "--save=4:0"), groups.stderr.read_text()
    return ranks.tmp_path


@pytest.fixture
def saved(original, tmp_path, groups) -> Ranks:
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return Ranks(tmp_path, groups)


WITH_SAVED = pytest.mark.xdist_group("saved")  # all in one process of xdist, which makes the original once

STEP_4 = "step_00000004.g0001"


@WITH_SAVED
@pytest.mark.parametrize("disks", ["ba", "nab"])
def test_parts_are_loaded_whoever_has_them(saved, disks):
    """By the same nodes in another order, and with a new one as the first."""
    (wanted,) = re.findall(r"^state (\w+)$", (saved.tmp_path / "saved.0").read_text(), re.MULTILINE)
    for name, lines in zip(disks, saved.run(disks, "again", "--steps=4"), strict=True):
        assert f"loaded {wanted}" in lines
        assert f"loaded {saved.disk(name) / STEP_4}" in saved.groups.stderr.read_text()
        assert not (saved.disk(name) / ".elastic_ext" / "fetched").exists()


@WITH_SAVED
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_what_a_disk_has_lost_is_loaded_remotely(saved, how):
    copiers = [copier_of(saved.disk(name), saved.remote) for name in "ab"]
    assert [copiers[turn].turn().complete for turn in (0, 1, 0)][-1] == STEP_4
    path = saved.disk("b") / STEP_4
    if how == "gone":
        shutil.rmtree(path)
    else:
        (shard,) = path.glob("*.distcp")
        flip(shard, -1)
    for lines in saved.run("ab", "again", "--steps=4", resume_from=STEP_4):
        assert "resumed 4 0" in lines
    assert saved.groups.stderr.read_text().count(f"loaded {saved.remote / STEP_4}") == 2


@WITH_SAVED
def test_what_is_gone_everywhere_is_an_error(saved):
    shutil.rmtree(saved.disk("b") / STEP_4)
    assert saved.run("ab", "again", "--steps=4", resume_from=STEP_4) == [None, None]
    assert " on no node, e.g. " in saved.groups.stderr.read_text()


def test_all_saves_arrive_although_the_copier_is_killed(nodes, tmp_path, groups):
    """Killed at its work, again and again, while a worker dies too; the job ends well when the last one is there."""
    jobs = [nodes.start(name, 14, HOLD="1") for name in "ab"]
    jobs[0].wait_for("is at step 6")
    kill_the_copier(jobs[0], 1)
    os.kill(int(jobs[0].wait_for(r"pid (\d+) is at step 6")[0][1]), signal.SIGKILL)
    for times in (2, 3):
        kill_the_copier(jobs[0], times)
    for job in jobs:
        assert job.finish().returncode == 0, job.err
    assert jobs[0].err.count(KILLED) >= 1
    assert nodes.complete()[0] == 14
    assert said(tmp_path, "tiers", "state") == unbroken_state(groups, tmp_path, 14)
    for name in "ab":
        assert [path.name[5:13] for path in nodes.local(name).glob("step_*")] == ["00000014"]  # the newest stays


KILLED = "the process that copies checkpoints ended with exit code -9; restarting it in"


def kill_the_copier(job: Job, times: int) -> None:
    """Once it runs, and return when the agent knows. At the end of a job it may end by itself, and then so does the agent.

    times: how often it has been killed then.
    """
    until(lambda: copiers(job.process.pid) or job.process.poll() is not None, limit_s=TIMEOUT_S)
    for pid in copiers(job.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: job.err.count(KILLED) >= times or job.process.poll() is not None, limit_s=TIMEOUT_S)


def copiers(agent: int) -> list[int]:
    """Pids of the copiers of an agent; none of one that has ended."""
    with suppress(FileNotFoundError):
        return [pid for pid in children(agent) if "elastic_ext.checkpoints.copying.replicate" in command_of(pid)]
    return []


def alone(nodes: Nodes, lines: str, *options: str) -> Job:
    """A job of one node, whose script is `lines` with a checkpointer."""
    script = nodes.tmp_path / "script.py"
    made = f"checkpointer = elastic_ext.Checkpointer({nodes.remote!r}, model=torch.nn.Linear(3, 3))"
    script.write_text(f"import os, signal, elastic_ext, torch\n{made}\n{lines}")
    conf = f"--rdzv-conf=checkpoint_dir={nodes.remote},backoff=0"
    command = [*AGENT, "--nproc-per-node=1", conf, *options, str(script)]
    return Job(command, nodes.tmp_path, ELASTIC_EXT_LOCAL_DIR=str(nodes.local("a")))


SAVE_AND_DIE = """
position = checkpointer.load()
if position.step == 0:
    checkpointer.save(5, wait=True)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
print("resumed", position.step, position.path, flush=True)
"""


def test_workers_and_agent_die_right_after_a_save(nodes):
    """Nobody is left who could tell of the save: the copier goes with its agent, and the next agent's one looks."""
    with alone(nodes, SAVE_AND_DIE, "--max-restarts=3") as job:
        assert job.finish().returncode == -signal.SIGKILL
    with alone(nodes, SAVE_AND_DIE, "--max-restarts=3") as job:
        done = job.finish()
    assert done.returncode == 0, done.err
    assert "resumed 5" in done.out
    assert nodes.complete() == [5]


@pytest.mark.seam
def test_a_worker_that_dies_of_its_last_save(nodes):
    """The agent does not restart: the copy arrives before it leaves."""
    with alone(nodes, "checkpointer.load(); checkpointer.save(5, wait=True); raise NameError('a bug')") as job:
        done = job.finish()
    assert done.returncode == 65, done.err
    assert nodes.complete() == [5]


def test_a_full_local_disk(tmp_path, groups):
    """Saves go to the remote directory, training goes on, one warning on each rank."""
    ranks = Ranks(tmp_path, groups)
    with small_disk(ranks.disk("b"), "16k"):
        told = ranks.run("ab", "tiers", "--steps=6", "--save=2:0", "--save=4:0", "--save=6:0")
        warned = re.findall(r"^(\d+) WARNING:.*cannot save to local_dir: ", groups.stderr.read_text(), re.MULTILINE)
        assert len(warned) == len(set(warned)) == 2
        assert complete_in(str(ranks.remote)) == [6, 4, 2]
        assert [lines[-1] for lines in told] == [f"state {state}" for (state,) in unbroken_state(groups, tmp_path, 6)]
        assert [path for name in "ab" for path in ranks.disk(name).glob("step_*")] == []
