"""Jobs of trainers that are killed with our callback, and end as if nothing had happened."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory.catalogue import Known, list_checkpoints
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.training.lightning_position import EpochPosition, ReaderNow, position_after
from tests.jobs import AGENT, EXT, SCRIPTS, Finished, Job
from tests.ports import free_port

SLOW_S = 250  # these libraries take long to import, the more so beside other tests
VARIABLES = {"HF_HUB_OFFLINE": "1", "TORCHELASTIC_LOG_LEVEL": "INFO", "LOGLEVEL": "INFO"}
PACKAGES = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}


def run(folder: Path, library: str, steps: int, workers: int = 2, **variables: str) -> Finished:
    """Stock torchrun, with our backend."""
    pytest.importorskip(PACKAGES[library])
    folder.mkdir(exist_ok=True)
    options = [f"--nproc-per-node={workers}", "--max-restarts=1", "--rdzv-conf=checkpoint_dir=saves"]
    script = [SCRIPTS / "resilient_job.py", library, "saves", str(steps)]
    with Job([*EXT, *options, *script], folder, **VARIABLES, **variables) as job:
        done = job.finish(SLOW_S)
    assert done.returncode == 0, done.all
    return done


def run_on_two_nodes(folder: Path, library: str, steps: int, **variables: str) -> list[Finished]:
    """A rank and a local directory on each."""
    pytest.importorskip(PACKAGES[library])
    conf = f"--rdzv-conf=checkpoint_dir={folder}/saves,local_dir=local,local_saves=all,last_call_timeout=1"
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1", "--rdzv-id=job", "--nnodes=2"]
    options = ["--rdzv-backend=ext_c10d", *where, "--nproc-per-node=1", "--max-restarts=1", conf]
    script = [SCRIPTS / "resilient_job.py", library, "saves", str(steps)]
    with ExitStack() as stack:
        jobs = []
        for name in ("a", "b"):
            (folder / name).mkdir(parents=True)
            started = Job([*AGENT, *options, *script], folder / name, ELASTIC_EXT_NODE_NAME=name, **VARIABLES, **variables)
            jobs.append(stack.enter_context(started))
        return [job.finish(SLOW_S) for job in jobs]


def ends(done: Finished) -> set[tuple[str, ...]]:
    """Of each rank: its number, its last step, its last loss and all its weights, to the bit."""
    return set(re.findall(r"rank (\d) told \w+ ended (\d+) loss (\S+) weights (\w+)", done.out))


def samples(done: Finished, ranks: int, micro_steps: int) -> list[int]:
    """Of these many micro-steps of each rank, in the first attempt."""
    found, seen = [], Counter[str]()
    for rank, batch in re.findall(r"attempt 0 rank (\d) samples \[([\d, ]+)\]", done.out):
        seen[rank] += 1
        found += list(map(int, batch.split(","))) if seen[rank] <= micro_steps else []
    assert len(seen) == ranks, done.all
    return found


@pytest.mark.full
@pytest.mark.timeout(3 * SLOW_S)
@pytest.mark.parametrize(
    ("library", "of_epoch"),
    [("huggingface", 56), ("lightning", 56), ("lightning", 40), ("accelerate", 56)],
    ids=["hugging-face", "lightning", "lightning-after-an-epoch", "accelerate"],
)
def test_a_killed_job_ends_as_if_undisturbed(tmp_path, library, of_epoch):
    """The save at step 10 is in mid-epoch with 56 samples, 8 in a step, and at the end of an epoch with 40."""
    undisturbed = run(tmp_path / "undisturbed", library, 18, SAMPLES=str(of_epoch))
    killed = run(tmp_path / "killed", library, 18, SAMPLES=str(of_epoch), KILL="1:13")
    assert "resuming from" in killed.err
    assert set(re.findall(r"told (\w+)", killed.out)) == {"10"}
    assert len(ends(undisturbed)) == 2, undisturbed.all
    assert ends(killed) == ends(undisturbed)
    assert len(list((tmp_path / "undisturbed" / "saves").glob("[!.]*"))) == 2, "older saves are removed"


@pytest.mark.full
@pytest.mark.timeout(3 * SLOW_S)
@pytest.mark.parametrize("library", PACKAGES)
def test_nodes_that_save_on_their_own_disks(tmp_path, library):
    """The ranks move to the other node after the kill: what one of them has saved then comes from there."""
    undisturbed = run(tmp_path / "undisturbed", library, 18)
    killed = run_on_two_nodes(tmp_path / "killed", library, 18, KILL="1:13")
    said = "\n".join(each.all for each in killed)
    assert [each.returncode for each in killed] == [0, 0], said
    for each in killed:
        assert re.search(rf"resuming from {tmp_path}/killed/\w/local/\S*[-_=]10\b", each.err), said
    assert ends(killed[0]) | ends(killed[1]) == ends(undisturbed), said
    newest = max(list_checkpoints(open_storage(str(tmp_path / "killed" / "saves"))), key=lambda row: row.step or 0)
    assert (newest.step, newest.known, newest.complete) == (15, Known.PROVED, True), said


@pytest.mark.full
@pytest.mark.timeout(3 * SLOW_S)
@pytest.mark.parametrize("library", PACKAGES)
def test_fewer_ranks_go_on_at_the_same_sample(tmp_path, library):
    """Three epochs: two ranks save at step 10, which is the first save by cost, and one rank does the other 11 steps."""
    before = run(tmp_path, library, 12, EVERY="0")
    after = run(tmp_path, library, 21, workers=1, EVERY="0")
    assert "told 10 ended 21" in after.out
    seen = samples(before, 2, 2 * 10) + samples(after, 1, 4 * 11)
    assert Counter(Counter(seen).values()) == {3: 56}
    assert [Counter(seen[at : at + 56]).most_common(1)[0][1] for at in (0, 56, 112)] == [1, 1, 1]


@pytest.mark.full
@pytest.mark.timeout(3 * SLOW_S)
def test_what_the_trainer_saves_itself_stays(tmp_path):
    """Every 3rd step by its own strategy, every 5th by the callback, and the 15th by both."""
    run(tmp_path, "huggingface", 21, SAVED="3")
    found = {int(each.name.partition("-")[2]) for each in (tmp_path / "saves").glob("checkpoint-*")}
    assert found == {3, 6, 9, 10, 12, 15, 18, 20, 21}


@pytest.mark.parametrize(
    ("batches", "batch_size", "ranks", "now", "found"),
    [
        (3, 2, 2, ReaderNow(2, 2, 28), (6, 3)),
        (6, 2, 2, ReaderNow(2, 1, 56), (24, 12)),
        (6, 2, 1, ReaderNow(2, 2, 28), (6, 3)),
        (3, 2, 2, ReaderNow(4, 2, 28), (6, 1)),  # 22 samples are left: 6 of 7 batches
        (3, 2, 1, ReaderNow(2, 4, 7), (2, 1)),  # two samples are left out, rather than trained on twice
        (2, 4, 1, ReaderNow(4, 1, 10, drop_last=True), (8, 2)),
        (9, 4, 4, ReaderNow(4, 1, 100), (100, 25)),
        (0, 2, 2, ReaderNow(2, 1, 56), (0, 0)),
    ],
)
def test_an_epoch_goes_on_where_the_ranks_were(batches, batch_size, ranks, now, found):
    assert position_after(batches, batch_size, ranks, now) == EpochPosition(*found)
