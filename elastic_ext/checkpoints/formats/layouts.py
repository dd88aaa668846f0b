"""The directories that tools for training write: a table of what each looks like, and of what must be in it.

The parts are checked alike, whatever tool wrote them (`trees`). A row says by which names in a directory the tool is known, and
what is missing if the save did not finish.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_ext.checkpoints.formats.inspection import (
    ACCELERATE,
    DEEPSPEED,
    FILES,
    HUGGING_FACE,
    MEGATRON,
    NAMES,
    NANOTRON,
    NEMO,
    NO_OPTIMIZER,
    SAVED_MODEL,
    TORCH_SAVE_SUFFIXES,
    TORCHTUNE,
    UNKNOWN,
    Inspection,
    is_hidden,
)
from elastic_ext.checkpoints.formats.names import family_of, says_step, step_of, words_of
from elastic_ext.checkpoints.formats.peek import is_count
from elastic_ext.checkpoints.formats.safetensors import SUFFIX
from elastic_ext.checkpoints.formats.trees import Parts, TornCheckpoint, Tree, check_parts, read_tree
from elastic_ext.checkpoints.storage import Entry, Storage

STATE = "trainer_state.json"  # of Hugging Face's Trainer, which writes it last

# The JSON files that give step and epoch, each with the keys for these.
_STATES = {
    STATE: ("global_step", "epoch"),
    "train_state.json": ("current_step", "current_epoch"),  # of sd-scripts (kohya), beside what accelerate writes
    "checkpoint_metadata.json": ("metas.last_train_step", ""),  # of nanotron
}

_WEIGHTS = (
    r"((adapter_|diffusion_pytorch_)?model|pytorch_lora_weights)(-\d+-of-\d+|_\d)?\.safetensors(\.index\.json)?"
    r"|((diffusion_)?pytorch_model|adapter_model)(-\d+-of-\d+|_\d|_fsdp)?\.bin(\.index\.json)?"
)
_FSDP = r"(pytorch_model_fsdp|optimizer)_\d+/"  # accelerate/utils/fsdp_utils.py
_DEEPSPEED_FOLDER = r"global_step\d+[^/]*/"
_TRAINER_STATES = r"training_args\.bin|rng_state(_\d+)?\.pth|scheduler\.pt"
_OTHERS = re.compile(r"(optimizer|scheduler)\.(pt|bin)|rng_state(_\d+)?\.pth|scaler\.pt")

# Files that are always parts of something larger, never checkpoints of their own.
_PARTS = re.compile(
    rf"{_WEIGHTS}|training_args\.bin|rng_state(_\d+)?\.pth|.*(model|optim)_states\.pt|model_optim_rng\.pt|distrib_optim\.pt"
    r"|recipe_state\.pt|ft-model-.*|(hf|meta)_model_\d+.*\.pt|adapter_model\.pt|consolidated\.\d+\.pth"
)


@dataclass(frozen=True)
class Layout:
    """How one tool lays out a checkpoint.

    Attributes:
        format: its name, for people.
        signs: patterns, each of which fits a name directly in the directory; those of folders end with a slash.
        name: pattern of the directory's own name; "": any.
        needs: a file that the tool writes last, or without which nothing works: its name for people, and a pattern of its path.
        missing: returns what else a save that did not finish lacks, or "".
    """

    format: str
    signs: tuple[str, ...]
    name: str = ""
    needs: tuple[str, str] | None = None
    missing: Callable[[Tree, Parts], str] = lambda tree, parts: _tracked(tree)

    def claims(self, name: str, top: Iterable[str]) -> bool:
        """Return whether the tool wrote a directory with these names directly in it, complete or not."""
        names = list(top)
        fits = not self.name or re.fullmatch(self.name, name) is not None
        return fits and all(any(re.fullmatch(sign, each) for each in names) for sign in self.signs)


def _trainer(tree: Tree, parts: Parts) -> str:
    """The Trainer writes weights, optimizer, scheduler, states of random numbers and STATE, in this order (`_save_checkpoint` in
    transformers/trainer.py, 4.40 to 5.24). Ranks do not wait for each other at the end, so every part must be checked.

    A load can do without the states of random numbers; save_only_model writes none of the states.
    """
    step = parts.states[STATE].get("global_step")
    if not is_count(step):
        return f"{STATE} has global_step {str(step)[:50]}, expected a whole number, 0 or more"
    top, deepspeed = tree.top, [name for name in tree.top if re.fullmatch(_DEEPSPEED_FOLDER, name)]
    for folder in deepspeed:
        if not any(path.startswith(folder) and path.endswith((".pt", ".distcp")) for path in tree.files):
            return f"{folder.rstrip('/')} holds no .pt file, the save did not finish"
    if not (deepspeed or tree.shard_folders or any(re.fullmatch(_WEIGHTS, name) for name in top)):
        return "no model weights, the save did not finish"
    others = [name for name in top if _OTHERS.fullmatch(name)]
    elsewhere = any(not folder.startswith("pytorch_model_fsdp") for folder in tree.shard_folders if "optim" not in folder)
    if not others or deepspeed or elsewhere:  # stored with the weights
        return ""
    if "scheduler.pt" not in others:
        return "no scheduler.pt beside the other states, the save did not finish"
    optimizer = any(name.startswith("optimizer") for name in top) or any("optim" in folder for folder in tree.shard_folders)
    return "" if optimizer else "no optimizer.pt beside the other states, the save did not finish"


def _tracked(tree: Tree) -> str:
    """DeepSpeed writes `latest` beside the folder of its files once all ranks are done."""
    for folder in {path.rpartition("/")[0] for path in tree.files if path.endswith("_states.pt")} - {""}:
        above = folder.rpartition("/")[0]
        if f"{above}/latest".lstrip("/") not in tree.files:
            return f"no latest beside {folder}, the save did not finish"
    return ""


# Of no tool that is known: a directory whose name says that it is a checkpoint.
STEP_DIRECTORY = Layout(FILES, ())
_STATE_FILE = STATE, re.escape(STATE)
_MODEL_STATES = "*_model_states.pt", r"(.*/)?(.*model_states|layer_\d+.*_states)\.pt"

# The first that claims a directory wins.
LAYOUTS = (
    Layout(HUGGING_FACE, (r"trainer_state\.json",), missing=_trainer),
    Layout(HUGGING_FACE, (_TRAINER_STATES,), r"checkpoint-\d+", needs=_STATE_FILE, missing=_trainer),
    Layout(
        ACCELERATE,
        (rf"random_states_\d+\.pkl|(optimizer|scheduler|sampler)(_\d+)?\.bin|train_state\.json|{_FSDP}",),
        needs=("random_states_0.pkl", r"random_states_\d+\.pkl"),
    ),
    Layout(DEEPSPEED, (r".*_states\.pt",), needs=_MODEL_STATES),
    Layout(DEEPSPEED, ("latest", r"checkpoint/|pytorch_model/"), r".+", needs=_MODEL_STATES),
    Layout(DEEPSPEED, ("latest", _DEEPSPEED_FOLDER), r".*(step|epoch|iter|checkpoint|ckpt).*\d.*", needs=_MODEL_STATES),
    Layout(MEGATRON, (r"mp_rank_\d{2,3}(_\d{3})*/",), needs=("model_optim_rng.pt", r".*/model(_optim)?_rng\.pt")),
    Layout(NEMO, ("weights/", "context/"), needs=("file in weights", r"weights/.+")),
    Layout(
        NANOTRON,
        ("model/", r"(checkpoint_metadata|model_config)\.json"),
        r"\d+",
        needs=("checkpoint_metadata.json", r"checkpoint_metadata\.json"),
    ),
    Layout(TORCHTUNE, (r"ft-model-.*|(hf|meta)_model_.*|torchtune_config\.yaml|adapter_model\.pt",)),
    Layout(SAVED_MODEL, (_WEIGHTS,), r"checkpoint-\d+", needs=_STATE_FILE, missing=_trainer),
)


def top_names(content: Iterable[Entry]) -> list[str]:
    """Return the names of entries as `layout_of` takes them: those of folders end with a slash."""
    return [f"{item.name}/" if item.is_dir else item.name for item in content]


def is_part(name: str) -> bool:
    """Return whether a file is a part of something larger by its name, and so never a checkpoint of its own."""
    return _PARTS.fullmatch(name) is not None


def layout_of(name: str, top: Sequence[str]) -> Layout | None:
    """Return the layout of a directory with these names directly in it; None if it is no checkpoint of a known layout."""
    if holds_several(name, top):
        return None
    found = next((layout for layout in LAYOUTS if layout.claims(name, top)), None)
    return found or (STEP_DIRECTORY if top and (says_step(name) or not NAMES.isdisjoint(words_of(name))) else None)


def holds_several(name: str, top: Iterable[str]) -> bool:
    """Return whether a directory holds checkpoints of several steps, by the names directly in it: then it is none itself.

    Numbers alone do not say so in the checkpoint of a step, nor where they begin as those of parts do (agent_0.pt, agent_1.pt).
    """
    steps: defaultdict[tuple[str, bool], set[int]] = defaultdict(set)
    for each in top:
        inner = each.rstrip("/")
        if each.endswith(("/", SUFFIX, *TORCH_SAVE_SUFFIXES)) and not (is_hidden(inner) or is_part(inner)):
            step = step_of(inner)
            if step is not None:
                steps[family_of(inner), says_step(inner) and not inner.isdigit()].add(step)
    return any(len(found) > 1 and (said or (min(found) > 1 and not says_step(name))) for (_, said), found in steps.items())


def check(storage: Storage, entry: Entry, content: Sequence[Entry], layout: Layout) -> Inspection:
    """Check a directory of a layout. content: the usable entries directly in it. Raises OSError."""
    try:
        tree = read_tree(storage, entry, content)
        unknown = Inspection(False, UNKNOWN, f"none of its {len(tree.files)} files is of a known format")
        if layout is STEP_DIRECTORY and not (tree.checked() or tree.shard_folders):
            return unknown
        _check_folders(tree)
        if layout.needs is not None and not any(re.fullmatch(layout.needs[1], path) for path in tree.files):
            raise TornCheckpoint(f"no {layout.needs[0]}, the save did not finish")
        parts = check_parts(storage, tree, tuple(_STATES))
        if layout is STEP_DIRECTORY and not parts.known:
            return unknown
        missing = layout.missing(tree, parts)
        if missing:
            raise TornCheckpoint(missing)
    except TornCheckpoint as error:
        return Inspection(False, layout.format, str(error))
    if parts.training is False and layout is STEP_DIRECTORY and not says_step(entry.name):
        return Inspection(False, SAVED_MODEL, f"{NO_OPTIMIZER}, and its name gives no step: a saved model")
    step, epoch = _numbers(parts)
    if step is None and step_of(entry.name) is None:
        step, epoch = parts.step, parts.epoch if epoch is None else epoch
    reason, written_at, training = f"all {len(tree.files)} files are whole", parts.written_at, parts.training
    if STATE in parts.states:
        reason, written_at = f"{STATE} says step {step}, all parts are complete", tree.files[STATE].mtime
    reason += f", {NO_OPTIMIZER}" * (training is False)
    return Inspection(True, layout.format, reason, written_at, step, epoch, parts.size, training=training, parts=parts.parts)


def _check_folders(tree: Tree) -> None:
    """Check that the folder of no rank is empty."""
    for folder in sorted(tree.folders):
        if re.search(r"rank_?\d+", folder) and not any(path.startswith(f"{folder}/") for path in tree.files):
            raise TornCheckpoint(f"{folder} is empty, the save did not finish")


def _numbers(parts: Parts) -> tuple[int | None, int | None]:
    """Return step and epoch by the first JSON file that gives them."""
    for path, keys in _STATES.items():
        if path in parts.states:
            step, epoch = (_value(parts.states[path], key) for key in keys)
            return step, epoch
    return None, None


def _value(state: object, key: str) -> int | None:
    for word in key.split("."):
        state = state.get(word) if isinstance(state, dict) else None
    if isinstance(state, float) and 0 <= state < 1e9:
        return int(state)
    return state if is_count(state) else None
