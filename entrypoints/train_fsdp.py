#!/usr/bin/env python3
"""Train a small byte-level transformer with FSDP2; it can be stopped, killed and rescaled at any step.

    torchrun --nproc-per-node=2 train_fsdp.py                       # stock torchrun
    python -m elastic_ext.agent --nproc-per-node=2 train_fsdp.py    # the same script under elastic_ext
    python train_fsdp.py                                            # one process

Each start resumes from the newest complete checkpoint, at any world size. Worth copying from this script:

* `elastic_ext.Checkpointer` saves the complete state: model, optimizer, scheduler, each rank's random generators, the data
  loader, step and epoch. It does so in the background, while training continues. On CPU, with the same world size and number
  of threads, the losses after a resume equal those of an uninterrupted run to the bit.
* Each rank calls `save_requested` after each step. When the job has to leave, or a person runs `elastic-ext checkpoints save`,
  all ranks save the same step.
* Step k of epoch e trains on the same global batch at every world size, split over the ranks, unevenly if necessary. So all
  ranks' data loaders are at the same position, and the state of any one is right for all ranks at another world size.
* Checkpoints are taken between optimizer steps, because half-accumulated gradients of FSDP2 cannot be saved.

With --save-every=epoch, rank 0 writes a file for torch.load after each epoch instead, checkpoint_epoch_N.pt: the form for a
checkpoint that other programs must read. It holds the whole model, so rank 0 needs the memory for that, and training waits for
it. A checkpoint of either form is resumed from, whatever --save-every is.

--checkpoint-dir must be on storage that every node reaches. To return to an older checkpoint, remove the newer ones. The script
needs no health check: every step has collectives, which fail when a peer is gone. --health-every has one nevertheless, which
names the ranks that are missing.
"""

import argparse
import hashlib
import math
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recomputed

from elastic_ext import Checkpointer, health_barrier, report_saved
from elastic_ext.checkpoints.choice.listing import newest_complete
from elastic_ext.checkpoints.writing.checkpointer import SaveEvent

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"no module {error.name}: resuming in mid-epoch needs torchdata's data loader; "
        "pip install 'elastic_ext[jobs]' or torchdata"
    ) from None

EPILOG = """environment:
  CHECKPOINT_DIR               default of --checkpoint-dir; if unset, the agent's checkpoint_dir, else "checkpoints"
  ELASTIC_EXT_RESUME_FROM      load exactly this checkpoint instead of the newest: a path, or a URL for fsspec
  TRAIN_FAULT=KIND:RANK:STEP   for demonstrations: RANK fails after STEP steps, before the next one. KIND is kill (SIGKILL),
                               stop (SIGSTOP), exit (status 3) or raise. Ignored where TORCHELASTIC_RESTART_COUNT is above 0"""


EPOCH = 0  # args.save_every for --save-every=epoch
EPOCH_FILE = re.compile(r"checkpoint_epoch_(\d+)\.pt")


def default_directory() -> str:
    return os.environ.get("CHECKPOINT_DIR") or os.environ.get("ELASTIC_EXT_CHECKPOINT_DIR") or "checkpoints"


def steps_or_epoch(text: str) -> int:
    """A number of steps, 1 or more; 0 for "epoch"."""
    if text == "epoch":
        return EPOCH
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected epoch or a number of steps, 1 or more")
    return int(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint-dir", default=default_directory(), help="a path, or a URL for fsspec")
    add("--resume", choices=("auto", "none"), default="auto", help="none: start from scratch, even after a restart")
    add(
        "--save-every",
        type=steps_or_epoch,
        default=100,
        help="steps between checkpoints, and the last step is always saved; or epoch: a file after each epoch",
    )
    add("--keep", type=int, default=3, help="how many of the newest complete checkpoints to keep")
    add("--epochs", type=int, default=1)
    add("--max-steps", type=int, default=0, help="stop after this many steps in total, unless --epochs ends first (0: no limit)")
    add(
        "--stop-after-steps",
        type=int,
        default=0,
        help="save and exit after this many steps of this run (0: no limit); the learning rate schedule stays the same",
    )
    add("--log-every", type=int, default=10)
    add("--global-batch", type=int, default=12, help="sequences per optimizer step, over all ranks")
    add(
        "--accumulate",
        "--gradient-accumulation-steps",
        type=int,
        default=1,
        help="micro-steps per optimizer step; fewer if a rank has fewer sequences",
    )
    add(
        "--micro-batch",
        type=int,
        default=0,
        help="sequences that fit on a rank at once: as many micro-steps as the global batch then needs, in place of --accumulate "
        "(0: not given)",
    )
    add(
        "--activation-checkpointing",
        action="store_true",
        help="compute activations again in the backward pass: slower, less memory",
    )
    add("--seq-len", type=int, default=64)
    add("--dim", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.05)
    add("--lr", type=float, default=1e-3)
    add("--warmup-steps", type=int, default=20)
    add("--clip", type=float, default=1.0, help="gradient norm limit")
    add("--num-workers", type=int, default=0, help="processes of the data loader; a resume needs the same number")
    add("--data-mb", type=float, default=4.0, help="MiB of the standard library's source to train on")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True, help="use deterministic algorithms only")
    add("--collective-timeout", type=float, default=600.0, help="seconds until a collective fails because a peer is lost")
    add("--health-every", type=int, default=0, help="steps between two health barriers of all ranks (0: none)")
    add("--health-timeout", type=float, default=10.0, help="seconds that a health barrier waits for the other ranks")
    add("--print-state-hash", action="store_true", help="print a hash of parameters and optimizer moments at each load and save")
    args = parser.parse_args(argv)
    for name, least in (("keep", 1), ("log_every", 1), ("accumulate", 1), ("micro_batch", 0), ("seq_len", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected {least} or more")
    if args.save_every == EPOCH and "://" in args.checkpoint_dir:
        parser.error(
            f"--checkpoint-dir is {args.checkpoint_dir}, expected a path: --save-every=epoch writes files; give steps for a URL"
        )
    if not re.fullmatch(rf"(({'|'.join(FAULTS)}):\d+:\d+)?", os.environ.get("TRAIN_FAULT", "")):
        parser.error(f"TRAIN_FAULT is {os.environ['TRAIN_FAULT']}, expected KIND:RANK:STEP with KIND one of {', '.join(FAULTS)}")
    return args


class Block(nn.Module):
    """One pre-norm transformer layer; input and output have shape (batch, time, dim)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        b, t, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).reshape(b, t, dim)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class ByteTransformer(nn.Module):
    """Decoder-only language model over bytes: maps (batch, time + 1) bytes to the sum of their losses, in nats."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.recompute = args.activation_checkpointing
        self.token, self.position = nn.Embedding(256, args.dim), nn.Embedding(args.seq_len, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.dropout) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.dim), nn.Linear(args.dim, 256)

    def forward(self, text: Tensor) -> Tensor:
        tokens, targets = text[:, :-1], text[:, 1:]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=text.device))
        for block in self.blocks:
            x = recomputed(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten(), reduction="sum")


def sharded_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    # Every rank draws the same weights and keeps its slice. A model that is too large for one host is made on the meta device
    # instead, and initialised after sharding.
    torch.manual_seed(derived_seed(args.seed, "weights"))
    model = ByteTransformer(args).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    cuda = device.type == "cuda"
    # The optimizer works on float32 weights.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


def lr_factor(step: int, warmup: int, total: int) -> float:
    """The learning rate at `step` of `total` as a share of its peak: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))


def stdlib_source(limit: int) -> bytes:
    """The first `limit` bytes of Python's own library, in sorted order: text that every machine has."""
    text = bytearray()
    for folder, subfolders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        for name in sorted(files):
            if name.endswith(".py") and len(text) < limit:
                text += Path(folder, name).read_bytes()
    return bytes(text[:limit])


def derived_seed(*parts: object) -> int:
    """A 32-bit seed: unrelated for different parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


class Shares:
    """The indices of one rank's share of each global batch of `epoch`. Every world size has the same batches; no share is empty.

    A batch_sampler for a data loader. Set `epoch` before each epoch, as for a DistributedSampler.
    """

    def __init__(self, windows: int, global_batch: int, seed: int, rank: int, world: int) -> None:
        self.windows, self.global_batch, self.seed, self.rank, self.world = windows, global_batch, seed, rank, world
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", self.epoch))
        order = torch.randperm(self.windows, generator=generator).tolist()
        for step in range(len(self)):
            yield order[step * self.global_batch : (step + 1) * self.global_batch][self.rank :: self.world]

    def __len__(self) -> int:
        return self.windows // self.global_batch


def micro_steps(global_batch: int, world: int, accumulate: int, micro_batch: int) -> int:
    """Micro-steps per optimizer step: equally many on each rank, and no more than the smallest share has sequences.

    micro_batch: 0, or sequences that fit on a rank at once. The global batch is kept exactly, by uneven shares; a script whose
    ranks take equal shares, as most do, gets its micro-steps from `elastic_ext.accumulation`.
    """
    smallest, largest = global_batch // world, -(-global_batch // world)
    return min(-(-largest // micro_batch) if micro_batch else accumulate, smallest)


def micro_batches(share: Tensor, pieces: int) -> list[Tensor]:
    """Split a rank's share into this many micro-batches."""
    return [share[i::pieces] for i in range(pieces)]


def chosen_checkpoint(directory: str) -> str:
    """The agent's choice; without an agent that makes one, the newest complete one that rank 0 finds; "": none. Collective."""
    chosen = os.environ.get("ELASTIC_EXT_RESUME_FROM")
    if chosen is not None:
        return chosen
    resume = newest_complete(directory).resume if dist.get_rank() == 0 else None
    found = [resume.path if resume else ""]
    dist.broadcast_object_list(found)
    return found[0]


def with_numbers(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state by the number of each parameter, as `Optimizer.load_state_dict` takes it, from one by name."""
    number = {name: i for i, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: moments for name, moments in state["state"].items()}, "param_groups": groups}


def with_names(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The opposite of `with_numbers`."""
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: moments for i, moments in state["state"].items()}, "param_groups": groups}


def write_file(path: Path, checkpoint: dict[str, Any]) -> None:
    """Under another name first: a rank that is killed while it writes leaves no half of a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def keep_newest(directory: Path, count: int) -> None:
    found = {path: int(match[1]) for path in directory.iterdir() if (match := EPOCH_FILE.fullmatch(path.name))}
    for path in sorted(found, key=found.__getitem__)[:-count]:
        path.unlink()


class Trainer:
    """Model, data, optimizer and checkpoints of one rank. One flat object, because the script is meant to be copied."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank, self.world = args, device, dist.get_rank(), dist.get_world_size()
        text = stdlib_source(int(args.data_mb * 2**20))
        # Shape (windows, seq_len + 1): inputs, and the targets one byte later; neighbours share a byte.
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, args.seq_len + 1, args.seq_len)
        if not self.world <= args.global_batch <= len(windows):
            sys.exit(
                f"--global-batch is {args.global_batch}, expected {self.world} (one sequence per rank) to {len(windows)} "
                "(all the data): change it, --data-mb, or the number of workers"
            )
        self.micro_steps = micro_steps(args.global_batch, self.world, args.accumulate, args.micro_batch)
        self.shares = Shares(len(windows), args.global_batch, args.seed, self.rank, self.world)
        self.loader = StatefulDataLoader(windows, batch_sampler=self.shares, num_workers=args.num_workers)
        self.step = self.epoch = 0
        self.total_steps = min(args.epochs * len(self.shares), args.max_steps or sys.maxsize)
        digest = hashlib.sha256(text).hexdigest()[:12]
        self.data = (  # everything that decides which bytes a position of the loader means
            f"seed {args.seed}, global batch {args.global_batch}, length {args.seq_len}, text {digest}, "
            f"{args.num_workers} loader processes"
        )
        self.model = sharded_model(args, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(step, args.warmup_steps, self.total_steps)
        )
        torch.manual_seed(derived_seed(args.seed, "dropout", self.rank))  # unlike the weights, dropout differs between ranks
        self.checkpointer = Checkpointer(
            args.checkpoint_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            dataloader=self.loader,
            reshard_dataloader=lambda states, rank, world: states[0],
            keep_last=args.keep,
            on_event=self.on_checkpoint,
        )

    def resume(self) -> None:
        if self.args.resume == "none":
            return
        path = chosen_checkpoint(self.args.checkpoint_dir)
        if EPOCH_FILE.fullmatch(os.path.basename(path)):
            self.load_epoch_file(path)
        else:
            position = self.checkpointer.load()
            if position.path is None:
                return
            path, self.step, self.epoch = position.path, position.step, position.epoch
            self.check_data(path, position.note.get("data", "other data"))
        say(f"resumed from {path} at step {self.step}")
        self.print_state_hash()

    def check_data(self, path: str, trained_on: str) -> None:
        if trained_on != self.data:
            sys.exit(
                f"{path} was trained on {trained_on}; this run has {self.data}, so its position would point at different data: "
                "use the same flags and Python version, or another --checkpoint-dir"
            )

    def load_epoch_file(self, path: str) -> None:
        """Every rank reads the file and keeps its slices."""
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.check_data(path, saved["data"])
        moments = with_names(saved["optimizer_state_dict"], [name for name, _ in self.model.named_parameters()])
        whole = StateDictOptions(full_state_dict=True)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=saved["model_state_dict"], optim_state_dict=moments, options=whole
        )
        self.scheduler.load_state_dict(saved["scheduler_state_dict"])
        self.step, self.epoch = saved["step"], saved["epoch"]

    def save_epoch_file(self, loss: float) -> None:
        """Rank 0 writes checkpoint_epoch_N.pt for N finished epochs, and removes all but the newest."""
        began, number = time.monotonic(), self.step // len(self.shares)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, moments = get_state_dict(self.model, self.optimizer, options=whole)  # collective; for rank 0 alone
        if self.rank == 0:
            checkpoint = {
                "epoch": number,
                "model_state_dict": model,
                "optimizer_state_dict": with_numbers(moments, [name for name, _ in self.model.named_parameters()]),
                "loss": loss,
                "scheduler_state_dict": self.scheduler.state_dict(),
                "step": self.step,
                "data": self.data,
            }
            directory = Path(self.args.checkpoint_dir)
            write_file(directory / f"checkpoint_epoch_{number}.pt", checkpoint)
            keep_newest(directory, self.args.keep)
            say(f"saved {directory}/checkpoint_epoch_{number}.pt")
        report_saved(self.step, time.monotonic() - began)

    def fit(self) -> None:
        last = min(self.total_steps, self.step + (self.args.stop_after_steps or sys.maxsize))
        self.logged_at, self.logged_step = time.monotonic(), self.step
        while self.step < last:
            self.shares.epoch = self.epoch
            if self.args.save_every == EPOCH and self.ends_epoch():  # else the generator is that of the checkpoint
                torch.manual_seed(derived_seed(self.args.seed, "dropout", self.rank, self.epoch))
            for share in self.loader:
                fail_on_request(self.rank, self.step)
                if self.args.health_every and self.world > 1 and self.step % self.args.health_every == 0:
                    health_barrier(self.args.health_timeout)
                lr = self.scheduler.get_last_lr()[0]
                loss = self.optimizer_step(share)
                self.step += 1
                self.after_step(loss, lr, last)
                if self.step == last:  # still in this epoch: the loader's state must be that of its end
                    break
            else:
                self.epoch += 1
        self.checkpointer.wait()
        if self.checkpointer.last_error is not None:
            raise RuntimeError(f"{self.checkpointer.last_error}; the steps since the previous checkpoint are lost")
        say(f"done at step {self.step} of {self.total_steps}")

    def optimizer_step(self, share: Tensor) -> Tensor:
        """One optimizer step on this rank's share of the next global batch; returns the global mean loss, on the device."""
        args = self.args
        total = torch.zeros((), device=self.device)
        for i, text in enumerate(micro_batches(share, self.micro_steps)):
            self.model.set_requires_gradient_sync(i + 1 == self.micro_steps)  # accumulate locally, reduce once
            # Dividing by the number of bytes of all ranks is right for uneven shares, too.
            loss = self.model(text.to(self.device, torch.long)) / (args.global_batch * args.seq_len)
            (loss * self.world).backward()  # FSDP averages gradients over the ranks
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total

    def after_step(self, loss: Tensor, lr: float, last: int) -> None:
        asked = self.checkpointer.save_requested(self.step)
        logs = self.step % self.args.log_every == 0 or self.step == last
        by_epoch, ends = self.args.save_every == EPOCH, self.ends_epoch()
        saves = self.step == last and not ends if by_epoch else self.step % self.args.save_every == 0 or self.step == last
        if not (logs or saves or asked or (by_epoch and ends)):
            return
        mean = float(loss)  # this waits for the device, so not at every step
        if not math.isfinite(mean):  # before a save, which would displace a good checkpoint
            raise FloatingPointError(f"loss is {mean} at step {self.step}: lower --lr, or resume from an older checkpoint")
        if logs:
            now, tokens = time.monotonic(), (self.step - self.logged_step) * self.args.global_batch * self.args.seq_len
            value, rate = f"{mean:.6f} ({mean.hex()})", tokens / (now - self.logged_at)
            say(f"epoch {self.epoch} step {self.step} loss {value} lr {lr:.3e} tokens/s {rate:.0f}")
            self.logged_at, self.logged_step = now, self.step
        if by_epoch and ends:
            self.print_state_hash()
            self.save_epoch_file(mean)
        if saves or asked:
            self.print_state_hash()
            # Somebody waits for a requested save and may end this run right after it, so no further step is started.
            self.checkpointer.save(self.step, epoch=self.epoch, note={"data": self.data, "loss": mean}, wait=asked)

    def ends_epoch(self) -> bool:
        return self.step % len(self.shares) == 0

    def on_checkpoint(self, event: SaveEvent) -> None:
        if event.kind == "saved":  # the Checkpointer logs failures
            say(f"saved {os.path.join(self.args.checkpoint_dir, event.name)}")

    def print_state_hash(self) -> None:
        """sha256 over all parameters and optimizer moments: equal at every world size."""
        if not self.args.print_state_hash:
            return
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            moments = self.optimizer.state[parameter]
            for tensor in (parameter.detach(), *(moments[key] for key in sorted(moments))):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                digest.update(bytes(whole.cpu().contiguous().flatten().view(torch.uint8).tolist()))  # works without numpy
        say(f"state hash {digest.hexdigest()} at step {self.step}")


def raise_error() -> None:
    raise RuntimeError("raised because TRAIN_FAULT asks for it")


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: sys.exit(3),
    "raise": raise_error,
}


def fail_on_request(rank: int, step: int) -> None:
    kind, _, when = os.environ.get("TRAIN_FAULT", "").partition(":")
    if when == f"{rank}:{step}" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        FAULTS[kind]()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{line}\n")  # one write, because the thread that saves prints, too
        sys.stdout.flush()


def start_process_group(args: argparse.Namespace) -> torch.device:
    """Join the process group that the environment describes, or make a group of one; returns this rank's device."""
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    timeout = timedelta(seconds=args.collective_timeout)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, device_id=device if cuda else None, **alone)
    return device


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    device = start_process_group(args)
    try:
        trainer = Trainer(args, device)
        with trainer.checkpointer:  # waits for a running save before the group is destroyed
            trainer.resume()
            trainer.fit()
    except BaseException:
        # Gloo's threads can turn any exit status into SIGABRT (pytorch issue 190489). NCCL would wait here for peers that
        # never come, and hide the failure.
        if device.type == "cpu":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def run(argv: list[str] | None = None) -> None:
    """What the process of a worker does."""
    main(argv)
    if not torch.cuda.is_initialized():  # gloo's threads may abort an interpreter that ends beside them (pytorch issue 190489)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    run()
