"""entrypoints/train_fsdp.py --save-every=epoch: checkpoint_epoch_N.pt, a file that plain PyTorch reads; and its other options."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.entrypoints.test_train_fsdp import TINY, Output, agent, imported, launch, stock
from tests.jobs import ROOT, TORCHRUN, Finished, Job, descendants, run, wait_gone

torch = pytest.importorskip("torch")

EPOCHS = ("--save-every=epoch", "--max-steps=0")  # of 6 steps, see TINY
NUMBERED = re.compile(r"saved .*/checkpoint_epoch_(\d+)\.pt")


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def by_step(losses: list[tuple[int, str]]) -> dict[int, set[str]]:
    return {step: {loss for other, loss in losses if other == step} for step, _ in losses}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Output]:
    """5 epochs on 2 ranks with all options on, one of which is killed in the third. For reading only."""
    directory = tmp_path_factory.mktemp("epochs") / "checkpoints"
    flags = (*EPOCHS, "--epochs=5", "--health-every=2", "--activation-checkpointing", "--gradient-accumulation-steps=2")
    output = launch(agent(2, directory), directory, *flags, TRAIN_FAULT="kill:1:15")
    assert output.status == 0, output.errors
    return directory, output


WITH_KILLED = pytest.mark.xdist_group("killed")  # all in one process of xdist, which makes it once

# ---------------------------------------------------------------- files of epochs


@pytest.mark.full
@WITH_KILLED
def test_a_killed_job_resumes_and_keeps_three_files(killed: tuple[Path, Output]) -> None:
    directory, output = killed
    assert output.resumed == [f"{directory}/checkpoint_epoch_2.pt at step 12"]
    assert NUMBERED.findall(output.text) == ["1", "2", "3", "4", "5"]
    assert files(directory) == [f"checkpoint_epoch_{number}.pt" for number in (3, 4, 5)]
    assert [step for step, _ in output.losses] == [*range(1, 16), *range(13, 31)]
    assert all(len(losses) == 1 for losses in by_step(output.losses).values())  # steps 13 to 15 were done twice, to the bit


@pytest.mark.full
@WITH_KILLED
def test_plain_pytorch_reads_the_file(killed: tuple[Path, Output]) -> None:
    """As people write it by hand: no process group, no FSDP, no elastic_ext."""
    directory, output = killed
    train = imported()
    model = train.ByteTransformer(train.parse_args(TINY))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = torch.load(directory / "checkpoint_epoch_5.pt")
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    start_epoch = checkpoint["epoch"]
    assert start_epoch == 5
    assert (30, float(checkpoint["loss"]).hex()) in output.losses
    assert tuple(optimizer.param_groups[0]["betas"]) == (0.9, 0.95)
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        assert moments["step"] == 30
        assert moments["exp_avg"].shape == parameter.shape


# ---------------------------------------------------------------- as the document has it

ELASTIC = ROOT / "entrypoints" / "train_pytorch_fsdp_elastic.py"
_AT = TINY.index("--save-every")  # without it: the script has its own
# Warm-up to the end: the learning rate of a step does not depend on the number of epochs.
DOCUMENT = [str(ELASTIC), *TINY[:_AT], *TINY[_AT + 2 :], "--max-steps=0", "--warmup-steps=1000"]


@pytest.mark.full
def test_two_epochs_and_then_more_from_epoch_3(tmp_path: Path) -> None:
    """Hypothesis: a run of 2 epochs goes on later, with the third, as if it had never stopped.

    Method: `python train_pytorch_fsdp_elastic.py` for 2 epochs, then for 3; another run of 3 epochs is not stopped.
    Observation: the second run begins with step 13 of epochs of 6, and both have the losses and the state of the third run.
    """
    (tmp_path / "other").mkdir()
    two, more, whole = (
        document(run([sys.executable, *DOCUMENT, f"--epochs={epochs}"], folder))
        for epochs, folder in ((2, tmp_path), (3, tmp_path), (3, tmp_path / "other"))
    )
    assert NUMBERED.findall(two.text) == ["1", "2"]
    assert more.resumed == [f"{tmp_path}/checkpoints/checkpoint_epoch_2.pt at step 12"]
    assert [step for step, _ in more.losses] == list(range(13, 19))
    assert two.losses + more.losses == whole.losses
    assert more.hashes[0] == two.hashes[-1]
    assert more.hashes[-1] == whole.hashes[-1]
    assert files(tmp_path / "checkpoints") == [f"checkpoint_epoch_{number}.pt" for number in (1, 2, 3)]


def document(done: Finished) -> Output:
    assert done.returncode == 0, done.err
    return Output(done.returncode, done.out, done.err)


@pytest.mark.full
def test_the_simulated_node_failure_of_the_document(tmp_path: Path) -> None:
    """Hypothesis: what `pkill -9 -f train_pytorch_fsdp_elastic.py` kills, the agent too, is made good by the same command.

    Method: `torchrun --nproc_per_node=2 train_pytorch_fsdp_elastic.py`, its backend by the environment. All processes of the job
    with that name in their command lines are killed, as pkill would; the same line is run again.
    Observation: nothing of the first run is left; the second one goes on from the newest `checkpoint_epoch_N.pt`, to the end, and
    what both did has the same losses to the bit.
    """
    command = [*TORCHRUN, "--nproc_per_node=2", *DOCUMENT, "--epochs=40"]
    with Job(command, tmp_path, forks=False, PET_RDZV_BACKEND="ext_c10d") as job:
        job.wait_for(r"saved checkpoints/checkpoint_epoch_2\.pt")
        started = descendants(job.process.pid)
        for pid in filter(is_named, started):
            with contextlib.suppress(ProcessLookupError):  # the agent is killed first, and its reaper is quick
                os.kill(pid, signal.SIGKILL)
        job.process.wait()
        assert wait_gone(started) == []
        first = Output(job.process.returncode, job.out, job.err)
    assert first.status == -signal.SIGKILL
    again = document(run(command, tmp_path, PET_RDZV_BACKEND="ext_c10d"))
    last = int(NUMBERED.findall(first.text)[-1])
    (resumed,) = again.resumed
    assert resumed in [f"{tmp_path}/checkpoints/checkpoint_epoch_{number}.pt at step {6 * number}" for number in (last, last + 1)]
    assert again.text.splitlines()[-1] == "done at step 240 of 240"
    assert all(len(losses) == 1 for losses in by_step(first.losses + again.losses).values())


def is_named(pid: int) -> bool:
    try:
        return ELASTIC.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.full
@WITH_KILLED
def test_files_of_epochs_load_at_another_world_size(killed: tuple[Path, Output], tmp_path: Path) -> None:
    directory, output = shutil.copytree(killed[0], tmp_path / "checkpoints"), killed[1]
    flags = (*EPOCHS, "--epochs=6", "--stop-after-steps=1")
    again = launch(stock(3), directory, *flags)
    assert again.status == 0, again.errors
    assert again.resumed == [f"{directory}/checkpoint_epoch_5.pt at step 30"]
    assert again.hashes[0] == output.hashes[-1]
    assert list(directory.glob("step_00000031.*/manifest.json"))  # the run ended in mid-epoch: no step is lost
    last = launch([sys.executable], directory, *EPOCHS, "--epochs=6")
    assert last.status == 0, last.errors
    assert last.hashes[0] == again.hashes[-1]
    assert last.text.splitlines()[-1] == "done at step 36 of 36"


def test_a_file_of_other_data_is_refused(tmp_path: Path) -> None:
    """Compared as that of a checkpoint, see test_train_fsdp.py."""
    train, path = imported(), tmp_path / "checkpoint_epoch_1.pt"
    train.write_file(path, {"data": "seed 0"})
    trainer = SimpleNamespace(data="seed 1")
    trainer.check_data = partial(train.Trainer.check_data, trainer)
    with pytest.raises(SystemExit, match="was trained on seed 0; this run has seed 1"):
        train.Trainer.load_epoch_file(trainer, path)


def test_the_newest_files_have_the_highest_numbers(tmp_path: Path) -> None:
    train = imported()
    for number in (8, 9, 10, 11):
        (tmp_path / f"checkpoint_epoch_{number}.pt").touch()
    (tmp_path / "checkpoint_epoch_best.pt").touch()
    train.keep_newest(tmp_path, 3)
    kept = ["checkpoint_epoch_10.pt", "checkpoint_epoch_11.pt", "checkpoint_epoch_9.pt", "checkpoint_epoch_best.pt"]
    assert files(tmp_path) == kept


def test_a_failed_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    train, path = imported(), tmp_path / "folder" / "checkpoint_epoch_1.pt"
    train.write_file(path, {"epoch": 1})
    with pytest.raises(Exception, match="pickle"):
        train.write_file(path, {"epoch": 2, "loss": lambda: 0})
    assert torch.load(path) == {"epoch": 1}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--save-every 0", "'0', expected epoch or a number of steps, 1 or more"),
        ("--save-every epochs", "'epochs', expected epoch or a number of steps, 1 or more"),
        ("--save-every epoch --checkpoint-dir s3://bucket/job", "expected a path"),
    ],
)
def test_what_cannot_be_saved_is_refused(flags: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        imported().parse_args(shlex.split(flags))
    assert expected in capsys.readouterr().err


def test_checkpoint_dir_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    train = imported()
    monkeypatch.setenv("ELASTIC_EXT_CHECKPOINT_DIR", "/of/the/agent")
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    assert train.parse_args([]).checkpoint_dir == "/of/the/agent"
    monkeypatch.setenv("CHECKPOINT_DIR", "/mnt/shared/checkpoints")
    assert train.parse_args([]).checkpoint_dir == "/mnt/shared/checkpoints"


# ---------------------------------------------------------------- activations


def test_recomputed_activations_give_the_same_gradients() -> None:
    train = imported()
    text = torch.randint(256, (4, 17))
    gradients, calls = [], []
    for flags in ([], ["--activation-checkpointing"]):
        torch.manual_seed(0)
        model = train.ByteTransformer(train.parse_args([*TINY, *flags]))
        count: list[int] = []
        model.blocks[0].norm1.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        model(text).backward()  # with dropout: both passes must draw alike
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(len(count))
    assert calls == [1, 2]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_accumulation_has_both_names() -> None:
    assert imported().parse_args(["--gradient-accumulation-steps=4"]).accumulate == 4


# ---------------------------------------------------------------- health


@pytest.mark.full
def test_the_health_barrier_names_a_stopped_rank(tmp_path: Path) -> None:
    """SIGSTOP, as on a host that does not answer any more. The file of epoch 1 is what all go on from."""
    directory = tmp_path / "checkpoints"
    flags = (*EPOCHS, "--epochs=2", "--health-every=2", "--health-timeout=10")
    output = launch(agent(2, directory), directory, *flags, TRAIN_FAULT="stop:1:8")
    assert output.status == 0, output.errors
    assert "health barrier: rank 1 of 2 did not arrive within 10 s" in output.errors
    assert output.resumed == [f"{directory}/checkpoint_epoch_1.pt at step 6"]
    assert NUMBERED.findall(output.text) == ["1", "2"]
