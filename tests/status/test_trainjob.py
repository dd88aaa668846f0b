"""The status of a TrainJob: its format, and posts of it to a real HTTPS server that answers well, badly, late or never."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ext.status import trainjob
from elastic_ext.status.trainjob import MAX_GAUGES, Poster, Training, TrainJobState, body_of, target_of
from tests.etcd_server import Certificates
from tests.status.trainer_server import PATH, TrainerServer, wrong
from tests.until import LIMIT_S, until

NOW = 1_763_800_000.7
SECRET = "eyJhbGciOi.payload.signature"
BODY = body_of(Training(1, 10, 1.0, 0), TrainJobState.TRAINING, NOW, {})


@pytest.mark.parametrize(
    ("training", "state", "percentage", "remaining_s"),
    [
        pytest.param(Training(45, 100, 2.0, 0), TrainJobState.TRAINING, 45, 110, id="known"),
        pytest.param(Training(45, None, 2.0, 0), TrainJobState.TRAINING, None, None, id="no-total"),
        pytest.param(Training(1, 1000, None, 0), TrainJobState.TRAINING, 0, None, id="first-step"),
        pytest.param(Training(999, 1000, 0.1, 0), TrainJobState.TRAINING, 99, 1, id="rounded-up"),
        pytest.param(Training(100, 100, 2.0, 0), TrainJobState.TRAINING, 99, 0, id="not-yet-done"),
        pytest.param(Training(120, 100, 2.0, 0), TrainJobState.TRAINING, 99, None, id="beyond-its-total"),
        pytest.param(Training(45, 100, 2.0, 3), TrainJobState.STOPPED, 45, None, id="between-rounds"),
        pytest.param(Training(45, 100, 2.0, 3), TrainJobState.DONE, 100, 0, id="done-early"),
        pytest.param(Training(45, None, None, 0), TrainJobState.DONE, 100, 0, id="done-without-total"),
        pytest.param(Training(1, 10**12, 1e3, 0), TrainJobState.TRAINING, 0, None, id="longer-than-int32"),
        pytest.param(Training(2, 4, float(2**30), 0), TrainJobState.TRAINING, 50, None, id="just-longer-than-int32"),
    ],
)
def test_the_status_holds_all_known_and_nothing_else(training, state, percentage, remaining_s):
    body = body_of(training, state, NOW, {})
    assert wrong(body) == ""
    shown = json.loads(body)["trainerStatus"]
    assert (shown.get("progressPercentage"), shown.get("estimatedRemainingSeconds")) == (percentage, remaining_s)
    assert shown["lastUpdatedTime"] == "2025-11-22T08:26:40Z"
    metrics = {each["name"]: each["value"] for each in shown["metrics"]}
    assert metrics["current_step"] == str(training.step)
    assert metrics["restarts"] == str(training.restarts)
    assert metrics.get("total_steps") == (None if training.total is None else str(training.total))


def test_what_the_controller_refuses_is_seen():
    """Of the test's own check."""
    good = json.loads(BODY)["trainerStatus"]
    for bad in (
        {"progressPercentage": 101},
        {"estimatedRemainingSeconds": 1 << 31},
        {"metrics": [{"name": "", "value": "1"}]},
        {"metrics": [{"name": "loss", "value": "1" * 65}]},
    ):
        assert wrong(json.dumps({"trainerStatus": {**good, **bad}}).encode())


def test_script_gauges_are_bounded_and_ours_win():
    gauges = {"restarts": 7.0, "x" * 65: 1.0, "loss": 0.123456789, "worst": math.nan, **{f"g{n}": float(n) for n in range(300)}}
    body = body_of(Training(1, 10, 1.0, 0), TrainJobState.TRAINING, NOW, gauges)
    shown = [(each["name"], each["value"]) for each in json.loads(body)["trainerStatus"]["metrics"]]
    assert len(shown) == 4 + MAX_GAUGES
    assert [name for name, _ in shown[:6]] == ["current_step", "total_steps", "step_seconds", "restarts", "loss", "worst"]
    assert [value for _, value in shown[3:7]] == ["0", "0.123457", "nan", "0"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good answer may take long on a busy machine."""
    monkeypatch.setattr(trainjob, "REQUEST_S", 600.0)


@pytest.fixture
def trainer(certificates: Certificates) -> Iterator[TrainerServer]:
    server = TrainerServer(certificates)
    yield server
    server.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    return file


def poster(environ: dict[str, str], interval_s: float = 0.05) -> Poster:
    target = target_of(environ)
    assert target is not None
    return Poster(target, interval_s, lambda: BODY)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert SECRET not in caplog.text
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.seam
def test_it_posts_repeatedly_with_the_current_token(trainer, token, caplog):
    posting = poster(trainer.environ(token))
    trainer.wait(2)
    (token.parent / "new").write_text("rotated")
    (token.parent / "new").rename(token)  # in one step, as Kubernetes does
    posts = trainer.wait(lambda posts: posts[-1].token == "rotated")
    posting.close(LIMIT_S)
    assert posts[0].token == SECRET
    assert {(post.path, post.wrong, post.percentage, post.remaining_s) for post in posts} == {(PATH, "", 10, 9)}
    assert warnings(caplog) == []


@pytest.mark.seam
def test_changes_are_posted_early_and_at_the_end(trainer, token, monkeypatch):
    monkeypatch.setattr(trainjob, "GAP_S", 0.0)
    posting = poster(trainer.environ(token), interval_s=3600)
    posting.changed()
    trainer.wait(1)
    posting.changed()
    trainer.wait(2)
    posting.close(LIMIT_S)
    assert len(trainer.posts) == 2  # nothing new
    monkeypatch.setattr(trainjob, "GAP_S", 3600)
    posting = poster(trainer.environ(token), interval_s=3600)
    posting.changed()
    posting.close(LIMIT_S)
    assert len(trainer.posts) == 3


@pytest.mark.seam
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (401, "answers 401, expected 200: sorry, 401"),
        (500, "answers 500, expected 200: sorry, 500"),
        ("reset", "127.0.0.1:"),
        ("hang", "no answer within 1 s"),
        ("drip", "no answer within 1 s"),
    ],
)
def test_it_says_once_what_fails_and_goes_on(trainer, token, caplog, monkeypatch, answer, said):
    monkeypatch.setattr(trainjob, "LONGEST_S", 0.1)
    if answer in ("hang", "drip"):
        monkeypatch.setattr(trainjob, "REQUEST_S", 1.0)
    caplog.set_level(logging.INFO, "elastic_ext")
    trainer.answers = [answer, answer, 200]
    posting = poster(trainer.environ(token))
    trainer.wait(2)
    monkeypatch.setattr(trainjob, "REQUEST_S", 600.0)
    until(lambda: "posted again after" in caplog.text)
    posting.close(LIMIT_S)
    (warning,) = warnings(caplog)
    assert said in warning


@pytest.mark.seam
def test_a_redirect_does_not_get_the_token(trainer, token, caplog, certificates):
    elsewhere = TrainerServer(certificates)
    try:
        trainer.answers = [elsewhere.url, 200]
        posting = poster(trainer.environ(token))
        trainer.wait(2)
        posting.close(LIMIT_S)
        assert elsewhere.posts == []
        (warning,) = warnings(caplog)
        assert "answers 307" in warning
    finally:
        elsewhere.close()


@pytest.mark.seam
def test_a_server_of_another_ca_gets_nothing(trainer, token, caplog, certificates):
    posting = poster({**trainer.environ(token), "KUBEFLOW_TRAINER_SERVER_CA_CERT": certificates.path("other-ca.crt")})
    posting.changed()
    posting.close(LIMIT_S)
    assert trainer.posts == []
    (warning,) = warnings(caplog)
    assert "127.0.0.1 is not who" in warning


@pytest.mark.seam
@pytest.mark.parametrize("content", [None, "", SECRET + "\nX-More: 1", SECRET + "\u00e9", "x" * (1 << 15)])
def test_what_is_no_token_stays_hidden(trainer, token, caplog, content):
    if content is None:
        token.unlink()
    else:
        token.write_text(content)
    posting = poster(trainer.environ(token))
    posting.changed()
    posting.close(LIMIT_S)
    assert trainer.posts == []
    (warning,) = warnings(caplog)
    assert str(token) in warning


@pytest.mark.seam
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"URL": ""}, ""),
        ({"URL": "http://127.0.0.1:1/status"}, "is not an https URL"),
        ({"URL": "https://[::1/status"}, "is not an https URL"),
        ({"URL": "https://host:port/status"}, "is not an https URL"),
        ({"TOKEN": ""}, "KUBEFLOW_TRAINER_SERVER_TOKEN is not"),
    ],
)
def test_nothing_is_posted_without_variables_or_tls(trainer, token, caplog, changes, said):
    environ = trainer.environ(token) | {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in changes.items()}
    assert target_of(environ) is None
    assert [said in each for each in warnings(caplog)] == [True] * bool(said)


@pytest.mark.seam
@pytest.mark.parametrize("answer", ["hang", "drip"])
def test_a_hanging_server_does_not_delay_the_end(trainer, token, answer, caplog):
    """close() returns though the server never answers; then the server loses its client, long before REQUEST_S."""
    trainer.answers = [answer]
    posting = poster(trainer.environ(token))
    trainer.wait(1)
    posting.close(0.1)
    assert trainer.left.acquire(timeout=LIMIT_S)
    assert len(trainer.posts) == 1
    assert warnings(caplog) == []


def test_the_more_posts_fail_the_longer_it_waits():
    waits = [trainjob.next_post_s(30, failures) for failures in (0, 1, 2, 3, 4, 5, 1000)]
    assert waits == [30, 60, 120, 240, 480, 600, 600]
    assert trainjob.next_post_s(3600, 9) == 3600
