"""What a worker does to the memory that it shares with the agent does not end the agent: a mapping of what has gone would."""

from __future__ import annotations

import mmap
import os
from contextlib import closing

import pytest

from elastic_ext.workers import logs, progress_layout, relay
from elastic_ext.workers.progress import ProgressTable


@pytest.mark.parametrize("left", [0, 12, progress_layout.ROW_BYTES + 12])
def test_a_truncated_table_ends_no_agent(tmp_path, left):
    """A script may truncate what it has open by mistake, or fill a directory's files anew. What is left is still read."""
    table = ProgressTable(str(tmp_path / "progress"), 2)
    with open(table.path, "r+b") as file, closing(mmap.mmap(file.fileno(), 0)) as memory:
        for slot in range(2):
            memoryview(memory)[slot * progress_layout.ROW_BYTES :].cast("Q")[progress_layout.PID] = 7 + slot
        assert [row.pid for row in table.read_all()] == [7, 8]
        os.truncate(table.path, left)
        assert [row.pid for row in table.read_all()] == [7 if left else 0, 8 if left > progress_layout.ROW_BYTES else 0]
        assert table.read(1).steps == 0
        table.want_save(1, 3)
        table.repeat(5)
    with open(table.path, "rb") as file, closing(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as memory:
        words = memoryview(memory)[progress_layout.ROW_BYTES :].cast("Q")
        assert (words[progress_layout.SAVE_WANTED], words[progress_layout.REPEATED]) == (3, 5)
        words.release()


def test_the_kept_stderr_gets_no_shorter(tmp_path):
    """The agent and its relay have it mapped."""
    source = logs.make_source(str(tmp_path / "stderr"), shown=False)
    with closing(source), pytest.raises(PermissionError):
        os.ftruncate(source.ring_fd, relay.HEADER_BYTES)
