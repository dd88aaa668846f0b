"""Which format a candidate is of, and its check. A format of your own is a plug-in: an entry point of the group
`elastic_ext.formats` that gives an object with the two methods of `Format`.

    [project.entry-points."elastic_ext.formats"]
    mine = "my_package.checkpoints:MyFormat"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.formats import huggingface
from elastic_ext.checkpoints.formats.checks import (
    DCP,
    DCP_METADATA,
    DCP_SHARD_SUFFIX,
    HUGGING_FACE,
    LIGHTNING,
    LIGHTNING_META,
    OWN,
    SUFFIXES,
    TORCH_SAVE,
    UNKNOWN,
    Inspection,
    check_dcp,
    check_lightning_directory,
    check_own,
    check_torch_save,
)
from elastic_ext.checkpoints.formats.manifest import MANIFEST, order_of
from elastic_ext.checkpoints.storage import Entry, Storage

GROUP = "elastic_ext.formats"
ZIP_MAGIC = b"PK"
SAFETENSORS = ".safetensors"


class Format(Protocol):
    """The seam of a plug-in. Neither method may unpickle; an OSError of `check` counts as "cannot be read"."""

    def claims(self, entry: Entry) -> bool:
        """Is this listed name a checkpoint of this format? Asked for each name of a listing: it must not read."""

    def check(self, storage: Storage, entry: Entry) -> Inspection:
        """Is it complete, and if not, why not?"""


@dataclass(frozen=True)
class _Directory:
    format: str
    is_one: Callable[[str, Sequence[str]], bool]  # by its name and the names in it
    check: Callable[[Storage, Entry, Sequence[Entry]], Inspection]


def _is_dcp(name: str, names: Sequence[str]) -> bool:
    return any(each.endswith((DCP_METADATA, f"{DCP_METADATA}.tmp", DCP_SHARD_SUFFIX)) for each in names)


# The first that fits holds: ours and Lightning's have the files of torch.distributed.checkpoint, too.
_DIRECTORIES = (
    _Directory(OWN, lambda name, names: order_of(name) is not None or _lists_manifest(names), check_own),
    _Directory(LIGHTNING, lambda name, names: LIGHTNING_META in names and _is_dcp(name, names), check_lightning_directory),
    _Directory(DCP, _is_dcp, check_dcp),
    _Directory(HUGGING_FACE, lambda name, names: huggingface.is_one(names), huggingface.check),
)


def _lists_manifest(names: Sequence[str]) -> bool:
    """manifest.json is a common name; beside shards it is ours, under whatever name the directory was copied to."""
    return MANIFEST in names and any(each.endswith(DCP_SHARD_SUFFIX) for each in names)


def check(storage: Storage, entry: Entry, plugins: Sequence[Format] = ()) -> Inspection:
    """Check one candidate. What cannot be read is incomplete, with the reason; the next one may do.

    Raises UsageError where a plug-in fails.
    """
    format = DCP if entry.is_dir else TORCH_SAVE
    try:
        for plugin in plugins:
            if _ask(plugin, plugin.claims, entry):
                format = type(plugin).__name__
                verdict: Inspection = _ask(plugin, plugin.check, storage, entry)
                return verdict
        return _check_directory(storage, entry) if entry.is_dir else _check_file(storage, entry)
    except FileNotFoundError:
        return Inspection(False, format, "it vanished after it was listed")
    except OSError as error:
        return Inspection(False, format, f"it cannot be read: {error.strerror or error}")


def _check_directory(storage: Storage, entry: Entry) -> Inspection:
    # A link to a directory is not followed here, see `files_of`. Unusable names do not count.
    content = [item for item in storage.entries(entry.name) if not item.unusable and not (item.is_link and item.is_dir)]
    names = [item.name for item in content]
    for format in _DIRECTORIES:
        if format.is_one(entry.name, names):
            return format.check(storage, entry, content)
    signs = f"no {MANIFEST}, {DCP_METADATA} or {huggingface.STATE}"
    return Inspection(False, UNKNOWN, f"{signs}: not a checkpoint of a known format")


def _check_file(storage: Storage, entry: Entry) -> Inspection:
    if entry.size == 0:
        return Inspection(False, TORCH_SAVE, "an empty file")
    with storage.open(entry.name) as file:
        if entry.name.endswith(SAFETENSORS):
            fault = huggingface.safetensors_fault(entry, file)
            return Inspection(not fault, "safetensors", fault or "header whole, size as it says", entry.mtime, size=entry.size)
        if entry.name.endswith(SUFFIXES) or file.read(len(ZIP_MAGIC)) == ZIP_MAGIC:
            return check_torch_save(entry, file)
    # Only a checkpoint_pattern of the user's leads here.
    return Inspection(True, UNKNOWN, "not empty; more is not known of its format", entry.mtime, size=entry.size)


def claimed(entry: Entry, plugins: Sequence[Format]) -> bool:
    """Does a plug-in know this name? Raises UsageError where one fails."""
    return any(_ask(plugin, plugin.claims, entry) for plugin in plugins)


@functools.cache
def plugins() -> tuple[Format, ...]:
    """The user's formats, by entry point. Raises UsageError for one that cannot be loaded."""
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            value = point.load()
            found.append(value() if isinstance(value, type) else value)
        except Exception as error:
            raise UsageError(f"entry point {point.name} = {point.value} of {GROUP} cannot be loaded: {error!r}") from error
        missing = [name for name in ("claims", "check") if not callable(getattr(found[-1], name, None))]
        if missing:
            raise UsageError(f"entry point {point.name} = {point.value} of {GROUP} has no method {missing[0]}; see Format")
    return tuple(found)


def _ask(plugin: Format, method: Callable[..., Any], *args: Any) -> Any:
    try:
        return method(*args)
    except OSError:
        raise
    except Exception as error:
        raise UsageError(f"the checkpoint format {type(plugin).__name__} failed at {args[-1].name}: {error!r}") from error
