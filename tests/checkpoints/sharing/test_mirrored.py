"""Parts that one node keeps of another one, over plain files: what they stand in for, and when they do not count."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elastic_ext.checkpoints.sharing.catalogue import MIRRORED
from elastic_ext.checkpoints.sharing.fetching import FETCHED, fetch
from elastic_ext.checkpoints.sharing.merging import SharedFile
from elastic_ext.checkpoints.sharing.mirrored import kept_in, mirrored_parts, name_of, remove_leftovers
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes


@pytest.fixture
def nodes(tmp_path: Path) -> SeveralNodes:
    made = SeveralNodes(tmp_path)
    made.mirrors = True
    return made


def save(nodes: SeveralNodes, name: str, count: int, *by: int) -> dict[str, bytes]:
    """A round saves, a file on each node; return their content by name."""
    for node in by or (0, 1):
        saved(nodes[node] / name / (f"optim_{node}.pt" if node else "model.pt"), OPTIMIZER if node else TRAINING, count)
    nodes.recorded(name, count, nodes=by)
    there = [nodes[node] / name for node in by or (0, 1)]
    return {each.name: each.read_bytes() for of in there for each in of.iterdir()}


def fetched(nodes: SeveralNodes, own: int, name: str) -> dict[str, bytes]:
    files = nodes.seen_by().files_of_save(name)
    path = Path(fetch(nodes.storage(own), name, 7, files, own, {n: each for n, each in nodes.peers().items() if n != own}))
    assert path == nodes[own] / FETCHED / "7" / name
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.mark.parametrize("lost", [0, 1])
def test_mirror_stands_in_for_lost_node(nodes: SeveralNodes, lost: int) -> None:
    had, number = save(nodes, "step_10", 10), nodes.seen_by().number_of("step_10")
    assert nodes.mirror(1 - lost, lost) == ["step_10"]
    nodes.lose(lost)
    assert nodes.chosen() == "step_10"
    assert nodes.seen_by().number_of("step_10") == number  # it is the same save
    for own in (0, 1):
        assert fetched(nodes, own, "step_10") == had


def test_without_mirror_the_save_is_lost(nodes: SeveralNodes) -> None:
    save(nodes, "step_10", 10)
    nodes.lose(0)
    assert nodes.chosen() == ""
    found = nodes.choice()
    assert "on no node" in found.passed_over[0].reason


def test_what_one_node_has_alone(nodes: SeveralNodes) -> None:
    """Rank 0 saves one file, and its node is lost."""
    data = saved(nodes[0] / "step_10.pt", TRAINING, 10).read_bytes()
    nodes.recorded("step_10.pt", 10, ranks=(0,))
    nodes.mirror(1, 0)
    nodes.lose(0)
    assert nodes.chosen() == "step_10.pt"
    for own in (0, 1):
        files = nodes.seen_by().files_of_save("step_10.pt")
        path = fetch(nodes.storage(own), "step_10.pt", 7, files, own, {n: of for n, of in nodes.peers().items() if n != own})
        assert Path(path).read_bytes() == data


def test_a_file_of_each_rank(nodes: SeveralNodes) -> None:
    for node in (0, 1):
        name = f"step_10_rank_{node}.pt"
        saved(nodes[node] / name, TRAINING, 10)
        nodes.recorded(name, 10, ranks=(node,), nodes=(node,), moment=(0, 1))
    nodes.mirror(0, 1)
    nodes.lose(1)
    assert nodes.chosen() == "step_10_rank_*.pt"


def test_any_node_may_have_the_mirror(nodes: SeveralNodes) -> None:
    """The one that has it has another group rank now, and the lost one is out of the job."""
    had = save(nodes, "step_10", 10)
    nodes.mirror(1, 0)
    shutil.rmtree(nodes.directories.pop(0))
    assert nodes.chosen() == "step_10"
    assert fetched(nodes, 0, "step_10") == had


def test_what_its_script_removed_stays_removed(nodes: SeveralNodes) -> None:
    """As long as that node is there, also in another place."""
    save(nodes, "step_10", 10, 0)
    nodes.mirror(1, 0)
    shutil.rmtree(nodes[0] / "step_10")
    assert nodes.chosen() == ""
    nodes.directories.reverse()
    assert nodes.chosen() == ""


def test_a_node_that_is_back_counts_itself(nodes: SeveralNodes) -> None:
    save(nodes, "step_10", 10)
    nodes.mirror(1, 0)
    assert {each.at for each in nodes.seen_by().files_of_save("step_10")} == {""}


def test_an_older_save_replaces_none(nodes: SeveralNodes) -> None:
    """The newer one of that name has been recorded, and was lost with its node."""
    save(nodes, "last", 10)
    nodes.mirror(1, 0)
    nodes.attempt = 2
    save(nodes, "last", 20)
    nodes.lose(0)
    assert nodes.chosen() == ""


def test_a_newer_save_that_has_gone(nodes: SeveralNodes) -> None:
    """Its record is left. What is mirrored of an older one of that name does not come back."""
    save(nodes, "last", 10, 0)
    nodes.mirror(1, 0)
    nodes.attempt = 2
    save(nodes, "last", 20, 1)
    shutil.rmtree(nodes[1] / "last")
    nodes.lose(0)
    assert nodes.chosen() == ""


def test_other_files_of_that_name(nodes: SeveralNodes) -> None:
    """The node that has the mirror was writing an entry of that name: it stays as it is there."""
    save(nodes, "last", 10, 0)
    nodes.mirror(1, 0)
    saved(nodes[1] / "last" / "model.pt", TRAINING, 20)
    nodes.lose(0)
    assert [(each.name, each.at) for each in nodes.seen_by().files_of_save("last")] == [("last/model.pt", "")]


def test_a_newer_save_beats_an_old_node(tmp_path: Path) -> None:
    """A node comes back with an older save of that name, and the one that had the newest is lost."""
    nodes = SeveralNodes(tmp_path, 3)
    nodes.mirrors = True
    save(nodes, "last", 10, 0, 2)
    nodes.attempt = 2
    had = save(nodes, "last", 20, 0, 1)
    assert nodes.mirror(0, 1) == ["last"]
    nodes.lose(1)
    assert nodes.chosen() == "last"
    assert fetched(nodes, 1, "last") == had


def test_a_part_rewritten_since_counts_not(nodes: SeveralNodes) -> None:
    """The script writes to its part of that save again on the node that is left: then it is no whole any more."""
    save(nodes, "last", 10)
    nodes.mirror(1, 0)
    nodes.lose(0)
    saved(nodes[1] / "last" / "optim_1.pt", OPTIMIZER, 20)
    assert nodes.chosen() == ""


def test_a_cut_file_counts_not(nodes: SeveralNodes) -> None:
    save(nodes, "step_10", 10)
    nodes.mirror(1, 0)
    (kept,) = mirrored_parts(nodes.storage(1))
    os.truncate(nodes[1] / kept.files / "step_10" / "model.pt", 5)
    nodes.lose(0)
    assert nodes.chosen() == ""
    assert mirrored_parts(nodes.storage(1)) == ()
    remove_leftovers(nodes.storage(1))
    assert os.listdir(nodes[1] / MIRRORED) == ["id"]


def test_what_changes_while_it_is_fetched(nodes: SeveralNodes) -> None:
    """It has the same size, and another content."""
    save(nodes, "last", 10)
    file = nodes[0] / "last" / "model.pt"
    size = file.stat().st_size
    assert nodes.mirror(1, 0, lambda: saved(file, TRAINING, 11)) == []
    assert file.stat().st_size == size
    nodes.lose(0)
    assert nodes.chosen() == ""


def test_one_save_is_kept(nodes: SeveralNodes) -> None:
    for step in (10, 20, 30):
        save(nodes, f"step_{step}", step)
        assert nodes.mirror(1, 0) == [f"step_{step}"]
    assert len(os.listdir(nodes[1] / MIRRORED)) == 1


def test_rounds_count_what_is_mirrored(nodes: SeveralNodes) -> None:
    """Else the next save could have the number of a mirrored one."""
    nodes.attempt = 5
    save(nodes, "step_10", 10, 0)
    nodes.mirror(1, 0)
    assert kept_in(nodes.storage(1)).rounds == 5


def test_a_directory_keeps_its_name(tmp_path: Path) -> None:
    one, other = LocalStorage(str(tmp_path / "a")), LocalStorage(str(tmp_path / "b"))
    assert name_of(one) == name_of(one) != name_of(other)
    (tmp_path / "c" / MIRRORED).mkdir(parents=True)
    (tmp_path / "c" / MIRRORED / "id").write_bytes(b"\xff")
    assert name_of(LocalStorage(str(tmp_path / "c"))) == ""


@pytest.mark.parametrize("at", ["/etc/passwd", "../x", ".elastic_ext/saves/x", f"{MIRRORED}/../../x"])
def test_no_file_elsewhere_is_linked(nodes: SeveralNodes, at: str) -> None:
    save(nodes, "step_10", 10)
    with pytest.raises(OSError, match="expected files of an entry"):
        fetch(nodes.storage(0), "step_10", 7, [SharedFile("step_10/x", 1, 0, at)], 0, nodes.peers())
