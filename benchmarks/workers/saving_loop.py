"""A worker of save_record.py: steps of AdamW with many parameters, then saves of many files. Prints its times as JSON.

saving_loop.py DIRECTORY PARAMETERS STEPS FILES
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch

directory, (parameters, steps, files) = Path(sys.argv[1]), map(int, sys.argv[2:])
torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(parameters)]
for weight in weights:
    weight.grad = torch.ones(1)
optimizer = torch.optim.AdamW(weights, lr=1e-3)
for _ in range(20):
    optimizer.step()
step_s = []
for _ in range(10):
    began = time.process_time()
    for _ in range(steps // 10):
        optimizer.step()
    step_s.append((time.process_time() - began) / (steps // 10))
event_s = []
for _ in range(20):
    began = time.process_time()
    for _ in range(20_000):
        id(weights)
    event_s.append((time.process_time() - began) / 20_000)
save_s = []
for number in range(3):
    target = directory / f"save_{number}"
    target.mkdir()
    began = time.process_time()
    for each in range(files):
        (target / f"part_{each}.bin").write_bytes(b"x")
    save_s.append(time.process_time() - began)
    optimizer.step()
    shutil.rmtree(target)
    optimizer.step()
print(json.dumps({"step_s": min(step_s), "save_s": min(save_s), "event_s": min(event_s)}))
