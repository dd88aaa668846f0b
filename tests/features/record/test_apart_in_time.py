"""What agents of several nodes record where a part is late, comes again, is renamed, or was saved in an earlier round."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from elastic_ext.checkpoints.choice.listing import Wanted, newest_in
from elastic_ext.checkpoints.sharing.all_nodes import AllNodes
from elastic_ext.checkpoints.sharing.catalogue import catalogue_of
from elastic_ext.checkpoints.storage import LocalStorage
from tests.checkpoints.choice.scenes import OPTIMIZER, saved
from tests.checkpoints.sharing.several_nodes import PeerOnDisk
from tests.features.record.rounds import checkpoints, store
from tests.features.record.test_apart import NODES, WHOLE, Apart, apart
from tests.until import until

__all__ = ["apart", "checkpoints", "store"]  # fixtures
pytestmark = pytest.mark.seam


def chosen(apart: Apart) -> str:
    catalogues = {node: catalogue_of(each) for node, each in enumerate(apart.locals)}
    peers = {node: PeerOnDisk(Path(each.address), node) for node, each in enumerate(apart.locals)}
    choice = newest_in(AllNodes(apart.locals[0], 0, catalogues, peers), Wanted(of_scripts=True))
    found = choice.resume
    return found.path.rpartition("/")[2] if found is not None else ""


def blob(folder: Path) -> bytes:
    return saved(folder / "blob" / "optim.pt", OPTIMIZER).read_bytes()


def test_a_part_that_has_not_begun(apart: Apart, tmp_path: Path) -> None:
    """Node 2's thread is still busy with its disk and has not begun its part, when its node is lost. All saves had 3 parts."""
    data = blob(tmp_path)
    apart.steps(1)
    for count in (5, 10):
        for node in range(NODES):
            apart.nodes[node].saves_apart(node, count, f"step_{count}/optim_{node}.pt", data)
        apart.steps(count + 1)
        until(lambda count=count: apart.parts(f"step_{count}") == WHOLE)  # type: ignore[misc]
    for node in (0, 1):
        apart.nodes[node].saves_apart(node, 15, f"step_15/optim_{node}.pt", data)
    apart.steps(16)
    apart.nodes[0].saves_apart(0, 16, "mark")  # after it, so step_15 was judged
    apart.steps(17)
    until(lambda: apart.parts("mark")[0] == (0, 1))
    apart.end()
    assert apart.parts("step_15") == [None] * NODES
    assert chosen(apart) == "step_10"


def test_two_saves_of_a_ring_are_not_one(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a number that comes again (the last two saves). Its second save is not recorded yet, since each entry is
    recorded every 10 s at most; node 2's thread has not begun the third one."""
    apart.steps(1)
    apart.save(5, "slot_0")
    apart.steps(6)
    until(lambda: apart.parts("slot_0") == WHOLE)
    monkeypatch.setattr("elastic_ext.features.record.orders.EVERY_S", 1e9)
    apart.save(6, "slot_0", data=b"again")
    apart.steps(7)
    until(lambda: {each.size for node in range(NODES) for each in apart.record(node, "slot_0").files} == {5})
    apart.save(10, "slot_0", data=b"of 10")
    apart.steps(11)
    apart.save(15, "slot_0", 0, 1, data=b"of 15")
    apart.steps(16)
    apart.end()
    found = [apart.locals[node].read(f"slot_0/r{node}") for node in range(NODES)]
    assert found == [b"of 15", b"of 15", b"of 10"]
    assert not is_whole(apart, "slot_0"), [apart.record(node, "slot_0").count for node in range(NODES)]


def is_whole(apart: Apart, name: str) -> bool:
    catalogues = {node: catalogue_of(each) for node, each in enumerate(apart.locals)}
    entry = AllNodes(apart.locals[0], 0, catalogues, {}).stat(name)
    return entry is not None and not entry.torn


def test_a_renamed_part_is_not_a_removed_one(apart: Apart) -> None:
    """Rank 0 moves its part to "best": nobody has removed that save, so the other parts stay."""
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    node = apart.nodes[0]
    node.note(0, "m", 6, 1, "s_5", 1, "best", 0)
    (Path(apart.locals[0].address) / "s_5").rename(Path(apart.locals[0].address) / "best")
    for count in (8, 10, 12):
        apart.save(count, f"s_{count}")
        apart.steps(count + 1)
        until(lambda count=count: apart.parts(f"s_{count}") == WHOLE)  # type: ignore[misc]
    assert [each.stat("s_5") is not None for each in apart.locals] == [False, True, True]


def test_removals_of_earlier_rounds(
    apart: Apart, tmp_path: Path, checkpoints: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart rank 0 goes on to rotate: what it removes then was saved before, and other nodes' parts stay for ever."""
    apart.steps(1)
    apart.save(5, "s_5")
    apart.steps(6)
    until(lambda: apart.parts("s_5") == WHOLE)
    apart.end()
    made = HashStore()
    monkeypatch.setattr("elastic_ext.base.round_store.connect", lambda host, port: made)
    with ExitStack() as stack:
        later = Apart(tmp_path, checkpoints, stack, rounds=1)
        later.steps(1)
        for count in (7, 9, 11, 13):
            later.save(count, f"s_{count}")
            later.steps(count + 1)
            until(lambda count=count: later.parts(f"s_{count}") == WHOLE)  # type: ignore[misc]
            if count == 7:
                later.nodes[0].removes_apart(0, 8, "s_5")
                later.steps(8)
        later.end()
    assert [each.stat("s_5") for each in later.locals] == [None] * NODES
