"""A job of a trainer, for trainers.py: it saves every few steps in `save_dir()`, and resumes from what the agent chose.

    trainer_job.py TRAINER NOTES MB STEPS EVERY [KILLED]

MB: of a checkpoint. EVERY: steps from one save to the next, 0 for none. KILLED: rank 1 is killed once as this step begins.
NOTES gets lines `step ATTEMPT RANK STEP NS` as each step begins (CLOCK_MONOTONIC), at last `end ATTEMPT RANK LOSS WEIGHTS`.
Dropout and the order of the data show whether a resume is exact.
"""

import hashlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import elastic_ext

TRAINER, NOTES = sys.argv[1], sys.argv[2]
MB, STEPS, EVERY, KILLED = map(int, [*sys.argv[3:], "0"][:4])
BATCH, SAMPLES, LR = 4, 480, 1e-4
TENSORS = 3  # in a checkpoint, for each parameter: itself and two of AdamW
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
width = int((MB * 1e6 / 4 / TENSORS / 2) ** 0.5)
begun, last_loss = elastic_ext.resume_step() or 0, 0.0


def note(*words: object) -> None:
    file = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


class Points(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.randn(width, generator=torch.Generator().manual_seed(index))}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, width))

    def forward(self, x):
        global begun, last_loss
        begun += 1
        note("step", attempt, rank, begun, time.monotonic_ns())
        if attempt == 0 and rank == 1 and begun == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.layers(x) - x).square().mean()
        last_loss = loss.item()
        return {"loss": loss}


def huggingface(net):
    from transformers import Trainer, TrainingArguments

    from elastic_ext.training.huggingface import Resilience

    args = TrainingArguments(
        output_dir=elastic_ext.save_dir("unused"),
        save_strategy="no",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
    )
    callbacks = [Resilience(every=EVERY)] if EVERY else []
    Trainer(model=net, args=args, train_dataset=Points(), callbacks=callbacks).train(
        resume_from_checkpoint=elastic_ext.resume_from()
    )


def lightning(net):
    import lightning.pytorch as pl

    from elastic_ext.training.lightning import Resilience

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=LR)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[Resilience(every=EVERY)] if EVERY else [],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Points(), batch_size=BATCH, shuffle=True), ckpt_path=elastic_ext.resume_from())


def accelerate(net):
    from accelerate import Accelerator, DataLoaderConfiguration

    from elastic_ext.training.accelerate import Resilience

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Points(), batch_size=BATCH, shuffle=True))
    saves = Resilience(accelerator, "unused", every=EVERY or STEPS + 1)
    step = saves.resume()
    for _, batches in saves.epochs(loader, STEPS):
        for batch in batches:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            saves.step_ended(step)
            if step == STEPS:
                return


def dcp_async(net):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    group = dist.new_group()  # the collectives of a save must not meet those of training
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data, step, future = Points(), 0, None

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, f"random{rank}": torch.get_rng_state(), "step": step}

    if resumed := elastic_ext.resume_from():
        found = state()
        dcp.load(found, checkpoint_id=resumed)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        torch.set_rng_state(found[f"random{rank}"])
        step = found["step"]
    while step < STEPS:
        first = (step * 2 + rank) * BATCH
        x = torch.stack([data[(first + at) % SAMPLES]["x"] for at in range(BATCH)])
        model(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if EVERY and step % EVERY == 0:
            if future is not None:
                future.result()
            folder = Path(elastic_ext.save_dir())
            future = dcp.async_save(state(), checkpoint_id=folder / f"step-{step}", process_group=group)
            if rank == 0:
                shutil.rmtree(folder / f"step-{step - 2 * EVERY}", ignore_errors=True)
    if future is not None:
        future.result()


torch.manual_seed(0)
net = Net()
torch.manual_seed(rank + 1)
{"huggingface": huggingface, "lightning": lightning, "accelerate": accelerate, "dcp_async": dcp_async}[TRAINER](net)
weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()
note("end", attempt, rank, last_loss.hex(), weights)
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
