"""A job as users of Hugging Face's Trainer write it, with a tiny random model, and our callback.

hf_job.py DIR STEPS     $KILL=RANK:STEP: that rank is killed once, when its step STEP begins; $STAY: likewise, it stays there.
    $BEST: save what evaluates best. $EVERY: save every so many steps. $JIT: the Trainer's own save before it leaves, instead of
    ours; if it is "torn", the worker is killed at the end of that save. $GATE: wait there after the last step.
"""

import fcntl
import os
import signal
import sys
import threading

import torch
from lines import say
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import elastic_ext
from elastic_ext.training.huggingface import SaveOnDemand

LENGTH, WORDS = 8, 32


class Texts(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps = 0


def count(module, args, kwargs):
    """For the test: how many steps this process has begun."""
    global steps
    steps += module.training
    if steps == 5:
        say(f"under way {rank}")
    if attempt == 0 and os.environ.get("KILL") == f"{rank}:{steps}":
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0 and os.environ.get("STAY") == f"{rank}:{steps}":
        threading.Event().wait()


class Torn(Trainer):
    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if os.path.exists(f"{args.output_dir}/checkpoint-{self.state.global_step}/checkpoint-is-incomplete.txt"):
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=LENGTH, vocab_size=WORDS))
model.register_forward_pre_hook(count, with_kwargs=True)
jit = os.environ.get("JIT", "")
best = {"eval_strategy": "steps", "save_strategy": "best", "eval_steps": 2, "metric_for_best_model": "loss"}
args = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=int(sys.argv[2]),
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    ddp_backend="gloo",
    ddp_find_unused_parameters=False,
    save_steps=int(os.environ.get("EVERY", "3")),
    **(best if "BEST" in os.environ else {"save_strategy": "steps"}),
    **({"enable_jit_checkpoint": True} if jit else {}),
)
made = Torn if jit == "torn" else Trainer
callbacks = [] if jit else [SaveOnDemand()]
trainer = made(model=model, args=args, train_dataset=Texts(), eval_dataset=Texts(), callbacks=callbacks)
trainer.train(resume_from_checkpoint=elastic_ext.resume_from())
end = trainer.state.global_step
if "GATE" in os.environ:
    with open(os.environ["GATE"]) as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)  # the test holds it
say(f"rank {rank} attempt {attempt} told {elastic_ext.resume_step()} went {end - steps} to {end}")
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends beside them (PyTorch issue 190489)
