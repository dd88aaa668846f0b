"""What a complete checkpoint looks like, format by format: our own, torch.save, torch.distributed.checkpoint, Lightning.

A check reads names, sizes, the tail of a file and small files; it never unpickles, because a checkpoint is data and unpickling
runs code (`peek` runs none). A check says "complete" or says what is missing; it does not raise for a damaged checkpoint, and it
reads no tensors: `verify` does. Hugging Face's checkpoints are in `huggingface`; `detect` tells which check is the right one.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from elastic_ext.checkpoints.formats.manifest import MANIFEST, ManifestError, decode
from elastic_ext.checkpoints.formats.peek import MOST_BYTES, PeekError, StandIn, is_count, number, peek
from elastic_ext.checkpoints.storage import Entry, Storage

OWN = "elastic_ext"
TORCH_SAVE = "torch.save"
DCP = "torch.distributed.checkpoint"
LIGHTNING = "Lightning"
HUGGING_FACE = "Hugging Face Trainer"
UNKNOWN = "unknown"  # shows no sign of a format that is known here

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
TEMPORARY_SUFFIXES = (".tmp", ".part")

DCP_METADATA = ".metadata"
DCP_SHARD_SUFFIX = ".distcp"
LIGHTNING_META = "meta.pt"  # lightning/fabric/strategies/fsdp.py, _METADATA_FILENAME: what is not sharded
LIGHTNING_VERSION = "pytorch-lightning_version"  # a key of every Lightning checkpoint

STEP_KEYS = ("global_step", "step", "global_steps", "iteration", "iter_num")  # by which scripts tell the step, best first
EPOCH_KEYS = ("epoch",)
PICKLE_READ = 1 << 20  # bytes of a torch.save file's data.pkl above which it is not looked into for the step

MOST_DIRECTORY = 256 << 20  # bytes of a zip directory; 100 for each record of a file

_ZIP_MAGIC = b"PK\x03\x04"  # local file header, APPNOTE.TXT 4.3.7: how every torch.save file since torch 1.6 begins

# What zipfile raises for bytes that are no zip directory; OSError (a file that cannot be read) is the caller's to report.
NOT_A_ZIP = (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OverflowError, IndexError, struct.error)


@dataclass(frozen=True)
class Inspection:
    """The outcome of one check.

    Attributes:
        written_at: when the last part was written, seconds by the clock of the filesystem.
        step, epoch: what the content says; None: it says nothing, or cannot be asked cheaply.
        size: bytes of all that belongs to it; None: not known.
        distrusted: it is whole, as far as one can see, and must not be used all the same.
    """

    complete: bool
    format: str
    reason: str
    written_at: float | None = None
    step: int | None = None
    epoch: int | None = None
    size: int | None = None
    distrusted: bool = False


def is_candidate(entry: Entry) -> bool:
    """True for what may be a checkpoint: any directory, and files by suffix. Hidden and temporary names never are."""
    return not is_hidden(entry.name) and (entry.is_dir or entry.name.endswith(SUFFIXES))


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith(TEMPORARY_SUFFIXES)


# Our own.


def check_own(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check a directory that our Checkpointer writes: all that its manifest lists is there, each file with its size."""
    found = {item.name: item for item in content}
    if MANIFEST not in found:
        return Inspection(False, OWN, f"no {MANIFEST}, the save did not finish")
    try:
        manifest = decode(storage.read(f"{entry.name}/{MANIFEST}"))
    except ManifestError as error:
        return Inspection(False, OWN, str(error))
    for folder in sorted({file.name.rpartition("/")[0] for file in manifest.files} - {""}):
        try:
            listed = list(storage.entries(f"{entry.name}/{folder}"))
        except (FileNotFoundError, NotADirectoryError):
            continue  # its files are missing, below
        found.update({f"{folder}/{item.name}": item for item in listed})
    faults = [
        f"{file.name} is missing" if file.name not in found else f"{file.name} has {found[file.name].size} bytes of {file.size}"
        for file in manifest.files
        if file.name not in found or found[file.name].is_dir or found[file.name].size != file.size
    ]
    if faults:
        return Inspection(False, OWN, _first(faults))
    return Inspection(
        True,
        OWN,
        f"manifest whole, {len(manifest.files)} files with their sizes",
        found[MANIFEST].mtime,
        manifest.step,
        manifest.epoch,
        manifest.size,
    )


def _first(faults: Sequence[str]) -> str:
    return faults[0] if len(faults) == 1 else f"{faults[0]}, and {len(faults) - 1} more faults"


# torch.save, and Lightning's file, which is one.


def check_torch_save(entry: Entry, file: IO[bytes]) -> Inspection:
    """Check a file of `torch.save`: a zip archive whose directory, which is written last, is intact and lists `*/data.pkl`.

    ``file`` must be seekable; only its tail and data.pkl are read, however large it is. Raises OSError when it cannot be read.
    """
    try:
        archive = open_zip(file)
    except NOT_A_ZIP:
        file.seek(0)
        if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            reason = f"its zip directory, at the end of {entry.size} bytes, is missing or damaged"
            return Inspection(False, TORCH_SAVE, reason)
        return Inspection(False, TORCH_SAVE, "not a zip archive: damaged, or not written by torch.save of torch 1.6 or later")
    names = archive.namelist()
    pickled = next((info for info in archive.infolist() if info.filename.endswith("/data.pkl")), None)
    if pickled is None:
        return Inspection(False, TORCH_SAVE, f"a zip archive of {len(names)} entries without data.pkl: not written by torch.save")
    try:
        values = _plain_values(archive, pickled)
    except (RuntimeError, *NOT_A_ZIP) as error:  # RuntimeError: its flags say that it is encrypted
        return Inspection(False, TORCH_SAVE, f"its data.pkl is damaged: {error}")
    kind = LIGHTNING if LIGHTNING_VERSION in values else TORCH_SAVE
    step, epoch = number(values, *STEP_KEYS), number(values, *EPOCH_KEYS)
    return Inspection(True, kind, f"zip directory intact, {len(names)} entries", entry.mtime, step, epoch, entry.size)


class _Sparing:
    """A file that gives no more at once than a zip directory may have: a damaged end of the archive says how much is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if size > MOST_DIRECTORY:
            raise zipfile.BadZipFile(f"a zip directory of {size} bytes")
        return self._file.read(size if size >= 0 else MOST_DIRECTORY)  # without a size: the end, after the directory

    def seekable(self) -> bool:
        return True


def open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """A zip archive for reading. Raises NOT_A_ZIP, OSError."""
    return zipfile.ZipFile(_Sparing(file))


def _plain_values(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Mapping[str, Any]:
    """What the saved dict holds at its top, as far as it is plain; empty where it is no dict or too large to look into."""
    if info.file_size > PICKLE_READ or info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return {}
    with archive.open(info) as content:
        if info.CRC == 0:  # torch.serialization.set_crc32_options(False) writes none
            content._expected_crc = None  # type: ignore[attr-defined]
        data = content.read()
    try:
        values = peek(data)
    except PeekError:  # it has its CRC: a pickle that does more than a stand-in can follow
        return {}
    return values if isinstance(values, dict) else {}


# torch.distributed.checkpoint, and Lightning's directory, which is one.


def check_dcp(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check a directory of torch.distributed.checkpoint: all the bytes that its `.metadata` tells of are there.

    Its `.metadata` is renamed into place after every rank has written its shards, so its presence marks the end of the save
    (`FileSystemWriter.finish` in torch/distributed/checkpoint/filesystem.py).
    """
    metadata = next((item for item in content if item.name == DCP_METADATA), None)
    shards = [item for item in content if item.name.endswith(DCP_SHARD_SUFFIX)]
    if metadata is None:
        return Inspection(False, DCP, f"no {DCP_METADATA}, the save did not finish")
    if metadata.size == 0:
        return Inspection(False, DCP, f"{DCP_METADATA} is empty, the save did not finish")
    filled = {shard.name: shard.size for shard in shards if shard.size > 0}
    if not filled:
        return Inspection(False, DCP, f"{DCP_METADATA} without any non-empty {DCP_SHARD_SUFFIX} file: the data is gone")
    size = sum(item.size for item in content if not item.is_dir)
    whole = Inspection(True, DCP, f"{DCP_METADATA} present, {len(filled)} shard files", metadata.mtime, size=size)
    if metadata.size > MOST_BYTES:
        return whole
    try:
        needed = dcp_sizes(dcp_items(storage.read(f"{entry.name}/{DCP_METADATA}")))
    except PeekError as error:
        return Inspection(False, DCP, f"{DCP_METADATA} is damaged: {error}")
    faults = [
        f"{name} has {filled.get(name, 0)} bytes of {least}" for name, least in needed.items() if filled.get(name, 0) < least
    ]
    return Inspection(False, DCP, _first(faults)) if faults else whole


@dataclass(frozen=True)
class DcpItem:
    """Where one tensor's shard or one object lies: bytes `offset` to `offset + length` of a file."""

    file: str
    offset: int
    length: int


def dcp_items(metadata: bytes) -> tuple[DcpItem, ...]:
    """What a `.metadata` tells of; nothing where a storage writer other than torch's own has written it. Raises PeekError."""
    value = peek(metadata)
    stored = value.field("storage_data") if isinstance(value, StandIn) else None
    found = []
    for info in stored.values() if isinstance(stored, dict) else ():
        place = [info.field(name) for name in ("relative_path", "offset", "length")] if isinstance(info, StandIn) else []
        if place and type(place[0]) is str and is_count(place[1]) and is_count(place[2]):
            found.append(DcpItem(*place))
    return tuple(found)


def dcp_sizes(items: Sequence[DcpItem]) -> dict[str, int]:
    """The least number of bytes that each file must have."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.file] = max(sizes.get(item.file, 0), item.offset + item.length)
    return sizes


def check_lightning_directory(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check what Lightning's FSDP strategy writes: a directory of torch.distributed.checkpoint with `meta.pt` beside it."""
    shards = check_dcp(storage, entry, content)
    if not shards.complete:
        return replace(shards, format=LIGHTNING)
    meta = next(item for item in content if item.name == LIGHTNING_META)
    with storage.open(f"{entry.name}/{LIGHTNING_META}") as file:
        rest = check_torch_save(meta, file)
    if not rest.complete:
        return replace(rest, format=LIGHTNING, reason=f"{LIGHTNING_META}: {rest.reason}")
    return replace(shards, format=LIGHTNING, step=rest.step, epoch=rest.epoch)
