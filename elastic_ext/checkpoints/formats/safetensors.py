"""A safetensors file. https://huggingface.co/docs/safetensors/index#format

    8 bytes, little endian: size of the header
    the header, JSON: dtype and shape of each tensor, and its offsets in the bytes after the header
    the tensors

The format has no checksums: only header and size can be checked.
"""

from __future__ import annotations

import json
from typing import IO

from elastic_ext.checkpoints.formats.inspection import NO_OPTIMIZER, SAFETENSORS, Content, Inspection
from elastic_ext.checkpoints.storage import Entry

SUFFIX = ".safetensors"
MAX_HEADER = 100_000_000  # bytes; MAX_HEADER_SIZE of the safetensors library


def check(entry: Entry, file: IO[bytes]) -> Inspection:
    """Check the header and size of a file. Raises OSError if it cannot be read."""
    fault = _fault(entry.size, file)
    if fault:
        return Inspection(False, SAFETENSORS, fault)
    reason = f"header intact, size as expected, weights only: {NO_OPTIMIZER}"
    return Inspection(True, SAFETENSORS, reason, entry.mtime, size=entry.size, training=False)


def read_content(size: int, file: IO[bytes]) -> Content:
    """Check the header and size of a file of `size` bytes. The tensors cannot be verified. Raises OSError."""
    return Content(_fault(size, file), "safetensors has no checksums: only header and size were checked")


def _fault(size: int, file: IO[bytes]) -> str:
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
