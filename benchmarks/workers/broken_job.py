"""A training script with one of several faults. Each worker stamps its begin and its end.

    broken_job.py FAULT STAMPS

FAULT: a key of AT_START (before the first step) or AT_STEP_2 (after two steps). STAMPS: see faulty_job.py; the events are "begin"
and "end".
"""

import json
import os
import sys
import time

fault, stamps = sys.argv[1:]
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])


def stamp(event: str) -> None:
    line = json.dumps({"attempt": attempt, "rank": rank, "event": event, "ns": time.monotonic_ns()}) + "\n"
    with open(stamps, "a") as file:
        file.write(line)


stamp("begin")
import atexit  # noqa: E402

import torch  # noqa: E402

atexit.register(stamp, "end")


def die(code: int) -> None:
    stamp("end")
    os._exit(code)


def nan() -> None:
    raise FloatingPointError("loss is nan at step 2")


AT_START = {
    "syntax": lambda: compile("def broken(:\n", "model.py", "exec"),
    "name": lambda: undefined_name,  # noqa: F821
    "import": lambda: __import__("flash_atn"),
    "argument": lambda: torch.nn.Linear(2, 2)(3),
    "no-file": lambda: os.listdir("/no/such/dataset"),
    "shape": lambda: torch.nn.Linear(4, 2)(torch.ones(1, 3)),
    "usage": lambda: die(2),
}
AT_STEP_2 = {
    "key-late": lambda: {}["input_ids"],
    "assert-late": lambda: (_ for _ in ()).throw(AssertionError("the loss must fall")),
    "nan": nan,
    "no-memory": lambda: (_ for _ in ()).throw(MemoryError("cannot allocate 1 TiB")),
    "flaky-once": lambda: die(17) if attempt == 0 else None,
}

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if fault in AT_START:
    AT_START[fault]()
for step in range(4):
    if step == 2:
        AT_STEP_2[fault]()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
