"""How many warm standbys does an agent have? Nothing tells a worker or a benchmark of them: look at the agent's children."""

import os
import time

STAY_S = 1.5  # what is learned late ends standbys that waited, and others come
LOOK_S = 0.05


def standbys(agent: int) -> int:
    """Children of the agent that run the standbys' program, less their server."""
    found = 0
    for task in os.listdir(f"/proc/{agent}/task"):
        with open(f"/proc/{agent}/task/{task}/children") as children:
            pids = children.read().split()
        for pid in pids:
            try:
                with open(f"/proc/{pid}/cmdline") as command:
                    found += "standby_server.py" in command.read()
            except OSError:
                pass  # it has ended
    return found - 1


def await_standbys(agent: int, wanted: int) -> None:
    """Until there are so many, and stay."""
    since = time.monotonic()
    while time.monotonic() - since < STAY_S:
        if standbys(agent) < wanted:
            since = time.monotonic()
        time.sleep(LOOK_S)
