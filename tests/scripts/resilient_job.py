"""A small job of a trainer with what `elastic_ext.training` has for it. Its dropout and its order show what a resume restores.

resilient_job.py huggingface|lightning|accelerate DIR STEPS     saves at every 5th step by default
    $KILL=RANK:STEP: that rank is killed once, when its step STEP begins. $BATCH: samples of one optimizer step over all ranks.
    $SAMPLES: of the dataset. $EVERY: 0 to save by cost. $SAVED: how the Trainer of Hugging Face saves besides.
Prints the samples of each step and rank, the last loss, and a checksum of the weights.
"""

import hashlib
import os
import signal
import sys

import torch
from lines import say
from torch.utils.data import DataLoader, Dataset

import elastic_ext

LIBRARY, DIRECTORY, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
SAMPLES, MICRO = int(os.environ.get("SAMPLES", "56")), 2
EVERY = int(os.environ.get("EVERY", "5")) or None
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
micro_steps = elastic_ext.accumulation(int(os.environ.get("BATCH", "8")), MICRO).micro_steps
begun, last_loss = 0, 0.0


class Points(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(index)), "index": torch.tensor(index)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, x, index):
        global begun, last_loss
        begun += 1
        if attempt == 0 and os.environ.get("KILL") == f"{rank}:{1 + (begun - 1) // micro_steps}":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.layers(x).squeeze(-1) - x.sum(-1)).square().mean()
        last_loss = loss.item()
        say(f"attempt {attempt} rank {rank} samples {index.tolist()}")
        return {"loss": loss}


def huggingface(net):
    from transformers import Trainer, TrainingArguments

    from elastic_ext.training.huggingface import Resilience

    args = TrainingArguments(
        output_dir=elastic_ext.save_dir(),
        save_strategy="steps" if "SAVED" in os.environ else "no",
        save_steps=int(os.environ.get("SAVED", "1000")),
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=micro_steps,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
    )
    trainer = Trainer(model=net, args=args, train_dataset=Points(), callbacks=[Resilience(every=EVERY)])
    trainer.train(resume_from_checkpoint=elastic_ext.resume_from())
    return trainer.state.global_step


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
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            decay = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        max_epochs=-1,
        accumulate_grad_batches=micro_steps,
        callbacks=[Resilience(every=EVERY)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Points(), batch_size=MICRO, shuffle=True), ckpt_path=elastic_ext.resume_from())
    return trainer.global_step


def accelerate(net):
    from accelerate import Accelerator, DataLoaderConfiguration

    from elastic_ext.training.accelerate import Resilience

    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_steps, dataloader_config=config)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(Points(), batch_size=MICRO, shuffle=True)
    model, optimizer, loader, decay = accelerator.prepare(net, optimizer, loader, decay)
    saves = Resilience(accelerator, every=EVERY)
    step = saves.resume()
    for _epoch, batches in saves.epochs(loader, 1_000_000):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                decay.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                saves.step_ended(step)
            if step == STEPS:
                return step
    return step


torch.manual_seed(0)
net = Net()
torch.manual_seed(rank + 1)
end = {"huggingface": huggingface, "lightning": lightning, "accelerate": accelerate}[LIBRARY](net)
weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters())).hexdigest()
say(f"rank {rank} told {elastic_ext.resume_step()} ended {end} loss {last_loss.hex()} weights {weights}")
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
