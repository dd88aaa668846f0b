"""The result of checking a checkpoint, and the interface of custom formats.

A check reads names, sizes, small files and the tail of large ones, but no tensors; `verify` reads everything. It never unpickles,
because a checkpoint is data and unpickling runs code (`single_files.peek` runs none). It reports "complete" or what is missing,
and does not raise for a damaged checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from elastic_ext.checkpoints.formats.names import step_of, words_of
from elastic_ext.checkpoints.storage import Entry, Storage

OWN = "elastic_ext"
TORCH_SAVE = "torch.save"
DCP = "torch.distributed.checkpoint"
LIGHTNING = "Lightning"
HUGGING_FACE = "Hugging Face Trainer"
SAFETENSORS = "safetensors"
SAVED_MODEL = "Hugging Face model"  # or what a Trainer that was killed has left
UNKNOWN = "unknown"  # no sign of a known format

TORCH_SAVE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")
TEMPORARY_SUFFIXES = (".tmp", ".part")
# But temp_0.7 is a temperature.
_TEMPORARY = re.compile(
    r"(?<![a-z])(tmp|temp(?![-_=]?[0-9]+\.[0-9])|partial|incomplete|unfinished|trash|deleting)(?![a-z])", re.IGNORECASE
)
NAMES = frozenset({"latest", "last", "current", "checkpoint", "ckpt", "final", "best"})  # words of checkpoints without a step
NO_OPTIMIZER = "no optimizer is in it"

MAX_THREADS = 16  # that read files at once


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


@dataclass(frozen=True)
class Content:
    """The result of reading a whole file."""

    fault: str = ""  # what is damaged, or ""
    note: str = ""  # what could not be verified, or ""
    unreadable: OSError | None = None  # why it could not be read, which is a fault for now; None: it was read


def is_candidate(entry: Entry) -> bool:
    """Return whether an entry may be a checkpoint: any directory, or a file with a known suffix, unless hidden or temporary.

    Files of safetensors hold weights alone, and most .bin files hold weights or other things (training_args.bin). They count only
    if their name gives a step, or for .bin says that it is a checkpoint.
    """
    if is_hidden(entry.name) or entry.is_dir:
        return not is_hidden(entry.name)
    if entry.name.endswith(".safetensors"):
        return step_of(entry.name) is not None
    if entry.name.endswith(".bin"):
        return step_of(entry.name) is not None or not NAMES.isdisjoint(words_of(entry.name))
    return entry.name.endswith(TORCH_SAVE_SUFFIXES)


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden or temporary."""
    return name.startswith(".") or name.endswith(TEMPORARY_SUFFIXES) or _TEMPORARY.search(name) is not None


def summary(faults: Sequence[str]) -> str:
    """Return the first fault and the number of the others."""
    return faults[0] if len(faults) == 1 else f"{faults[0]}, and {len(faults) - 1} more faults"


def thread_pool(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool for reading files. threads: by default one per core, up to MAX_THREADS."""
    return ThreadPoolExecutor(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))))
