"""A storage that fails while a checkpoint is loaded: a failure is no damage, and no reason to go back to an older checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import s3fs
import torch

from elastic_ext import Checkpointer
from elastic_ext.checkpoints.writing.errors import StorageFailed
from tests.chaos.seeded.object_store import WELL, Ill, ObjectStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with ExitStack() as stack:
        made = ObjectStore([], "127.0.0.1", tmp_path / "store.log", lambda path: None, stack)
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # each keeps the endpoint that it was made with
        yield made


def test_the_newest_checkpoint_is_not_passed_over(store: ObjectStore) -> None:
    with Checkpointer(store.url, model=torch.nn.Linear(2, 2), verify=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, wait=True)
            assert checkpointer.last_error is None
    with Checkpointer(store.url, model=torch.nn.Linear(2, 2), verify=True) as checkpointer:
        for file in ("__0_0.distcp", "rank_00000.pt"):
            store.be(Ill(errors=1.0, path=f"/step_00000002.g0001/{file}"))
            with pytest.raises(StorageFailed, match="step_00000002"):
                checkpointer.load()
        store.be(WELL)
        assert checkpointer.load().step == 2
