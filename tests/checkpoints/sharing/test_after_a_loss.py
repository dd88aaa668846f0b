"""What nodes see of each other's saves after ranks have moved, and after a node was lost.

- An older save of that name on another node does not hide the newest one.
- What was fetched of a lost timeline is not taken for that of this one.
- A mark on a node without a part bars that save, and no later one of that name.
- What is left of a save of several ranks after a node was lost is not whole, whatever its files are called.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement.quarantine import quarantine
from elastic_ext.checkpoints.record.stored import known_saves, newest_attempt
from elastic_ext.checkpoints.sharing.fetching import FETCHED, fetch
from tests.checkpoints.choice.scenes import OPTIMIZER, TRAINING, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes


@pytest.fixture
def nodes(tmp_path: Path) -> SeveralNodes:
    return SeveralNodes(tmp_path)


def test_a_new_last_beats_old_one_elsewhere(nodes: SeveralNodes) -> None:
    """rank 0 alone saves; after the first failure rank 0 is on the other node, where it saves the same name."""
    saved(nodes[0] / "last.pt", {**TRAINING, "step": 10}, 10)
    nodes.recorded("last.pt", 10, ranks=(0,))
    assert nodes.chosen() == "last.pt"
    nodes.attempt = 2
    saved(nodes[1] / "last.pt", {**TRAINING, "step": 20}, 20)
    nodes.recorded("last.pt", 20, ranks=(0,), nodes=(1,))
    assert nodes.chosen() == "last.pt"


def test_ranks_move_and_save_last_again(nodes: SeveralNodes) -> None:
    """Each rank writes last_rank_N.pt; then the nodes have swapped their ranks."""
    for node in (0, 1):
        saved(nodes[node] / f"last_rank_{node}.pt", {**TRAINING, "step": 10}, 10)
        nodes.recorded(f"last_rank_{node}.pt", 10, ranks=(node,), nodes=(node,))
    assert nodes.chosen() == "last_rank_*.pt"
    nodes.attempt, nodes.order = 2, 0
    for node in (0, 1):
        saved(nodes[node] / f"last_rank_{1 - node}.pt", {**TRAINING, "step": 20}, 20)
        nodes.recorded(f"last_rank_{1 - node}.pt", 20, ranks=(1 - node,), nodes=(node,))
    assert nodes.chosen() == "last_rank_*.pt"


def test_a_node_comes_back_with_older_last(tmp_path: Path) -> None:
    nodes = SeveralNodes(tmp_path, 3)
    for node in range(3):
        saved(nodes[node] / "last" / f"optim_{node}.pt", OPTIMIZER, 10)
    nodes.recorded("last", 10, world=3)
    assert nodes.chosen() == "last"
    nodes.attempt = 2
    for node in range(2):
        saved(nodes[node] / "last" / f"optim_{node}.pt", OPTIMIZER, 20)
    nodes.recorded("last", 20, world=2, nodes=(0, 1))
    assert nodes.chosen() == "last"


def test_fetched_files_of_another_timeline(nodes: SeveralNodes) -> None:
    """Rank 0 saves alone, on node 0. Node 1 has fetched step_30. Node 0 is replaced before any copy; the job saves step_30 again.

    The record's numbers begin again, since they were lost with node 0.
    """
    saved(nodes[0] / "step_30.pt", {**TRAINING, "step": 30}, 30)
    known = nodes.recorded("step_30.pt", 30, ranks=(0,))
    first = nodes.seen_by(1)
    path = fetch(
        nodes.storage(1), "step_30.pt", first.number_of("step_30.pt"), first.files_of_save("step_30.pt"), 1, nodes.peers()
    )
    assert Path(path).read_bytes() == (nodes[0] / "step_30.pt").read_bytes()
    shutil.rmtree(nodes[0])
    nodes[0].mkdir()
    assert [newest_attempt(known_saves(nodes.storage(node)).values()) for node in (0, 1)] == [0, 0]
    nodes.order = 0
    saved(nodes[0] / "step_30.pt", {**TRAINING, "step": 30}, 99)
    again = nodes.recorded("step_30.pt", 30, ranks=(0,))
    assert again.number == known.number
    second = nodes.seen_by(1)
    path = fetch(
        nodes.storage(1), "step_30.pt", second.number_of("step_30.pt"), second.files_of_save("step_30.pt"), 1, nodes.peers()
    )
    assert Path(path).read_bytes() == (nodes[0] / "step_30.pt").read_bytes()


@pytest.mark.parametrize("name", ["last.pt", "step_30.pt"])
def test_quarantine_on_a_node_without_parts(nodes: SeveralNodes, tmp_path: Path, name: str) -> None:
    """Node 1 has fetched what it is to blame for. The script saves that name again, on node 0."""
    (tmp_path / "remote").mkdir()
    saved(tmp_path / "remote" / "step_1.pt", {**TRAINING, "step": 1}, 1)  # another one may be used
    saved(nodes[0] / name, {**TRAINING, "step": 30}, 30)
    known = nodes.recorded(name, 30, ranks=(0,))
    path = fetch(nodes.storage(1), name, known.number, nodes.seen_by(1).files_of_save(name), 1, nodes.peers())
    assert FETCHED in path
    settings = Settings(checkpoint_dir=str(tmp_path / "remote"), local_dir=str(nodes[1]))
    assert quarantine(settings, path, False, "it failed twice", known.number) == name
    assert nodes.chosen() == ""
    nodes.attempt, nodes.order = 2, 0
    saved(nodes[0] / name, {**TRAINING, "step": 30}, 90)
    nodes.recorded(name, 30, ranks=(0,))
    assert nodes.chosen() == name


@pytest.mark.parametrize("word", ["rank_", "tp_", "node", "worker_", "part_", "mp_rank_0", ""])
def test_files_of_a_lost_node_are_missed(nodes: SeveralNodes, word: str) -> None:
    """Each rank has written one file, on its node; then node 1 is replaced by an empty one."""
    for node in (0, 1):
        name = f"step_10_{word}{node}.pt"
        saved(nodes[node] / name, {**TRAINING, "step": 10}, 10)
        nodes.recorded(name, 10, ranks=(node,), nodes=(node,), moment=(0, 1))
    found = nodes.chosen()
    assert "*" in found
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()
    assert nodes.chosen() == "", os.listdir(nodes[0])


def test_directories_of_a_lost_node_are_missed(nodes: SeveralNodes) -> None:
    """Each rank has a directory of its own."""
    for node in (0, 1):
        name = f"step_10_rank_{node}"
        saved(nodes[node] / name / "optim.pt", OPTIMIZER, 10)
        saved(nodes[node] / name / "model.pt", TRAINING, 10)
        nodes.recorded(name, 10, ranks=(node,), nodes=(node,), moment=(0, 1))
    before = nodes.choice()
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()
    assert nodes.chosen() == "", before


@pytest.mark.parametrize("word", ["rank_", ""])
def test_no_record_vouches_for_one_file(nodes: SeveralNodes, word: str) -> None:
    """The agents were killed before they had recorded the last saves, and the machine of one of them is lost."""
    for step, ranks in ((8, (1,)), (12, (0, 1)), (16, (0,))):
        for rank in ranks:
            saved(nodes[0] / f"ckpt_{step}_{word}{rank}.pt", {**TRAINING, "step": step}, step)
    nodes.recorded(f"ckpt_8_{word}1.pt", 8, ranks=(1,), nodes=(0,), moment=(0, 1))
    assert nodes.chosen() == ""
