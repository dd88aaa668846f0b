"""Arguments of `Checkpointer` that are wrong: refused at the call, before anything is written and before any collective."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, count, decode
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.writing.checkpointer import Checkpointer
from tests.checkpoints.rank_groups import complete

NO_COUNTS = (1.5, 8.0, "8", None, True, np.bool_(True), -1, np.int64(-1), float("nan"), [1], b"1", torch.tensor(2.0))
COUNTS = (0, 7, 10**12, np.int32(7), np.uint8(7), torch.tensor(7), torch.tensor([7]), np.array(7))


def made(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(directory, model=torch.nn.Linear(2, 2), **options)


@pytest.mark.parametrize("call", [Checkpointer.save, Checkpointer.snapshot])
@pytest.mark.parametrize("name", ["step", "epoch", "accumulation"])
def test_a_position_that_is_none(tmp_path: Path, call: Callable[..., None], name: str) -> None:
    with made(tmp_path / "checkpoints") as checkpointer:
        for value in NO_COUNTS:
            with pytest.raises(UsageError) as raised:
                call(checkpointer, **{"step": 1, name: value})
            assert str(raised.value) == f"{name} is {value!r}, expected a whole number, 0 or more"
        assert not (tmp_path / "checkpoints").exists()
        checkpointer.save(8, wait=True)
        assert (checkpointer.last_error, checkpointer.failures, checkpointer.last_saved) == (None, 0, 8)


def test_a_group_saves_each_step_once(tmp_path: Path) -> None:
    """Its files would be written into a committed checkpoint, which a crash meanwhile, or a full disk, would end."""
    with made(tmp_path) as checkpointer:
        for step in (5, 6):
            checkpointer.save(step, epoch=1, wait=True)
        checkpointer.save(5, epoch=2, wait=True)
        names = complete(str(tmp_path))
        assert [decode(open_storage(str(tmp_path)).read(f"{name}/{MANIFEST}")).epoch for name in names] == [1, 1]
        checkpointer.load()  # which begins a new group, with directories of its own
        checkpointer.save(5, epoch=2, wait=True)
        assert (checkpointer.last_error, checkpointer.last_saved) == (None, 5)
        assert checkpointer.load().epoch == 2


@pytest.mark.parametrize("value", COUNTS, ids=repr)
def test_other_libraries_integers_are_saved_as_plain_ones(tmp_path: Path, value: Any) -> None:
    with made(tmp_path) as checkpointer:
        checkpointer.snapshot(value, epoch=value)
        checkpointer.save(value, epoch=value, wait=True)
        assert checkpointer.last_error is None
        assert type(checkpointer.last_saved) is int
        position = checkpointer.load()
    assert (position.step, position.epoch) == (int(value), int(value))
    [name] = complete(str(tmp_path))
    assert decode(open_storage(str(tmp_path)).read(f"{name}/{MANIFEST}")).step == int(value)


def test_a_note_that_is_no_mapping(tmp_path: Path) -> None:
    with made(tmp_path) as checkpointer, pytest.raises(UsageError, match="note is 5, expected a mapping"):
        checkpointer.save(1, note=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("keep_last", (*NO_COUNTS, 0), "a whole number, 1 or more"),
        ("keep_every", (2.5, "3", 0, -1, True), "a whole number, 1 or more"),
        ("memory_every", (1.5, "2", -1, True), "a whole number, 0 or more"),
        ("timeout", (30, None, "30", timedelta(0), timedelta(seconds=-1)), "a datetime.timedelta above 0"),
    ],
)
def test_options_that_are_none(tmp_path: Path, name: str, wrong: tuple[Any, ...], expected: str) -> None:
    for value in wrong:
        with pytest.raises(UsageError) as raised:
            made(tmp_path / "checkpoints", **{name: value})
        assert str(raised.value).startswith(f"{name} is {value!r}, expected {expected}")
    assert not (tmp_path / "checkpoints").exists()


def test_a_manifest_no_reader_takes_cannot_be_written() -> None:
    """One rule for both sides."""
    for value in NO_COUNTS:
        with pytest.raises(ValueError, match="is not a whole number, 0 or more"):
            count(value)
        for name in ("step", "epoch", "accumulation", "generation", "world_size", "restart"):
            with pytest.raises(ValueError, match="is not a whole number"):
                Manifest(**{"step": 1, "generation": 1, "files": (), name: value})
