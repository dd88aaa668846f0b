"""What Kubeflow Trainer hears of a real job through trainjob_status.py: a crash, a moved rank 0, and Hugging Face's callback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.jobs import AGENT, SCRIPTS, Gate, Job
from tests.kubernetes.test_trainjob_status import SCRIPT
from tests.kubernetes.trainer_server import TrainerServer
from tests.ports import free_port

# The script itself, but for its times.
OFTEN = "import sys; sys.path.insert(0, {!r}); import trainjob_status; sys.exit(trainjob_status.run(sys.argv[1:], 0.05, 0.2))"
OURS = "elastic_ext"


def job(tmp_path: Path, trainer: TrainerServer, *command: object, **variables: str) -> Job:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    conf = f"--rdzv-conf=checkpoint_dir={checkpoints}"
    environ = {"ELASTIC_EXT_METRICS_PORT": str(free_port()), "ELASTIC_EXT_BACKOFF": "0", **trainer.environ(tmp_path / "token")}
    posting = [sys.executable, "-c", OFTEN.format(str(SCRIPT.parent)), *AGENT]
    return Job([*posting, "--max-restarts=3", conf, *command], tmp_path, forks=False, **{**environ, **variables})


@pytest.mark.seam
def test_a_crash_a_restart_and_the_end(tmp_path, trainer):
    """Steps count from the beginning of the job, not from the restart: 5 of 20 are in the checkpoint, the last 15 are new."""
    again, gate = Gate(tmp_path / "again"), Gate(tmp_path / "gate")
    script = [SCRIPTS / "status_job.py", tmp_path / "checkpoints", 20]
    gates = {"AGAIN": str(again.path), "GATE": str(gate.path)}
    with job(tmp_path, trainer, "--nproc-per-node=2", *script, KILL="1:8", **gates) as running:
        running.wait_for("again", 2)
        trainer.wait(lambda posts: posts[-1:] and posts[-1].metrics["restarts"] == "1")
        again.open()
        running.wait_for("trained", 2)
        trainer.wait(lambda posts: posts[-1].metrics["current_step"] == "20" and posts[-1].remaining_s is not None)
        gate.open()
        done = running.finish()
    assert done.returncode == 0, done.all
    posts = trainer.posts
    assert {(post.wrong, post.token, post.agent, post.metrics["total_steps"]) for post in posts} == {("", "token", OURS, "20")}
    *before, last = posts
    assert {(99, 0)} <= {(post.percentage, post.remaining_s) for post in before if post.metrics["current_step"] == "20"}
    assert (last.percentage, last.remaining_s, last.metrics["restarts"], last.metrics["loss"]) == (100, 0, "1", "0.05")
    assert [post for post in posts if post.percentage == 100] == [last]
    assert "trainjob_status" not in done.err


@pytest.mark.full
def test_a_trainer_that_never_answers_delays_nothing(tmp_path, trainer):
    """Each post hangs until the test is over, and the job ends."""
    gate = Gate(tmp_path / "gate")
    trainer.answers = ["hang"]
    script = [SCRIPTS / "status_job.py", tmp_path / "checkpoints", 20]
    with job(tmp_path, trainer, "--nproc-per-node=2", *script, GATE=str(gate.path)) as running:
        trainer.wait(1)
        gate.open()
        done = running.finish()
    assert done.returncode == 0, done.all


@pytest.mark.full
def test_hugging_faces_callback_does_not_post_too(tmp_path, trainer):
    integrations = pytest.importorskip("transformers.integrations")
    if not hasattr(integrations, "KubeflowCallback"):
        pytest.skip("this version of transformers has no KubeflowCallback")
    script, gate = [SCRIPTS / "hf_job.py", tmp_path / "checkpoints", 12], Gate(tmp_path / "gate")
    with job(tmp_path, trainer, "--nproc-per-node=1", *script, HF_HUB_OFFLINE="1", GATE=str(gate.path)) as running:
        trainer.wait(1)  # the steps themselves take less time than one look at the job
        gate.open()
        done = running.finish()
    assert done.returncode == 0, done.all
    assert {(post.agent, post.wrong, post.metrics["total_steps"]) for post in trainer.posts} == {(OURS, "", "12")}
    assert trainer.posts[-1].percentage == 100


@pytest.mark.full
def test_the_first_pod_posts_wherever_rank_0_is(tmp_path, trainer, server):
    """Two nodes; the one with rank 0 is killed, and comes back as a pod of the same index does."""
    gate = Gate(tmp_path / "gate")
    script = [SCRIPTS / "status_job.py", tmp_path / "checkpoints", 8]  # the checkpoint is of step 5
    where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=1:2"]

    def pod(index: int) -> Job:
        mine = {"JOB_COMPLETION_INDEX": str(index), "ELASTIC_EXT_LEASE_TTL": "15", "LOGLEVEL": "INFO"}
        return job(tmp_path, trainer, *where, "--nproc-per-node=1", *script, GATE=str(gate.path), **mine)

    with pod(1) as other:
        other.wait_for("trained")
        assert trainer.posts == []
        with pod(0):
            other.wait_for("trained", 2)
            trainer.wait(lambda posts: posts[-1:] and posts[-1].metrics.get("loss") == "0.125")  # of rank 0, in the other pod
        gate.open()
        assert other.finish().returncode == 0
    assert {post.wrong for post in trainer.posts} == {""}
