"""torchrun that tells when it is ready to begin: torch is imported, the rendezvous is not yet begun.

    told_torchrun.py SOCKET TORCHRUN-OPTIONS...

SOCKET: see stepping_job.py; the event is "agent". What Python and torch take to start is the same for every rendezvous.
"""

import json
import os
import socket
import sys
import time

from torch.distributed import run

path, *options = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
    message = {
        "node": os.environ["NODE"],
        "pid": os.getpid(),
        "rank": -1,
        "world": 0,
        "event": "agent",
        "ns": time.monotonic_ns(),
    }
    told.sendto(json.dumps(message).encode(), path)
run.main(options)
