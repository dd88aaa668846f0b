"""The verdict where schedulers look, whatever is in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from elastic_ext import exits

NO_ROOM = """
import resource, sys
from elastic_ext import exits
resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))  # as a full disk does: the file is there, the bytes are not taken
exits.tell({"a": 1}, sys.argv[1])
"""


def test_the_verdict_file_is_replaced(tmp_path):
    path = tmp_path / "verdict"
    path.write_text("old")
    exits.tell({"a": 1}, str(path))
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["verdict"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    path = tmp_path / "verdict"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", NO_ROOM, str(path)], capture_output=True, text=True, check=True, timeout=60)
    assert "could not be written" in done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["verdict"]


@pytest.mark.parametrize("path", ["/", ".", "..", "/dev/full", "{0}/pipe", "{0}", "{0}/no/verdict"])
def test_a_path_that_is_no_file_ends_no_agent(tmp_path, path, caplog):
    """A pipe without a reader would block for ever; a device must not be replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    exits.tell({"a": 1}, path.format(tmp_path))
    assert "could not be written" in caplog.text
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_pipe_and_a_device_are_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    exits.tell({"a": 1}, str(tmp_path / "link"))
    assert json.loads(os.read(reader, 4096)) == {"a": 1}
    os.close(reader)
    assert (tmp_path / "link").is_symlink()
