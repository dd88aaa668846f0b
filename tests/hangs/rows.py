"""Progress rows, written as workers do."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from elastic_ext.workers import progress_layout


def write(path: str, slot: int, words: Mapping[int, int]) -> None:
    """Set these words of a row. path: of a progress table."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as shared, memoryview(shared).cast("Q") as table:
        for word, value in words.items():
            table[slot * progress_layout.ROW_BYTES // 8 + word] = value
