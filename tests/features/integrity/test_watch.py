"""A flipped bit in a replica, for real: found at the next comparison, the right node named, resumed from before it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_ext.agent.companion import LocalWorkers
from elastic_ext.agent.observation import FeatureMetrics, OwnNode
from elastic_ext.base import records
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.failures.joint_evidence import SCHEMA, Hashed, WorkerHashes
from elastic_ext.features.integrity.watch import REPORT_S, Integrity, ReplicaWatch, hashed_by
from elastic_ext.rendezvous.contract import NodeIdentity
from elastic_ext.status.job_status import MAX_WHY
from elastic_ext.telemetry.agent_metrics import AgentMetrics
from elastic_ext.workers import worker_env
from elastic_ext.workers.progress import ProgressTable
from tests.embedded_server import EmbeddedServer
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Finished, Job, run
from tests.rendezvous.test_etcd_jobs import wait_for_nodes

SCRIPT = SCRIPTS / "replicated_job.py"
EVERY, STEPS = 20, 120
CONF = f"last_call_timeout=0.5,hang_timeout=off,integrity_every={EVERY}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int], str]:
    """Returns the last loss, to the bit, of a job of so many ranks in which no bit flips."""
    return cache(lambda ranks: loss(plain(tmp_path_factory.mktemp("undisturbed"), "ddp", ranks, integrity_every=0)))


def plain(folder: Path, how: str, ranks: int, flips: str = "", integrity_every: int = EVERY, **variables: str) -> Finished:
    """A job of one agent, to its end."""
    (folder / "checkpoints").mkdir()
    conf = f"{CONF.rpartition('=')[0]}={integrity_every},checkpoint_dir={folder / 'checkpoints'}"
    options = [f"--nproc-per-node={ranks}", "--max-restarts=3", f"--rdzv-conf={conf}"]
    return run([*AGENT, *options, SCRIPT, folder, how], folder, STEPS=str(STEPS), FLIP=flips, **variables)


def loss(*jobs: Finished) -> str:
    found = {each for job in jobs for each in re.findall(r"loss (\S+)", job.out)}
    assert len(found) == 1, "\n".join(job.all for job in jobs)
    return found.pop()


def quarantined(folder: Path) -> set[str]:
    return set(own_files.quarantined_names(open_storage(str(folder / "checkpoints"))))


class Hosts:
    """Agents of one job, with one worker each."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.folder, self._stack = tmp_path, stack
        self.server = stack.enter_context(EmbeddedServer())
        (tmp_path / "checkpoints").mkdir()

    def start(self, names: str, nnodes: str, flips: str, **variables: str) -> dict[str, Job]:
        where = [f"--rdzv-endpoint={self.server.endpoint}", "--rdzv-id=job", f"--nnodes={nnodes}", "--nproc-per-node=1"]
        conf = f"--rdzv-conf={CONF},checkpoint_dir={self.folder / 'checkpoints'}"
        command = [*TORCHRUN, *self.server.options, *where, conf, "--max-restarts=3", SCRIPT, self.folder, "ddp"]
        return {
            name: self._stack.enter_context(
                Job(command, self.folder, NODE=name, ELASTIC_EXT_NODE_NAME=name, STEPS=str(STEPS), FLIP=flips, **variables)
            )
            for name in names
        }


@pytest.fixture
def hosts(tmp_path):
    with ExitStack() as stack:
        yield Hosts(tmp_path, stack)


@pytest.mark.parametrize("what", ["parameter", "state"])
@pytest.mark.full
def test_a_spare_replaces_the_odd_one_of_three(hosts, undisturbed, what):
    """It is rank 0, which also saves: what it has saved since is refused."""
    gate = hosts.folder / "gate"
    os.mkfifo(gate)
    jobs = hosts.start("abc", "3", flips=f"0 0 50 {what}", GATE=str(gate))
    for job in jobs.values():
        job.wait_for("attempt 0 from step 0")
    bad = next(name for name, job in jobs.items() if re.search("rank 0 on", job.out))
    spare = hosts.start("d", "3", flips="")
    wait_for_nodes(hosts.server, 4)  # else no node may leave
    gate.open("w").close()
    done = {name: job.finish() for name, job in {**jobs, **spare}.items()}
    assert done[bad].returncode == 69, done[bad].err
    assert {each.returncode for name, each in done.items() if name != bad} == {0}
    said = (
        "the replica of rank 0 differs from 2 others, which are equal, after step 60 of this round; all were equal after step 40"
    )
    assert f"{said}, on {bad}:" in done[bad].err, done[bad].err
    assert "kind hardware, rule replicas-differ" in done[bad].err
    assert quarantined(hosts.folder) <= {"step_60.pt"}
    well = [each for name, each in done.items() if name != bad]
    assert {each for job in well for each in re.findall(r"attempt 1 from step (\d+)", job.out)} == {"40"}
    assert loss(*well) == undisturbed(3)


@pytest.mark.seam
def test_two_differ_restart_once_then_both_are_named(hosts, undisturbed):
    jobs = hosts.start("ab", "2", flips="0 0 50 parameter,1 1 70 state")
    done = {name: job.finish() for name, job in jobs.items()}
    assert {each.returncode for each in done.values()} == {69}
    said = "".join(each.err for each in done.values())
    assert "the replicas of ranks 0, 1 differ after step 60 of this round; all were equal after step 40" in said
    assert "the replicas of ranks 0, 1 differ after step 40 of this round; all were equal after step 20" in said
    assert re.search("no majority shows which of (a and b|b and a) is bad: replace them all", said)
    assert {each for job in done.values() for each in re.findall(r"attempt 1 from step (\d+)", job.out)} == {"40"}
    again = {name: job.finish() for name, job in hosts.start("ab", "2", flips="").items()}  # they have been replaced
    assert {each for job in again.values() for each in re.findall(r"attempt \d from step (\d+)", job.out)} == {"60"}
    assert loss(*again.values()) == undisturbed(2)


@pytest.mark.full
def test_on_one_host_fresh_jobs_begin_again_fresh(tmp_path, undisturbed):
    """All its checkpoints are refused: they are newer than the first comparison."""
    done = plain(tmp_path, "ddp", 2, flips="0 0 10 parameter")
    assert done.returncode == 0, done.err
    assert "after step 20 of this round; all were equal after step 1" in done.err
    assert re.findall(r"attempt 1 from step (\d+)", done.out) == ["0", "0"]
    assert loss_of(done, 1) == undisturbed(2)


def loss_of(done: Finished, attempt: int) -> str:
    (found,) = set(re.findall(rf"attempt {attempt} loss (\S+)", done.out))
    return found


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unequal", "not the hardware is to blame but the script"),  # the ranks were never equal
        ("fsdp", "rank 0: . of . parameters of Adam are no replicas"),
        ("local", "rank 0: . of . parameters of Adam are no replicas"),
        ("sparse", "integrity_every: rank 1: replicas are no longer hashed in this round: "),
    ],
)
@pytest.mark.full
def test_what_cannot_be_compared_is_said_once(tmp_path, how, said):
    """And the job trains on."""
    done = plain(tmp_path, how, 2)
    assert done.returncode == 0, done.err
    assert len(re.findall(said, done.err)) == 1, done.err


@pytest.mark.full
def test_shards_of_hsdp(tmp_path):
    """Of rank 2, which holds what rank 0 holds."""
    done = plain(tmp_path, "hsdp", 4, flips="0 2 30 state")
    assert done.returncode == 0, done.err
    assert "the replicas of ranks 0, 2 differ after step 40 of this round; all were equal after step 20" in done.err


def test_a_nodes_hashes_are_of_all_its_workers(tmp_path):
    """What is no hash, or no file yet, says nothing."""
    table = ProgressTable(str(tmp_path / "progress"), 3)
    workers = LocalWorkers(cast("Any", None), table, {0: 6, 1: 7, 2: 8}, {}, {})
    paths = [Path(str(worker_env.hashes_path(table.path, slot))) for slot in range(3)]
    assert hashed_by(workers) == ()
    write(paths[0], Hashed("s", 8, 1, "a"), Hashed("s", 8, 20, "b"))
    write(paths[1], Hashed("s", 8, 1, "a"), Hashed("s", 8, 20, "c"))
    paths[2].write_text('{"schema": 1, "hashed": [{"of": "s"')
    read = hashed_by(workers)
    assert read == (
        Hashed("s", 8, 1, "a", (6, 7)),
        Hashed("s", 8, 20, "b", (6,)),
        Hashed("s", 8, 20, "c", (7,)),
    )
    for wrong in (Hashed("s", -8, 20, "c"), Hashed("a/b", 8, 20, "c"), Hashed("s", 8, 20, "")):
        write(paths[2], wrong)
        assert hashed_by(workers) == read
    reported: list[tuple[Hashed, ...]] = []
    part = SimpleNamespace(post=lambda topic, value: reported.append(value.hashed))
    watch = ReplicaWatch(cast("Any", SimpleNamespace(part=part)), lambda workers, why: None)
    watch.workers_started(workers)
    watch.check(workers)
    assert (reported, watch.next_check_s()) == ([read], math.inf)
    write(paths[2], Hashed("s", 8, 1, "a"))
    watch.check(workers)  # too soon after the last
    assert len(reported) == 1
    assert 0 <= watch.next_check_s() <= REPORT_S
    watch.workers_ended(workers)
    assert not any(path.exists() for path in paths)
    table.remove()


def write(path: Path, *hashed: Hashed, off: str = "", note: str = "") -> None:
    path.write_text(json.dumps({"schema": SCHEMA, **records.plain(WorkerHashes(hashed, off, note))}))


def test_who_is_uncompared_is_shown_until_the_end():
    handler: Any = SimpleNamespace(node=NodeIdentity("n0", "n0", "127.0.0.1"), part=SimpleNamespace(round=1))
    node, of_features, states = OwnNode(handler, AgentMetrics(version="1", torch="2", run_id="job")), FeatureMetrics(), []
    node.on_state = lambda: states.append(1)
    integrity = Integrity(cast("Any", SimpleNamespace(observation=SimpleNamespace(node=node, of_features=of_features))))
    integrity._show(1, "x" * 1000)
    integrity._show(1, "x" * 1000)
    assert of_features.value("replicas_uncompared_workers") == 1
    assert "x" in (why := node.now(0.0).report.uncompared)
    assert len(why) <= MAX_WHY
    integrity._show(None, "")
    assert not [each for each in of_features.values() if each[0] == "elastic_ext_replicas_uncompared_workers"]
    assert not node.now(0.0).report.uncompared
    assert len(states) == 2
