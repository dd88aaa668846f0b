"""Faults that a review has found in the copies of several nodes, mended since. Why each matters, in its words and here.

- A late upload: a file counts for the save that is announced when it arrives. So a torn copy has a proof, or a copy that lacks
  files counts as done.
- What has changed since its record: the end of a job loses logs, without a word on the exit code.
- One node after two, and what rank 0 has cleaned up: each end of the job waits for 60 s and exits with 75, for nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from elastic_ext.checkpoints.copying.targets import STALLED_S
from elastic_ext.checkpoints.directory import upkeep
from tests.checkpoints.copying.several import Nodes
from tests.checkpoints.copying.test_script_saves import torch_file
from tests.checkpoints.copying.test_the_end_on_several_nodes import ends, nodes
from tests.checkpoints.record.recording import Script

__all__ = ["nodes"]  # a fixture


def record_apart(nodes: Nodes, node: int, *names: str, step: int = 20) -> None:
    """The agents record single files of this node, in a round of two nodes."""
    nodes.round += 1
    script = Script(nodes.local[node], world=2)
    script.saves(step, *names).steps(step + 1).record(least=nodes.round)
    for name in names:
        known, save = nodes._recorded(node, name)
        nodes._put(node, known, replace(save, here=1))


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "final.pt"])
def test_what_has_changed_arrives_or_is_named(nodes: Nodes, name: str) -> None:
    """A log is written to after its record. The job fails, so its last lines are not recorded."""
    path = nodes.local[0] / name
    path.write_text("a line\n")
    record_apart(nodes, 0, name)
    with path.open("a") as file:
        file.write("Traceback: the reason\n")
    through = ends(nodes, 0, 1)
    there = nodes.remote / name
    assert (there.exists() and there.read_bytes() == path.read_bytes()) or not through[0]


def test_a_new_log_beside_a_recorded_one(nodes: Nodes) -> None:
    """Agents have recorded log_1.txt. log_2.txt was written later, by the script's last words, and was not recorded."""
    (nodes.local[0] / "log_1.txt").write_text("1")
    record_apart(nodes, 0, "log_1.txt")
    (nodes.local[0] / "log_2.txt").write_text("2")
    through = ends(nodes, 0, 1)
    assert (nodes.remote / "log_2.txt").exists() or not through[0]


def test_one_node_after_two(nodes: Nodes) -> None:
    """The job goes on with one node, whose saves are whole; an older save has a part on the other node, which is not there."""
    old = nodes.save(20)
    torch_file(nodes.local[0] / "checkpoint-40.pt", step=40)
    (nodes.local[0] / "checkpoint-40").mkdir()
    torch_file(nodes.local[0] / "checkpoint-40" / "part_0_0.pt", step=40)
    nodes.round += 1
    Script(nodes.local[0]).saves(40, "checkpoint-40").steps(41).record(least=nodes.round)
    nodes.whole["checkpoint-40"] = [dict(nodes.files("checkpoint-40"))]
    os.unlink(nodes.local[0] / "checkpoint-40.pt")
    assert ends(nodes, 0) == {0: True}, old
    assert nodes.check() == "checkpoint-40"


@pytest.mark.parametrize("copied", [True, False])
def test_rank_0_cleans_up_at_the_end(nodes: Nodes, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes its checkpoints once the final model is saved. The job has ended well, and nothing is missing."""
    name = nodes.save(20)
    if copied:
        nodes.until(name)
    torch_file(nodes.local[0] / "final.pt", step=30)
    record_apart(nodes, 0, "final.pt", step=30)
    nodes.removes(name, [0])
    monkeypatch.setattr(nodes, "check", lambda: "")  # it expects directories
    assert ends(nodes, 0, 1) == {0: True, 1: True}
    assert (nodes.remote / "final.pt").exists()


def hangs_in_an_upload(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    """Node 1 hangs in the upload of its part of "last". It is given up, and the next "last" is announced. Then the upload ends.

    The leader looks before node 1 does. check: what counts right then.
    """
    nodes.save(20, name="last", files=1)
    nodes.turn(0)
    send, hung = upkeep.send, [False]

    def slow(*args: object, **more: object) -> None:
        if hung[0]:
            send(*args, **more)  # type: ignore[arg-type]
            return
        hung[0] = True
        nodes.save(40, name="last", files=1)
        for _ in range(4):
            nodes.turn(0)
            nodes.now += STALLED_S + 1
        send(*args, **more)  # type: ignore[arg-type]
        nodes.turn(0)
        if check:
            nodes.check()

    monkeypatch.setattr(upkeep, "send", slow)
    nodes.turn(1)
    assert hung[0]


def test_a_late_part_of_the_save_before(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worst case: a torn copy with a proof. If node 1 is killed right then, it stays."""
    hangs_in_an_upload(nodes, monkeypatch, check=True)


def test_after_a_late_part_all_arrives(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 takes back what it has sent, but both nodes take the save for copied."""
    hangs_in_an_upload(nodes, monkeypatch, check=False)
    through = ends(nodes, 0, 1)
    assert nodes.check() == "last" or not all(through.values()), sorted(os.listdir(nodes.remote / "last"))
