"""entrypoints/train_ddp.py: one file, model_latest.pt, on shared storage or on each node's own disk."""

import contextlib
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from tests.entrypoints.test_train_fsdp import imported
from tests.jobs import AGENT, EXT, ROOT, Finished, Job, descendants, run
from tests.ports import free_port

torch = pytest.importorskip("torch")

SCRIPT = ROOT / "entrypoints" / "train_ddp.py"
AT = re.compile(r"epoch (\d+) loss \S+ \((\S+)\)")


@pytest.fixture(scope="module")
def train() -> ModuleType:
    return imported(SCRIPT)


def a_worker(job: Job) -> int:
    """The pid of the worker of rank 1."""
    for pid in descendants(job.process.pid):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise AssertionError("no worker of rank 1")


@pytest.mark.full
def test_a_killed_job_resumes_from_the_one_file(tmp_path: Path) -> None:
    """Nothing of elastic_ext is in the script. What is trained twice is the same to the bit, and so is the end."""
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=3", str(SCRIPT), "--epochs=6", "--examples=16384"]
    with Job(command, tmp_path, CHECKPOINT_DIR="shared") as job:
        job.wait_for("epoch 1 loss")
        os.kill(a_worker(job), signal.SIGKILL)
        done = job.finish()
    assert done.returncode == 0, done.err
    first, again = done.out.split("Resuming from epoch ")
    start = int(re.match(r"\d+", again)[0])
    assert 1 <= start <= len(AT.findall(first)) + 1  # the file of an epoch is there a moment before, or after, its line
    assert [int(epoch) for epoch, _ in AT.findall(again)] == list(range(start, 6))
    assert set(AT.findall(first)[start:]) <= set(AT.findall(again))
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["model_latest.pt"]


def test_the_file_is_replaced_in_one_step(train: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "shared" / "model_latest.pt"
    train.save(path, {"epoch": 1})
    with pytest.raises(Exception, match="pickle"):
        train.save(path, {"epoch": 2, "model": lambda: 0})
    assert torch.load(path) == {"epoch": 1}


@pytest.mark.full
def test_a_resume_elsewhere_without_our_agent(tmp_path: Path) -> None:
    stock = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for ranks, epochs in ((2, 1), (1, 2)):
        done = run([*stock, f"--nproc-per-node={ranks}", str(SCRIPT), f"--epochs={epochs}"], tmp_path)
        assert done.returncode == 0, done.err
        assert re.findall(r"Resuming from epoch (\d+)", done.out) == ([str(epochs - 1)] if epochs > 1 else [])
        assert [epoch for epoch, _ in AT.findall(done.out)] == [str(epochs - 1)]


@pytest.mark.full
def test_fewer_ranks_keep_the_global_batch(tmp_path: Path) -> None:
    """Which examples are in a step stays, too: losses are those of 4 ranks all along, but for rounding. Else they are not."""
    flags = [str(SCRIPT), "--batch=16", "--examples=1000", "--dropout=0", "--lr=0.01"]
    whole, *others = ("--global-batch=128", "--global-batch=128", "--global-batch=0")
    unbroken = losses(tmp_path, 4, *flags, whole, "--epochs=4", "--checkpoint-dir=whole")
    kept, changed = (
        losses(tmp_path, 4, *flags, each, "--epochs=2", f"--checkpoint-dir={number}")
        + losses(tmp_path, 2, *flags, each, "--epochs=4", f"--checkpoint-dir={number}")
        for number, each in enumerate(others)
    )
    assert len(unbroken) == 4
    assert kept == pytest.approx(unbroken, rel=1e-4)
    assert changed[-1] != pytest.approx(unbroken[-1], rel=1e-2)


def losses(folder: Path, ranks: int, *words: str) -> list[float]:
    done = run([*AGENT, f"--nproc-per-node={ranks}", "--max-restarts=0", *words], folder)
    assert done.returncode == 0, done.err
    return [float.fromhex(loss) for _, loss in AT.findall(done.out)]


@pytest.mark.full
def test_a_global_batch_cannot_exceed_the_data(tmp_path: Path) -> None:
    done = run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", str(SCRIPT), "--global-batch=64", "--examples=63"],
        tmp_path,
    )
    assert done.returncode == 1
    assert "--global-batch is 64, expected at most --examples, 63" in done.err


@pytest.mark.full
def test_each_node_has_a_copy_new_ones_too(tmp_path: Path) -> None:
    of_two_nodes(tmp_path, epochs=2)
    files = [tmp_path / name / "model_latest.pt" for name in ("disk0", "disk1")]
    one, other = (torch.load(path) for path in files)
    assert one["epoch"] == other["epoch"] == 2
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    files[0].unlink()  # as on a node that takes the place of one that was lost
    again = of_two_nodes(tmp_path, epochs=3)
    assert "Resuming from epoch 2" in again
    assert [epoch for epoch, _ in AT.findall(again)] == ["2"]
    assert [torch.load(path)["epoch"] for path in files] == [3, 3]


def of_two_nodes(folder: Path, epochs: int) -> str:
    """Run to the end on two agents, each with a directory of its own; return what rank 0 printed."""
    where = [*EXT[:-1], f"--rdzv-endpoint=localhost:{free_port()}", "--local-addr=127.0.0.1", "--rdzv-id=job", "--nnodes=2"]
    command = [*where, "--nproc-per-node=1", str(SCRIPT), "--copies=node", f"--epochs={epochs}"]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(command, folder, CHECKPOINT_DIR=f"disk{number}")) for number in range(2)]
        done: list[Finished] = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0], done[0].err + done[1].err
    return "".join(each.out for each in done)
