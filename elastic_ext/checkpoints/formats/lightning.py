"""A directory of Lightning's FSDP strategy: a torch.distributed.checkpoint directory plus `meta.pt`, the unsharded values.

`torch_save` handles Lightning's `.ckpt` files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_ext.checkpoints.formats import dcp, torch_save
from elastic_ext.checkpoints.formats.inspection import LIGHTNING, Inspection
from elastic_ext.checkpoints.storage import Entry, Storage

META = "meta.pt"  # lightning/fabric/strategies/fsdp.py, _METADATA_FILENAME


def matches(name: str, names: Sequence[str]) -> bool:
    """Return whether Lightning wrote a directory with these names, complete or not."""
    return (META in names or ("=" in name and name.endswith(".ckpt"))) and dcp.matches(name, names)


def check(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check the shards and `meta.pt`. Raises OSError."""
    shards = dcp.check(storage, entry, content)
    if not shards.complete:
        return replace(shards, format=LIGHTNING)
    meta = next((item for item in content if item.name == META), None)
    if meta is None:
        return replace(shards, complete=False, format=LIGHTNING, reason=f"no {META}, the save did not finish")
    with storage.open(f"{entry.name}/{META}") as file:
        rest = torch_save.check(meta, file)
    if not rest.complete:
        return replace(rest, format=LIGHTNING, reason=f"{META}: {rest.reason}")
    return replace(shards, format=LIGHTNING, step=rest.step, epoch=rest.epoch)
