"""What a script does normally on several nodes, each of which saves in a directory of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from elastic_ext.checkpoints.copying import notes
from elastic_ext.checkpoints.sharing.catalogue import catalogue_of
from elastic_ext.checkpoints.sharing.merging import merged
from elastic_ext.checkpoints.storage import LocalStorage
from tests.features.record.rounds import checkpoints, recorded, store
from tests.features.record.test_apart import NODES, WHOLE, Apart
from tests.until import until

__all__ = ["checkpoints", "store"]  # fixtures
pytestmark = pytest.mark.seam


@pytest.fixture
def apart(tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> Iterator[Apart]:
    with ExitStack() as stack:
        made = Apart(tmp_path, checkpoints, stack)
        yield made
        made.end()


def renames(apart: Apart, node: int, count: int, old: str, new: str) -> None:
    one = apart.nodes[node]
    one.note(node, "m", count, 1, old, 1, new, 0)
    assert one.local is not None
    os.rename(one.local.path(old), one.local.path(new))


def test_rank_0_renames_for_all(apart: Apart) -> None:
    """All write below a temporary name; after a barrier, rank 0 gives it the final one, as in a directory of all."""
    apart.steps(1)
    apart.save(5, "tmp_5")
    renames(apart, 0, 5, "tmp_5", "s_5")
    apart.steps(6)
    apart.save(8, "mark_8")
    apart.steps(9)
    until(lambda: apart.parts("mark_8") == WHOLE)
    apart.end()
    assert apart.parts("s_5") == [None] * NODES, "the parts of the other nodes are missing"


def writes(apart: Apart, shared: bool, node: int, count: int, path: str) -> None:
    one = apart.nodes[node]
    (one.saves if shared else one.saves_apart)(node, count, path, b"%d" % count)


def known_counts(apart: Apart, shared: LocalStorage | None, name: str) -> list[int]:
    """The counts of the proved saves of that name, by node, or in the directory of all."""
    found = [recorded(each).get(name) for each in ([shared] if shared is not None else apart.locals)]
    return [each.count for each in found if each is not None and each.proved]


def test_old_part_of_a_killed_round(
    apart: Apart, tmp_path: Path, checkpoints: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was killed as it wrote. It is on another node now, and goes on to save for all under the same name."""
    apart.steps(1)
    apart.save(5, "last", 1)
    apart.steps(6)
    until(lambda: apart.parts("last") == [None, (0, 1), None])
    apart.save(8, "last", 1, data=b"half")
    apart.end()
    made = HashStore()
    monkeypatch.setattr("elastic_ext.base.round_store.connect", lambda host, port: made)
    with ExitStack() as stack:
        later = Apart(tmp_path, checkpoints, stack, rounds=1)
        later.steps(1)
        for count in (7, 10):
            later.save(count, "last", 0, data=b"%d" % count)
            later.steps(count + 1)
            later.save(count + 1, f"mark_{count}")
            later.steps(count + 2)
            until(lambda count=count: later.parts(f"mark_{count}") == WHOLE)  # type: ignore[misc]
        assert later.parts("last") == [(0, 1), (0, 1), None]  # that of node 1 is of the round before
        of_all = {node: catalogue_of(each) for node, each in enumerate(later.locals)}
        found = merged(of_all)["last"]
        assert (found.torn, [node for node, _ in found.files.values()]) == ("", [0])
        later.locals[1].put("last/r1", b"half")
        of_all[1] = catalogue_of(later.locals[1])
        assert merged(of_all)["last"].torn  # it may be of the same save


def test_only_rank_0_asks_for_the_directory(tmp_path: Path, store: HashStore, checkpoints: LocalStorage) -> None:
    """Its last save is recorded at the end, although `save_dir()` was never called on the other nodes."""
    with ExitStack() as stack:
        apart = Apart(tmp_path, checkpoints, stack)
        for each in apart.locals[1:]:
            each.remove(notes.USED)
        apart.steps(1)
        apart.save(5, "s_5", 0)
        apart.steps(6)
        until(lambda: apart.parts("s_5") == [(0, 1), None, None])
        apart.save(8, "s_8", 0)
        for node in range(NODES):
            apart.nodes[node].note(node, "x", 8)
        for each in apart.nodes[::-1]:
            each.watch.patience_s = 3
            each.watch._over.set()
        first = apart.nodes[0].watch._thread
        assert first is not None
        first.join(30)
        assert apart.parts("s_8")[0] == (0, 1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_fixed_name_with_late_parts(apart: Apart, checkpoints: LocalStorage, shared: bool) -> None:
    """What writes beside the training begins a step later on one node, as with DCP's async_save to one directory."""
    apart.steps(1)
    for count in (5, 9, 13):
        writes(apart, shared, 0, count, "last/r0")
        writes(apart, shared, 2, count, "last/r2")
        apart.steps(count + 1)
        writes(apart, shared, 1, count + 1, "last/r1")
        apart.steps(count + 2)
        apart.save(count + 2, f"mark_{count}")
        apart.steps(count + 3)
        until(lambda count=count: apart.parts(f"mark_{count}") == WHOLE)  # type: ignore[misc]
    apart.end()
    assert known_counts(apart, checkpoints if shared else None, "last")


def test_fewer_ranks_save_less(apart: Apart, tmp_path: Path, checkpoints: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job shrinks from three nodes to two; the lost one's rank had much of its own. The next save counts."""
    apart.steps(1)
    apart.save(5, "s_5", 0, 1, data=b"x" * 10)
    apart.save(5, "s_5", 2, data=b"x" * 100)
    apart.steps(6)
    apart.end()
    assert apart.parts("s_5") == WHOLE
    made = HashStore()
    monkeypatch.setattr("elastic_ext.base.round_store.connect", lambda host, port: made)
    monkeypatch.setattr("tests.features.record.test_apart.NODES", 2)
    with ExitStack() as stack:
        later = Apart(tmp_path, checkpoints, stack, rounds=1)
        for node in (0, 1):
            later.nodes[node].steps(1, node)
            later.nodes[node].saves_apart(node, 7, f"s_7/r{node}", b"x" * 10)
            later.nodes[node].steps(8, node)
        later.end()
        assert later.parts("s_7") == [(0, 2), (1, 2)]


def test_files_of_another_program(apart: Apart) -> None:
    """In each save node 0 has a file that another program wrote, as `cp` does, or a library in C or Rust."""
    apart.steps(1)
    for count in (5, 8, 11):
        apart.locals[0].put(f"s_{count}/tokenizer.json", b"{}")
        apart.save(count, f"s_{count}")
        apart.steps(count + 1)
    apart.end()
    assert apart.parts("s_11") == WHOLE
