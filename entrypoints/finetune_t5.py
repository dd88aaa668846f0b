#!/usr/bin/env python3
"""Train a T5 with Hugging Face's Trainer and FSDP2; weights are random and the tokenizer is made on the spot: no download.

    torchrun --nproc-per-node=8 finetune_t5.py --model_id=google-t5/t5-large --epochs=10
    python -m elastic_ext.agent --nproc-per-node=2 --rdzv-conf=checkpoint_dir=checkpoints finetune_t5.py --d_model=64 --layers=2

It learns to name functions of Python's library by their documentation. Each start resumes from the agent's choice, else from the
newest complete checkpoint, at any world size. Worth copying:

* `SaveOnDemand`: when the job has to leave, all ranks save the same step.
* --global_batch: a restart with fewer or more ranks keeps the number of examples per optimizer step.
* Sharded checkpoints (SHARDED_STATE_DICT): each rank writes its part, and they load at another world size.
"""

import argparse
import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

from elastic_ext import accumulation
from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.training.huggingface import SaveOnDemand

# The sizes that the models of these names have; https://huggingface.co/google-t5/t5-large/blob/main/config.json and so on.
MODELS = {
    "google-t5/t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "google-t5/t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "google-t5/t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "google-t5/t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="environment: CHECKPOINT_DIR is the default of --checkpoint_dir; if unset, the agent's checkpoint_dir"
    )
    add = parser.add_argument
    directory = os.environ.get("CHECKPOINT_DIR") or os.environ.get("ELASTIC_EXT_CHECKPOINT_DIR") or "checkpoints"
    add("--model_id", choices=MODELS, default="google-t5/t5-small", help="its sizes; nothing is downloaded")
    add("--d_model", type=int, help="another width, for a try on a small machine; the other sizes shrink alike")
    add("--layers", type=int, help="another number of layers")
    add("--epochs", type=int, default=1)
    add("--max_steps", type=int, default=-1, help="stop after this many optimizer steps (-1: no limit)")
    add("--batch", type=int, default=4, help="examples per rank and micro-step")
    add("--gradient_accumulation_steps", type=int, default=1)
    add(
        "--global_batch",
        type=int,
        default=0,
        help="examples per optimizer step, over all ranks, in place of --gradient_accumulation_steps (0: not given)",
    )
    add("--activation_checkpointing", action="store_true")
    add("--examples", type=int, default=512)
    add("--lr", type=float, default=3e-4)
    add("--checkpoint_dir", default=directory, help="a path that every node reaches")
    return parser.parse_args()


def functions() -> Iterator[tuple[str, str]]:
    """The first line of documentation, and the name, of functions of Python's library, in sorted order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                yield doc.partition("\n")[0], node.name


def sized(args: argparse.Namespace, tokenizer: ByT5Tokenizer) -> T5Config:
    sizes = dict(MODELS[args.model_id])
    if args.d_model:
        heads = min(sizes["num_heads"], 4)
        sizes |= {"d_model": args.d_model, "d_kv": args.d_model // heads, "d_ff": 4 * args.d_model, "num_heads": heads}
    if args.layers:
        sizes["num_layers"] = args.layers
    pad = tokenizer.pad_token_id
    return T5Config(vocab_size=len(tokenizer), decoder_start_token_id=pad, pad_token_id=pad, **sizes)


def settings(args: argparse.Namespace) -> TrainingArguments:
    several, cpu = int(os.environ.get("WORLD_SIZE", "1")) > 1, not torch.cuda.is_available()
    micro_steps = args.gradient_accumulation_steps
    if args.global_batch:
        micro_steps = accumulation(args.global_batch, args.batch).micro_steps
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["T5Block"],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    made = TrainingArguments(
        output_dir=args.checkpoint_dir,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=micro_steps,
        # That of fsdp_config would change the names of the weights, and so which checkpoints fit.
        gradient_checkpointing=args.activation_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if args.activation_checkpointing else None,
        learning_rate=args.lr,
        logging_steps=1,
        save_strategy="epoch",
        save_total_limit=3,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu else None,
        fsdp=several,
        fsdp_config=fsdp if several else None,
        report_to="none",
        disable_tqdm=True,
    )
    if several and cpu:
        made.device  # joins the process group  # noqa: B018
        # accelerate shards for accelerators only, and would take DDP here; FSDP2 itself runs on CPUs.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    return made


def chosen_checkpoint(directory: str) -> str | None:
    """The agent's choice; without an agent that makes one, what rank 0 finds."""
    chosen = os.environ.get("ELASTIC_EXT_RESUME_FROM")
    if chosen is not None:
        return chosen or None
    resume = newest_complete(directory).resume
    found = [resume.path if resume else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def main() -> None:
    args = parse_args()
    set_seed(0)
    tokenizer = ByT5Tokenizer()  # bytes: nothing to learn or to load
    examples = [
        {"input_ids": tokenizer(doc[:120]).input_ids, "labels": tokenizer(name).input_ids}
        for (doc, name), _ in zip(functions(), range(args.examples), strict=False)
    ]
    model = T5ForConditionalGeneration(sized(args, tokenizer))
    # One module in three places instead of three with one weight: torch 2.13 refuses a weight that two FSDP groups can see.
    model.set_input_embeddings(model.get_input_embeddings())
    trainer = Trainer(
        model=model,
        args=settings(args),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=[SaveOnDemand()],
    )
    # T5 takes the number of items in the batch and ignores it; the Trainer counts on it, and would add up instead of averaging.
    trainer.model_accepts_loss_kwargs = False
    start = chosen_checkpoint(args.checkpoint_dir)
    if trainer.is_world_process_zero():
        print(f"resuming from {start}" if start else "starting from random weights", flush=True)
    trainer.train(resume_from_checkpoint=start)
    if trainer.is_world_process_zero():
        wrapped = trainer.accelerator.distributed_type.value
        print(f"done at step {trainer.state.global_step}, epoch {trainer.state.epoch:g} ({wrapped})", flush=True)


def run() -> None:
    """What the process of a worker does."""
    main()
    if not torch.cuda.is_initialized():  # gloo's threads may abort an interpreter that ends beside them (pytorch issue 190489)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    run()
