"""What ranks copy together, and what they refuse together: real ranks over gloo, forked."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch import nn

from elastic_ext.base.contracts import MemoryRoom
from elastic_ext.checkpoints.directory.own_files import Manifest
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from elastic_ext.checkpoints.memory.saver import MemorySaver
from elastic_ext.checkpoints.ranks import LocalTier, Ranks
from elastic_ext.checkpoints.state import Objects
from elastic_ext.checkpoints.storage import open_storage
from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups

pytestmark = pytest.mark.seam


def test_training_copies_nothing_before_the_ranks_have_begun(tmp_path: Path) -> None:
    """They begin in the thread of a save, where their collectives must not mix with those of a copy."""
    tier = LocalTier(open_storage(str(tmp_path)), (1,), 0, True)
    objects = Objects(nn.Linear(1, 1), ())
    saver = MemorySaver(tier, MemoryRoom("", 1 << 20), 1, objects, Ranks(timedelta(seconds=60)), None)
    saver.begin(None)
    begins = saver._schedule.begins

    def trains_meanwhile(due: int | None) -> None:
        saver.step(1, 0, lambda: Manifest(1, 0, (), nodes=(1,)))
        begins(due)

    saver._schedule.begins = trains_meanwhile
    saver.has_generation(1)
    assert saver._attempt is None


@pytest.mark.full
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_values_beside_a_tensor_come_back(hosts: Hosts, tier: str) -> None:
    """To as many ranks as there were, and to one."""
    first = {"list": [0, 0], "gone": {"a": 1}, "deep": {"a": {"b": 1}}}
    then = {"list": [3, 4, 5], "gone": {}, "deep": {"a": {"b": 1, "c": 2}}}
    hosts.task("meter", {"values": first, "become": then, "save": tier == "disk"})
    resume = hosts.newest() if tier == "memory" else ""
    for after in ([2], [1]):
        hosts.resize(after)
        for result in hosts.task("meter", {"values": first}, resume):
            assert (result["step"], result["path"], result["average"]) == (2, resume, [1.0, 1.0, 1.0])
            assert {key: result[key] for key in then} == then


@pytest.mark.full
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_sharded_average_is_loaded_into_any_object(hosts: Hosts, tier: str) -> None:
    """Sharded as it was, over the ranks that there are now; whole if the model is not sharded any more."""
    hosts.task("averages", {"save": tier})
    resume = hosts.newest() if tier == "memory" else ""
    for after, there in (([1, 1], "empty"), ([3], "whole"), ([1], "sharded")):
        hosts.resize(after)
        for result in hosts.task("averages", {"save": "", "there": there}, resume):
            assert (result["step"], result["path"]) == (2, resume)
            assert (result["kinds"], result["right"]) == (["Tensor" if after == [1] else "DTensor"], True)


def test_a_tensor_of_one_rank_alone_blocks_commits(hosts: Hosts, groups: RankGroups) -> None:
    results = hosts.task("meter", {"values": {}, "become": {}, "save": True, "uneven": [1]})
    assert hosts.newest() == ""
    told = groups.stderr.read_text()
    assert told.count("cannot copy its state to memory: ranks 0 to 1, of one node, do not have the same tensors") == 1
    for result in results:
        assert "rank 1: other: the state of extra 'meter' has other tensors than on rank 0" in result["error"]


def test_sharded_parts_that_no_load_joins_are_refused(hosts: Hosts) -> None:
    told = {
        "partial": "extra.meter['a'] is a DTensor of which each rank has a partial sum",
        "beside a tensor": "extra.meter has a DTensor in an object that is no dict, list or tuple",
        "alone": "the state to save holds a DTensor, of which this rank has a part, where one rank's state is kept for all",
    }
    results = hosts.task("refused", {})
    for name, text in told.items():
        assert results[0]["raised"][name].startswith(f"UsageError: {text}")
    assert [result["saved"] for result in results] == [None, None]
    assert hosts.newest() == ""


def test_ranks_follow_rank_0_in_the_interval(hosts: Hosts) -> None:
    """A step that is not copied costs no manifest: it is asked for at steps 1, 2, 4, 6, 8 and 10, and only on rank 0."""
    results = hosts.task("together", {"steps": 10, "every": [2, 3], "timeout_s": 60})
    assert [(result["next"], result["asked"]) for result in results] == [(12, 6), (12, 0)]
    assert order_of(hosts.newest()) == (1, 10)


@pytest.mark.parametrize(("fault", "faulty"), [("note", 0), ("no mapping", 0), ("thread", 1), ("absent", 1)])
def test_what_one_rank_cannot_copy_all_refuse(hosts: Hosts, groups: RankGroups, fault: str, faulty: int) -> None:
    """Nobody waits for anybody until the limit, after which the ranks could no longer communicate."""
    results = hosts.task("together", {"steps": 12, "fault": fault, "faulty": [faulty], "at": [4], "timeout_s": 60})
    assert None not in results
    assert results[0]["next"] == results[1]["next"] is not None
    told = groups.stderr.read_text()
    assert told.count("cannot copy its state to memory") == 1
    assert "no more copies in memory" not in told
    assert (order_of(hosts.newest()) or (0, 0))[1] > 4


def test_an_unreadable_manifest_is_refused_on_all_ranks(hosts: Hosts) -> None:
    """Only rank 0 reads it, and the others wait for the result."""
    for result in hosts.task("unreadable_manifest", {}):
        [[committed, reason], then] = result["told"]
        assert not committed
        assert "the manifest cannot be read" in reason
        assert then == [True, ""]


@pytest.mark.full
def test_a_loaded_copy_stays_until_a_newer_one(hosts: Hosts, groups: RankGroups) -> None:
    """The directory of checkpoints cannot be written to as the ranks load, so they get their generation with a later save."""
    hosts.run(9)
    name = hosts.newest()
    for result in hosts.task("late_generation", {"steps": 0}, name):
        assert (result["step"], result["kept"]) == (9, ["manifest.json", "rank_00000.mem", "rank_00001.mem"])
    assert groups.stderr.read_text().count("not copied to memory until a save has reached the directory") == 1
    assert hosts.newest() == name
    hosts.task("late_generation", {"steps": 11, "every": 50}, name)  # 10 steps ahead, for buffers; then the copy
    assert order_or_oldest(hosts.newest()) > order_or_oldest(name)


def test_training_waits_for_buffers_limitedly(hosts: Hosts) -> None:
    """It goes on without copies, which begin once all ranks have their buffers."""
    for result in hosts.task("slow_buffers", {}):
        assert result == {"went_on": True, "buffers": 2}
    assert (order_of(hosts.newest()) or (0, 0))[1] > 6


@pytest.mark.parametrize("after", [[1], [1, 1]])
def test_a_load_by_others_needs_at_most_two(hosts: Hosts, after: list[int]) -> None:
    """The copy that was loaded, by two ranks, goes before there is a second buffer."""
    hosts.run(5)
    name = hosts.newest()
    hosts.resize(after)
    for result in hosts.run(6, name):
        assert result["most"] <= max(2 + 1, 2 * sum(after))  # with those of the other node
    assert order_or_oldest(hosts.newest()) == (2, 11)


@pytest.mark.full
def test_buffers_alone_do_not_count_as_copying_again(hosts: Hosts, groups: RankGroups) -> None:
    """The copies of steps 2 and 3 fail, at step 5 a rank makes new buffers, and the copy of step 9 is committed."""
    hosts.task("together", {"steps": 8, "refuses": 1, "steps_that_fail": 2})
    assert hosts.newest() == ""
    assert "the state is copied to memory again" not in groups.stderr.read_text()
    hosts.task("together", {"steps": 30, "refuses": 1, "steps_that_fail": 2})
    assert hosts.newest() != ""
    assert groups.stderr.read_text().count("the state is copied to memory again") == 1
