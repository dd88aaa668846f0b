"""Directories as widespread tools write them, built of small files without torch, and what a job resumes from there.

`T0` is the time of the oldest file.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import socket
import zipfile
from pathlib import Path
from typing import Any

from elastic_ext.base.contracts import Resumption, SingleNode
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.agreement import nodes
from elastic_ext.checkpoints.agreement.nodes import NodeInRound
from elastic_ext.checkpoints.choice.decisions import Resume
from elastic_ext.checkpoints.choice.listing import Wanted, newest_complete
from elastic_ext.checkpoints.formats import detect
from elastic_ext.checkpoints.formats.candidates import Inspection
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage

T0 = 1_700_000_000

TRAINING = {"model": {}, "optimizer": {}}
WEIGHTS = {"model": {}}
OPTIMIZER = {"state": {}, "param_groups": []}


_TENSORS = itertools.count()


def saved(path: Path, value: object = None, at: float = 0.0) -> Path:
    """A file of torch.save."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(TRAINING if value is None else value, 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", next(_TENSORS).to_bytes(8, "little"))  # no two saves have the same bytes
        for info in archive.infolist():
            info.external_attr = 0  # as torch leaves it
    return put(path, data.getvalue(), at)


def tensors(path: Path, at: float = 0.0) -> Path:
    """A file of safetensors."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return put(path, len(header).to_bytes(8, "little") + header + bytes(8), at)


def text(path: Path, value: object, at: float = 0.0) -> Path:
    return put(path, (value if isinstance(value, str) else json.dumps(value)).encode(), at)


def planted(path: Path, value: object, at: float = 0.0) -> Path:
    """A file of text, of safetensors (None), or of torch.save."""
    return tensors(path, at) if value is None else text(path, value, at) if isinstance(value, str) else saved(path, value, at)


class Metadata:
    """Stands for torch's own classes in a pickle: only the names of the fields count."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


def shards(path: Path, *keys: str) -> Path:
    """A directory of torch.distributed.checkpoint. keys: of what it holds."""
    put(path / "__0_0.distcp", b"PK" * 50)
    item = Metadata(relative_path="__0_0.distcp", offset=0, length=100)
    put(path / ".metadata", pickle.dumps(Metadata(state_dict_metadata=dict.fromkeys(keys), storage_data={"w": item})))
    return path


def put(path: Path, data: bytes, at: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (T0 + at, T0 + at))
    return path


def half(path: Path) -> Path:
    """Cut a file short, as a kill does."""
    os.truncate(path, path.stat().st_size * 2 // 3)
    return path


def flip(path: Path, at: int = 0) -> Path:
    """Flip a bit of the byte at this place; from the end if it is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path


def ranks(directory: Path, name: str, count: int, step: int = 0, start: int = 0) -> None:
    """A file of each rank."""
    for rank in range(start, count):
        saved(directory / name.format(rank), TRAINING, step + rank / 100)


def plant(path: Path, kind: str) -> None:
    """Something that is no plain file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # the path of a socket is 108 bytes at most
            try:
                made.bind(path.name)
            finally:
                os.chdir(here)
    elif kind == "directory":
        path.mkdir()
    elif kind in ("loop", "up", "root", "dangling"):
        path.symlink_to({"loop": path.name, "up": ".", "root": "/", "dangling": "nowhere"}[kind])


def entry_of(storage: Storage, name: str) -> Entry:
    return next(entry for entry in storage.entries() if entry.name == name)


# What a job resumes from.


def inspected(directory: Path | str, name: str) -> Inspection:
    storage = open_storage(str(directory))
    return detect.check(storage, entry_of(storage, name))


def resume_in(directory: Path | str, **wanted: Any) -> Resume:
    """There must be something."""
    choice = newest_complete(str(directory), Wanted(**wanted))
    assert choice.resume is not None, choice
    return choice.resume


def chosen(directory: Path | str, **wanted: Any) -> tuple[str, int | None] | None:
    """The name and the step; None if there is nothing."""
    resume = newest_complete(str(directory), Wanted(**wanted)).resume
    return (os.path.basename(resume.path), resume.step) if resume is not None else None


def step_in(directory: Path | str, **wanted: Any) -> int | None:
    found = chosen(directory, **wanted)
    return found and found[1]


def resumed(directory: Path, run_id: str = "run", place: NodeInRound | None = None, **settings: str) -> Resumption:
    """What the only node of a job resumes from, with these settings."""
    chosen = Settings(checkpoint_dir=str(directory), **settings)
    return nodes.agree(chosen, run_id, SingleNode(), place or NodeInRound())


def reasons(directory: Path | str, **wanted: Any) -> dict[str, str]:
    """Why others were passed over, by name."""
    choice = newest_complete(str(directory), Wanted(**wanted))
    return {os.path.basename(passed.path): passed.reason for passed in choice.passed_over}


# Each tool's checkpoint; of several the step is in the name alone.


def trainer(path: Path, step: int) -> Path:
    """Of Hugging Face's Trainer."""
    tensors(path / "model.safetensors", step)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        saved(path / name, {"state": {}}, step)
    text(path / "trainer_state.json", {"global_step": step, "epoch": 1.5}, step)
    return path


def trainer_of_deepspeed(path: Path, step: int, ranks: int = 2) -> Path:
    for name in ("scheduler.pt", *(f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth" for rank in range(ranks))):
        saved(path / name, {})
    deepspeed(path / f"global_step{step}", step, ranks)
    text(path / "latest", f"global_step{step}")
    text(path / "trainer_state.json", {"global_step": step})
    return path


def trainer_of_fsdp(path: Path, step: int) -> Path:
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        saved(path / name, {})
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        shards(path / folder)
    text(path / "trainer_state.json", {"global_step": step})
    return path


def accelerate(path: Path, step: int = 0, weights: str = "model.safetensors") -> Path:
    """Of accelerate's save_state; diffusers has the weights in folders."""
    tensors(path / weights)
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        saved(path / name, {"step": 3})  # the step of random_states counts from the last save
    return path


def accelerate_of_deepspeed(path: Path, step: int = 0) -> Path:
    deepspeed(path / "pytorch_model", 7)
    text(path / "latest", "pytorch_model")
    saved(path / "random_states_0.pkl", {"step": 3})
    return path


def kohya(path: Path, step: int) -> Path:
    accelerate(path)
    text(path / "train_state.json", {"current_epoch": 2, "current_step": step})
    return path


def deepspeed(path: Path, step: int, ranks: int = 2) -> Path:
    saved(path / "mp_rank_00_model_states.pt", {"module": {}, "global_steps": step})
    for rank in range(ranks):
        saved(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {}})
    return path


def lightning_of_deepspeed(path: Path, step: int, ranks: int = 2) -> Path:
    deepspeed(path / "checkpoint", step, ranks)
    text(path / "latest", "checkpoint")
    return path


def megatron(path: Path, step: int, tensor: int = 2, pipeline: int = 2) -> Path:
    for rank in range(tensor):
        for stage in range(pipeline):
            saved(path / f"mp_rank_{rank:02}_{stage:03}" / "model_optim_rng.pt", {"iteration": step, "model": {}})
    return path


def nemo(path: Path, step: int = 0) -> Path:
    shards(path / "weights")
    saved(path / "weights" / "common.pt", {})
    text(path / "weights" / "metadata.json", {"sharded_backend": "torch_dist"})
    text(path / "context" / "io.json", {})
    return path


def nanotron(path: Path, step: int) -> Path:
    for stage in range(2):  # each stage of the pipeline has parameters of its own
        name = f"model_weight_pp-rank-{stage}-of-2_tp-rank-0-of-1.safetensors"
        tensors(path / "model" / "model" / f"layer{stage}" / name)
    for data in range(2):
        for stage in range(2):
            saved(path / "optimizer" / f"optimizer_pp-{stage}-of-2_dp-{data}-of-2_tp-0-of-1_exp-0-of-1.pt", {})
    saved(path / "random" / "tp-0-of-1_dp-0-of-1_pp-0-of-1.pt", {})
    text(path / "model_config.json", {})
    text(path / "checkpoint_metadata.json", {"version": "1.4", "metas": {"last_train_step": step}})
    return path


def torchtune(path: Path, step: int = 0) -> Path:
    for number in (1, 2):
        tensors(path / f"model-{number:05}-of-00002.safetensors")
    text(path / "model.safetensors.index.json", {"weight_map": {"w": "model-00001-of-00002.safetensors"}})
    text(path / "torchtune_config.yaml", "lr: 1")
    return path


def verl(path: Path, step: int = 0, ranks: int = 2) -> Path:
    for rank in range(ranks):
        for part in ("model", "optim", "extra_state"):
            saved(path / "actor" / f"{part}_world_size_{ranks}_rank_{rank}.pt", {})
    return path


def cosmos(path: Path, step: int = 0) -> Path:
    for part in ("model", "optim"):
        shards(path / part)
    return path
