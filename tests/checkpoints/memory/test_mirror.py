"""Parts of copies in memory on two nodes: who keeps whose, sent by real ranks over gloo."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.own_files import StoredFile
from elastic_ext.checkpoints.directory.tiers import memory_file
from elastic_ext.checkpoints.formats.candidates import order_of
from elastic_ext.checkpoints.memory.mirror import RankReport, keepers, keeping_ranks, sent_parts
from elastic_ext.checkpoints.memory.pace import Timing
from tests.checkpoints.memory.hosts import Hosts
from tests.checkpoints.rank_groups import RankGroups

ALONE = "are on this node only"


def test_which_node_keeps_whose_parts():
    for domains, expected in (
        ([], ()),
        ([""], ()),
        (["", ""], (1, 0)),
        (["", "", ""], (1, 2, 0)),
        (["a", "a", "b", "b"], (2, 3, 0, 1)),
        (["a", "b", "a", "b"], (1, 0, 3, 2)),  # in the order of domains: 0 2 1 3
        (["a", "a", "a", "b"], (2, 3, 0, 1)),  # two of three stay in a
    ):
        assert keepers(domains) == expected, domains


def test_each_node_keeps_another_domains_copy_where_possible():
    draw = random.Random(1)
    for _ in range(200):
        domains = [draw.choice("abcd") for _ in range(draw.randint(2, 40))]
        found = keepers(domains)
        assert sorted(found) == list(range(len(domains)))
        assert all(node != keeper for node, keeper in enumerate(found))
        largest = max(domains.count(each) for each in domains)
        same = sum(domains[node] == domains[keeper] for node, keeper in enumerate(found))
        assert same == max(0, 2 * largest - len(domains)), domains


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([2, 2], (2, 3, 0, 1)), ([1, 3], (1, 0, 0, 0)), ([1, 1, 1], (1, 2, 0)), ([2, 1, 2], (2, 2, 3, 0, 1)), ([2], ())],
)
def test_ranks_of_a_node_share_anothers_parts(nodes, expected):
    assert keeping_ranks(nodes, [""] * len(nodes)) == expected


def report(size: int | None, sends: bool = True, **takes: int) -> RankReport:
    file = StoredFile("part", size, "") if size is not None else None
    return RankReport("copy", b"", Timing(), file, sends=sends, takes={int(rank[1:]): each for rank, each in takes.items()})


@pytest.mark.parametrize(
    ("first", "second", "sent"),
    [
        (report(8, r1=8), report(8, r0=8), [0, 1]),
        (report(8, r1=8), report(8), [1]),  # no memory for it
        (report(8, r1=8), report(8, r0=9), [1]),  # a file of another size would count as damaged
        (report(8, False, r1=8), report(8, r0=8), [1]),  # it was slow
        (report(None, r1=8), report(8, r0=8), [1]),
    ],
)
def test_what_is_sent(first, second, sent):
    assert sent_parts([first, second], [1, 0]) == sent


@pytest.mark.seam
@pytest.mark.full("[1, 1, 1]")
@pytest.mark.parametrize("nodes", [[2, 2], [1, 2], [1, 1, 1]], ids=str)
def test_a_lost_node_gets_its_parts_from_another(tmp_path: Path, groups: RankGroups, nodes: list[int]) -> None:
    hosts = Hosts(tmp_path, groups, nodes)
    hosts.run(5)
    name = hosts.newest()
    assert order_of(name) == (1, 5)
    keeping = keeping_ranks(nodes, [""] * len(nodes))
    for rank, keeper in enumerate(keeping):
        node = tiers.node_of(nodes, keeper)
        assert hosts.part(name, rank).read_bytes() == hosts.part(name, rank, node).read_bytes()
    shutil.rmtree(hosts.memory / "1")
    (hosts.memory / "1").mkdir()
    assert hosts.load(name) == (5, f"memory/{name}")
    assert f"{nodes[1]} parts of {name} came from other nodes" in groups.stderr.read_text()
    assert set(map(memory_file, tiers.ranks_of(nodes, 1))) <= set(hosts.parts(name)[1])
    for result in hosts.run(3, name):
        assert (result["step"], result["wrong"]) == (5, [])
    for copy in hosts.memory.glob("0/step_*"):
        assert sum(len(found) for found in hosts.parts(copy.name)) == 2 * sum(nodes), "each part is on two nodes again"


@pytest.mark.full
def test_a_node_without_spare_memory_keeps_its_own(tmp_path: Path, groups: RankGroups) -> None:
    """The one rank of a node has as much memory as each of the two of the other, whose parts it would keep."""
    hosts = Hosts(tmp_path, groups, [1, 2])
    hosts.run(8, each=[{"ELASTIC_EXT_MEMORY_LIMIT": "250000"}] * 3)
    name = hosts.newest()
    assert order_of(name) == (1, 8)
    assert hosts.parts(name) == [[memory_file(0)], [memory_file(0), memory_file(1), memory_file(2)]]
    told = groups.stderr.read_text()
    assert told.count("rank 0 has no memory for the copies of another node: two copies of its state need") == 1
    assert [told.count(f"of rank {rank} {ALONE}") for rank in range(3)] == [0, 1, 1]


@pytest.mark.full
@pytest.mark.parametrize("piece", [1 << 20, 4096], ids=["late", "given-up"])
def test_a_slow_network_delays_no_copy_for_long(tmp_path: Path, groups: RankGroups, piece: int) -> None:
    """A part takes longer than it may, and the next ones are not sent, but committed all the same. To send 1 MB takes an hour."""
    hosts = Hosts(tmp_path, groups, [1, 1])
    rate = {"ELASTIC_EXT_MEMORY_MB_S": "0.4" if piece > 4096 else "0.0003"}
    hosts.run(8, args={"least_send_s": 0.05, "piece": piece, "slow_network": True}, each=[rate] * 2)
    name = hosts.newest()
    assert order_of(name) == (1, 8)
    assert hosts.parts(name) == [[memory_file(0)], [memory_file(1)]]
    told = groups.stderr.read_text()
    assert [told.count(f"of rank {rank} {ALONE}, as rank {1 - rank} gets them too slowly") for rank in range(2)] == [1, 1]


@pytest.mark.full
def test_a_rate_too_low_makes_copies_rarer(tmp_path: Path, groups: RankGroups) -> None:
    """A part takes longer than two intervals: it is sent all the same, and the next copy is due later."""
    hosts = Hosts(tmp_path, groups, [1, 1])
    hosts.run(8, args={"least_send_s": 0.05, "piece": 4096}, each=[{"ELASTIC_EXT_MEMORY_MB_S": "0.02"}] * 2)
    name = hosts.newest()
    assert hosts.parts(name) == [[memory_file(0), memory_file(1)]] * 2
    assert order_of(name)[1] < 8
    logged = groups.stderr.read_text()
    assert logged.count("(memory_every): at copy_mb_s=0.02 a part takes ") == 1
    assert ALONE not in logged
