"""trainjob_status.py: the format of the status, and posts to a real HTTPS server that answers well, badly, late or never."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic_ext.base import records
from elastic_ext.status.job_status import MAX_GAUGES, Document, ScriptGauge, gauges_of
from elastic_ext.status.job_status import Job as Training
from tests.jobs import ROOT, Job
from tests.kubernetes.trainer_server import PATH, TrainerServer, wrong
from tests.until import LIMIT_S

SCRIPT = ROOT / "entrypoints" / "kubernetes" / "trainer" / "trainjob_status.py"
NOW = 1_763_800_000.7
SECRET = "eyJhbGciOi.payload.signature"
TRAINS = Training("job", "ext_etcd", "running", "", 1, 1, 1, 0, None, None, step=1, steps_per_s=1.0, total_steps=10)


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainjob_status", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = loaded()


def document(gauges: tuple[ScriptGauge, ...] = (), **changes: Any) -> dict[str, Any]:
    """What an agent's /job.json says."""
    return records.plain(Document(replace(TRAINS, **changes), gauges=gauges))


@pytest.mark.parametrize(
    ("changes", "done", "percentage", "remaining_s"),
    [
        pytest.param({"step": 45, "total_steps": 100, "steps_per_s": 0.5}, False, 45, 110, id="known"),
        pytest.param({"step": 45, "total_steps": None}, False, None, None, id="no-total"),
        pytest.param({"step": 1, "total_steps": 1000, "steps_per_s": None}, False, 0, None, id="first-step"),
        pytest.param({"step": 999, "total_steps": 1000, "steps_per_s": 10.0}, False, 99, 1, id="rounded-up"),
        pytest.param({"step": 100, "total_steps": 100}, False, 99, 0, id="not-yet-done"),
        pytest.param({"step": 120, "total_steps": 100}, False, 99, None, id="beyond-its-total"),
        pytest.param({"step": 45, "total_steps": 100, "state": "recovering"}, False, 45, None, id="between-rounds"),
        pytest.param({"step": 45, "total_steps": 100}, True, 100, 0, id="done-early"),
        pytest.param({"step": 45, "total_steps": None, "steps_per_s": None}, True, 100, 0, id="done-without-total"),
        pytest.param({"step": 1, "total_steps": 10**12, "steps_per_s": 1e-3}, False, 0, None, id="longer-than-int32"),
        pytest.param({"step": 2, "total_steps": 4, "steps_per_s": 2.0**-30}, False, 50, None, id="just-longer-than-int32"),
        pytest.param({"step": 0, "total_steps": 2**62, "steps_per_s": 5e-324}, False, 0, None, id="as-long-as-can-be"),
    ],
)
def test_the_status_holds_all_known_and_nothing_else(changes, done, percentage, remaining_s):
    status = script.status_of(document(round=4, **changes), NOW, done)
    assert wrong(json.dumps(status).encode()) == ""
    shown = status["trainerStatus"]
    assert (shown.get("progressPercentage"), shown.get("estimatedRemainingSeconds")) == (percentage, remaining_s)
    assert shown["lastUpdatedTime"] == "2025-11-22T08:26:40Z"
    metrics = {each["name"]: each["value"] for each in shown["metrics"]}
    assert (metrics["current_step"], metrics["restarts"]) == (str(changes["step"]), "3")
    assert metrics.get("total_steps") == (None if changes["total_steps"] is None else str(changes["total_steps"]))


def test_what_the_controller_refuses_is_seen():
    """Of the test's own check."""
    good = script.status_of(document(), NOW, False)["trainerStatus"]
    for bad in (
        {"progressPercentage": 101},
        {"estimatedRemainingSeconds": 1 << 31},
        {"metrics": [{"name": "", "value": "1"}]},
        {"metrics": [{"name": "loss", "value": "1" * 65}]},
    ):
        assert wrong(json.dumps({"trainerStatus": {**good, **bad}}).encode())


def test_script_gauges_are_bounded_and_ours_win():
    gauges = {"restarts": 7.0, "x" * 65: 1.0, "loss": 0.123456789, "worst": float("nan")}
    status = script.status_of(document(gauges_of({**gauges, **{f"g{n}": float(n) for n in range(300)}})), NOW, False)
    assert wrong(json.dumps(status).encode()) == ""
    shown = [(each["name"], each["value"]) for each in status["trainerStatus"]["metrics"]]
    assert len(shown) == 4 + MAX_GAUGES - 1
    assert [name for name, _ in shown[:6]] == ["current_step", "total_steps", "step_seconds", "restarts", "loss", "worst"]
    assert [value for _, value in shown[3:7]] == ["0", "0.123457", "nan", "0"]


def test_between_rounds_the_last_step_still_counts():
    loss = (ScriptGauge("loss", "0.5"),)
    stopped = document(state="recovering", step=None, total_steps=None, steps_per_s=None)
    assert script.since(None, stopped) is None
    kept = script.since(document(loss, step=7), stopped)
    assert (kept["job"]["state"], kept["job"]["step"], kept["job"]["total_steps"]) == ("recovering", 7, 10)
    assert script.status_of(kept, NOW, False) == script.status_of(document(loss, step=7, state="x", steps_per_s=None), NOW, False)
    again = script.since(kept, document(step=6, total_steps=None))["job"]
    assert (again["step"], again["total_steps"]) == (6, 10)  # the next round resumed from there


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good answer may take long on a busy machine."""
    monkeypatch.setattr(script, "REQUEST_S", 600.0)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    return file


class Told:
    """What the agent says; the test changes it."""

    def __init__(self) -> None:
        self.document = document()

    def read(self) -> dict[str, Any]:
        if not self.document:
            raise ConnectionRefusedError
        return self.document


def poster(environ: dict[str, str], told: Told, every_s: float = 0.05) -> Any:
    return script.Poster(told.read, lambda status: script.post(environ, status), poll_s=0.01, every_s=every_s)


@pytest.mark.seam
def test_it_posts_repeatedly_with_the_current_token(trainer, token, capsys):
    posting = poster(trainer.environ(token), Told())
    trainer.wait(2)
    (token.parent / "new").write_text("rotated")
    (token.parent / "new").rename(token)  # in one step, as Kubernetes does
    posts = trainer.wait(lambda posts: posts[-1].token == "rotated")
    posting.end(done=False, wait_s=LIMIT_S)
    assert posts[0].token == SECRET
    assert {(post.path, post.wrong, post.percentage, post.remaining_s) for post in posts} == {(PATH, "", 10, 9)}
    assert capsys.readouterr().err == ""


@pytest.mark.seam
def test_changes_are_posted_early_and_at_the_end(trainer, token):
    told = Told()
    posting = poster(trainer.environ(token), told, every_s=3600)
    trainer.wait(1)
    told.document = document(state="recovering", step=None)
    trainer.wait(2)
    told.document = document(round=2)
    trainer.wait(3)
    told.document = {}  # the agent has ended
    posting.end(done=True, wait_s=LIMIT_S)
    assert [(post.percentage, post.remaining_s, post.metrics["restarts"]) for post in trainer.posts] == [
        (10, 9, "0"),
        (10, None, "0"),
        (10, 9, "1"),
        (100, 0, "1"),
    ]


@pytest.mark.seam
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (401, "answered 401, expected 200: "),
        (500, "answered 500, expected 200: "),
        ("reset", "not posted: "),
        ("hang", "timed out"),
    ],
)
def test_it_says_once_what_fails_and_goes_on(trainer, token, capsys, monkeypatch, answer, said):
    if answer == "hang":
        monkeypatch.setattr(script, "REQUEST_S", 1.0)
    trainer.answers = [answer, answer, 200]
    posting = poster(trainer.environ(token), Told())
    trainer.wait(2)
    monkeypatch.setattr(script, "REQUEST_S", 600.0)
    trainer.wait(4)
    posting.end(done=False, wait_s=LIMIT_S)
    (warning,) = capsys.readouterr().err.splitlines()
    assert said in warning
    assert SECRET not in warning


@pytest.mark.seam
def test_a_redirect_does_not_get_the_token(trainer, token, capsys, certificates):
    elsewhere = TrainerServer(certificates)
    try:
        trainer.answers = [elsewhere.url, 200]
        posting = poster(trainer.environ(token), Told())
        trainer.wait(2)
        posting.end(done=False, wait_s=LIMIT_S)
        assert elsewhere.posts == []
        assert "answered 307" in capsys.readouterr().err
    finally:
        elsewhere.close()


@pytest.mark.seam
def test_a_server_of_another_ca_gets_nothing(trainer, token, capsys, certificates):
    environ = {**trainer.environ(token), "KUBEFLOW_TRAINER_SERVER_CA_CERT": certificates.path("other-ca.crt")}
    with pytest.raises(OSError, match="certificate verify failed"):
        script.post(environ, script.status_of(document(), NOW, False))
    assert trainer.posts == []


@pytest.mark.seam
@pytest.mark.parametrize("content", [None, "", SECRET + "\nX-More: 1", SECRET + "\u00e9"])
def test_what_is_no_token_stays_hidden(trainer, token, content):
    if content is None:
        token.unlink()
    else:
        token.write_text(content)
    with pytest.raises((OSError, ValueError)) as failed:
        script.post(trainer.environ(token), script.status_of(document(), NOW, False))
    assert trainer.posts == []
    assert str(token) in str(failed.value)
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/status", "https://[::1/status", "https://host:port/status", "https:///status"]
)
def test_without_tls_nothing_is_posted(token, url):
    environ = {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token)}
    with pytest.raises(ValueError):
        script.post(environ, {})


@pytest.mark.seam
def test_a_hanging_server_does_not_delay_the_end(trainer, token):
    trainer.answers = ["hang"]
    posting = poster(trainer.environ(token), Told())
    trainer.wait(1)
    posting.end(done=True, wait_s=0.1)
    assert len(trainer.posts) == 1


ENDS = "import os, sys, signal; print(os.environ.get('KUBEFLOW_TRAINER_SERVER_URL'), flush=True); "


@pytest.mark.seam
@pytest.mark.parametrize(
    ("command", "code"),
    [("sys.exit(0)", 0), ("sys.exit(75)", 75), ("os.kill(os.getpid(), 9)", 137)],
    ids=["0", "75", "SIGKILL"],
)
@pytest.mark.parametrize("index", ["0", "1"])
def test_the_exit_code_is_the_commands(tmp_path, trainer, command, code, index):
    environ = {**trainer.environ(tmp_path / "token"), "JOB_COMPLETION_INDEX": index, "ELASTIC_EXT_METRICS_PORT": "1"}
    with Job([sys.executable, SCRIPT, sys.executable, "-c", ENDS + command], tmp_path, **environ) as job:
        done = job.finish()
    assert done.returncode == (-signal.SIGKILL if index == "1" and code == 137 else code)
    assert done.out == "None\n"  # the address is for the script alone
    assert trainer.posts == []
    assert ("posted nothing" in done.err) == (index == "0")


@pytest.mark.seam
def test_signals_reach_the_command(tmp_path, trainer):
    """The first process of a container gets SIGTERM, and nobody else does."""
    waits = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print('ready', flush=True); signal.pause()"
    environ = {**trainer.environ(tmp_path / "token"), "ELASTIC_EXT_METRICS_PORT": "1"}
    with Job([sys.executable, SCRIPT, sys.executable, "-c", ENDS + waits], tmp_path, **environ) as job:
        job.wait_for("ready")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish().returncode == 3
