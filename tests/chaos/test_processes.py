"""Processes as the chaos suites see them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.chaos.processes import descendants, zombies

PARENT = """
import os, sys
child = os.fork()
if child == 0:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(child, flush=True)
sys.stdin.readline()
os.waitpid(child, 0)
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.seam
def test_an_ended_child_is_a_zombie_until_awaited():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True, bufsize=1) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert (child, parent.pid) in seen()
        assert not {child} & {each.pid for each in descendants(os.getpid())}
        parent.stdin.write("\n")
        parent.stdout.readline()
        assert not {child} & {pid for pid, _ in seen()}
        parent.stdin.close()
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        assert not {parent.pid} & {pid for pid, _ in seen()}, "it is a child of this process, which waits for it"


def seen() -> list[tuple[int, int]]:
    return [(child.pid, parent.pid) for child, parent in zombies(os.getpid())]
