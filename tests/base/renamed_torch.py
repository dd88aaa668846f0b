"""A torch that has other private names: links to the one that is installed, beside files in which the names are replaced."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

INSTALLED = Path(torch.__file__).parent
ADDED = {  # what cannot be renamed, as C code has it, or a class has its name, too: the end of a file, without it
    **{
        name: ("distributed/__init__.py", f"\nimport torch\ndel torch._C._distributed_c10d.{name}\n")
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    },
    "LocalElasticAgent": ("distributed/launcher/api.py", "\nTheirAgent = LocalElasticAgent\ndel LocalElasticAgent\n"),
}

C_CODE = {  # what torch's own Python code calls, too: the class that has it in C code
    "_get_backend": "ProcessGroup",
    "_device_types": "ProcessGroup",
    "supports_completion_hooks": "Backend",
}
RENAME = """
import torch
class_ = torch._C._distributed_c10d.{class_}
if hasattr(class_, "{name}"):
    class_.new{name} = class_.{name}
    del class_.{name}
"""


def environment(folder: Path, names: Sequence[str], version: str = "") -> dict[str, str]:
    """Return the variables with which Python imports such a torch from `folder`, which gets it.

    names: those that torch has no longer; of an attribute, without its class. version: "": that which is installed.
    """
    added = defaultdict(str, {"version.py": f"\n__version__ = {version!r}\n"} if version else {})
    for path, text in (ADDED[name] for name in names if name in ADDED):
        added[path] += text
    for name in C_CODE.keys() & set(names):
        added["distributed/__init__.py"] += RENAME.format(name=name, class_=C_CODE[name])
    renamed = [name for name in names if name not in ADDED]
    words = re.compile(rf"\b({'|'.join(renamed)})\b") if renamed else None
    changed = {}
    for file in [*INSTALLED.rglob("*.py")] if words is not None else [INSTALLED / path for path in added]:
        before = file.read_text()
        name = str(file.relative_to(INSTALLED))
        after = (words.sub(r"new\1", before) if words is not None else before) + added[name]
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
