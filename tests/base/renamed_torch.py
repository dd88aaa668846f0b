"""A torch that has other private names: links to the one that is installed, beside files in which the names are replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

INSTALLED = Path(torch.__file__).parent
ADDED = {  # what cannot be renamed: C code has the one, and the class of the other has its name, too
    "_dump_fr_trace_json": ("distributed/__init__.py", "\nimport torch\ndel torch._C._distributed_c10d._dump_fr_trace_json\n"),
    "LocalElasticAgent": ("distributed/launcher/api.py", "\nTheirAgent = LocalElasticAgent\ndel LocalElasticAgent\n"),
}


def environment(folder: Path, names: Sequence[str], version: str = "") -> dict[str, str]:
    """Return the variables with which Python imports such a torch from `folder`, which gets it.

    names: those that torch has no longer; of an attribute, without its class. version: "": that which is installed.
    """
    added = dict(ADDED[name] for name in names if name in ADDED)
    if version:
        added["version.py"] = f"\n__version__ = {version!r}\n"
    renamed = [name for name in names if name not in ADDED]
    words = re.compile(rf"\b({'|'.join(renamed)})\b") if renamed else None
    changed = {}
    for path in INSTALLED.rglob("*.py") if words is not None else map(INSTALLED.joinpath, added):
        before = path.read_text()
        name = str(path.relative_to(INSTALLED))
        after = (words.sub(r"new\1", before) if words is not None else before) + added.get(name, "")
        if after != before:
            changed[Path(name)] = after
    site = folder / "site"
    _link(INSTALLED, site / "torch", changed)
    for libraries in INSTALLED.parent.glob("nvidia*"):
        (site / libraries.name).symlink_to(libraries)  # those of torch find them beside it
    return {"PYTHONPATH": str(site)}


def _link(installed: Path, folder: Path, changed: dict[Path, str]) -> None:
    """Make `folder` a copy of one that is installed. changed: by path in it, the text of the files that differ."""
    folder.mkdir(parents=True)
    with os.scandir(installed) as entries:
        for entry in entries:
            inside = {Path(*path.parts[1:]): text for path, text in changed.items() if path.parts[0] == entry.name}
            if entry.name == "__pycache__":
                continue  # Python writes another one
            if inside and entry.is_dir():
                _link(Path(entry.path), folder / entry.name, inside)
            elif inside:
                (folder / entry.name).write_text(inside[Path()])
            else:
                (folder / entry.name).symlink_to(entry.path)
