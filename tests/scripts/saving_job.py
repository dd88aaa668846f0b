"""Steps with one collective each, of uneven length on the ranks, until $STOP is there; saves when the agent asks.

saving_job.py DIR [stall]   DIR: gets saved.<attempt>.<rank> with the step of each save
                            stall: nothing happens at step 3 until $STALL is there
$SAVE_WHEN: a file for which a save waits
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lines import say

import elastic_ext

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
how = sys.argv[2:]
dist.init_process_group("gloo")
say(f"started {rank} of {dist.get_world_size()} attempt {attempt}")
step = 0
while True:
    time.sleep(0.002 * (rank + 1) if step % 3 == rank % 3 else 0)  # the work of a step
    over = torch.tensor([float(os.path.exists(os.environ["STOP"]))])
    dist.all_reduce(over)
    step += 1
    elastic_ext.report_progress()
    if step == 3 and "stall" in how:
        while not os.path.exists(os.environ["STALL"]):
            time.sleep(0.01)
    if step == 3:
        say(f"steps {rank} attempt {attempt}")
    if elastic_ext.save_requested():
        begin = time.monotonic()
        say(f"saves {rank}")
        while "SAVE_WHEN" in os.environ and not os.path.exists(os.environ["SAVE_WHEN"]):
            time.sleep(0.01)
        with Path(sys.argv[1], f"saved.{attempt}.{rank}").open("a") as file:
            file.write(f"{step}\n")
        dist.barrier()
        elastic_ext.report_saved(step, time.monotonic() - begin)
        say(f"saved by {rank}")
    if over.item():
        break
dist.destroy_process_group()
