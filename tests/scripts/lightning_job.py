"""A job as users of Lightning write it, with a tiny random model, and our callback.

lightning_job.py DIR STEPS     $KILL=RANK:STEP: that rank is killed once, when its step STEP begins; $ASYNC: save beside the steps
"""

import os
import signal
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lines import say
from torch.utils.data import DataLoader, TensorDataset

import elastic_ext
from elastic_ext.training.lightning import SaveOnDemand

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ACCUMULATE = 2


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.count()
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def count(self):
        """For the test: how many batches this process has begun."""
        self.batches += 1
        if self.batches == 3 * ACCUMULATE:
            say(f"under way {rank}")
        if attempt == 0 and os.environ.get("KILL") == f"{rank}:{self.batches / ACCUMULATE:g}":
            os.kill(os.getpid(), signal.SIGKILL)


pl.seed_everything(0)
data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
model = Line()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_steps=int(sys.argv[2]),
    max_epochs=-1,
    accumulate_grad_batches=ACCUMULATE,
    callbacks=[pl.callbacks.ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=3, save_top_k=-1), SaveOnDemand()],
    plugins=[AsyncCheckpointIO()] if "ASYNC" in os.environ else None,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=elastic_ext.resume_from())
end = trainer.global_step
say(f"rank {rank} attempt {attempt} told {elastic_ext.resume_step()} went {end - model.batches / ACCUMULATE:g} to {end}")
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
