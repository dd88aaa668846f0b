"""What the suite does to the surroundings of a host, on a process of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.seeded.surroundings import clocks, unavailable
from tests.programs import required

SCRIPT = """
import datetime, json, queue, sys, threading, time
def told():
    began = time.monotonic()
    time.sleep(0.01)
    threading.Event().wait(0.01)
    print(json.dumps([time.time(), datetime.datetime.now().timestamp(), time.monotonic() - began]), flush=True)
told()
sys.stdin.readline()
told()
"""


@pytest.mark.seam
@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_running_process_sees_a_clock_step(tmp_path: Path, step_s: int):
    required(not unavailable("clock step"), unavailable("clock step"))
    one, other = clocks(tmp_path, "ab").values()
    pipe, command = subprocess.PIPE, [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, env=one.environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        before = json.loads(process.stdout.readline())
        one.step(step_s)
        out, err = process.communicate("\n", timeout=60)
    assert err == ""
    for shown, ahead_s in ((before, 0), (json.loads(out), step_s)):
        assert shown[0] - time.time() == pytest.approx(ahead_s, abs=600)
        assert shown[1] - time.time() == pytest.approx(ahead_s, abs=600)
        assert shown[2] < 60
    assert (one.ahead_s, other.ahead_s) == (step_s, 0)
