#!/usr/bin/env python3
"""Train a small byte-level transformer with FSDP2; it can be stopped, killed and rescaled at any step.

    torchrun --nproc-per-node=2 train_fsdp.py                       # stock torchrun
    python -m elastic_ext.agent --nproc-per-node=2 train_fsdp.py    # the same script under elastic_ext
    python train_fsdp.py                                            # one process

Started again, at any world size, it goes on from its newest complete checkpoint. What is worth copying:

* Step k of epoch e trains on the same global batch at every world size; the ranks share it out, unevenly if they
  must. So the position in the data is (epoch, step in epoch): a resume in mid-epoch sees the batches of an unbroken run.
* The whole state is saved: model, optimizer, scheduler, position, each rank's random generators. Checkpoints lie between
  optimizer steps, where no gradient is half accumulated. On CPU, with the same world size and number of threads, losses
  after a resume equal those of an unbroken run to the bit.
* A checkpoint, step_<8 digits>, is complete if and only if it holds `.metadata`: torch.distributed.checkpoint renames that
  file into place after all ranks have written. That is the commit; renaming the directory too would add nothing, and an
  object store cannot do it atomically.

--checkpoint-dir must be on storage that every node mounts. To go back for good, delete or rename the newer step_*
directories. No health check is needed beside the steps: each has collectives, and they fail when a peer is gone.
"""

import argparse
import hashlib
import math
import os
import pickle
import random
import re
import shutil
import signal
import socket
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

try:
    import numpy as np
except ImportError:  # torch works without it, and so does this script
    np = None  # type: ignore[assignment]

EPILOG = """environment:
  CHECKPOINT_DIR               default of --checkpoint-dir
  ELASTIC_EXT_RESUME_FROM      load exactly this checkpoint instead of the newest: a path, or a URL for fsspec
  TRAIN_FAULT=KIND:RANK:STEP   for demonstrations: RANK fails once STEP steps are done and another would start; KIND is
                               kill (SIGKILL), exit (status 3) or raise; not if TORCHELASTIC_RESTART_COUNT is above 0"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint-dir", type=Path, default=Path(os.environ.get("CHECKPOINT_DIR") or "checkpoints"))
    add("--resume", choices=("auto", "none"), default="auto", help="none: start from scratch, after a restart too")
    add("--save-every", type=int, default=100, help="steps between checkpoints; the last step is always saved")
    add("--keep", type=int, default=3, help="newest complete checkpoints to keep")
    add("--epochs", type=int, default=1)
    add("--max-steps", type=int, default=0, help="length of training in steps, if --epochs are not over before (0: no limit)")
    add("--stop-after-steps", type=int, default=0, help="save and leave after so many steps of this run; same schedule")
    add("--log-every", type=int, default=10)
    add("--global-batch", type=int, default=12, help="sequences per optimizer step, over all ranks")
    add("--accumulate", type=int, default=1, help="micro-steps per step; fewer where a rank has fewer sequences")
    add("--seq-len", type=int, default=64)
    add("--dim", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.05)
    add("--lr", type=float, default=1e-3)
    add("--warmup-steps", type=int, default=20)
    add("--clip", type=float, default=1.0, help="gradient norm limit")
    add("--data-mb", type=float, default=4.0, help="MiB of the standard library's source to train on")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True, help="deterministic algorithms only")
    add("--collective-timeout", type=float, default=600.0, help="seconds until a collective gives up on a lost peer")
    add("--print-state-hash", action="store_true", help="hash parameters and optimizer moments after each load and save")
    args = parser.parse_args(argv)
    for name in ("save_every", "keep", "log_every", "accumulate", "seq_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected 1 or more")
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
    """Decoder-only language model over bytes: (batch, time + 1) of 0..255 to the sum of their losses, in nats."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, args.dim), nn.Embedding(args.seq_len, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.dropout) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.dim), nn.Linear(args.dim, 256)

    def forward(self, text: Tensor) -> Tensor:
        tokens, targets = text[:, :-1], text[:, 1:]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten(), reduction="sum")


def sharded_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    # Every rank draws the same weights and keeps its slice of them. A model too large for one host is made on the meta
    # device instead, and initialised after sharding.
    torch.manual_seed(derived_seed(args.seed, "weights"))
    model = ByteTransformer(args).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    cuda = device.type == "cuda"
    # The weights that the optimizer steps stay float32.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


def lr_factor(step: int, warmup: int, total: int) -> float:
    """Share of the peak learning rate at `step` of `total`: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))


def stdlib_source(limit: int) -> bytes:
    """The first `limit` bytes of Python's own library, in sorted order: real text that every machine has."""
    text = bytearray()
    for folder, subfolders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        for name in sorted(files):
            if name.endswith(".py") and len(text) < limit:
                text += Path(folder, name).read_bytes()
    return bytes(text[:limit])


def derived_seed(*parts: object) -> int:
    """A 32-bit seed (numpy takes no more), unrelated for unlike parts and the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def global_batch(windows: int, size: int, seed: int, epoch: int, step: int) -> Tensor:
    """Indices of the `size` windows of step `step` (from 0) in `epoch`: the same whoever asks, at any world size."""
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(derived_seed(seed, "order", epoch)))
    return order[step * size : (step + 1) * size]


def micro_batches(batch: Tensor, rank: int, world: int, accumulate: int) -> list[Tensor]:
    """This rank's share of a global batch, in micro-steps: as many on each rank (collectives must match), none empty."""
    pieces = min(accumulate, len(batch) // world)
    return [batch[rank::world][i::pieces] for i in range(pieces)]


def seed_generators(*parts: object) -> None:
    random.seed(derived_seed(*parts))
    torch.manual_seed(derived_seed(*parts))  # CUDA too
    if np is not None:
        np.random.seed(derived_seed(*parts))


def generator_state(device: torch.device) -> bytes:
    """Every generator that training may draw from, as one opaque value."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return pickle.dumps((random.getstate(), np and np.random.get_state(), torch.get_rng_state(), cuda))


def restore_generators(state: bytes, device: torch.device) -> None:
    python, numpy, cpu, cuda = pickle.loads(state)
    random.setstate(python)
    torch.set_rng_state(cpu)
    if np is not None and numpy is not None:
        np.random.set_state(numpy)
    if device.type == "cuda" and cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


def checkpoints(directory: Path) -> list[Path]:
    """All step_<8 digits> directories, complete or not, oldest first."""
    return sorted(path for path in directory.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))


def is_complete(path: Path) -> bool:
    return (path / ".metadata").is_file()


def remove(path: Path) -> None:
    # The commit mark goes first: killed half-way, this leaves a directory that counts as incomplete.
    (path / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(path)


def prune(newest: Path, keep: int) -> None:
    """Keep `newest`, just completed, and the keep-1 complete ones before it; remove older ones and torn ones.

    Later steps exist only after a deliberate step back. They are left alone: were they counted, `newest` could be deleted.
    """
    candidates = [path for path in checkpoints(newest.parent) if path.name <= newest.name]
    kept = [path for path in candidates if is_complete(path)][-keep:]
    for path in set(candidates) - set(kept):
        try:
            remove(path)
        except OSError as error:
            say(f"could not remove {path}: {error}; remove it by hand")  # no reason to stop training


def chosen_checkpoint(args: argparse.Namespace, device: torch.device) -> str | None:
    """What to resume from. Rank 0 decides for all: other nodes may see an older list of files."""
    choice: list[str | None] = [None]
    if dist.get_rank() == 0 and args.resume == "auto":
        complete = [str(path) for path in checkpoints(args.checkpoint_dir) if is_complete(path)]
        # The agent's word, where there is one; an empty one says: from nothing.
        choice = [os.environ.get("ELASTIC_EXT_RESUME_FROM", complete[-1] if complete else None) or None]
    dist.broadcast_object_list(choice, src=0, device=device)
    path = choice[0]
    if path and "://" not in path and not is_complete(Path(path)):
        raise FileNotFoundError(
            f"rank {dist.get_rank()} on {socket.gethostname()} sees no {path}/.metadata: the checkpoint is incomplete, or not "
            "on storage that every node mounts; choose another one, or put --checkpoint-dir on shared storage"
        )
    return path


@dataclass
class Progress:
    """Where training is; saved as it stands. `loss` is the global mean at `step`, in nats per byte."""

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    loss: float = math.nan
    world_size: int = 0
    data: str = ""  # all that decides which bytes a position stands for


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank, self.world = args, device, dist.get_rank(), dist.get_world_size()
        text = stdlib_source(int(args.data_mb * 2**20))
        # (windows, seq_len + 1): inputs and, one further, targets; neighbours share a byte.
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, args.seq_len + 1, args.seq_len)
        if not self.world <= args.global_batch <= len(self.windows):
            sys.exit(
                f"--global-batch is {args.global_batch}, expected {self.world} (one sequence per rank) to {len(self.windows)} "
                "(all the data): change it, --data-mb, or the number of workers"
            )
        self.steps_per_epoch = len(self.windows) // args.global_batch
        self.total_steps = min(args.epochs * self.steps_per_epoch, args.max_steps or sys.maxsize)
        digest = hashlib.sha256(text).hexdigest()[:12]
        data = f"seed {args.seed}, global batch {args.global_batch}, length {args.seq_len}, text {digest}"
        self.progress = Progress(world_size=self.world, data=data)
        self.model = sharded_model(args, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(step, args.warmup_steps, self.total_steps)
        )
        seed_generators(args.seed, 0, self.rank)  # weights were drawn alike on all ranks; dropout must not be

    def optimizer_step(self) -> Tensor:
        """One step on the next global batch; returns the global mean loss, still on the device."""
        args, progress = self.args, self.progress
        batch = global_batch(len(self.windows), args.global_batch, args.seed, progress.epoch, progress.step_in_epoch)
        micro_steps = micro_batches(batch, self.rank, self.world, args.accumulate)
        total = torch.zeros((), device=self.device)
        for i, indices in enumerate(micro_steps):
            self.model.set_requires_gradient_sync(i + 1 == len(micro_steps))  # add up here, reduce once
            # Divided by the number of all ranks' bytes, this is right for uneven shares too.
            loss = self.model(self.windows[indices].to(self.device, torch.long)) / (args.global_batch * args.seq_len)
            (loss * self.world).backward()  # times world, because FSDP averages gradients over the ranks
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        progress.step += 1
        epochs_over, progress.step_in_epoch = divmod(progress.step_in_epoch + 1, self.steps_per_epoch)
        progress.epoch += epochs_over
        return total

    def fit(self) -> None:
        args, progress = self.args, self.progress
        last = min(self.total_steps, progress.step + (args.stop_after_steps or sys.maxsize))
        logged_at, logged_step = time.monotonic(), progress.step
        while progress.step < last:
            fail_on_request(self.rank, progress.step)
            epoch, lr = progress.epoch, self.scheduler.get_last_lr()[0]
            loss = self.optimizer_step()
            logs, saves = (progress.step % every == 0 or progress.step == last for every in (args.log_every, args.save_every))
            if logs or saves:
                progress.loss = float(loss)  # waits for the device, so not at every step
                if not math.isfinite(progress.loss):  # checked before a save: it would push out a good checkpoint
                    raise FloatingPointError(f"loss is {progress.loss} at step {progress.step}: lower --lr, or go back further")
            if logs:
                now, tokens = time.monotonic(), (progress.step - logged_step) * args.global_batch * args.seq_len
                value = f"{progress.loss:.6f} ({progress.loss.hex()})"
                rate = tokens / (now - logged_at)
                say(f"epoch {epoch} step {progress.step} loss {value} lr {lr:.3e} tokens/s {rate:.0f}")
                logged_at, logged_step = now, progress.step
            if saves:
                self.save()
        say(f"done at step {progress.step} of {self.total_steps}")

    def state(self, generators: bool) -> dict[str, Any]:
        """What a checkpoint holds beside the progress; for loading, the form to be filled in."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {f"rank{self.rank}": generator_state(self.device)} if generators else {}  # each rank adds its own key
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "generators": own}

    def save(self) -> None:
        path = self.args.checkpoint_dir / f"step_{self.progress.step:08d}"
        if self.rank == 0 and path.exists():
            remove(path)  # torn, or from before a step back: its old .metadata would vouch for half-written files
        dist.barrier()
        dcp.save({"progress": asdict(self.progress), **self.state(generators=True)}, checkpoint_id=path)
        say(f"saved {path}")
        self.print_state_hash()
        if self.rank == 0:
            prune(path, self.args.keep)

    def resume(self) -> None:
        path = chosen_checkpoint(self.args, self.device)
        if path is None:
            return
        head = {"progress": asdict(self.progress)}
        dcp.load(head, checkpoint_id=path)
        saved = Progress(**head["progress"])
        if saved.data != self.progress.data:
            sys.exit(
                f"{path} was trained on {saved.data}; this run has {self.progress.data}, where its position means other bytes: "
                "use the same flags and Python version, or another --checkpoint-dir"
            )
        same_world = saved.world_size == self.world
        state = self.state(generators=same_world)
        dcp.load(state, checkpoint_id=path)  # each rank reads what its shards need, whatever world size wrote it
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if same_world:
            restore_generators(state["generators"][f"rank{self.rank}"], self.device)
        else:  # the saved ones belong to other shares of the batch
            seed_generators(self.args.seed, saved.step, self.rank)
        saved.world_size = self.world
        self.progress = saved
        say(f"resumed from {path} at step {saved.step}")
        self.print_state_hash()

    def print_state_hash(self) -> None:
        """sha256 over all parameters and optimizer moments, gathered on rank 0: equal at every world size."""
        if not self.args.print_state_hash:
            return
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tensors, optimizer = get_state_dict(self.model, self.optimizer, options=whole)
        for name, moments in optimizer.get("state", {}).items():
            tensors |= {f"{name}.{key}": value for key, value in moments.items()}
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode() + bytes(tensor.flatten().view(torch.uint8).tolist()))  # works without numpy
        say(f"state hash {digest.hexdigest()} at step {self.progress.step}")


def raise_error() -> None:
    raise RuntimeError("raised on request of TRAIN_FAULT")


FAULTS = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: sys.exit(3), "raise": raise_error}


def fail_on_request(rank: int, step: int) -> None:
    kind, _, when = os.environ.get("TRAIN_FAULT", "").partition(":")
    if when == f"{rank}:{step}" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        FAULTS[kind]()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def start_process_group(args: argparse.Namespace) -> torch.device:
    """Join the group that the launcher describes in the environment, or a group of one; returns this rank's device."""
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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be there before cuBLAS is first used
        torch.use_deterministic_algorithms(True)
    device = start_process_group(args)
    try:
        trainer = Trainer(args, device)
        trainer.resume()
        trainer.fit()
    except BaseException:
        # Gloo's threads, left alone, can turn any exit status into SIGABRT (pytorch issue 190489). NCCL on the other hand
        # would wait here for peers that never come, and hide the failure.
        if device.type == "cpu":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
