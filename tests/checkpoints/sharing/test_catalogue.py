"""What one node says of its local directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_ext.base import records
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.sharing import catalogue
from elastic_ext.checkpoints.sharing.catalogue import Catalogue, NodeEntry, NodeFile, catalogue_of, decode, encode
from tests.checkpoints.choice.scenes import T0, put, saved
from tests.checkpoints.sharing.several_nodes import SeveralNodes


@pytest.fixture
def nodes(tmp_path: Path) -> SeveralNodes:
    return SeveralNodes(tmp_path)


def rows(nodes: SeveralNodes) -> dict[str, NodeEntry]:
    found = catalogue_of(nodes.storage(0))
    assert decode(encode(found), "a test") == found
    return {each.name: each for each in found.entries}


def test_nothing_is_in_no_directory(tmp_path: Path) -> None:
    assert catalogue_of(catalogue.LocalStorage(str(tmp_path / "none"))) == Catalogue()


def test_files_are_listed_with_sizes_and_times(nodes: SeveralNodes) -> None:
    put(nodes[0] / "step_10" / "deep" / "a.pt", b"12345", 1.5)
    put(nodes[0] / "b.pt", b"1", 2.5)
    found = rows(nodes)
    assert found["step_10"].files == (NodeFile("deep/a.pt", 5, T0 + 1.5),)
    assert found["b.pt"].files == (NodeFile("", 1, T0 + 2.5),)
    assert (found["step_10"].is_dir, found["b.pt"].is_dir) == (True, False)


def test_only_what_a_script_saves_is_listed(nodes: SeveralNodes) -> None:
    put(nodes[0] / "step_00000010.g0001" / "manifest.json", b"{}")
    put(nodes[0] / ".hidden" / "a", b"1")
    put(nodes[0] / "step_10" / "a.pt", b"1")
    (nodes[0] / "latest").symlink_to("step_10")
    (nodes[0] / "away").symlink_to("/")
    (nodes[0] / "nowhere").symlink_to("none")
    os.mkfifo(nodes[0] / "pipe")
    (nodes[0] / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"1")
    put(nodes[0] / "step_10-unfinished", b"")  # by which NeMo says that it is being written
    assert rows(nodes).keys() == {"step_10", "step_10-unfinished"}


def test_links_that_lead_out_are_left_out(nodes: SeveralNodes) -> None:
    put(nodes[0].parent / "secret", b"12345")
    put(nodes[0] / "step_10" / "a.pt", b"1")
    (nodes[0] / "step_10" / "b.pt").symlink_to("a.pt")
    (nodes[0] / "step_10" / "c.pt").symlink_to(nodes[0].parent / "secret")
    found = rows(nodes)["step_10"]
    assert {each.name for each in found.files} == {"a.pt", "b.pt"}
    assert found.more


def test_a_record_vouches_for_this_part(nodes: SeveralNodes) -> None:
    for node in (0, 1):
        saved(nodes[node] / "step_10" / f"rng_{node}.pt")
    known = nodes.recorded("step_10")
    found = rows(nodes)["step_10"]
    assert (found.known, found.vouched) == (known, True)
    saved(nodes[0] / "step_10" / "rng_0.pt", at=50)
    found = rows(nodes)["step_10"]
    assert (found.known, found.vouched) == (known, False)
    (nodes[0] / known.file).write_text('{"schema": 99}')
    assert rows(nodes)["step_10"].known is None


def test_an_unproved_part_is_not_vouched_for(nodes: SeveralNodes) -> None:
    saved(nodes[0] / "step_10" / "rng_0.pt")
    nodes.recorded("step_10", proved=False)
    assert not rows(nodes)["step_10"].vouched


def test_a_record_is_listed_without_its_entry(nodes: SeveralNodes) -> None:
    known = nodes.recorded_and_gone("step_10")
    found = rows(nodes)["step_10"]
    assert (found.known, found.is_there, found.vouched) == (known, False, False)


@pytest.mark.parametrize(("written_at", "holds"), [(T0 + 5.0, True), (T0 + 4.0, False), (0.0, True)])
def test_a_mark_holds_by_this_clock(nodes: SeveralNodes, written_at: float, holds: bool) -> None:
    put(nodes[0] / "step_10" / "a.pt", b"1", 3)
    put(nodes[0] / "step_10" / "b.pt", b"1", 5)
    own_files.quarantine(nodes.storage(0), "step_10", "diverged", written_at=written_at)
    mark = rows(nodes)["step_10"].mark
    assert (mark is not None and mark.reason == "diverged") is holds


def test_a_mark_holds_where_nothing_is(nodes: SeveralNodes) -> None:
    own_files.quarantine(nodes.storage(0), "step_10", "diverged", written_at=1.0)
    own_files.quarantine(nodes.storage(0), "step_00000010.g0001", "one of our own")
    assert [(each.name, each.is_there, each.mark is not None) for each in rows(nodes).values()] == [("step_10", False, True)]


def test_a_mark_for_files_of_all_ranks(nodes: SeveralNodes) -> None:
    for rank in range(2):
        put(nodes[0] / f"ckpt_10_rank_{rank}.pt", b"1", 10 + rank)
    for written_at, holds in ((T0 + 11.0, True), (T0 + 10.0, False)):
        own_files.quarantine(nodes.storage(0), "ckpt_10_rank_*.pt", "diverged", written_at=written_at)
        assert ("ckpt_10_rank_*.pt" in rows(nodes)) is holds


def test_the_newest_saves_are_listed_first(nodes: SeveralNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are named: else what another node has of them would look whole."""
    monkeypatch.setattr(catalogue, "MAX_FILES", 8)
    for step in (10, 20, 30):
        for number in range(3):
            put(nodes[0] / f"step_{step}" / f"{number}.pt", b"1", 100 - step)
        nodes.recorded(f"step_{step}")
    found = rows(nodes)
    assert {name: (len(each.files), each.more, each.vouched) for name, each in found.items()} == {
        "step_30": (3, False, True),
        "step_20": (3, False, True),
        "step_10": (2, True, False),
    }
    assert "step_10" in catalogue_of(nodes.storage(0)).left_out


def test_too_many_names_are_refused(nodes: SeveralNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "MAX_FILES", 2)
    for number in range(3):
        put(nodes[0] / f"{number}.pt", b"1")
    with pytest.raises(OSError, match="3 names, expected 2 at most"):
        catalogue_of(nodes.storage(0))


def test_too_long_a_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Catalogue((NodeEntry("a" * 100),))
    data = encode(found)
    monkeypatch.setattr(catalogue, "MAX_BYTES", len(data) - 1)
    with pytest.raises(OSError, match="at most"):
        encode(found)
    with pytest.raises(records.RecordError):
        decode(data, "a test")


BAD_NAMES = ("", ".", "..", "a/b", "/a", ".hidden", "a\0b", "a" * 300)
BAD_PATHS = ("..", "../a", "a/../../b", "/etc/passwd", "a//b", "a/", "./a", "a\0b")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_strange_name_is_refused(name: str) -> None:
    with pytest.raises(records.RecordError):
        decode(encode(Catalogue((NodeEntry(name),))), "a test")


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_strange_path_is_refused(path: str) -> None:
    with pytest.raises(records.RecordError):
        decode(encode(Catalogue((NodeEntry("a", True, 0.0, (NodeFile(path, 1, 1.0),)),))), "a test")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"schema": 2, "entries": []}', b"\xff", b"[" * 100_000])
def test_what_is_no_catalogue_is_refused(data: bytes) -> None:
    with pytest.raises(records.RecordError):
        decode(data, "a test")


def test_unknown_fields_are_ignored() -> None:
    data = json.loads(encode(Catalogue((NodeEntry("a", True),)))) | {"later": 1}
    assert decode(json.dumps(data).encode(), "a test") == Catalogue((NodeEntry("a", True),))
