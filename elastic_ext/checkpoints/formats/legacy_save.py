"""A file of `torch.save` before torch 1.6, or with `_use_new_zipfile_serialization=False`. No zip archive: five pickles in a row
(a magic number, a version, the machine, the object, the keys of the storages), then the storages of the tensors.

It has no checksums, and nothing marks its end. But the pickles say how many bytes must follow them (`_legacy_save` in
torch/serialization.py: each storage is its number of elements in 8 bytes, and its bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from elastic_ext.checkpoints.formats.peek import MAX_BYTES, Peeked, PeekError, peek_first

START = 32  # bytes of the file that `matches` needs
_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_BEGIN = b"\x80\x02\x8a\x0a" + _MAGIC
_FIRST_READ = 1 << 20  # bytes

# Bytes of an element; 1 for all others, which are quantized or untyped.
_ELEMENT = {
    **{"ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "DoubleStorage": 8, "LongStorage": 8, "FloatStorage": 4},
    **{"IntStorage": 4, "QInt32Storage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "ShortStorage": 2},
}


@dataclass(frozen=True)
class LegacyFile:
    """What such a file holds. fault: what is damaged, or "". saved: with stand-ins for all objects."""

    fault: str = ""
    saved: object = None


def matches(start: bytes) -> bool:
    """Return whether a file that begins with these bytes is of this format, whole or cut short."""
    return start[:1] == b"\x80" and (_MAGIC in start or _BEGIN.startswith(start))


def read(file: IO[bytes], size: int) -> LegacyFile:
    """Check the pickles and the size of a file. Its tensors are not read. Raises OSError."""
    try:
        pickles = _pickles(file, size)
    except PeekError as error:
        return LegacyFile(f"damaged or cut short: {error}")
    saved, keys = pickles[3], pickles[4].value
    if not isinstance(keys, list) or not all(str(key) in saved.storages for key in keys):
        return LegacyFile("the list of its tensors does not match what was saved")
    sizes = (saved.storages[str(key)] for key in keys)
    expected = sum(each.length for each in pickles) + sum(8 + _ELEMENT.get(kind, 1) * count for kind, count in sizes)
    if size != expected:
        return LegacyFile(f"{size} bytes, expected {expected}: truncated or damaged")
    return LegacyFile(saved=saved.value)


def _pickles(file: IO[bytes], size: int) -> list[Peeked]:
    """Return the five pickles. Reads as much of the file as they take. Raises PeekError, OSError."""
    length = _FIRST_READ
    while True:
        file.seek(0)
        data, found, at = file.read(length), [], 0
        try:
            for _ in range(5):
                found.append(peek_first(data[at:]))
                at += found[-1].length
        except PeekError:
            if length >= min(size, MAX_BYTES):
                raise
            length *= 4
        else:
            return found
