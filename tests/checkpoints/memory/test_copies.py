"""Copies in memory by real ranks over gloo, on one node and on two, that are killed at any moment."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

import pytest
import torch

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.candidates import directory_name, order_of
from elastic_ext.checkpoints.memory.part import Box, Piece, Read, TensorPlace, overlap
from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups, drawn_kill, last_told

KILLS = int(os.environ.get("ELASTIC_EXT_TEST_KILLS", "6"))  # twice as many on one node
SEED = int(os.environ.get("ELASTIC_EXT_TEST_SEED", "5"))
pytestmark = [pytest.mark.timeout(max(600, 10 * KILLS))]


@pytest.fixture(params=[[2], [1, 1]], ids=["one node", "two nodes"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path, groups: RankGroups) -> Hosts:
    return Hosts(tmp_path, groups, request.param)


@pytest.mark.seam
def test_all_of_the_state_comes_back(hosts: Hosts) -> None:
    """Sharded parameters and moments, each rank's generators and data loader, the epoch and the note."""
    hosts.run(23)
    for result in hosts.run(3, hosts.newest()):
        assert (result["step"], result["wrong"], result["epoch"], result["note"]) == (23, [], 2, {"step": 23})
        assert result["generators"]
        assert result["dataloader"]
    assert order_of(hosts.newest()) == (2, 26)
    assert len(list(hosts.memory.rglob("*.mem"))) == 2 * len(hosts.nodes) * sum(hosts.nodes)  # with those of the other node
    assert [len(list(node.glob("step_*"))) for node in hosts.memory.iterdir()] == [2] * len(hosts.nodes)


@pytest.mark.full
def test_the_first_copy_does_not_await_an_interval(hosts: Hosts) -> None:
    """The first step only makes the buffers. Until there is a copy, what was loaded may be whole on one node only."""
    seldom = {"options": {"memory_every": 50}}
    hosts.run(2, args=seldom)
    assert order_of(hosts.newest()) == (1, 2)
    hosts.run(9, hosts.newest(), seldom)
    assert order_of(hosts.newest()) == (2, 4)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_copy_gives_way_to_an_older(hosts: Hosts, groups: RankGroups, rank: int) -> None:
    hosts.run(9)
    name = hosts.newest()
    hosts.damage(name, rank)
    assert hosts.load(name)[0] == 8
    assert f"{tiers.memory_file(rank)} has checksum" in groups.stderr.read_text()


@pytest.mark.full
def test_with_both_copies_damaged_the_disk_is_loaded(hosts: Hosts, groups: RankGroups) -> None:
    hosts.run(24)
    for _ in range(2):
        name = hosts.newest()
        hosts.damage(name, 1)
        if hosts.newest() == name:  # damage does not show before the load
            break
    older = next(each for each in sorted(path.name for path in (hosts.memory / "0").glob("step_*")) if each != name)
    hosts.damage(older, 0)
    assert hosts.load(name) == (20, f"checkpoints/{directory_name(20, 1)}")
    assert not hosts.newest(), "what could not be loaded is gone"


@pytest.mark.full
def test_a_newer_checkpoint_beats_an_older_copy(hosts: Hosts) -> None:
    """When the newest copy is damaged: the older one is of step 19, the checkpoint of step 20."""
    hosts.run(20)
    name = hosts.newest()
    hosts.damage(name, 0)
    assert hosts.load(name) == (20, f"checkpoints/{directory_name(20, 1)}")


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [([1, 1, 1], [1, 1]), ([2, 1], [1, 2]), ([1], [5])], ids=str)
def test_other_nodes_or_ranks_load_available_parts(tmp_path: Path, groups: RankGroups, before, after) -> None:
    """Of seven rows over five ranks the fifth has none."""
    hosts = Hosts(tmp_path, groups, before)
    hosts.run(12)
    name = hosts.newest()
    hosts.resize(after)
    assert hosts.newest() == name
    for result in hosts.run(1, name):  # makes its buffers
        assert (result["step"], result["wrong"], Path(result["path"]).name) == (12, [], name)
        assert result["generators"] == (sum(before) == sum(after))
    assert hosts.newest() == name, "until the next one is committed"
    for result in hosts.run(3, name):
        assert (result["step"], result["wrong"]) == (12, [])
    assert order_of(hosts.newest()) == (3, 15)
    for result in hosts.run(2, hosts.newest()):
        assert (result["step"], result["wrong"]) == (15, [])
    for node in range(len(after)):
        assert len(list((hosts.memory / str(node)).glob("step_*"))) == 2


@pytest.mark.full
def test_a_part_damaged_on_the_remaining_node(tmp_path: Path, groups: RankGroups) -> None:
    """The older copy is loaded, with the other node's part of that."""
    hosts = Hosts(tmp_path, groups, [1, 1])
    hosts.run(12)
    name = hosts.newest()
    hosts.damage(name, 1, node=0)
    hosts.resize([2])
    assert hosts.newest() == name
    assert hosts.load(name) == (11, f"memory/{directory_name(11, 1)}")
    assert "rank_00001.mem has checksum" in groups.stderr.read_text()


@pytest.mark.seam
@pytest.mark.full("two nodes")
def test_training_does_not_mind_a_lack_of_room(hosts: Hosts, groups: RankGroups) -> None:
    """Said once; the checkpoints on disk are as they should be."""
    hosts.run(30, file_limit=65536, args={"save_every": 4})
    told = groups.stderr.read_text()
    assert told.count("cannot copy its state to memory: OSError: [Errno 27] File too large") == 1
    assert not list(hosts.memory.rglob("*.mem"))
    assert hosts.load()[0] == 28


@pytest.mark.full
def test_killed_at_any_moment_one_step_is_lost(tmp_path: Path, groups: RankGroups) -> None:
    """None where it was committed."""
    hosts, resume, step = Hosts(tmp_path, groups, [2]), "", 0
    for at, copied in (("planned", 3), ("half", 3), ("copied", 3), ("reported", 3), ("committed", 4)):
        assert hosts.run(6, resume, {"act": {"at": at, "step": step + 4, "rank": 1}, "save_every": 10**6})[1] is None
        step, resume = step + copied, hosts.newest()
        assert hosts.load(resume) == (step, f"memory/{resume}"), at


@pytest.mark.seam
@pytest.mark.full("one node")
def test_killed_ranks_lose_no_copy_that_was_committed(tmp_path: Path, hosts: Hosts) -> None:
    """After each kill the newest copy is that of the last step that any rank was told of, or newer, and is loaded exactly."""
    draw, told = random.Random(f"{SEED} {hosts.nodes}"), tmp_path / "told"
    losses: list[str] = []
    killed, torn, resume = 0, 0, ""
    kills = KILLS if len(hosts.nodes) > 1 else 2 * KILLS
    for turn in range(kills):
        at, kill = drawn_kill(draw, turn, 3000)
        killed += None in hosts.run(10**6, resume, {"told": str(told), "save_every": 10**6, **at}, **kill)
        before, resume = resume, hosts.newest()
        assert resume or not before, f"turn {turn}: no copy is whole"
        torn += len(list(hosts.memory.glob("0/step_*"))) - (resume != "")
        step = (order_of(resume) or (0, 0))[1]
        if step < last_told(told) or (order_of(resume) or (0, 0)) < (order_of(before) or (0, 0)):
            losses.append(f"turn {turn}: step {last_told(told)} was told, {resume} is there, before it {before}")
        assert hosts.load(resume) == (step, f"memory/{resume}" if resume else "/")
    print(f"{hosts.nodes}: {killed} of {kills} groups killed, {torn} torn copies seen, losses: {len(losses)}")
    assert losses == []
    assert killed > kills // 2
    assert torn > 0 or kills < 12  # a few kills may all come between copies


def cuts(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """(begin, size) of consecutive ranges; some may be empty."""
    ends = sorted(draw.randrange(size + 1) for _ in range(draw.randrange(3)))
    return [(begin, end - begin) for begin, end in zip([0, *ends], [*ends, size], strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_every_box_from_any_pieces(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(4)))
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    whole = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    files: dict[str, bytes] = {}
    pieces = []
    for number, ranges in enumerate(product(*(cuts(draw, size) for size in shape))):
        box = Box(tuple(begin for begin, _ in ranges), tuple(size for _, size in ranges))
        held = whole[tuple(slice(begin, begin + size) for begin, size in ranges)].contiguous()
        offset = 64 * draw.randrange(3)
        files[f"{number}"] = b"\xff" * offset + held.flatten().view(torch.uint8).numpy().tobytes()
        pieces.append(Piece(f"{number}", box, TensorPlace(offset, dtype, tuple(held.shape))))
    begin = tuple(draw.randrange(size) for size in shape)
    target_box = Box(begin, tuple(draw.randrange(1, size - at + 1) for size, at in zip(shape, begin, strict=True)))
    target = torch.zeros(target_box.size, dtype=dtype)
    reads = [Read(target, target_box, each, shared) for each in pieces if (shared := overlap(target_box, each.box)) is not None]
    for read in reads:
        file, first, last = read.range
        assert last <= len(files[file])
        read.copy(torch.frombuffer(bytearray(files[file][first:last]), dtype=torch.uint8))
    expected = whole[tuple(slice(at, at + size) for at, size in zip(target_box.begin, target_box.size, strict=True))]
    assert torch.equal(target, expected)
    assert sum(torch.Size(read.box.size).numel() for read in reads) == target.numel()
