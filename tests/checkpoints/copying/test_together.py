"""Saves of which each node has a part are copied by all nodes together: copiers over plain files, which take turns."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_ext.checkpoints.copying.held import HELD
from elastic_ext.checkpoints.copying.replicate import Copies, Replicator
from elastic_ext.checkpoints.copying.reports import made_progress
from elastic_ext.checkpoints.copying.script_saves import ScriptSaves
from elastic_ext.checkpoints.copying.targets import ALONE_S, HEARTBEATS, MOST_HELD, STALLED_S
from elastic_ext.checkpoints.directory import own_files, upkeep
from elastic_ext.checkpoints.record import stored
from elastic_ext.checkpoints.record.stored import Trust
from elastic_ext.checkpoints.storage import Entry, LocalStorage
from tests.checkpoints.copying.several import MOST_TURNS, Nodes
from tests.checkpoints.copying.test_script_saves import Counted, Killed, content, nothing, torch_file, trust_in


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def remote_record(nodes: Nodes, name: str) -> stored.StoredSave:
    storage = LocalStorage(str(nodes.remote))
    save = stored.read_save(storage, stored.known_saves(storage)[name])
    assert save is not None
    return save


def held(nodes: Nodes, node: int) -> list[Path]:
    return list((nodes.local[node] / HELD).glob("*"))


def test_the_union_of_all_parts_counts(nodes: Nodes) -> None:
    name = nodes.save(20)
    nodes.until(name)
    assert content(nodes.remote, name) == nodes.files(name)
    save = remote_record(nodes, name)
    assert (save.parts, save.elsewhere, save.copied, save.arriving, len(save.files)) == (1, (), True, False, 4)
    assert trust_in(nodes.remote, name) is Trust.PROVED
    assert not held(nodes, 0)
    assert not held(nodes, 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_in_any_order_of_turns(tmp_path: Path, order: tuple[int, ...]) -> None:
    nodes = Nodes(tmp_path, 3)
    name = nodes.save(20)
    for _ in range(MOST_TURNS):
        for node in order:
            nodes.turn(node)
            assert nodes.check() in ("", name)
    assert nodes.check() == name


def test_nothing_counts_before_all_is_there(tmp_path: Path) -> None:
    """Node 2 does nothing. An older save is what counts."""
    nodes = Nodes(tmp_path, 3)
    old = nodes.save(20)
    nodes.until(old)
    nodes.save(40)
    for _ in range(MOST_TURNS):
        nodes.turn(0, 1)
    assert nodes.check() == old
    assert remote_record(nodes, "checkpoint-40").arriving


def test_others_send_nothing_before_the_announcement(nodes: Nodes) -> None:
    name = nodes.save(20)
    assert nodes.turn(1)[0].waiting == (name,)
    assert not (nodes.remote / name).exists()


def test_an_older_file_of_its_name(nodes: Nodes) -> None:
    """Of the same size: node 1 has sent its part of an earlier save of that name, and not yet that of this one."""
    nodes.save(20, name="last")
    nodes.until("last")
    nodes.save(40, name="last")
    for _ in range(MOST_TURNS):
        nodes.turn(0)
    assert nodes.check() == ""
    nodes.until("last")
    assert content(nodes.remote, "last") == nodes.files("last")


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("same_name", [False, True])
def test_killed_at_each_step(tmp_path: Path, node: int, same_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next process goes on, though the script has removed the original of what it holds."""
    for point in range(100):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        nodes = Nodes(tmp_path)
        nodes.until(nodes.save(20))
        name = nodes.save(40, name="checkpoint-20" if same_name else "")
        counted = Counted(point)
        nodes.restart(node, counted)
        killed = False
        for _ in range(MOST_TURNS):
            if not killed:
                with monkeypatch.context() as patched:
                    for act in ("put", "remove", "remove_tree"):
                        patched.setattr(LocalStorage, act, counted.before(getattr(LocalStorage, act)))
                    patched.setattr(os, "link", counted.before(os.link))
                    try:
                        nodes.turn(node)
                    except Killed:
                        killed = True
            nodes.check()
            if killed:
                nodes.restart(node)
                break
            nodes.turn(1 - node)
            nodes.check()
        nodes.until(name)
        if not killed:
            break
    assert 4 < point < 99


def test_a_node_that_comes_late(nodes: Nodes) -> None:
    """The leader has waited for long, and nothing newer is there."""
    name = nodes.save(20)
    for _ in range(3):
        nodes.turn(0)
        nodes.now += 10 * STALLED_S
    nodes.until(name)


def stalls(nodes: Nodes, *at_work: int) -> None:
    for _ in range(2):
        nodes.turn(*at_work)
        nodes.now += STALLED_S + 1


@pytest.mark.parametrize("how", ["gone", "replaced", "written again"])
def test_a_part_that_does_not_come(nodes: Nodes, how: str) -> None:
    """The leader gives that save up, and the next one goes through."""
    old = nodes.save(20)
    if how == "gone":
        shutil.rmtree(nodes.local[1] / old)
    elif how == "replaced":
        nodes.lose(1)
    else:
        torch_file(nodes.local[1] / old / "part_1_0.pt", step=99)
    nodes.turn()
    new = nodes.save(40)
    for _ in range(MOST_TURNS):
        nodes.turn()
    assert nodes.check() == ""
    stalls(nodes, 0, 1)
    nodes.until(new)
    assert not (nodes.remote / old).exists()
    assert not held(nodes, 0)


def test_the_leaders_part_has_changed(nodes: Nodes) -> None:
    nodes.save(20)
    nodes.turn()
    for local in nodes.local:
        with open(local / "checkpoint-20" / f"part_{local.name[-1]}_0.pt", "ab") as file:
            file.write(b"x")
    new = nodes.save(40)
    nodes.until(new)
    assert nodes.check() == new


def test_a_replaced_leader(nodes: Nodes) -> None:
    """It had announced a save. The next one goes through, without a wait."""
    nodes.save(20)
    nodes.turn(0)
    nodes.lose(0)
    new = nodes.save(40)
    nodes.until(new)


def test_progress_of_another_node_keeps_the_target(nodes: Nodes) -> None:
    """One large file of it takes longer than the limit, and newer saves are there."""
    name = nodes.save(20)
    nodes.turn(0)
    nodes.save(40)
    for beat in range(9):
        LocalStorage(str(nodes.remote)).put(".elastic_ext/copying_from/part-1", b"%d" % beat)
        nodes.turn(0)
        nodes.now += STALLED_S - 1
    assert remote_record(nodes, name).arriving
    assert "checkpoint-40" not in stored.known_saves(LocalStorage(str(nodes.remote)))


def test_saves_faster_than_copies(tmp_path: Path) -> None:
    """All nodes meet on one target: each save is older than a newer one before any node has sent its part."""
    nodes = Nodes(tmp_path, 3)
    arrived = set()
    for step in range(10, 200, 10):
        nodes.save(step)
        if step > 30:  # each node looks once before that
            nodes.removes(f"checkpoint-{step - 30}", seen=False)
        nodes.turn(step // 10 % 3)
        arrived.add(nodes.check())
        assert all(len(held(nodes, node)) <= MOST_HELD for node in range(3))
    assert len(arrived) > 2
    nodes.until("checkpoint-190")


def test_rotation_takes_nothing_away(nodes: Nodes) -> None:
    """What is announced is removed on all nodes before they have sent it."""
    name = nodes.save(20)
    wanted = nodes.files(name)
    nodes.turn(1)  # it holds the newest
    nodes.turn(0)
    nodes.save(40)
    nodes.removes(name, seen=False)
    nodes.turn(1)
    nodes.turn(0)
    assert content(nodes.remote, name) == wanted
    nodes.until("checkpoint-40")


@pytest.mark.parametrize("node", [0, 1])
def test_any_node_removes_the_copy(nodes: Nodes, node: int) -> None:
    """Where a worker was seen to remove the original, and a newer copy is whole."""
    old = nodes.save(20)
    nodes.until(old)
    nodes.removes(old, [node])
    nodes.turn()
    assert (nodes.remote / old).exists()
    nodes.until(nodes.save(40))
    nodes.turn(node)
    assert not (nodes.remote / old).exists()


def test_a_node_learns_late_that_it_was_copied(nodes: Nodes) -> None:
    """A newer save is there by then. It removes the copy of the old one nevertheless."""
    old = nodes.save(20)
    while nodes.check() != old:
        nodes.turn(1, 0)
    nodes.save(40)
    nodes.turn(1)
    nodes.removes(old, [1])
    nodes.until("checkpoint-40")
    nodes.turn(1)
    assert not (nodes.remote / old).exists()


def test_both_nodes_remove_the_copy(nodes: Nodes) -> None:
    old = nodes.save(20)
    nodes.until(old)
    nodes.removes(old)
    nodes.until(nodes.save(40))
    assert not any(each.failures for each in nodes.turn())
    assert sorted(each.name for each in nodes.remote.iterdir()) == [".elastic_ext", "checkpoint-40"]


def test_two_nodes_remove_at_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has done it between two requests of this one. No mark of a removal is left."""
    old = nodes.save(20)
    nodes.until(old)
    nodes.until(nodes.save(40))
    nodes.removes(old)
    put, others = LocalStorage.put, iter([1])

    def other_first(storage: LocalStorage, name: str, data: bytes) -> None:
        if name.endswith("-unfinished"):
            for node in others:
                nodes.turn(node)
        put(storage, name, data)

    monkeypatch.setattr(LocalStorage, "put", other_first)
    assert not nodes.turn(0)[0].failures
    assert sorted(each.name for each in nodes.remote.iterdir()) == [".elastic_ext", "checkpoint-40"]


def test_a_large_part_beats(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its leader, and the agent that waits for it, see progress."""
    monkeypatch.setattr("elastic_ext.checkpoints.copying.replicate.HEARTBEAT_S", 0.0)
    nodes.save(20)
    nodes.turn(0)
    local, remote = LocalStorage(str(nodes.local[1])), LocalStorage(str(nodes.remote))
    replicator = Replicator(local, remote, upkeep.TokenBucket(0.0))
    throttle = replicator.throttle
    copies = Copies(replicator, ScriptSaves(local, remote, "", throttle.wait_to_send, throttle.name_node))
    copies.turn(finish=False)
    assert (nodes.remote / HEARTBEATS / "part-1").exists()
    before = copies.turn(finish=True)
    (nodes.remote / HEARTBEATS / "part-0").write_text("1")
    assert made_progress(copies.turn(finish=True), before)


def test_what_a_user_keeps_is_not_cleaned_up(nodes: Nodes) -> None:
    """Of a save that was given up."""
    old = nodes.save(20)
    nodes.lose(1)
    nodes.turn()
    (nodes.remote / old / "notes.txt").write_text("mine")
    new = nodes.save(40)
    stalls(nodes, 0, 1)
    nodes.until(new)
    assert (nodes.remote / old / "notes.txt").exists()


def test_a_late_file_is_taken_back(nodes: Nodes) -> None:
    """Node 1 stood still while it sent its part, and its leader has passed on to a newer save of that name."""
    nodes.save(20, name="last")
    nodes.turn(0)
    old = content(nodes.local[1], "last")
    stops = iter(range(1))

    def stop(size: int) -> None:
        for _ in stops:
            nodes.save(40, name="last")
            nodes.now += STALLED_S + 1
            stalls(nodes, 0)
            nodes.turn(0)

    nodes.restart(1, stop)
    nodes.turn(1)
    nodes.check()
    assert not any(path.read_bytes() in old.values() for path in (nodes.remote / "last").glob("part_1*"))
    nodes.restart(1)
    nodes.until("last")
    assert content(nodes.remote, "last") == nodes.files("last")


def test_a_newer_save_of_one_node_stays(nodes: Nodes) -> None:
    """In the remote directory, under the name that the nodes would copy to."""
    nodes.save(20, name="last")
    newer = Nodes.__new__(Nodes)
    newer.__dict__ = {**nodes.__dict__, "local": [nodes.remote], "round": 9}
    torch_file(nodes.remote / "last.pt", step=1)
    newer.save(40, name="last")
    before = content(nodes.remote, "last")
    for _ in range(3):
        assert not any(each.waiting for each in nodes.turn())
    assert content(nodes.remote, "last") == before


def test_logs_of_all_nodes_are_no_checkpoint(nodes: Nodes) -> None:
    name = nodes.save(20, name="runs", suffix=".tfevents")
    assert not any(each.waiting for each in nodes.turn())
    assert not (nodes.remote / name).exists()


def test_a_quarantined_part_does_not_arrive(nodes: Nodes) -> None:
    old = nodes.save(20)
    nodes.until(old)
    name = nodes.save(40)
    own_files.quarantine(LocalStorage(str(nodes.local[0])), name, "bad")
    for _ in range(MOST_TURNS):
        nodes.turn()
    assert nodes.check() == old


class Timeless(LocalStorage):
    def stat(self, name: str) -> Entry | None:
        found = super().stat(name)
        return replace(found, mtime=None) if found is not None else None


def test_a_storage_without_times_is_named(nodes: Nodes) -> None:
    nodes.save(20)
    local = LocalStorage(str(nodes.local[0]))
    report = ScriptSaves(local, Timeless(str(nodes.remote)), "", nothing).turn(finish=False)
    assert report.failures == 1
    assert "keeps no times" in report.reason


# Files of which each rank wrote its own.


def test_files_of_ranks_count_together(nodes: Nodes) -> None:
    name = nodes.save_files(20)
    for _ in range(MOST_TURNS):
        for node in (1, 0):
            nodes.turn(node)
            assert nodes.check() in ("", name)
    assert nodes.check() == name


def test_files_of_ranks_without_their_leader(nodes: Nodes) -> None:
    nodes.save_files(20)
    nodes.turn(1)
    assert not list(nodes.remote.glob("step_20*"))


def test_files_of_ranks_meet_on_one_moment(nodes: Nodes) -> None:
    """The leader has announced a save, and the other node has a newer one. All are removed by rotation."""
    old = nodes.save_files(20)
    nodes.turn(1)
    nodes.turn(0)
    new = nodes.save_files(40)
    for rank in range(4):
        nodes.removes(f"step_20_rank_{rank}.pt", seen=False)
    seen = []
    for _ in range(MOST_TURNS):
        for node in (1, 0):
            nodes.turn(node)
            seen.append(nodes.check())
    assert [name for name, _ in itertools.groupby(seen) if name] == [old, new]


def test_files_of_ranks_of_a_lost_node(nodes: Nodes) -> None:
    """They never count without those of the others, and the next save goes through."""
    nodes.save_files(20)
    nodes.turn(0)
    nodes.lose(1)
    for _ in range(3):
        stalls(nodes, 0, 1)
        assert nodes.check() == ""
    new = nodes.save_files(40)
    stalls(nodes, 0, 1)
    nodes.until(new)


@pytest.mark.parametrize("node", [0, 1])
def test_files_of_ranks_killed_at_each_step(tmp_path: Path, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for point in range(100):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        nodes = Nodes(tmp_path)
        name, counted = nodes.save_files(20), Counted(point)
        nodes.restart(node, counted)
        killed = False
        for _ in range(MOST_TURNS):
            with monkeypatch.context() as patched, contextlib.suppress(Killed):
                for act in ("put", "remove", "remove_tree"):
                    patched.setattr(LocalStorage, act, counted.before(getattr(LocalStorage, act)))
                killed = True
                nodes.turn(node)
                killed = False
            nodes.check()
            if killed:
                break
            nodes.turn(1 - node)
            nodes.check()
        nodes.restart(node)
        nodes.until(name)
        if not killed:
            break
    assert 4 < point < 99


def test_a_file_of_one_rank_for_all(nodes: Nodes) -> None:
    """Its name says which rank wrote it, but the other rank of its node wrote none."""
    nodes.save_files(20)
    for rank in (1, 2, 3):
        nodes.removes(f"step_20_rank_{rank}.pt", seen=False)
    for _ in range(3):
        nodes.turn(0)
        nodes.now += ALONE_S + 1
    assert (nodes.remote / "step_20_rank_0.pt").exists()
    assert not remote_record(nodes, "step_20_rank_0.pt").arriving


def test_files_with_bare_numbers_arrive_together(nodes: Nodes) -> None:
    """Only the record says that the numbers are ranks. Until all files are there, none of them counts."""
    name = nodes.save_files(20, ranks=1, label="", moment=True)
    for _ in range(MOST_TURNS):
        nodes.turn(0)
    assert trust_in(nodes.remote, name.replace("*", "0")) is Trust.TORN
    nodes.until(name)
    assert nodes.check() == name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_one_moment_stays(nodes: Nodes, rank: int) -> None:
    """One rank has removed its old file, and the other one is about to: the copies of both stay until a newer save is there."""
    name = nodes.save_files(20, ranks=1, label="", moment=True)
    nodes.until(name)
    nodes.removes(name.replace("*", str(rank)), [rank])
    for _ in range(MOST_TURNS):
        nodes.turn()
    assert nodes.check() == name
    newer = nodes.save_files(40, ranks=1, label="", moment=True)
    nodes.until(newer)
    for _ in range(MOST_TURNS):
        nodes.turn()
    assert not (nodes.remote / name.replace("*", str(rank))).exists()
