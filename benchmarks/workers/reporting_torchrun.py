"""torchrun that reports when it is ready: it has imported torch and not yet begun the rendezvous.

    reporting_torchrun.py SOCKET TORCHRUN-OPTIONS...

SOCKET: see stepping_job.py; the event is "agent". The benchmark leaves out the time before it, which Python and torch take to
start, because it is the same for every rendezvous.
"""

import json
import os
import socket
import sys
import time

from torch.distributed import run

path, *options = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
    message = {
        "node": os.environ["NODE"],
        "pid": os.getpid(),
        "rank": -1,
        "world": 0,
        "event": "agent",
        "ns": time.monotonic_ns(),
    }
    events.sendto(json.dumps(message).encode(), path)
run.main(options)
