"""At the end of a job on several nodes, each copier ends on its own, in any order."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.copying.replicate import FINISH_S
from elastic_ext.checkpoints.copying.script_saves import OLDER_S
from elastic_ext.checkpoints.record.stored import Trust
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.copying.several import MOST_TURNS, Nodes
from tests.checkpoints.copying.test_script_saves import content, trust_in
from tests.until import until


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    found = Nodes(tmp_path)
    for local in found.local:
        LocalStorage(str(local)).put(notes.USED, b"")
    return found


def ends(nodes: Nodes, *order: int) -> dict[int, bool]:
    """Each node takes turns until it has nothing left, or has waited for long. Return which have got through."""
    through: dict[int, bool] = {}
    still = dict.fromkeys(order, 0.0)
    before: dict[int, tuple[object, ...]] = {}
    while len(through) < len(order):
        for node in order:
            if node in through:
                continue
            report = nodes.turn(node, finish=True)[0]
            nodes.check()
            seen = report.waiting, report.others, report.arrived
            still[node] = nodes.now if seen != before.get(node) else still[node]
            before[node] = seen
            if not report.waiting and not report.failures:
                through[node] = True
            elif nodes.now - still[node] > FINISH_S or set(report.waiting) <= set(report.given_up):
                through[node] = False
        nodes.now += 5
    return through


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_newest_arrives_in_each_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    nodes = Nodes(tmp_path, 3)
    old, new = nodes.save(20), nodes.save(40)
    assert ends(nodes, *order) == dict.fromkeys(range(3), True)
    assert nodes.check() == new
    for name in (old, new):
        assert content(nodes.remote, name) == nodes.files(name)
        assert trust_in(nodes.remote, name) is Trust.PROVED


def test_files_of_ranks_arrive_at_the_end(nodes: Nodes) -> None:
    nodes.save_files(20)
    new = nodes.save_files(40)
    assert ends(nodes, 1, 0) == {0: True, 1: True}
    assert nodes.check() == new
    assert len(list(nodes.remote.glob("step_*"))) == 8


@pytest.mark.parametrize("first", [0, 1])
def test_others_have_ended_already(nodes: Nodes, first: int) -> None:
    """All is there when the first one ends."""
    name = nodes.save(20)
    for _ in range(MOST_TURNS):
        nodes.turn()
    assert ends(nodes, first) == {first: True}
    assert ends(nodes, 1 - first) == {1 - first: True}
    assert nodes.check() == name


@pytest.mark.parametrize("node", [0, 1])
def test_the_other_node_does_not_come(nodes: Nodes, node: int) -> None:
    """The last save is named, and everything else is copied."""
    name = nodes.save(20)
    (nodes.local[node] / "log.txt").write_text("lines")
    assert ends(nodes, node) == {node: False}
    assert nodes.turn(node, finish=True)[0].waiting == (name,)
    assert (nodes.remote / "log.txt").exists()
    assert nodes.check() == ""


def test_an_older_save_without_all_parts(nodes: Nodes) -> None:
    """The node was replaced since. The job ends as if nothing were left, and the older one never counts."""
    old = nodes.save(20)
    nodes.lose(1)
    new = nodes.save(40)
    assert ends(nodes, 0, 1) == {0: True, 1: True}
    assert nodes.check() == new
    assert trust_in(nodes.remote, old) is Trust.TORN


def test_the_leader_waits_shortly_for_older_ones(nodes: Nodes) -> None:
    nodes.save(20)
    nodes.lose(1)
    new = nodes.save(40)
    began = nodes.now
    ends(nodes, 0, 1)
    assert nodes.check() == new
    assert nodes.now - began <= OLDER_S + 15


def test_older_ones_are_sent_after_the_newest(nodes: Nodes) -> None:
    """There may be little time at the end. The others send their parts of all, and need not wait."""
    names = [nodes.save(step) for step in (20, 40)]
    nodes.turn(0, finish=True)
    assert not (nodes.remote / names[0]).exists()
    for _ in range(2):  # a clock of coarse steps
        nodes.turn(1, finish=True)
    assert len(list((nodes.remote / names[0]).glob("part_1*"))) == 2
    assert ends(nodes, 0) == {0: True}
    assert content(nodes.remote, names[0]) == nodes.files(names[0])


def test_a_leader_at_work_is_waited_for(nodes: Nodes) -> None:
    """It has not announced the last save yet."""
    nodes.save(20)
    before = nodes.turn(1, finish=True)[0]
    LocalStorage(str(nodes.remote)).put(".elastic_ext/copying_from/part-0", b"1")
    assert nodes.turn(1, finish=True)[0].others != before.others


def test_an_emptied_remote_directory(nodes: Nodes) -> None:
    """The notes of all nodes say that it was copied."""
    name = nodes.save(20)
    nodes.until(name)
    shutil.rmtree(nodes.remote)
    nodes.remote.mkdir()
    assert ends(nodes, 1, 0) == {0: True, 1: True}
    assert nodes.check() == name


def test_logs_of_two_nodes_do_not_overwrite(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The first one that is there stays, also where this node has ended before."""
    caplog.set_level(logging.INFO)
    for node, local in enumerate(nodes.local):
        (local / "log.txt").write_text(f"of node {node}")
    assert ends(nodes, 0, 1) == {0: True, 1: True}
    assert (nodes.remote / "log.txt").read_text() == "of node 0"
    assert "log.txt is not copied" in caplog.text
    (nodes.local[0] / "log.txt").write_text("more of node 0")
    assert ends(nodes, 1, 0) == {0: True, 1: True}
    assert (nodes.remote / "log.txt").read_text() == "more of node 0"


def test_directories_of_logs_are_merged(nodes: Nodes) -> None:
    for node, local in enumerate(nodes.local):
        (local / "runs").mkdir()
        (local / "runs" / f"events.{node}").write_text(f"of node {node}")
        (local / "runs" / "summary").write_text(f"of node {node}")
    assert ends(nodes, 0, 1) == {0: True, 1: True}
    found = {name: data.decode() for name, data in content(nodes.remote, "runs").items()}
    assert found == {"runs/events.0": "of node 0", "runs/events.1": "of node 1", "runs/summary": "of node 0"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rank_0_has_removed_the_newest(nodes: Nodes, order: tuple[int, int]) -> None:
    """The one before it is copied by all."""
    old, new = nodes.save(20), nodes.save(40)
    nodes.removes(new, [0])
    assert ends(nodes, *order) == {0: True, 1: True}
    assert nodes.check() == old


def forget(nodes: Nodes, name: str) -> None:
    """The agents were killed before they had recorded this save."""
    for local in nodes.local:
        for path in (local / ".elastic_ext" / "saves").glob(f"*{name}"):
            path.unlink()


@pytest.mark.parametrize("newest", [True, False])
def test_unrecorded_parts_are_left_out(nodes: Nodes, newest: bool) -> None:
    """Their files may be of two saves, and those of one node look like a whole one. The newest is named."""
    names = [nodes.save(20), nodes.save(40)]
    name, other = names[newest], names[not newest]
    forget(nodes, name)
    assert ends(nodes, 0, 1) == dict.fromkeys(range(2), not newest)
    assert nodes.check() == other
    assert not (nodes.remote / name).exists()
    assert nodes.turn(1, finish=True)[0].waiting == ((name,) if newest else ())


def test_what_nothing_records_is_not_waited_for(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    """The agents have a few seconds to record it. Then it is named, once, and no time is spent on it."""
    nodes.save(20)
    name, began = nodes.save(40), nodes.now
    forget(nodes, name)
    assert ends(nodes, 0, 1) == {0: False, 1: False}
    assert OLDER_S <= nodes.now - began <= OLDER_S + 15
    assert [f"{name} is not copied" in each.message for each in caplog.records].count(True) == len(nodes.local)


def test_a_torn_save_of_an_earlier_round(nodes: Nodes) -> None:
    """A later round has begun without it, and has ended before it came to that step again."""
    old, torn = nodes.save(20), nodes.save(40)
    forget(nodes, torn)
    for local in map(LocalStorage, map(str, nodes.local)):

        def begins(local: LocalStorage = local) -> bool:
            notes.note_round(local, True)
            return notes.is_of_earlier_round(local, torn)

        until(begins)  # the clock of a file system is coarse
    assert ends(nodes, 0, 1) == {0: True, 1: True}
    assert nodes.check() == old
    assert not (nodes.remote / torn).exists()
    assert all((local / torn).exists() for local in nodes.local)


def test_a_part_without_its_record_is_not_sent(nodes: Nodes) -> None:
    """The agent of node 1 was killed before it could write that. The files do not make the save whole."""
    name = nodes.save(20, recorded=[0])
    assert ends(nodes, 0, 1) == {0: False, 1: True}
    assert nodes.check() == ""
    assert not list((nodes.remote / name).glob("part_1*"))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_final_model_of_node_0(nodes: Nodes, order: tuple[int, int]) -> None:
    """The other node has an old one of that name."""
    for node, local in enumerate(nodes.local):
        (local / "final").mkdir()
        (local / "final" / "config.json").write_text("{}")
        (local / "final" / "model.safetensors").write_text(f"of node {node}")
        (local / "final" / f"generation_{node}.json").write_text("{}")
    nodes.save(20)
    assert ends(nodes, *order) == {0: True, 1: True}
    assert content(nodes.remote, "final") == content(nodes.local[0], "final")


def test_links_lead_to_the_newest(nodes: Nodes) -> None:
    for local in nodes.local:
        os.symlink("checkpoint-20", local / "last")
    nodes.save(20)
    ends(nodes, 0, 1)
    assert os.readlink(nodes.remote / "last") == "checkpoint-20"
    nodes.lose(0)  # with its notes
    LocalStorage(str(nodes.local[0])).put(notes.USED, b"")
    nodes.save(40)
    os.symlink("checkpoint-40", nodes.local[0] / "last")
    nodes.restart(1)
    ends(nodes, 0, 1)
    assert os.readlink(nodes.remote / "last") == "checkpoint-40"
