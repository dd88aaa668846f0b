"""What checkpoints of earlier versions hold is still understood."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.writing.optimizer_state import Moment
from elastic_ext.checkpoints.writing.reading import read_objects


@pytest.mark.parametrize("module", ["elastic_ext.checkpoints.state", "elastic_ext.checkpoints.writing.state"])
def test_optimizer_state_under_its_old_module_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    @dataclass(frozen=True)
    class Old:
        like_parameter: bool
        shape: tuple[int, ...]
        dtype: torch.dtype

    Old.__module__, Old.__qualname__, Old.__name__ = module, "Moment", "Moment"
    before = ModuleType(module)
    before.Moment = Old  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module, before)
        torch.save({"exp_avg": Old(True, (3, 4), torch.float32)}, buffer)
    storage = open_storage(str(tmp_path))
    storage.put("step/shared.pt", buffer.getvalue())
    assert read_objects(storage, "step", "shared.pt") == {"exp_avg": Moment(True, (3, 4), torch.float32)}
