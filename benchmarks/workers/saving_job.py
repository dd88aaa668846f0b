"""A worker of save_record.py under an agent: it steps, and saves many files every second. Prints "ready", then its times as JSON.

saving_job.py DIRECTORY FILES SECONDS
"""

import json
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

directory, files, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
directory.mkdir(exist_ok=True)
torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(30)]
for weight in weights:
    weight.grad = torch.ones(1)
optimizer = torch.optim.AdamW(weights, lr=1e-3)


def save(number: int) -> float:
    began, target = time.monotonic(), directory / f"save_{number}"
    target.mkdir()
    for each in range(files):
        (target / f"part_{each}.bin").write_bytes(b"x")
    took = time.monotonic() - began
    if number > 1:
        shutil.rmtree(directory / f"save_{number - 2}")
    return took


for _ in range(20):
    optimizer.step()
print("ready", flush=True)
began, steps, save_s = time.monotonic(), 0, []
while (passed := time.monotonic() - began) < seconds:
    if passed >= len(save_s):
        save_s.append(save(len(save_s)))
    optimizer.step()
    steps += 1
print(json.dumps({"steps_per_s": steps / seconds, "save_s": statistics.median(save_s), "saves": len(save_s)}), flush=True)
