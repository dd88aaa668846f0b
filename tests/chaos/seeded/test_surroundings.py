"""What the suite does to the surroundings of a host, on a process of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.seeded.schedule import Fault, Plan
from tests.chaos.seeded.surroundings import Surroundings, unavailable
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


def planned(kind: str) -> Plan:
    required(not unavailable(kind), unavailable(kind))
    return Plan(0, 2, "own hosts", "2", False, False, False, "folder", (Fault(kind, "a", 4, 0.0, 1.0),))


@pytest.mark.seam
@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_step_of_the_clock_is_seen_by_a_process_that_runs_and_its_waits_stay_as_long(tmp_path: Path, step_s: int):
    with ExitStack() as stack:
        surroundings = Surroundings(planned("clock step"), tmp_path, stack)
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SCRIPT]
        process = subprocess.Popen(command, env=surroundings.environ("a"), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        stack.enter_context(process)
        assert process.stdout is not None
        before = json.loads(process.stdout.readline())
        surroundings.set_clock("a", step_s)
        out, err = process.communicate("\n", timeout=60)
        assert err == ""
        after = json.loads(out)
        for shown, ahead_s in ((before, 0), (after, step_s)):
            assert shown[0] - time.time() == pytest.approx(ahead_s, abs=600)
            assert shown[1] - time.time() == pytest.approx(ahead_s, abs=600)
            assert shown[2] < 60
        assert surroundings.clock("a") == step_s
        assert surroundings.clock("b") == 0
