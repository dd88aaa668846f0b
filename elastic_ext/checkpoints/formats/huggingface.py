"""The `checkpoint-N` directory of Hugging Face's Trainer: plain, FSDP and DeepSpeed; and the safetensors file.

What the Trainer writes, in this order: weights, optimizer, scheduler, RNG states, trainer_state.json (`_save_checkpoint` in
transformers/trainer.py, 4.40 to 5.23). Ranks do not wait for each other at the end, so each part is looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from elastic_ext.checkpoints.formats.checks import DCP_METADATA, HUGGING_FACE, Inspection, check_dcp, check_torch_save
from elastic_ext.checkpoints.storage import Entry, Storage

STATE = "trainer_state.json"
INDEX_SUFFIX = ".index.json"
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library, MAX_HEADER_SIZE

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


class Torn(Exception):
    """A part that is missing or damaged; the text says which, and why."""


def is_one(names: Sequence[str]) -> bool:
    """Do the names in a directory say that the Trainer has written it?"""
    return any(_SIGNS.fullmatch(name) for name in names)


def check(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check a `checkpoint-N` directory. Raises OSError."""
    found = {item.name: item for item in content}
    try:
        state = _state(storage, entry, found)
        for look in (_look_at_index, _look_at_weights, _look_at_rest, _look_at_folders):
            look(storage, entry, found)
    except Torn as error:
        return Inspection(False, HUGGING_FACE, str(error))
    size = sum(item.size for item in content if not item.is_dir)
    step, epoch = state["global_step"], state.get("epoch")
    whole_epoch = int(epoch) if isinstance(epoch, (int, float)) and 0 <= epoch < 1e9 else None
    reason = f"{STATE} says step {step}, each part is whole"
    return Inspection(True, HUGGING_FACE, reason, found[STATE].mtime, step, whole_epoch, size)


def _state(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> Mapping[str, Any]:
    if STATE not in found:
        raise Torn(f"no {STATE}, the save did not finish")
    state = _json(storage, f"{entry.name}/{STATE}", STATE)
    step = state.get("global_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise Torn(f"{STATE} has global_step {str(step)[:50]}, expected a count")
    return state


def _json(storage: Storage, path: str, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(storage.read(path))
    except (ValueError, RecursionError) as error:
        raise Torn(f"{name} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise Torn(f"{name} is damaged: it holds a {type(value).__name__}, expected an object")
    return value


def _look_at_index(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    """Weights in several files: the index names them."""
    for name in found:
        if not name.endswith(INDEX_SUFFIX):
            continue
        weights = _json(storage, f"{entry.name}/{name}", name).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise Torn(f"{name} is damaged: it has no weight_map")
        missing = sorted(set(weights.values()) - found.keys())
        if missing:
            raise Torn(f"{missing[0]}, which {name} names, is missing")


def _look_at_weights(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    weights = [name for name in found if _WEIGHTS.fullmatch(name)]
    folders = [name for name in found if _DEEPSPEED.fullmatch(name) or name.startswith("pytorch_model_fsdp_")]
    if not weights and not folders:
        raise Torn("no weights of a model, the save did not finish")
    for name in weights:
        _look_at_file(storage, entry, found[name])


def _look_at_rest(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    """Optimizer, scheduler, RNG states; none of them with save_only_model."""
    rest = [name for name in found if _OTHERS.fullmatch(name)]
    for name in rest:
        _look_at_file(storage, entry, found[name])
    if not rest or any(_DEEPSPEED.fullmatch(name) for name in found):  # DeepSpeed keeps optimizer and scheduler with the weights
        return
    if "scheduler.pt" not in found:
        raise Torn("no scheduler.pt beside the other states, the save did not finish")
    if not any(name in found for name in _OPTIMIZERS) and not any(name.startswith("optimizer_") for name in found):
        raise Torn("no optimizer.pt beside the other states, the save did not finish")
    if not any(name.startswith("rng_state") for name in rest):
        raise Torn("no rng_state beside the other states, the save did not finish")


def _look_at_folders(storage: Storage, entry: Entry, found: Mapping[str, Entry]) -> None:
    """FSDP's sharded state and DeepSpeed's."""
    for name, item in found.items():
        if not item.is_dir or not (_DCP_FOLDERS.fullmatch(name) or _DEEPSPEED.fullmatch(name)):
            continue
        path = f"{entry.name}/{name}"
        content = list(storage.entries(path))
        if _DCP_FOLDERS.fullmatch(name) or any(each.name == DCP_METADATA for each in content):
            verdict = check_dcp(storage, Entry(path, item.path, True, 0, item.mtime), content)
            if not verdict.complete:
                raise Torn(f"{name}: {verdict.reason}")
            continue
        parts = [each for each in content if each.name.endswith(".pt")]
        if not parts:
            raise Torn(f"{name} holds no .pt file, the save did not finish")
        for part in parts:
            _look_at_file(storage, entry, Entry(f"{name}/{part.name}", part.path, False, part.size, part.mtime))


def _look_at_file(storage: Storage, entry: Entry, item: Entry) -> None:
    look: Callable[[Entry, IO[bytes]], str] = safetensors_fault if item.name.endswith(".safetensors") else _zip_fault
    with storage.open(f"{entry.name}/{item.name}") as file:
        fault = look(item, file)
    if fault:
        raise Torn(f"{item.name}: {fault}")


def _zip_fault(item: Entry, file: IO[bytes]) -> str:
    if item.size == 0:
        return "an empty file"
    verdict = check_torch_save(item, file)
    return "" if verdict.complete else verdict.reason


def safetensors_fault(item: Entry, file: IO[bytes]) -> str:
    """What is wrong with a safetensors file by its header and size: "" for nothing. Its format has no checksums.

    8 bytes, little endian: the header's size; the header, JSON, with the place of each tensor in the bytes behind it.
    https://huggingface.co/docs/safetensors/index#format
    """
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if item.size < 8 or size > min(HEADER_LIMIT, item.size - 8):
        return f"a header of {size} bytes does not fit into {item.size}: truncated or damaged"
    try:
        header = json.loads(file.read(size))
        ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
        end = max(ends, default=0)
        whole = size + 8 + end == item.size
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        return f"its header is damaged: {type(error).__name__}: {error}"
    return "" if whole else f"{item.size} bytes, expected {size + 8 + end}: truncated or damaged"
