"""How many warm standbys does an agent have? Nothing tells a worker or a benchmark of them: look at the agent's children."""

import os
import time

STAY_S = 1.5  # what is learned late ends standbys that waited, and others come
LOOK_S = 0.05


def standbys(agent: int) -> int:
    """Children of the agent that run the standbys' program, less their server."""
    found = 0
    for task in os.listdir(f"/proc/{agent}/task"):
        for pid in _text(f"/proc/{agent}/task/{task}/children").split():
            found += "standby/server.py" in _text(f"/proc/{pid}/cmdline")
    return found - 1


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the thread or the process has ended
        return ""


def await_standbys(agent: int, wanted: int) -> None:
    """Until there are so many, and stay."""
    since = time.monotonic()
    while time.monotonic() - since < STAY_S:
        if standbys(agent) < wanted:
            since = time.monotonic()
        time.sleep(LOOK_S)
