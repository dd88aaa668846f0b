"""All that a worker can ask of its process, as one line of JSON; what no two processes have in common is left out or compared."""

import os
import sys

modules_before = len(sys.modules)
import json  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402

limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")}


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines() if ":" in line)

handlers = {number.name: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.Signals}
told = json.loads(os.environ["ELASTIC_EXT_WORKER"])
instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
torchs = getattr(instantiator, "INSTANTIATED_TEMPLATE_DIR_PATH", None)  # of torch 2.8, which a standby has imported
state = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "flags": str(sys.flags),
    "path": [each for each in sys.path if each != torchs],
    "cwd": os.getcwd(),
    "env": dict(os.environ),
    "told": sorted(told.keys() - {"modules"}),
    "shown": dict(each.split("=", 1) for each in read("/proc/self/environ").split("\0") if each),
    "cmdline": read("/proc/self/cmdline").split("\0"),
    "signals": [status[name].strip() for name in ("SigBlk", "SigIgn")],
    "handlers": handlers,
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "parent": "elastic_ext.agent" in read(f"/proc/{os.getppid()}/cmdline"),
    "umask": status["Umask"].strip(),
    "limits": limits,
    "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "memory kill": read("/proc/self/oom_score_adj").strip(),
    "open": [os.path.basename(os.readlink(f"/proc/self/fd/{fd}").split(":")[0]) for fd in range(3)],
    "inherited": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
                        and os.get_inheritable(int(fd))),
    "threads": [len(os.listdir("/proc/self/task")), threading.current_thread() is threading.main_thread()],
    "streams": [(s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()) for s in (sys.stdin, sys.stdout,
                sys.stderr)],
}  # fmt: skip
import random  # noqa: E402
import uuid  # noqa: E402
from multiprocessing.process import current_process  # noqa: E402

import numpy  # noqa: E402
import torch  # noqa: E402

chance = [random.random(), float(numpy.random.random()), str(uuid.uuid4()), bytes(current_process().authkey).hex()]
chance += [torch.initial_seed(), torch.rand(1).item()]
state["torch"] = [torch.get_num_threads(), torch.is_grad_enabled()]
report = {
    "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "state": state,
    "chance": chance,
    "many": modules_before > 500,
}
attempt = report["attempt"]
sys.stdout.write("state " + json.dumps(report) + "\n")
if attempt == 0:
    sys.stdin.close()
    with open("gate") as gate:
        import fcntl

        fcntl.flock(gate, fcntl.LOCK_SH)
    os._exit(9)
