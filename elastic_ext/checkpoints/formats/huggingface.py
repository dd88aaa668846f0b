"""The `checkpoint-N` directory of Hugging Face's Trainer: plain, FSDP or DeepSpeed.

The Trainer writes weights, optimizer, scheduler, RNG states and trainer_state.json, in this order (`_save_checkpoint` in
transformers/trainer.py, 4.40 to 5.23). Ranks do not wait for each other at the end, so every part must be checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ext.checkpoints.formats import dcp, safetensors, torch_save
from elastic_ext.checkpoints.formats.inspection import HUGGING_FACE, Inspection, total_size
from elastic_ext.checkpoints.storage import Entry, Storage

STATE = "trainer_state.json"
INDEX_SUFFIX = ".index.json"

_SIGNS = re.compile(
    r"trainer_state\.json|(model|adapter_model).*\.safetensors(\.index\.json)?|pytorch_model.*|training_args\.bin"
)
_WEIGHTS = re.compile(
    r"((adapter_)?model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)|adapter_model\.bin|pytorch_model_fsdp\.bin"
)
_DEEPSPEED = re.compile(r"global_step\d+")
_DCP_FOLDERS = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")  # accelerate/utils/fsdp_utils.py
_OTHERS = re.compile(r"(optimizer|scheduler)\.(pt|bin)|rng_state(_\d+)?\.pth|scaler\.pt")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


class TornCheckpoint(Exception):
    """A part is missing or damaged. The message names the part and the reason."""


def matches(name: str, names: Sequence[str]) -> bool:
    """Return whether the Trainer wrote a directory with these names, complete or not."""
    return any(_SIGNS.fullmatch(each) for each in names)


def check(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check each part of a `checkpoint-N` directory. Raises OSError."""
    found = {item.name: item for item in content}
    try:
        state = _read_state(storage, entry, found)
        for check_part in (_check_index, _check_weights, _check_training_state, _check_folders):
            check_part(storage, entry, found)
    except TornCheckpoint as error:
        return Inspection(False, HUGGING_FACE, str(error))
    step, epoch = state["global_step"], state.get("epoch")
    whole_epoch = int(epoch) if isinstance(epoch, (int, float)) and 0 <= epoch < 1e9 else None
    reason = f"{STATE} says step {step}, all parts are complete"
    return Inspection(True, HUGGING_FACE, reason, found[STATE].mtime, step, whole_epoch, total_size(content))


def _read_state(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> Mapping[str, Any]:
    if STATE not in found:
        raise TornCheckpoint(f"no {STATE}, the save did not finish")
    state = _read_json(storage, entry, STATE)
    step = state.get("global_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise TornCheckpoint(f"{STATE} has global_step {str(step)[:50]}, expected a whole number, 0 or more")
    return state


def _read_json(storage: Storage, entry: Entry, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(storage.read(f"{entry.name}/{name}"))
    except (ValueError, RecursionError) as error:
        raise TornCheckpoint(f"{name} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise TornCheckpoint(f"{name} is damaged: it holds a {type(value).__name__}, expected an object")
    return value


def _check_index(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    """Check that every file that an index of sharded weights names exists."""
    for name in found:
        if not name.endswith(INDEX_SUFFIX):
            continue
        weights = _read_json(storage, entry, name).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise TornCheckpoint(f"{name} is damaged: it has no weight_map")
        missing = sorted(set(weights.values()) - found.keys())
        if missing:
            raise TornCheckpoint(f"{missing[0]} is missing, although {name} lists it")


def _check_weights(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    weights = [name for name in found if _WEIGHTS.fullmatch(name)]
    folders = [name for name in found if _DEEPSPEED.fullmatch(name) or name.startswith("pytorch_model_fsdp_")]
    if not weights and not folders:
        raise TornCheckpoint("no model weights, the save did not finish")
    for name in weights:
        _check_file(storage, entry, found[name])


def _check_training_state(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    """Check optimizer, scheduler and RNG states. save_only_model writes none of them."""
    parts = [name for name in found if _OTHERS.fullmatch(name)]
    for name in parts:
        _check_file(storage, entry, found[name])
    if not parts or any(_DEEPSPEED.fullmatch(name) for name in found):  # DeepSpeed stores them with the weights
        return
    if "scheduler.pt" not in found:
        raise TornCheckpoint("no scheduler.pt beside the other states, the save did not finish")
    if not any(name in found for name in _OPTIMIZERS) and not any(name.startswith("optimizer_") for name in found):
        raise TornCheckpoint("no optimizer.pt beside the other states, the save did not finish")
    if not any(name.startswith("rng_state") for name in parts):
        raise TornCheckpoint("no rng_state beside the other states, the save did not finish")


def _check_folders(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    """Check the sharded state of FSDP and of DeepSpeed."""
    for name, item in found.items():
        is_dcp = _DCP_FOLDERS.fullmatch(name) is not None
        if not item.is_dir or not (is_dcp or _DEEPSPEED.fullmatch(name)):
            continue
        path = f"{entry.name}/{name}"
        content = list(storage.entries(path))
        if is_dcp or any(each.name == dcp.METADATA for each in content):
            found_there = dcp.check(storage, Entry(path, item.path, True, 0, item.mtime), content)
            if not found_there.complete:
                raise TornCheckpoint(f"{name}: {found_there.reason}")
            continue
        parts = [each for each in content if each.name.endswith(".pt")]
        if not parts:
            raise TornCheckpoint(f"{name} holds no .pt file, the save did not finish")
        for part in parts:
            _check_file(storage, entry, Entry(f"{name}/{part.name}", part.path, False, part.size, part.mtime))


def _check_file(storage: Storage, entry: Entry, item: Entry) -> None:
    if item.size == 0:
        raise TornCheckpoint(f"{item.name} is empty")
    check_file = safetensors.check if item.name.endswith(safetensors.SUFFIX) else torch_save.check
    with storage.open(f"{entry.name}/{item.name}") as file:
        found = check_file(item, file)
    if not found.complete:
        raise TornCheckpoint(f"{item.name}: {found.reason}")
