"""A job without torch or collectives that does what it is told, for tests that are about the agent only.

plain_job.py [FAULT:RANK ...]      faults happen in the first attempt only, in which the other ranks then wait
"""

import json
import os
import signal
import sys

from lines import say

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
report = {"rank": rank, "attempt": attempt, "pid": os.getpid()}
say(json.dumps(report))
faults = {int(who): fault for fault, _, who in (argument.partition(":") for argument in sys.argv[1:])}
if faults and attempt == 0:
    match faults.get(rank, "hang"):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "runtime":
            raise RuntimeError("flaky")
        case "hang":
            signal.pause()
        case unknown:
            raise NotImplementedError(unknown)
say(f"finished {rank}")
