"""What is chosen among the local directories of several nodes, as formats and records see them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastic_ext.checkpoints import verifying
from elastic_ext.checkpoints.choice.listing import Wanted, newest_in
from elastic_ext.checkpoints.choice.rank_files import files_by_rank
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.record.stored import RecordBook, Trust
from elastic_ext.checkpoints.sharing.merging import SharedFile
from elastic_ext.checkpoints.storage import Entry, files_of
from tests.checkpoints.choice.scenes import T0, TRAINING, flip, put, saved, tensors, text
from tests.checkpoints.sharing.several_nodes import PeerOnDisk, SeveralNodes

AHEAD = 40_000  # seconds by which the clock of node 1 is wrong


@pytest.fixture
def nodes(tmp_path: Path) -> SeveralNodes:
    return SeveralNodes(tmp_path)


def trainer(nodes: SeveralNodes, step: int) -> str:
    """Of Hugging Face's Trainer on two nodes: the first one has all but the states of the other's generators."""
    name = f"checkpoint-{step}"
    tensors(nodes[0] / name / "model.safetensors", step)
    for file in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        saved(nodes[0] / name / file, {"state": {}}, step)
    text(nodes[0] / name / "trainer_state.json", {"global_step": step, "epoch": 1.5}, step)
    for rank in range(4):
        saved(nodes[rank // 2] / name / f"rng_state_{rank}.pth", {"state": {}}, step + AHEAD * (rank // 2))
    return name


def sharded(nodes: SeveralNodes, step: int) -> str:
    """By torch itself; the shard of the second rank is on the second node."""
    name = f"step_{step}"
    state = {"model": {f"w{number}": torch.full((50,), float(step)) for number in range(4)}, "optimizer": {"lr": step}}
    writer = dcp.FileSystemWriter(nodes[0] / name, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    shards = sorted(each for each in os.listdir(nodes[0] / name) if each.endswith(".distcp"))
    (nodes[1] / name).mkdir()
    for each in shards[1::2]:
        shutil.move(nodes[0] / name / each, nodes[1] / name / each)
        os.utime(nodes[1] / name / each, (T0 + AHEAD, T0 + AHEAD))
    return name


def lightning(nodes: SeveralNodes, step: int) -> str:
    path = nodes[0] / f"epoch=1-step={step}.ckpt"
    return saved(
        path, {"pytorch-lightning_version": "2.4", "global_step": step, "optimizer_states": [{}], "state_dict": {}}, step
    ).name


def of_ranks(nodes: SeveralNodes, step: int) -> str:
    for rank in range(4):
        name = f"ckpt_{step}_rank_{rank}.pt"
        saved(nodes[rank // 2] / name, {**TRAINING, "step": step}, step + AHEAD * (rank // 2))
    return f"ckpt_{step}_rank_*.pt"


MAKERS = {each.__name__: each for each in (trainer, sharded, lightning, of_ranks)}


def recorded(nodes: SeveralNodes, name: str, count: int, proved: bool = True) -> None:
    if "*" not in name:
        nodes.recorded(name, count, proved, world=4)
        return
    for rank in range(4):
        nodes.recorded(name.replace("*", str(rank)), count, proved, ranks=(rank,), world=4)


@pytest.mark.parametrize("maker", MAKERS)
def test_the_newest_save_of_two_nodes(nodes: SeveralNodes, maker: str) -> None:
    for step in (10, 20):
        recorded(nodes, name := MAKERS[maker](nodes, step), step)
    for own in (0, 1):
        found = nodes.choice(own).resume
        assert found is not None
        assert found.path == str(nodes[own] / name)
        assert "last proved save" in found.reason
        if maker != "sharded":  # which does not say its step
            assert found.step == 20
    assert verifying.verify(nodes.seen_by(1), entry(nodes, name)).sound


def entry(nodes: SeveralNodes, name: str) -> Entry:
    found = detect.candidates.entry_of(nodes.seen_by(), name)
    assert found is not None
    return found


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_node_that_lost_its_directory(nodes: SeveralNodes, maker: str, lost: int) -> None:
    recorded(nodes, name := MAKERS[maker](nodes, 10), 10)
    shutil.rmtree(nodes[lost])
    choice = nodes.choice()
    assert (choice.resume is not None) is ((maker, lost) == ("lightning", 1)), choice
    if choice.resume is not None:
        assert choice.resume.path.endswith(name)


@pytest.mark.parametrize("maker", ["trainer", "sharded", "of_ranks"])
def test_an_older_save_if_a_part_is_missing(nodes: SeveralNodes, maker: str) -> None:
    names = [MAKERS[maker](nodes, step) for step in (10, 20)]
    for step, name in zip((10, 20), names, strict=True):
        recorded(nodes, name, step)
    for path in nodes[1].glob(names[1]):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert nodes.chosen() == names[0]


@pytest.mark.parametrize("maker", ["trainer", "sharded", "of_ranks"])
def test_without_a_record_several_nodes_have_nothing(nodes: SeveralNodes, maker: str) -> None:
    """Files of a node that is lost would not be missed."""
    MAKERS[maker](nodes, 10)
    assert nodes.chosen() == ""


def test_what_is_not_proved_is_not_merged(nodes: SeveralNodes) -> None:
    recorded(nodes, trainer(nodes, 10), 10)
    recorded(nodes, name := trainer(nodes, 20), 20, proved=False)
    choice = nodes.choice()
    assert nodes.chosen() == "checkpoint-10"
    assert [(os.path.basename(each.path), each.reason) for each in choice.passed_over] == [
        (name, "its files are on several nodes, and its save was not proved")
    ]


def test_an_unproved_file_of_one_node_may_count(nodes: SeveralNodes) -> None:
    recorded(nodes, lightning(nodes, 10), 10)
    recorded(nodes, name := lightning(nodes, 20), 20, proved=False)
    assert nodes.chosen(1) == name


def test_the_record_vouches_for_the_whole(nodes: SeveralNodes) -> None:
    recorded(nodes, name := trainer(nodes, 10), 10)
    verdict = RecordBook(nodes.seen_by()).verdict(entry(nodes, name))
    assert verdict.trust is Trust.PROVED
    assert verdict.save is not None
    assert len(verdict.save.files) == 9
    put(nodes[1] / name / "rng_state_3.pth", b"torn", AHEAD)
    assert RecordBook(nodes.seen_by()).verdict(entry(nodes, name)).trust is Trust.TORN


@pytest.mark.parametrize("by", [0, 1])
def test_a_save_that_one_node_bars(nodes: SeveralNodes, by: int) -> None:
    for step in (10, 20):
        recorded(nodes, trainer(nodes, step), step)
    own_files.quarantine(nodes.storage(by), "checkpoint-20", "it diverged", written_at=T0 + 20.0 + AHEAD * by)
    assert nodes.chosen() == "checkpoint-10"
    assert own_files.quarantined_names(nodes.seen_by()) == {"checkpoint-20"}
    mark = own_files.quarantine_of(nodes.seen_by(), "checkpoint-20")
    assert mark is not None
    assert (mark.reason, mark.written_at) == ("it diverged", 0.0)


def test_a_mark_where_nothing_is(nodes: SeveralNodes) -> None:
    """A node that has lost its part still knows that it was bad. Its clock is that of a mark no more."""
    for step in (10, 20):
        recorded(nodes, lightning(nodes, step), step)
    own_files.quarantine(nodes.storage(1), "epoch=1-step=20.ckpt", "it diverged", written_at=5.0)
    assert nodes.chosen() == "epoch=1-step=10.ckpt"


@pytest.mark.parametrize("by", [0, 1])
def test_a_mark_of_an_older_save(nodes: SeveralNodes, by: int) -> None:
    recorded(nodes, trainer(nodes, 20), 20)
    own_files.quarantine(nodes.storage(by), "checkpoint-20", "it diverged", written_at=T0 + AHEAD * by - 5.0)
    assert nodes.chosen() == "checkpoint-20"
    assert not own_files.quarantined_names(nodes.seen_by())


def test_files_of_all_ranks_are_barred_together(nodes: SeveralNodes) -> None:
    for step in (10, 20):
        recorded(nodes, of_ranks(nodes, step), step)
    own_files.quarantine(nodes.storage(0), "ckpt_20_rank_*.pt", "it diverged", written_at=T0 + 20.5)  # before those of node 1
    assert nodes.chosen() == "ckpt_10_rank_*.pt"


def test_each_rank_has_its_path(nodes: SeveralNodes) -> None:
    recorded(nodes, name := of_ranks(nodes, 10), 10)
    found = files_by_rank(nodes.seen_by(), name)
    assert found == {rank: str(nodes[0] / f"ckpt_10_rank_{rank}.pt") for rank in range(4)}


def test_which_node_has_each_file(nodes: SeveralNodes) -> None:
    recorded(nodes, name := trainer(nodes, 10), 10)
    shared = nodes.seen_by()
    found = {each.name: each.node for each in shared.files_of_save(name)}
    assert found == {f"{name}/{path}": int(path in ("rng_state_2.pth", "rng_state_3.pth")) for path, _ in files_of(shared, name)}
    recorded(nodes, ranks := of_ranks(nodes, 30), 30)
    found = {each.name: each.node for each in nodes.seen_by().files_of_save(ranks)}
    assert found == {f"ckpt_30_rank_{rank}.pt": rank // 2 for rank in range(4)}
    assert nodes.seen_by().files_of_save("none") == ()
    recorded(nodes, single := lightning(nodes, 40), 40)
    assert nodes.seen_by().files_of_save(single) == (SharedFile(single, (nodes[0] / single).stat().st_size, 0),)


def test_a_tracker_of_one_node_counts(nodes: SeveralNodes) -> None:
    """What is newer than that is not whole, as on one machine."""
    for step in (10, 20):
        saved(nodes[0] / f"step_{step}" / "model.pt", {"model": {}}, step)
        saved(nodes[0] / f"step_{step}" / "optimizer.pt", {"state": {}, "param_groups": []}, step)
        nodes.recorded(f"step_{step}", step, ranks=(0,))
    text(nodes[1] / "latest", "step_10")
    assert nodes.chosen() == "step_10"


def test_a_mark_of_an_unfinished_save(nodes: SeveralNodes) -> None:
    for step in (10, 20):
        recorded(nodes, trainer(nodes, step), step)
    put(nodes[1] / "checkpoint-20-unfinished", b"")
    assert nodes.chosen() == "checkpoint-10"


def test_storage_lists_as_a_directory_does(nodes: SeveralNodes) -> None:
    """Of one node, the same as its own storage, but for the times of folders within a save."""
    put(nodes[0] / "step_10" / "deep" / "er" / "a.pt", b"12345", 1.5)
    put(nodes[0] / "step_10" / "b.pt", b"1", 2.5)
    put(nodes[0] / "c.pt", b"123", 3.5)
    (nodes[0] / "empty").mkdir()
    nodes.recorded("c.pt")
    shared, local = nodes.seen_by(), nodes.storage(0)
    for folder in ("", "step_10", "step_10/", "step_10/deep", "step_10/deep/er", "empty", ".elastic_ext/saves"):
        found, there = ({each.name: each for each in of.entries(folder)} for of in (shared, local))
        assert found.keys() == there.keys()
        for name in found:
            assert (found[name].is_dir, found[name].path) == (there[name].is_dir, there[name].path)
            if not found[name].is_dir:
                assert found[name].size == there[name].size
    for name in ("step_10", "c.pt", "step_10/deep", "step_10/b.pt"):
        found_one, there_one = shared.stat(name), local.stat(name)
        assert found_one is not None
        assert there_one is not None
        assert (found_one.name, found_one.is_dir, found_one.path) == (there_one.name, there_one.is_dir, there_one.path)
    assert shared.stat("step_10").mtime == local.stat("step_10").mtime  # type: ignore[union-attr]
    assert shared.read("step_10/deep/er/a.pt") == b"12345"
    assert shared.stat("none") is None


@pytest.mark.parametrize(("name", "kind"), [("none", FileNotFoundError), ("c.pt", NotADirectoryError)])
def test_listing_what_is_no_directory(nodes: SeveralNodes, name: str, kind: type[OSError]) -> None:
    put(nodes[0] / "c.pt", b"123")
    with pytest.raises(kind):
        list(nodes.seen_by().entries(name))
    assert nodes.seen_by().listed(name) == []


def test_reading_what_is_no_file(nodes: SeveralNodes) -> None:
    put(nodes[1] / "step_10" / "a.pt", b"1")
    for name, kind in (("none", FileNotFoundError), ("step_10", IsADirectoryError)):
        with pytest.raises(kind), nodes.seen_by().open(name):
            pass


def test_a_node_out_of_reach_is_no_damage(nodes: SeveralNodes) -> None:
    shared = nodes.seen_by()
    for error in (ConnectionError("node 1 has broken off"), TimeoutError("node 1 does not answer")):
        assert not shared.means_damage(error)
    assert shared.means_damage(OSError("not a gzip file"))


def test_damage_on_another_node_is_found(nodes: SeveralNodes) -> None:
    recorded(nodes, name := of_ranks(nodes, 10), 10)
    path = nodes[1] / "ckpt_10_rank_3.pt"
    before = path.stat()
    flip(path, 45)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    choice = newest_in(nodes.seen_by(), Wanted(of_scripts=True, verify=verifying.Mode.FULL))
    assert choice.resume is None
    assert "damaged" in choice.passed_over[0].reason
    assert name in choice.passed_over[0].path


def test_a_choice_reads_little_of_others(nodes: SeveralNodes) -> None:
    """Zip archives are read from their ends, in small pieces: one request, not one for each."""
    recorded(nodes, trainer(nodes, 10), 10)
    shared = nodes.seen_by(1)
    assert newest_in(shared, Wanted(of_scripts=True)).resume is not None
    peer = shared._peers[0]
    assert isinstance(peer, PeerOnDisk)
    assert 0 < peer.requests <= 8  # one for each file of node 0, and one more
