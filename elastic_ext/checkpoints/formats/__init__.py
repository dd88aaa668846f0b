"""Checkpoint formats, and the interface for custom formats.

A custom format is an object with the two methods of `Format`. An installed package registers it as an entry point in the group
`elastic_ext.formats`:

    [project.entry-points."elastic_ext.formats"]
    mine = "my_package.checkpoints:MyFormat"

    from elastic_ext.checkpoints.formats import Entry, Inspection, Storage

    class MyFormat:
        def claims(self, entry: Entry) -> bool:
            return entry.name.endswith(".mine")

        def check(self, storage: Storage, entry: Entry) -> Inspection:
            whole = storage.read(entry.name).endswith(b"END")
            return Inspection(whole, "mine", "it ends as it should" if whole else "its end is missing", entry.mtime)

`single_files` knows the formats of a single file, `layouts` those of directories, with a table of those of tools. `detect`
chooses among them, and verifies. `names` reads what names say. Nothing else in this package is public.

A check reads names, sizes, small files and the tail of large ones, but no tensors; `verify` reads everything. It never unpickles,
because a checkpoint is data and unpickling runs code (`single_files.peek` runs none). It reports "complete" or what is missing,
and does not raise for a damaged checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elastic_ext.checkpoints.storage import Entry, Storage

__all__ = ["Entry", "Format", "Inspection", "Storage"]

OWN = "elastic_ext"
TORCH_SAVE = "torch.save"
DCP = "torch.distributed.checkpoint"
LIGHTNING = "Lightning"
HUGGING_FACE = "Hugging Face Trainer"
SAFETENSORS = "safetensors"
SAVED_MODEL = "Hugging Face model"  # or what a Trainer that was killed has left
UNKNOWN = "unknown"  # no sign of a known format
NO_OPTIMIZER = "no optimizer is in it"


@dataclass(frozen=True)
class Inspection:
    """The result of one check."""

    complete: bool  # whether training can resume from it, judging by names, sizes and small files
    format: str  # name of the format, for people
    reason: str  # why it is complete or not, one sentence without a period, for people
    written_at: float | None = None  # when its last part was written, in seconds since the epoch by the clock of the filesystem
    # step, epoch: from its content; None if the content does not say, or is costly to read
    step: int | None = None
    epoch: int | None = None
    size: int | None = None  # bytes of all its files; None if unknown
    distrusted: bool = False  # it looks complete, but must not be used
    unreadable: OSError | None = None  # why it could not be read; it may be complete. None: it was read
    training: bool | None = None  # whether it holds the state of an optimizer; None: not known
    # what a save may have left out, see `names.parts_of`; none if it is known to be whole
    parts: Mapping[str, frozenset[tuple[int, ...]]] = field(default_factory=dict)
    compared: bool = False  # it is incomplete only by what lies beside it


class Format(Protocol):
    """A user-defined checkpoint format. Neither method may unpickle.

    If `check` raises OSError, the checkpoint counts as unreadable. Any other exception becomes a UsageError that names it.
    """

    def claims(self, entry: Entry) -> bool:
        """Return whether a listed name is a checkpoint of this format. Called for each listed name, so it must not read."""

    def check(self, storage: Storage, entry: Entry) -> Inspection:
        """Return whether the checkpoint is complete, and why or why not."""
