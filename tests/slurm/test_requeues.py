"""What ends a run of entrypoints/slurm/train.sbatch, on a real Slurm, and what the next run finds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.jobs import AGENT, DEFAULTS
from tests.slurm.cluster import SlurmCluster, SlurmJob
from tests.slurm.jobs import Training, loads
from tests.until import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # a minute each on an idle machine


def ended(job: SlurmJob) -> list[str]:
    """States of the job's ends so far, one for each run; what is requeued by request or by exit code is shown as PENDING."""
    return [each["JobState"] for each in job.cluster.completions(job.id)]


def hold(training: Training, job: SlurmJob) -> int:
    """Have the script save only when it is asked to; return a step after its last save."""
    (training.folder / "hold").touch()
    return int(job.await_out(r"saves no more by itself after (\d+)")[-1][1])


def test_try_again_means_the_same_job_again(tmp_path: Path) -> None:
    """Once, from its checkpoint, without the host that it has refused; the job that waits for it still waits. A bug ends it,
    though Slurm is told to requeue after any failure.
    """
    with SlurmCluster(4, RequeueExit="1-255") as cluster, Training(cluster, tmp_path) as training:
        job = training.submit("--nodes=3", SPARES="1")
        after = cluster.submit(tmp_path, "--nodes=1", f"--dependency=afterok:{job.id}", "--output=/dev/null", "--wrap=true")
        job.await_out("trains rank .* run 0", 2)
        node = loads(job, 0)[0][2]
        training.fault(node, "exit 14")  # a broken driver: this node leaves with 69, the spare takes its place
        job.await_out("trains rank .* run 0", 4)
        before = hold(training, job)
        cluster.call("scancel", "--signal=USR1", job.id)
        job.await_out(rf"requeued \(run 1\), without {node}\n")
        assert job.await_state("PENDING", "COMPLETING", "RUNNING")["ExcNodeList"] == node
        assert after.state == "PENDING"
        job.await_out("trains rank .* run 1", 2)
        assert all(step > before and world == 2 for step, world, _ in loads(job, 1))
        assert f"{node} may not come back yet: rank" in training.explain(job)
        assert job.show()["Restarts"] == "1"
        training.fault(loads(job, 1)[0][2], "bug")
        job.await_state("CANCELLED")
        assert [each["ExitCode"] for each in cluster.completions(job.id)][1] == "65:0"
        assert len(ended(job)) == 3
        assert not loads(job, 2)
        assert after.state == "PENDING"


FAILS = """
import os, pathlib, time
print("waits", flush=True)
while not pathlib.Path("go").exists(): time.sleep(0.05)
pathlib.Path("go").unlink()
os._exit(1)
"""


def test_a_requeue_gives_no_budget_back(training: Training) -> None:
    """The notice comes to the script alone, as by --signal=B:USR1@180."""
    script = training.folder / "fails.py"
    script.write_text(FAILS)
    job = training.submit("--nodes=1", script=(str(script),), MAX_RESTARTS="1")
    job.await_out("waits")
    (training.folder / "go").touch()
    job.await_out("restart 1 of 1")
    job.await_out("waits", 2)
    training.cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    job.await_out("waits", 3)
    (training.folder / "go").touch()
    assert job.await_state("FAILED", "COMPLETED")["ExitCode"] == "1:0"
    assert "exit code 1: not requeued" in job.out


BROKEN = """
import os, signal
if os.environ["SLURMD_NODENAME"] == "n2": os._exit(14)
if "SLURM_RESTART_COUNT" not in os.environ: signal.pause()
print("trained", os.environ["SLURMD_NODENAME"], flush=True)
"""


def test_the_next_run_excludes_only_the_bad_node(tmp_path: Path) -> None:
    """The first run cannot do without it: it stops after three tries."""
    with SlurmCluster(3) as cluster, Training(cluster, tmp_path) as training:
        script = tmp_path / "broken.py"
        script.write_text(BROKEN)
        job = training.submit("--nodes=2", "--nodelist=n1,n2", script=(str(script),))
        job.await_out(r"requeued \(run 1\), without n2\n")
        cluster.call("scontrol", "update", f"JobId={job.id}", "NodeList=")  # the user's own wish would keep it waiting
        assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"
        assert sorted(re.findall(r"trained (n\d)", job.out)) == ["n1", "n3"]


def test_preemption(training: Training) -> None:
    """A partition with more priority takes the nodes. SIGTERM comes first; the job saves and leaves within its GraceTime."""
    job = training.submit("--nodes=2", "--partition=low")
    job.await_out("trains rank .* run 0", 2)
    before = hold(training, job)
    urgent = training.cluster.submit(
        training.folder, "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    urgent.await_state("COMPLETED")
    assert "checkpoint before leaving: saved" in job.out
    assert "requeued (run 1)" in job.out
    job.await_out("trains rank .* run 1", 2)
    assert all(step > before for step, _, _ in loads(job, 1))
    training.finish()
    assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"


def test_time_limit(training: Training) -> None:
    """Without a notice, which other tests here send: SIGTERM comes with the limit, and KillWait is the time to save."""
    job = training.submit("--nodes=2", "--time=30", "--signal=USR2@0")
    job.await_out("trains rank .* run 0", 2)
    before = hold(training, job)
    job.cluster.call("scontrol", "update", f"JobId={job.id}", "EndTime=now+1")
    job.await_out(r"requeued \(run 1\)")
    assert "checkpoint before leaving: saved" in job.out, job.out
    assert "is lost" not in job.out
    assert "DUE TO TIME LIMIT" in job.out
    job.await_out("trains rank .* run 1", 2)
    assert all(step > before for step, _, _ in loads(job, 1))
    training.finish()
    assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"


def test_a_process_that_crashes_alone_costs_no_requeue(training: Training) -> None:
    job = training.submit("--nodes=2")
    job.await_out("trains rank .* run 0", 2)
    training.fault(loads(job, 0)[0][2], "exit 1")
    job.await_out("trains rank .* run 0", 4)
    training.finish()
    shown = job.await_state("COMPLETED", "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("0:0", "0")


def test_scancel(training: Training) -> None:
    """It is never requeued, and the verdict says that the user did it."""
    job = training.submit("--nodes=2")
    job.await_out("trains rank .* run 0", 2)
    assert any("/dev/shm" in each for each in training.left_behind())  # so far
    job.cluster.call("scancel", job.id)
    assert job.await_state("CANCELLED", "COMPLETED", "PENDING")["Restarts"] == "0"
    assert ended(job) == ["CANCELLED"]
    assert "exit code 130: not requeued" in job.out
    until(lambda: not training.left_behind(), "nothing left of the jobs' etcd: the keepers end last")


@pytest.mark.parametrize("script", ["exec srun {agent}", "srun --output=tasks-%N.log {agent}"], ids=["exec", "output"])
def test_an_own_scripts_last_line_after_scancel(cluster: SlurmCluster, tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text("import signal; print('trains', flush=True); signal.pause()")
    agent = shlex.join([*AGENT, "--nproc-per-node=1", str(tmp_path / "train.py")])
    (tmp_path / "own.sh").write_text(f"#!/bin/bash\n{script.format(agent=agent)}\n")
    job = cluster.submit(tmp_path, "--nodes=1", "--output=own.log", "--open-mode=append", str(tmp_path / "own.sh"), **DEFAULTS)

    def shown() -> str:
        return "".join(each.read_text() for each in tmp_path.glob("*.log"))

    until(lambda: "trains" in shown(), "the script trains")
    cluster.call("scancel", job.id)
    until(lambda: "elastic_ext: stopped by SIGTERM; exit code 130\n" in shown(), "the agent's last line")


def test_a_job_without_requeue_says_so(training: Training) -> None:
    script = training.folder / "sleeps.py"
    script.write_text("import signal; print('sleeps', flush=True); signal.pause()")
    never = training.submit("--nodes=1", "--no-requeue", script=(str(script),), STATE=str(training.folder / "never"))
    once = training.submit("--nodes=1", script=(str(script),), STATE=str(training.folder / "once"), MAX_REQUEUES="1")
    for job in (never, once):
        job.await_out("sleeps")
        job.cluster.call("scancel", "--signal=USR1", job.id)
    assert never.await_state("FAILED", "COMPLETED")["ExitCode"] == "75:0"
    assert "Slurm refuses to requeue the job" in never.out
    once.await_out("sleeps", 2)
    once.cluster.call("scancel", "--signal=USR1", once.id)
    assert once.await_state("FAILED", "COMPLETED")["ExitCode"] == "1:0"
    assert "requeued 1 times, which is MAX_REQUEUES" in once.out


def test_too_few_nodes(training: Training) -> None:
    """The job waits in the queue, and starts when a node is back."""
    script, cluster = training.folder / "ok.py", training.cluster
    script.write_text("print('ran')")
    cluster.call("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    job = training.submit("--nodes=3", script=(str(script),))
    job.await_state("PENDING")  # its Reason depends on how far the scheduler is
    assert job.out == ""
    cluster.call("scontrol", "update", "NodeName=n3", "State=RESUME")
    assert job.await_state("COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert job.out.count("ran\n") == 3
