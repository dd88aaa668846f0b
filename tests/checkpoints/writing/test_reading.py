"""What checkpoints of earlier versions hold is still understood."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from elastic_ext.checkpoints.state import Moment, capture
from elastic_ext.checkpoints.storage import open_storage
from elastic_ext.checkpoints.writing.dcp_files import read_objects


@pytest.mark.parametrize(
    "module", [f"elastic_ext.checkpoints.{name}" for name in ("state", "writing.state", "writing.optimizer_state")]
)
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


def test_pickles_name_the_module_that_the_versions_before_know() -> None:
    """After a downgrade the older version has to find the class."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    shared = capture.capture(capture.Objects(model, (optimizer,)), 0, 0).shared
    names = {text for op, text, _ in pickletools.genops(pickle.dumps(shared)) if isinstance(text, str)}
    assert {name for name in names if name.startswith("elastic_ext")} == {"elastic_ext.checkpoints.state"}
