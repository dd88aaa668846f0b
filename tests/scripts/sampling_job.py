"""Two epochs over 60 samples with an ElasticSampler and a loader that reads ahead. Prints each rank's samples of each step.

sampling_job.py STEPS    stop after so many steps of this run, with a save; 0: at the end
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import elastic_ext

BATCH, EPOCHS = 3, 2
limit, made = int(sys.argv[1]), 0
dist.init_process_group("gloo")
data, model = range(60), torch.nn.Linear(1, 1)
sampler = elastic_ext.ElasticSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=1)
with elastic_ext.Checkpointer(model=model, extra={"sampler": sampler}) as checkpointer:
    step = checkpointer.load().step
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            os.write(1, f"epoch {epoch}: {' '.join(map(str, batch.tolist()))}\n".encode())
            sampler.advance(len(batch))
            step, made = step + 1, made + 1
            if made == limit:
                break
        if made == limit:
            break
    checkpointer.save(step)
dist.destroy_process_group()
