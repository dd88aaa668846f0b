"""What Kubeflow Trainer hears from a real job: through a crash, whichever node has rank 0, and beside Hugging Face's callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ext.agent.companions import training_of
from elastic_ext.status.trainjob import Training
from elastic_ext.workers.progress import Progress
from tests.jobs import AGENT, SCRIPTS, Gate, Job
from tests.status.trainer_server import Post, TrainerServer

OURS = "elastic_ext"


def job(tmp_path: Path, trainer: TrainerServer, *command: object, **variables: str) -> Job:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    conf = f"--rdzv-conf=checkpoint_dir={checkpoints}"
    to_trainer = trainer.environ(tmp_path / "token")
    environ = {"ELASTIC_EXT_TRAINJOB_INTERVAL": "0.2", "ELASTIC_EXT_BACKOFF": "0", **to_trainer, **variables}
    return Job([*AGENT, "--max-restarts=3", conf, *command], tmp_path, **environ)


@pytest.mark.seam
def test_a_crash_a_restart_and_the_end(tmp_path, trainer):
    """Steps count from the beginning of the job, not from the restart: 5 of 20 are in the checkpoint, the last 15 are new."""
    again, gate = Gate(tmp_path / "again"), Gate(tmp_path / "gate")
    script = [SCRIPTS / "status_job.py", tmp_path / "checkpoints", 20]
    gates = {"AGAIN": str(again.path), "GATE": str(gate.path)}
    with job(tmp_path, trainer, "--nproc-per-node=2", *script, KILL="1:8", **gates) as running:
        running.wait_for("again", 2)
        trainer.wait(len(trainer.posts) + 2)  # the second one began after the loss of the new round was set
        again.open()
        running.wait_for("trained", 2)
        trainer.wait(lambda posts: posts[-1:] and posts[-1].metrics["current_step"] == "20" and posts[-1].remaining_s is not None)
        gate.open()
        done = running.finish()
    assert done.returncode == 0, done.all
    posts = trainer.posts
    assert {(post.wrong, post.token, post.agent, post.metrics["total_steps"]) for post in posts} == {("", "token", OURS, "20")}
    stopped = [post for post in posts if post.remaining_s is None and post.metrics["current_step"] == "7"]
    assert {post.percentage for post in stopped} == {35}, posts
    assert {post.metrics["loss"] for post in stopped} == {f"{1 / 7:.6g}"}  # and not that of a step which is not over
    *before, last = posts
    trained = {(post.percentage, post.remaining_s) for post in before if post.metrics["current_step"] == "20"}
    assert {(99, 0)} <= trained <= {(99, 0), (99, None)}
    assert (last.percentage, last.remaining_s, last.metrics["restarts"], last.metrics["loss"]) == (100, 0, "1", "0.05")
    assert [post for post in posts if post.percentage == 100] == [last]
    assert "TrainJob" not in done.err


@pytest.mark.full
def test_a_trainer_that_never_answers_delays_nothing(tmp_path, trainer):
    """Each post hangs until the test is over, and the job ends."""
    trainer.answers = ["hang"]
    with job(tmp_path, trainer, "--nproc-per-node=2", SCRIPTS / "status_job.py", tmp_path / "checkpoints", 20) as running:
        done = running.finish()
    assert done.returncode == 0, done.all
    assert trainer.posts


def own(posts: list[Post]) -> set[bool]:
    return {post.agent == OURS for post in posts}


@pytest.mark.full
@pytest.mark.parametrize("silent", [pytest.param(False, id="the-trainer-posts"), pytest.param(True, id="the-agent-posts")])
def test_only_one_posts_if_hugging_faces_trainer_can(tmp_path, trainer, silent):
    integrations = pytest.importorskip("transformers.integrations")
    if not hasattr(integrations, "KubeflowCallback"):
        pytest.skip("this version of transformers has no KubeflowCallback")
    variables = {"HF_HUB_OFFLINE": "1", **({"DISABLE_KUBEFLOW_INTEGRATION": "TRUE"} if silent else {})}
    script = [SCRIPTS / "hf_job.py", tmp_path / "checkpoints", 12]
    with job(tmp_path, trainer, "--nproc-per-node=1", *script, **variables) as running:
        done = running.finish()
    assert done.returncode == 0, done.all
    assert own(trainer.posts) == {silent}
    assert {post.wrong for post in trainer.posts} == {""}
    assert trainer.posts[-1].percentage == 100
    if silent:
        assert {post.metrics["total_steps"] for post in trainer.posts} == {"12"}


@pytest.mark.full
def test_rank_0_moves_and_so_does_who_posts(tmp_path, trainer, server):
    """Two nodes; the one with rank 0 is killed. They have tokens of their own, which tell who posts."""
    gate = Gate(tmp_path / "gate")
    script = [SCRIPTS / "status_job.py", tmp_path / "checkpoints", 8]  # the checkpoint is of step 5
    where = ["--rdzv-backend=ext_etcd", f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", "--nnodes=1:2"]

    def node(name: str) -> Job:
        (tmp_path / name).write_text(name)
        mine = {"KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / name), "ELASTIC_EXT_LEASE_TTL": "15"}
        return job(tmp_path, trainer, *where, "--nproc-per-node=1", *script, GATE=str(gate.path), **mine)

    with node("a") as a, node("b") as b:
        posts = trainer.wait(3)
        (first,) = {post.token for post in posts}
        lost, left = (a, b) if first == "a" else (b, a)
        lost.process.kill()
        trainer.wait(lambda posts: posts[-1].token != first)
        gate.open()
        done = left.finish()
    assert done.returncode == 0, done.all
    tokens = [str(post.token) for post in trainer.posts]
    assert tokens == sorted(tokens, reverse=first == "b")  # one after the other, never both
    assert trainer.posts[-1].percentage == 100


def worker(**changes: object) -> Progress:
    values: dict[str, object] = {"pid": 1, "steps": 5, "first_step_ns": 10**9, "last_step_ns": 9 * 10**9, "stacks_armed": True}
    return Progress(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "resumed_at", "expected"),
    [
        pytest.param(worker(), 100, Training(105, None, 2.0, 1), id="resumed"),
        pytest.param(worker(), None, Training(5, None, 2.0, 1), id="unknown"),
        pytest.param(worker(steps_before=40, total_steps=50), 100, Training(45, 50, 2.0, 1), id="the-script-knows-best"),
        pytest.param(worker(steps=1), 0, Training(1, None, None, 1), id="one-step"),
        pytest.param(worker(steps=0), 100, None, id="no-step-yet"),
        pytest.param(worker(pid=0), 100, None, id="no-bootstrap"),
        pytest.param(worker(posts_status=True), 100, None, id="the-script-posts"),
    ],
)
def test_how_far_the_training_is(row, resumed_at, expected):
    assert training_of(row, resumed_at, restarts=1) == expected
