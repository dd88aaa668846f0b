"""Jobs of Hugging Face's Trainer and of Lightning under the agent: killed, told to leave, and resumed where the agent says."""

from __future__ import annotations

import importlib
import re
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from elastic_ext.checkpoints.choice import listing
from elastic_ext.training import lightning
from tests.jobs import AGENT, SCRIPTS, Finished, Job

VARIABLES = {"HF_HUB_OFFLINE": "1", "TORCHELASTIC_LOG_LEVEL": "INFO", "LOGLEVEL": "INFO"}
UNFINISHED = "checkpoint-is-incomplete.txt is there: the save did not finish"
SLOW_S = 250  # these libraries take long to import, the more so beside other tests
pytestmark = pytest.mark.timeout(3 * SLOW_S)


def job(folder: Path, script: str, steps: int, workers: int = 2, shutdown_s: int = 3, **variables: str) -> Job:
    checkpoints = folder / "checkpoints"
    conf = f"--rdzv-conf=checkpoint_dir={checkpoints},platform_grace={shutdown_s + 57}"
    # Lightning's workers do not end on SIGTERM, so their grace is waited for.
    options = [f"--nproc-per-node={workers}", "--max-restarts=1", f"--shutdown-timeout={shutdown_s}", conf]
    return Job([*AGENT, *options, SCRIPTS / script, checkpoints, str(steps)], folder, **VARIABLES, **variables)


def chosen(done: Finished) -> list[int]:
    """The steps that the agent has chosen, in its own words."""
    return [int(step) for step in re.findall(r"resuming from \S+, step (\d+)", done.err)]


def ends(done: Finished, workers: int = 2) -> set[tuple[int, str, int, int]]:
    """Of each rank: the attempt, the step that it was told, the library's own first and last step."""
    found = re.findall(r"rank \d attempt (\d+) told (\w+) went (\S+) to (\d+)", done.out)
    assert len(found) == workers, done.all
    return {(int(attempt), told, int(first), int(last)) for attempt, told, first, last in found}


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "script", "how"),
    [("transformers", "hf_job.py", {"BEST": "1"}), ("lightning", "lightning_job.py", {"ASYNC": "1"})],
    ids=["hugging-face", "lightning"],
)
def test_it_saves_before_leaving_and_resumes_as_asked(tmp_path, package, script, how):
    """Told to leave, it saves what is not the best, or at once what it saves in the background else. Then a rank is killed.

    save_strategy="best" says no to a save at a step at which it evaluates, and it does at each second one.
    """
    pytest.importorskip(package)
    with job(tmp_path, script, 1_000_000, **how) as running:
        running.wait_for("under way", 2, SLOW_S)
        running.process.send_signal(signal.SIGTERM)
        done = running.finish(SLOW_S)
    assert done.returncode == 75, done.all
    assert "checkpoint before leaving: saved" in done.err
    newest = listing.newest_complete(str(tmp_path / "checkpoints")).resume
    assert newest is not None
    saved = newest.step
    assert saved
    with job(tmp_path, script, saved + 12, KILL="1:8") as running:
        done = running.finish(SLOW_S)
    assert done.returncode == 0, done.all
    first, step = chosen(done)
    assert first == saved
    assert step in range(saved + 1, saved + 8)
    assert step % 3 == 0
    assert ends(done) == {(1, str(step), step, saved + 12)}


@pytest.mark.full
def test_a_failure_waits_for_no_jit_save(tmp_path):
    """The handler of the Trainer's own save keeps the other rank running; after a failure nothing can come of that save."""
    pytest.importorskip("transformers", "5.0")
    with job(tmp_path, "hf_job.py", 12, JIT="on", KILL="1:5", STAY="0:5") as running:
        done = running.finish(SLOW_S)
    assert done.returncode == 0, done.all
    assert "killing rank 0 at once: on SIGTERM, transformers would begin a save" in done.err
    assert "did not end on SIGTERM" not in done.err
    assert chosen(done) == [3]
    assert ends(done) == {(1, "3", 3, 12)}


@pytest.mark.full
def test_a_jit_save_ends_and_is_resumed_from(tmp_path):
    pytest.importorskip("transformers", "5.0")
    with job(tmp_path, "hf_job.py", 1_000_000, workers=1, shutdown_s=SLOW_S, JIT="on", EVERY="1000000") as running:
        running.wait_for("under way", 1, SLOW_S)
        running.process.send_signal(signal.SIGTERM)
        done = running.finish(SLOW_S)
    assert done.returncode == 75, done.all
    assert "killing rank" not in done.err
    newest = listing.newest_complete(str(tmp_path / "checkpoints")).resume
    assert newest is not None, done.all
    saved = newest.step
    with job(tmp_path, "hf_job.py", saved + 3, workers=1, JIT="on", EVERY="1000000") as running:
        done = running.finish(SLOW_S)
    assert done.returncode == 0, done.all
    assert chosen(done) == [saved]
    assert ends(done, workers=1) == {(0, str(saved), saved, saved + 3)}


@pytest.mark.full
def test_a_torn_jit_save_is_passed_over(tmp_path):
    """All its files are whole, but for the one that says that it is not."""
    pytest.importorskip("transformers", "5.0")
    checkpoints = tmp_path / "checkpoints"
    with job(tmp_path, "hf_job.py", 1_000_000, workers=1, shutdown_s=SLOW_S, JIT="torn") as running:
        running.wait_for("under way", 1, SLOW_S)
        running.process.send_signal(signal.SIGTERM)
        done = running.finish(SLOW_S)
    assert done.returncode == 75, done.all
    (torn,) = [each.parent.name for each in checkpoints.glob("*/checkpoint-is-incomplete.txt")]
    found = listing.newest_complete(str(checkpoints))
    assert [each.reason for each in found.passed_over if each.path.endswith(torn)] == [UNFINISHED]
    assert found.resume is not None
    step = found.resume.step
    assert step == (int(torn.removeprefix("checkpoint-")) - 1) // 3 * 3
    with job(tmp_path, "hf_job.py", step + 1, workers=1, JIT="on") as running:
        done = running.finish(SLOW_S)
    assert done.returncode == 0, done.all
    assert chosen(done) == [step]
    assert UNFINISHED in done.err
    assert ends(done, workers=1) == {(0, str(step), step, step + 1)}


class One:
    pass


class Other:
    pass


CALLBACKS = {"lightning.pytorch": One, "pytorch_lightning": Other}


@pytest.mark.parametrize(
    ("imported", "installed", "bases"),
    [
        (("lightning.pytorch",), (), {One}),
        (("pytorch_lightning",), ("lightning.pytorch",), {Other}),
        (tuple(CALLBACKS), (), {One, Other}),
        ((), tuple(CALLBACKS), {One}),
        ((), ("pytorch_lightning",), {Other}),
    ],
)
def test_the_callback_is_of_the_imported_library(monkeypatch, imported, installed, bases):
    for name in CALLBACKS:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def module(name: str) -> ModuleType:
        if name not in (*imported, *installed):
            raise ModuleNotFoundError(name)
        return SimpleNamespace(Callback=CALLBACKS[name])  # type: ignore[return-value]

    for name in imported:
        monkeypatch.setitem(sys.modules, name, module(name))
    monkeypatch.setattr(importlib, "import_module", module)
    made = lightning.SaveOnDemand()
    assert {base for base in (One, Other) if isinstance(made, base)} == bases


class AsyncCheckpointIO:
    checkpoint_io = "as it usually is"


@pytest.mark.parametrize(("usual", "during"), [("as it is", "as it is"), (AsyncCheckpointIO(), "as it usually is")])
def test_only_a_background_save_is_done_otherwise(usual, during):
    strategy = SimpleNamespace(checkpoint_io=usual)
    with lightning._synchronous(strategy):
        assert strategy.checkpoint_io == during
    assert strategy.checkpoint_io is usual


def test_without_the_library_it_says_so(monkeypatch):
    for missing in ("transformers", "lightning", *CALLBACKS):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "elastic_ext.training.huggingface", raising=False)
    with pytest.raises(ImportError, match=r"elastic_ext\.training\.huggingface needs the package transformers"):
        importlib.import_module("elastic_ext.training.huggingface")
    with pytest.raises(ImportError, match=r"elastic_ext\.training\.lightning needs the package lightning or pytorch_lightning"):
        lightning.SaveOnDemand()
