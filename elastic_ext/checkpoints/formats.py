"""What a complete checkpoint looks like, format by format.

A check reads names, sizes and the tail of a file; it never unpickles, because a checkpoint is data and unpickling runs code.
A check says "complete" or says what is missing; it does not raise for a damaged checkpoint.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

TORCH_SAVE = "torch.save"
DCP = "torch.distributed.checkpoint"
UNKNOWN = "unknown"  # shows no sign of a format of this module

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
TEMPORARY_SUFFIXES = (".tmp", ".part")

DCP_METADATA = ".metadata"
DCP_SHARD_SUFFIX = ".distcp"

_ZIP_MAGIC = b"PK\x03\x04"  # local file header, APPNOTE.TXT 4.3.7: how every torch.save file since torch 1.6 begins

# What zipfile raises for bytes that are no zip directory; OSError (a file that cannot be read) is the caller's to report.
_NOT_A_ZIP = (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OverflowError, IndexError, struct.error)


@dataclass(frozen=True)
class Entry:
    """One name in a listed directory. ``path`` is the address that a worker can open."""

    name: str
    path: str
    is_dir: bool
    size: int  # bytes; of a link's target; meaningless for a directory
    mtime: float | None  # seconds since the epoch by the clock of the filesystem, None where it keeps no time
    barred: str = ""  # why this cannot be a checkpoint of its own, known from the listing alone


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check. ``written_at``: when the last part was written, seconds by the clock of the filesystem."""

    complete: bool
    format: str
    reason: str
    written_at: float | None = None


def is_candidate(entry: Entry) -> bool:
    """True for what may be a checkpoint: any directory, and files by suffix. Hidden and temporary names never are."""
    if entry.name.startswith(".") or entry.name.endswith(TEMPORARY_SUFFIXES):
        return False
    return entry.is_dir or entry.name.endswith(SUFFIXES)


def check_torch_save(entry: Entry, file: IO[bytes]) -> Verdict:
    """Check a file of `torch.save`: a zip archive whose directory, which is written last, is intact and lists `*/data.pkl`.

    ``file`` must be seekable; only its tail is read, however large it is. Raises OSError when it cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except _NOT_A_ZIP:
        file.seek(0)
        if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            reason = f"its zip directory, at the end of {entry.size} bytes, is missing or damaged"
            return Verdict(False, TORCH_SAVE, reason)
        return Verdict(False, TORCH_SAVE, "not a zip archive: damaged, or not written by torch.save of torch 1.6 or later")
    if not any(name.endswith("/data.pkl") for name in names):
        return Verdict(False, TORCH_SAVE, f"a zip archive of {len(names)} entries without data.pkl: not written by torch.save")
    return Verdict(True, TORCH_SAVE, f"zip directory intact, {len(names)} entries", entry.mtime)


def check_dcp(entry: Entry, content: Sequence[Entry]) -> Verdict:
    """Check a directory of torch.distributed.checkpoint by its listing.

    Its `.metadata` is renamed into place after every rank has written its shards, so its presence marks the end of the save
    (`FileSystemWriter.finish` in torch/distributed/checkpoint/filesystem.py).
    """
    metadata = next((item for item in content if item.name == DCP_METADATA), None)
    shards = [item for item in content if item.name.endswith(DCP_SHARD_SUFFIX)]
    unfinished = shards or any(item.name.endswith(f"{DCP_METADATA}.tmp") for item in content)
    if metadata is None and unfinished:
        return Verdict(False, DCP, f"no {DCP_METADATA}, the save did not finish")
    if metadata is None:
        return Verdict(False, UNKNOWN, f"no {DCP_METADATA} and no {DCP_SHARD_SUFFIX} file: not a {DCP} directory")
    if metadata.size == 0:
        return Verdict(False, DCP, f"{DCP_METADATA} is empty, the save did not finish")
    filled = [shard for shard in shards if shard.size > 0]
    if not filled:
        return Verdict(False, DCP, f"{DCP_METADATA} without any non-empty {DCP_SHARD_SUFFIX} file: the data is gone")
    return Verdict(True, DCP, f"{DCP_METADATA} present, {len(filled)} shard files", metadata.mtime)
