"""Checkpoints of a single file: of `torch.save`, and of safetensors.

torch.save writes an uncompressed zip archive of one pickle (`*/data.pkl`) and the storages of its tensors. The zip directory is
written last, so an intact directory marks the end of the save. Each record has a CRC-32, unless
torch.serialization.set_crc32_options(False) was called. Lightning's `.ckpt` files have the same format.

The form before torch 1.6 (also of `_use_new_zipfile_serialization=False`) does not show its end: only the record of saves does.

A safetensors file (https://huggingface.co/docs/safetensors/index#format) is 8 bytes, little endian, with the size of the header;
the header, JSON: dtype and shape of each tensor, and its offsets in the bytes after the header; and the tensors. It has no
checksums.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, TypeGuard

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.formats import candidates
from elastic_ext.checkpoints.formats.candidates import LIGHTNING, SAFETENSORS, TORCH_SAVE, UNKNOWN, Inspection
from elastic_ext.checkpoints.storage import Entry

# Read the plain values of a pickle without running any code: a stand-in replaces every class and function. Numbers, strings,
# lists, tuples and dicts are returned as they are. An object becomes a `StandIn` that holds its state; the storage of a tensor
# becomes an empty one. A pickle can only call what `find_class` returns, which here is always a stand-in. One flipped bit can
# make a pickle ask for gigabytes: for a memo up to some index, or for bytes that it does not contain. So
# `_refuse_claims` first goes through its instructions.

LIMIT = 1 << 63  # a count is smaller than this
MAX_BYTES = 64 << 20  # larger pickles are not worth the cost of reading

# Unpickling raises these for damaged bytes, when an opcode is applied to the wrong object.
_BAD_PICKLE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
    RecursionError, ImportError, AssertionError,
)  # fmt: skip


class PeekError(ElasticExtError):
    """The bytes are not a complete pickle."""


class StandIn:
    """An object of a pickle. `state`: the state that the pickle would have set."""

    state: object = None

    def __new__(cls, *args: object, **kwargs: object) -> StandIn:
        return super().__new__(cls)

    def __call__(self, *args: object, **kwargs: object) -> StandIn:
        """Stand in for a call of an object that was itself the result of a call."""
        return StandIn()

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, *item: object) -> None:
        """Ignore an item, or several, of a subclass of list or dict."""

    __setitem__ = extend = append

    def field(self, name: str) -> object:
        """Return a field of a dataclass or plain object, or None. A class with slots has its slot values second."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((state[name] for state in states if isinstance(state, dict) and name in state), None)


class StandInDict(dict[object, object]):
    """An OrderedDict of a pickle, such as a state dict, without its attributes."""

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes."""


class _Peeker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[StandIn | StandInDict]:
        return StandInDict if (module, name) == ("collections", "OrderedDict") else StandIn

    def persistent_load(self, pid: object) -> StandIn:
        return StandIn()


# Instructions that number an entry of the memo. Each takes at least two bytes, and pickles number the entries from 0.
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def _refuse_claims(data: bytes) -> None:
    """Raise PeekError if a pickle asks for more than it contains."""
    try:
        for instruction, argument, at in pickletools.genops(data):
            if instruction.name in _PUTS and argument is not None and argument > (at or 0) // 2 + 1:
                raise PeekError(f"the pickle cannot be read: memo index {argument} at byte {at}")
    except ValueError as error:
        raise PeekError(f"the pickle cannot be read: {error}") from error


def peek(data: bytes) -> object:
    """Return the value of a pickle, with stand-ins for all objects. Memory use is proportional to its size.

    Raises PeekError for damaged bytes.
    """
    _refuse_claims(data)
    try:
        return _Peeker(io.BytesIO(data)).load()
    except _BAD_PICKLE as error:
        raise PeekError(f"the pickle cannot be read: {type(error).__name__}: {error}") from error


def number(values: object, *keys: str) -> int | None:
    """Return the value of the first of these keys whose value is a count; None without one, or if `values` is not a dict."""
    if not isinstance(values, Mapping):
        return None
    return next((value for key in keys if is_count(value := values.get(key))), None)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is an int from 0 to below LIMIT. An int in a pickle may have a million digits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT


# A file of torch.save.

ZIP_MAGIC = b"PK\x03\x04"  # local file header, APPNOTE.TXT 4.3.7: the first bytes of every torch.save file since torch 1.6
LIGHTNING_VERSION = "pytorch-lightning_version"  # a key of every Lightning checkpoint
STEP_KEYS = ("global_step", "step", "global_steps", "iteration", "iter_num")  # where scripts keep the step, best first
EPOCH_KEYS = ("epoch",)
_OPTIMIZER_KEYS = {"state", "param_groups"}  # of torch.optim.Optimizer.state_dict

SAFETENSORS_SUFFIX = ".safetensors"
MAX_HEADER = 100_000_000  # bytes of safetensors; MAX_HEADER_SIZE of its library
MAX_PICKLE = 4 << 20  # bytes; a larger data.pkl is not searched for the step
MAX_DIRECTORY = 256 << 20  # bytes of a zip directory; each record takes about 100
_BLOCK = 512 << 10  # bytes per read of a record
_BLANK = 4096  # zero bytes at its begin: the file was never written
_PICKLE = b"\x80"  # the first byte of every pickle since protocol 2
START = 32  # bytes at its begin, which say what a file is
_OLD_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(
    10, "little"
)  # MAGIC_NUMBER of torch/serialization.py, in the first of its pickles
OLD_FORM = "in the form before torch 1.6, which does not show its end: if it is whole, set resume_from to its name"

# zipfile raises these for bytes that are not a zip archive. The caller reports OSError: the file cannot be read.
_NOT_A_ZIP = (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OverflowError, IndexError, struct.error)
_DAMAGED = (RuntimeError, zlib.error, *_NOT_A_ZIP)  # RuntimeError: a flag claims that the record is encrypted

# Signature, size of the rest, versions, two disks, two counts, size, start. Then the locator: signature, disk, offset, disks.
_END = struct.Struct("<4sQHHIIQQQQ4sIQI")
_END_64, _LOCATOR, _END_64_SIZE = b"PK\x06\x06", b"PK\x06\x07", 44
_FLAGS = 0x0808  # flags of a zip entry: sizes follow the data, the name is UTF-8


def check(entry: Entry, file: IO[bytes]) -> Inspection:
    """Check a file without reading its tensors. What another program may have written is of format UNKNOWN.

    `file` must be seekable. Raises OSError if it cannot be read.
    """
    if entry.name.endswith(SAFETENSORS_SUFFIX):
        fault = safetensors_fault(entry.size, file)
        if fault:
            return Inspection(False, SAFETENSORS, fault)
        reason = f"header intact, size as expected, weights only: {candidates.NO_OPTIMIZER}"
        return Inspection(True, SAFETENSORS, reason, entry.mtime, size=entry.size, training=False)
    try:
        archive = _open_zip(file)
    except _NOT_A_ZIP:
        return _check_other(entry, file)
    names = archive.namelist()
    pickled = next((info for info in archive.infolist() if info.filename.endswith("/data.pkl")), None)
    if pickled is None:
        return Inspection(False, UNKNOWN, f"a zip archive of {len(names)} entries without data.pkl: not written by torch.save")
    try:
        values = _saved(archive, pickled)
    except _DAMAGED as error:
        return Inspection(False, TORCH_SAVE, f"its data.pkl is damaged: {error}")
    return _whole(entry, f"zip directory intact, {len(names)} entries", values)


def _check_other(entry: Entry, file: IO[bytes]) -> Inspection:
    """Check a file that cannot be opened as a zip archive."""
    file.seek(0)
    start = file.read(START)
    if start.startswith(ZIP_MAGIC):
        return Inspection(False, TORCH_SAVE, f"its zip directory, at the end of {entry.size} bytes, is missing or damaged")
    if _OLD_MAGIC in start:
        return Inspection(False, UNKNOWN, OLD_FORM, entry.mtime, size=entry.size, compared=True)
    if start.startswith(_PICKLE):
        file.seek(entry.size - 1)
        if file.read(1) != pickle.STOP:
            return Inspection(False, TORCH_SAVE, "a pickle without its end: it is cut short")
        file.seek(START)
    never_written = not any(start + file.read(_BLANK)) or ZIP_MAGIC.startswith(start)
    return Inspection(False, TORCH_SAVE if never_written else UNKNOWN, "not a zip archive: damaged, or not written by torch.save")


def _whole(entry: Entry, reason: str, saved: object) -> Inspection:
    """Return the result for an intact file. saved: its plain values; None if they are not known."""
    values = saved if isinstance(saved, Mapping) else {}
    format = LIGHTNING if LIGHTNING_VERSION in values else TORCH_SAVE
    training = None if saved is None else holds_optimizer(values)
    if training is False:
        reason += ", the state of an optimizer alone" if values.keys() >= _OPTIMIZER_KEYS else f", {candidates.NO_OPTIMIZER}"
    step, epoch = number(values, *STEP_KEYS), number(values, *EPOCH_KEYS)
    return Inspection(True, format, reason, entry.mtime, step, epoch, entry.size, training=training)


def holds_optimizer(values: Mapping[object, object]) -> bool:
    """Return whether a saved dict holds an optimizer's state, beside what it trains."""
    if values.keys() >= _OPTIMIZER_KEYS:  # of an optimizer alone
        return False
    if any(map(_is_optimizer, values, values.values())):
        rest = [value for key, value in values.items() if not _is_optimizer(key, value)]
        return any(isinstance(value, (Mapping, StandIn, list)) for value in rest)
    inner = (value for value in values.values() if isinstance(value, Mapping))
    return any(_is_optimizer(key, value) for each in inner for key, value in each.items())


def _is_optimizer(key: object, value: object) -> bool:
    """Return whether this is a state of optimizers: not a name, nor what a configuration says of one."""
    name = str(key).lower()
    if "optim" not in name and name not in ("opt", "opt_state"):
        return False
    if isinstance(value, Mapping) and value:
        return any(isinstance(each, (Mapping, StandIn, list)) for each in value.values())
    return isinstance(value, (Mapping, StandIn, list))


def read_torch_save(file: IO[bytes]) -> candidates.Content:
    """Read all records of a file of torch.save and check their CRCs. Raises OSError."""
    unchecked = 0
    file.seek(0)
    try:
        with _open_zip(file) as archive:
            if not any(info.filename.endswith("/data.pkl") for info in archive.infolist()):  # another program's
                damaged = archive.testzip()
                return candidates.Content(f"damaged: {damaged[:100]!r}" if damaged else "")
            for info in archive.infolist():
                count, fault = 0, _entry_fault(info)
                with _open_record(archive, info) as record:
                    while not fault and (block := record.read(_BLOCK)):
                        count += len(block)
                if fault or count != info.file_size:
                    fault = fault or f"only {count} of {info.file_size} bytes"
                    return candidates.Content(f"damaged: {info.filename[:100]!r}: {fault}")
                unchecked += info.CRC == 0 and info.file_size > 0
            fault = _end_fault(file, archive)
    except _DAMAGED as error:
        return candidates.Content(f"damaged: {error}")
    note = f"{unchecked} records were written without a CRC" if unchecked else ""
    return candidates.Content(f"damaged: {fault}" if fault else "", note)


class _BoundedReads:
    """A file that refuses reads larger than MAX_DIRECTORY, because a damaged archive may claim any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a zip directory of {size} bytes")
        return self._file.read(size if size >= 0 else MAX_DIRECTORY)  # no size given: the rest of the file, after the directory

    def seekable(self) -> bool:
        return True


def _open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip archive for reading. Raises _NOT_A_ZIP, OSError."""
    return zipfile.ZipFile(_BoundedReads(file))


def _open_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    record = archive.open(info)
    if info.CRC == 0:  # torch.serialization.set_crc32_options(False) writes no CRC
        record._expected_crc = None  # type: ignore[attr-defined]
    return record


def _is_stored(info: zipfile.ZipInfo) -> bool:
    return info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size


def _saved(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> object:
    """Return what was saved, with stand-ins for all objects; None if it is too large to read."""
    if info.file_size > MAX_PICKLE or not _is_stored(info):
        return None
    with _open_record(archive, info) as content:
        data = content.read()
    try:
        return peek(data)
    except PeekError:  # the CRC is right, so the pickle is intact but does more than a stand-in can follow
        return None


def _entry_fault(info: zipfile.ZipInfo) -> str:
    """Return a fault if torch never writes such a directory entry. Python's zipfile ignores it, but torch.load fails."""
    if not _is_stored(info):
        return f"{info.compress_size} bytes stored for {info.file_size}, expected no compression"
    if info.flag_bits & ~_FLAGS or info.comment or info.volume or info.external_attr:
        return "torch never writes such an entry in the zip directory"
    return ""


def _end_fault(file: IO[bytes], archive: zipfile.ZipFile) -> str:
    """Check the zip64 end of the directory, APPNOTE.TXT 4.3.14 and 4.3.15. torch writes it; zipfile reads only part of it."""
    start = archive.start_dir
    file.seek(start)
    tail = file.read(MAX_DIRECTORY)
    size = tail.rfind(_END_64)
    if size < 0 or len(tail) - size < _END.size:
        return ""
    count = len(archive.infolist())
    found = _END.unpack_from(tail, size)
    disks, entries, end_size, end_start, locator, end_place = found[4:6], found[6:8], *found[8:11], found[12]
    same = disks == (0, 0) and entries == (count, count) and (end_size, end_start) == (size, start)
    located = locator == _LOCATOR and end_place == start + size and found[11::2] == (0, 1)
    return "" if same and located and found[1] == _END_64_SIZE else "the end of its zip directory does not match the rest"


# safetensors.


def safetensors_fault(size: int, file: IO[bytes]) -> str:
    """Return what is wrong with the header and size of a file of `size` bytes, or "". Raises OSError."""
    file.seek(0)
    header_size = int.from_bytes(file.read(8), "little")
    if size < 8 or header_size > min(MAX_HEADER, size - 8):
        return f"a header of {header_size} bytes does not fit into {size} bytes: truncated or damaged"
    try:
        header = json.loads(file.read(header_size))
        ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
        expected = header_size + 8 + max(ends, default=0)
        whole = expected == size
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return f"its header is damaged: {type(error).__name__}: {error}"
    return "" if whole else f"{size} bytes, expected {expected}: truncated or damaged"
