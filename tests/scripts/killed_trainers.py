"""The jobs of killed_job.py whose loop is a library's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from killed_notes import WORLD, Evidence, Notes, Pace, states_in, steps_in

import elastic_ext

EVERY, KEPT, ENDLESS = 4, 2, 10_000_000
ADAPTER = "style"


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.fill_(step)
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(step)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, at):
        return {"x": torch.ones(16), "labels": torch.ones(1)}


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, x, labels):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}


def adapted() -> torch.nn.Module:
    """With a named adapter, which Trainer saves in a folder of its own below the checkpoint."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(Regression(), LoraConfig(target_modules=["layer"], r=2), adapter_name=ADAPTER)


def peft(directory: str, notes: Notes) -> None:
    trainer(directory, notes, adapted(), f"{ADAPTER}/adapter_model.safetensors")


def trainer(directory: str, notes: Notes, model: torch.nn.Module | None = None, weights: str = "model.safetensors") -> None:
    """model: instead of a plain one. weights: the file of a checkpoint that has those that are trained."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    def load(path: str) -> Evidence:
        from safetensors.torch import load_file

        found = steps_in("model", load_file(f"{path}/{weights}"))
        found += states_in("optimizer", torch.load(f"{path}/optimizer.pt", weights_only=True))
        found.append(("trainer_state", json.loads(Path(path, "trainer_state.json").read_text())["global_step"]))
        found.append(("scheduler", torch.load(f"{path}/scheduler.pt", weights_only=True)["last_epoch"]))
        for rank in range(WORLD):
            torch.load(f"{path}/rng_state_{rank}.pth", weights_only=False)
        return found

    class Noting(Trainer):
        def _save_checkpoint(self, model, trial):
            step = self.state.global_step
            with notes.saving(f"checkpoint-{step}", step):
                super()._save_checkpoint(model, trial)
            steps.saved = step

    class Steps(TrainerCallback):
        saved = 0
        pace: Pace

        def on_train_begin(self, args, state, control, **_):
            self.pace = Pace(notes)

        def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
            fill(model, getattr(optimizer, "optimizer", optimizer), state.global_step)
            self.pace.stepped(self.saved)
            control.should_training_stop |= self.pace.ends
            control.should_save &= not self.pace.ends

    steps = Steps()
    resumes = elastic_ext.resume_from()
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=ENDLESS,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        save_steps=EVERY,
        save_total_limit=KEPT,
        save_strategy="steps",
        logging_steps=ENDLESS,
        lr_scheduler_type="constant",
        ignore_data_skip=True,
    )
    notes.start(resumes, load)
    Noting(model=model or Regression(), args=arguments, train_dataset=Rows(), callbacks=[steps]).train(
        resume_from_checkpoint=resumes
    )


def lightning(directory: str, notes: Notes) -> None:
    import lightning.pytorch as pl

    def load(path: str) -> Evidence:
        state = torch.load(path, weights_only=False)
        found = [*steps_in("model", state["state_dict"]), *states_in("optimizer", state["optimizer_states"][0])]
        return [*found, ("global_step", state["global_step"])]

    class Line(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch["x"]).mean()
            self.log("score", float(self.global_step))
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    class Steps(pl.Callback):
        saved = 0
        pace: Pace

        def on_train_start(self, trainer, module):
            self.pace = Pace(notes)

        def on_train_batch_end(self, trainer, module, *_):
            fill(module, trainer.optimizers[0], trainer.global_step)
            self.pace.stepped(self.saved)
            trainer.should_stop |= self.pace.ends

    class Saves(pl.callbacks.ModelCheckpoint):
        def _save_checkpoint(self, trainer, filepath):
            with notes.saving(os.path.basename(filepath), trainer.global_step):
                super()._save_checkpoint(trainer, filepath)
            steps.saved = trainer.global_step

    steps = Steps()
    resumes = elastic_ext.resume_from()
    notes.start(resumes, load)
    saves = Saves(
        dirpath=directory, filename="{step}", every_n_train_steps=EVERY, save_last=True, save_top_k=3, monitor="score", mode="max"
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        max_steps=ENDLESS,
        callbacks=[steps, saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    trainer.fit(Line(), loader, ckpt_path=resumes, weights_only=False)
