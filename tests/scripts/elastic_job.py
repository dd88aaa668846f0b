"""A job without collectives whose nodes come and go: each worker says where it is and waits until the test lets go of $GATE.

elastic_job.py [FAULT:ATTEMPT]      bug: an error that comes back on every try
"""

import fcntl
import json
import os
import sys

env = os.environ
report = {
    "rank": int(env["RANK"]),
    "world": int(env["WORLD_SIZE"]),
    "attempt": int(env["TORCHELASTIC_RESTART_COUNT"]),
    "node": env["NODE"],
    "pid": os.getpid(),
}
sys.stdout.write(json.dumps(report) + "\n")
for argument in sys.argv[1:]:
    fault, _, attempt = argument.partition(":")
    if int(attempt) == report["attempt"] and fault == "bug":
        raise NameError("a bug on one node")
with open(env["GATE"]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)  # the test holds it
sys.stdout.write(f"finished {report['rank']}\n")
