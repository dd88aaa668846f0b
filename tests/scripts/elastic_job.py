"""A job without collectives whose nodes come and go: each worker says where it is and waits until the test lets go of $GATE.

elastic_job.py [FAULT:ATTEMPT]      bug: an error that comes back on every try; deaf: SIGTERM does not end it;
                                    segv: crash; segvN: rank N crashes; exitN: exit with this code,
                                    once the test lets go of $FAULTS followed by the attempt, if that is set
"""

import fcntl
import json
import os
import signal
import sys

env = os.environ
report = {
    "rank": int(env["RANK"]),
    "world": int(env["WORLD_SIZE"]),
    "attempt": int(env["TORCHELASTIC_RESTART_COUNT"]),
    "node": env["NODE"],
    "pid": os.getpid(),
}
faults = {
    fault for fault, _, attempt in (argument.partition(":") for argument in sys.argv[1:]) if int(attempt) == report["attempt"]
}
if "deaf" in faults:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write(json.dumps(report) + "\n")
sys.stdout.flush()
if not faults.isdisjoint({"segv", f"segv{report['rank']}"}):
    os.kill(os.getpid(), signal.SIGSEGV)
for fault in faults:
    if fault.startswith("exit"):
        if "FAULTS" in env:
            with open(f"{env['FAULTS']}{report['attempt']}") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
        os._exit(int(fault[4:]))
if "bug" in faults:
    raise NameError("a bug on one node")
with open(env["GATE"]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)  # the test holds it
sys.stdout.write(f"finished {report['rank']}\n")
