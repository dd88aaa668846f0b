"""The loss of a node, and of Slurm's controller, under entrypoints/slurm/train.sbatch. Each test has a cluster of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, SlurmJob
from tests.slurm.jobs import Training, loads
from tests.until import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # a minute each on an idle machine

BATCH_HOST = "n1"  # where Slurm runs the script: the first node of the allocation


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    """Of its own: the test breaks it. One node more than any job here has.

    After the loss of a node Slurm refuses to change the job where there is no accounting, as here: it stays as large as it was.
    """
    with SlurmCluster(4) as made:
        yield made


def test_a_spare_replaces_a_lost_node(training: Training) -> None:
    """In the same allocation, in the same run. The lost node had a member of the job's etcd: the spare gets one, too."""
    job = training.submit("--nodes=4", SPARES="1")
    job.await_out("trains rank .* run 0", 3)
    members = ["n1", "n2", "n3"]
    lost = next(node for _, _, node in loads(job, 0) if node in members and node != BATCH_HOST)
    await_newer(training.folder, "")
    training.cluster.kill_node(lost)
    job.await_out("trains rank .* run 0", 6)
    again = loads(job, 0)[3:]
    assert all(step > 0 and world == 3 and node != lost for step, world, node in again)
    training.cluster.await_on_node("n4", "pgrep", "-x", "etcd")
    training.finish()
    shown = job.await_state("COMPLETED", "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("0:0", "0")
    until(lambda: not training.left_behind(but=lost), "nothing left of the jobs' etcd: the keepers end last")


def test_a_spare_replaces_the_batch_host(training: Training) -> None:
    """In the same allocation, in the same run; it takes another run to say how the job has ended."""
    job = training.submit("--nodes=3", SPARES="1")
    job.await_out("trains rank .* run 0", 2)
    await_newer(training.folder, "")
    training.cluster.kill_node(BATCH_HOST)
    # With it srun is lost, which writes the output: only checkpoints tell.
    trained = BATCH_HOST in {node for _, _, node in loads(job, 0)}  # or it was the spare
    await_newer(training.folder, newest(training.folder), generations=int(trained))
    shown = job.show()
    assert (shown["JobState"], shown["Restarts"]) == ("RUNNING", "0")
    training.finish()
    shown = job.await_state("COMPLETED", "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("0:0", "1")
    assert not loads(job, 1)


@pytest.mark.parametrize("which", ["another", "batch-host"])
def test_without_a_spare_the_job_goes_on_elsewhere(training: Training, which: str) -> None:
    """The script asks for a requeue as soon as nobody is waited for, or the agent that is left does in its place.

    The job's etcd is lost with the script's node; nobody waits for join_timeout, which is longer than this test.
    """
    job = training.submit("--nodes=2", JOIN_TIMEOUT="600")
    job.await_out("trains rank .* run 0", 2)
    lost = node_to_lose(training, job, which)
    await_newer(training.folder, "")
    training.cluster.kill_node(lost)
    job.await_out("trains rank .* run 1", 2)
    again = loads(job, 1)
    assert all(step > 0 and world == 2 and node != lost for step, world, node in again)
    assert job.show()["Restarts"] == "1"
    training.finish()
    assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"


def node_to_lose(training: Training, job: SlurmJob, which: str) -> str:
    return BATCH_HOST if which == "batch-host" else next(node for _, _, node in loads(job, 0) if node != BATCH_HOST)


def test_training_goes_on_without_the_controller(training: Training) -> None:
    """slurmctld is killed and started again: the job makes checkpoints meanwhile, and the queue is what it was."""
    job = training.submit("--nodes=2")
    job.await_out("trains rank .* run 0", 2)
    training.cluster.await_state_saved(job)
    training.cluster.kill_controller()
    seen = newest(training.folder)
    await_newer(training.folder, seen)
    await_newer(training.folder, newest(training.folder))
    training.cluster.start_controller()
    training.cluster.await_nodes("n1", "n2", "n3")
    shown = job.show()
    assert (shown["JobState"], shown["Restarts"]) == ("RUNNING", "0")
    assert job.id in training.cluster.call("squeue", "--noheader", "--format=%i")
    assert len(loads(job, 0)) == 2
    training.finish()
    assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"


def newest(folder: Path) -> str:
    """Name of the newest complete checkpoint: its step, then the number of the round; "": none."""
    return max((each.parent.name for each in (folder / "checkpoints").glob("step_*/manifest.json")), default="")


def await_newer(folder: Path, than: str, generations: int = 0) -> None:
    """Wait for a newer checkpoint. generations: of that many rounds later, or more."""
    round_ = int(than.rpartition(".g")[2] or 0) + generations
    until(lambda: (now := newest(folder)) > than and int(now.rpartition(".g")[2]) >= round_, f"after {than}", 240)


def test_a_sick_node_is_replaced_and_drained(training: Training) -> None:
    """By health_command before the next round, and by bad_node_command, as the README has them."""
    job = training.submit(
        "--nodes=3",
        SPARES="1",
        ELASTIC_EXT_HEALTH_COMMAND=f"test ! -e {training.folder}/sick.$SLURMD_NODENAME",
        ELASTIC_EXT_BAD_NODE_COMMAND='scontrol update nodename=$SLURMD_NODENAME state=drain reason="$ELASTIC_EXT_REASON"',
    )
    job.await_out("trains rank .* run 0", 2)
    sick, other = [node for _, _, node in loads(job, 0)]
    (training.folder / f"sick.{sick}").touch()
    training.fault(other, "exit 1")
    job.await_out("trains rank .* run 0", 4)
    assert sick not in {node for _, _, node in loads(job, 0)[2:]}
    shown = training.cluster.call("scontrol", "--oneliner", "show", "node", sick)
    assert "DRAIN" in shown
    assert "Reason=the health check ended with exit code 1" in shown
    training.finish()
    assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"
