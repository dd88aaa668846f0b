"""Counts the warm standbys of an agent. Nothing reports them to a worker, so this looks at the agent's children."""

import os
import time

PROGRAM = "/workers/standby/"  # in the command line of the server and of the standbys that it forks
STAY_S = 1.5  # an import that the agent learns late ends the waiting standbys, and others take their place
CHECK_S = 0.05
LIMIT_S = 100.0  # most of it is imports, beside other jobs


def standbys(agent: int) -> int:
    """The children of the agent that run the standbys' program, without their server."""
    found = 0
    for task in os.listdir(f"/proc/{agent}/task"):
        for pid in _text(f"/proc/{agent}/task/{task}/children").split():
            found += PROGRAM in _text(f"/proc/{pid}/cmdline")
    return max(0, found - 1)


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the thread or the process has ended
        return ""


def await_standbys(agent: int, wanted: int) -> None:
    """Wait until the agent has had this many for STAY_S. Raises TimeoutError: it has not, after LIMIT_S."""
    since = began = time.monotonic()
    while time.monotonic() - since < STAY_S:
        if (found := standbys(agent)) < wanted:
            since = time.monotonic()
            if since - began > LIMIT_S:
                raise TimeoutError(f"the agent (pid {agent}) has {found} warm standbys, expected {wanted}; see its log for why")
        time.sleep(CHECK_S)
