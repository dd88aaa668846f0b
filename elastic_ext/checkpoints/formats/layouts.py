"""The directories of checkpoints: those of torch.distributed.checkpoint, and those that tools for training write, by a table of
what each looks like, and of what must be in it.

A row of the table says by which names in a directory the tool is known, and what is missing if the save did not finish. For every
tool the parts are checked in the same way: files of torch.save and of safetensors, directories of torch.distributed.checkpoint,
JSON, and files of which each rank wrote its own.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ext.base.printable import counted
from elastic_ext.checkpoints.formats import candidates, single_files
from elastic_ext.checkpoints.formats.candidates import DCP, HUGGING_FACE, LIGHTNING, NO_OPTIMIZER, UNKNOWN, Inspection
from elastic_ext.checkpoints.formats.single_files import MAX_BYTES, SAFETENSORS_SUFFIX, PeekError, StandIn, is_count, peek
from elastic_ext.checkpoints.storage import Entry, Storage, thread_pool

# Directories of torch.distributed.checkpoint. Their tensors are in shards (`*.distcp`), and `.metadata` says where each one is.
# It is renamed into place after every rank has written its shards, so its presence marks the end of the save
# (`FileSystemWriter.finish` in torch/distributed/checkpoint/filesystem.py). With use_collectives=False there is none, but each
# rank ends its own part with a `__N.metadata`.

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"
_METADATA = r"(__\d+)?\.metadata"  # `.metadata`, or that of one rank
_SHARDS = rf"{_METADATA}(\.tmp)?|.+\.distcp"
_OPTIMIZER_KEYS = re.compile(r"optim|exp_avg|momentum|param_groups", re.IGNORECASE)  # in keys of a state with an optimizer's


@dataclass(frozen=True)
class Item:
    """Location of an object or of a shard of a tensor: bytes `offset` to `offset + length` of a file."""

    file: str
    offset: int
    length: int


def is_dcp(name: str, names: Iterable[str]) -> bool:
    """Return whether torch.distributed.checkpoint wrote a directory with these names, complete or not."""
    return any(re.fullmatch(_SHARDS, each) for each in names)


def is_metadata(name: str) -> bool:
    """Return whether a name is `.metadata`, or that of one rank."""
    return re.fullmatch(_METADATA, name) is not None


def metadata_files(names: Collection[str]) -> list[str]:
    """Return the names of `.metadata`, or of those of all ranks with shards among these names; also of those that are missing."""
    found = set(filter(is_metadata, names))
    if METADATA in found or not found:
        return [METADATA]
    return sorted(found | {f"{shard[0]}{METADATA}" for name in names if (shard := re.match(r"__\d+(?=_.*\.distcp$)", name))})


def _check_shards(storage: Storage, tree: Tree, folder: str, content: Sequence[Entry]) -> Inspection:
    """Check that `.metadata` and all the bytes that it refers to exist. Raises TornCheckpoint, OSError."""
    there, where = {item.name: item for item in content}, f"{folder}: " * bool(folder)
    items: list[Item] = []
    keys: list[str] = []
    shards = {item.name: item.size for item in content if item.name.endswith(SHARD_SUFFIX) and item.size > 0}
    markers = metadata_files(there)
    for marker in markers:
        if marker not in there or there[marker].size == 0:
            said = f"{marker} is empty" if marker in there else f"no {marker}"
            raise TornCheckpoint(f"{where}{said}, the save did not finish")
    if not shards:
        raise TornCheckpoint(f"{where}{METADATA} without any non-empty {SHARD_SUFFIX} file: the data is missing")
    for marker in markers:
        try:
            found = read_metadata(storage, f"{tree.name}/{folder}", there[marker])
        except PeekError as error:
            raise TornCheckpoint(f"{where}{marker} is damaged: {error}") from error
        items += found[0]
        keys += found[1]
    needed: dict[str, int] = {}  # bytes of each file
    for item in items:
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    faults = [f"{file} has {shards.get(file, 0)} bytes of {size}" for file, size in needed.items() if shards.get(file, 0) < size]
    if faults:
        raise TornCheckpoint(where + summary(faults))
    return Inspection(True, DCP, "", training=any(map(_OPTIMIZER_KEYS.search, keys)) if keys else None)


def parse_metadata(data: bytes) -> tuple[list[Item], list[str]]:
    """Return the items of a `.metadata`, none if it is not by torch's own writer; and the keys of the saved state.

    Raises PeekError.
    """
    value = peek(data)
    stored, keys = (value.field(name) if isinstance(value, StandIn) else None for name in ("storage_data", "state_dict_metadata"))
    found = []
    for info in stored.values() if isinstance(stored, dict) else ():
        if isinstance(info, StandIn):
            file, offset, length = (info.field(name) for name in ("relative_path", "offset", "length"))
            if type(file) is str and is_count(offset) and is_count(length):
                found.append(Item(file, offset, length))
    return found, [key for key in keys if isinstance(key, str)] if isinstance(keys, dict) else []


def read_metadata(storage: Storage, folder: str, metadata: Entry) -> tuple[list[Item], list[str]]:
    """Return what a `.metadata` in a folder says; nothing if it is too large to read. Raises PeekError, OSError."""
    return ([], []) if metadata.size > MAX_BYTES else parse_metadata(storage.read(f"{folder.rstrip('/')}/{metadata.name}"))


def has_shards(names: Iterable[str]) -> bool:
    """Return whether a shard is among these names."""
    return any(each.endswith(SHARD_SUFFIX) for each in names)


# Those of other tools.

ACCELERATE, DEEPSPEED, MEGATRON, NEMO = "accelerate", "DeepSpeed", "Megatron", "NeMo 2"
NANOTRON, TORCHTUNE = "nanotron", "torchtune"
FILES = "directory of files"  # of torch.save, of safetensors, of torch.distributed.checkpoint in folders

MAX_JSON = 1 << 18  # bytes of a JSON file that is read to see whether it is whole
MAX_FILES = 20_000  # no checkpoint of training has more; a directory of data may
INDEX_SUFFIX = ".index.json"
_CHECKED = candidates.CHECKED_SUFFIXES
_FOREIGN = Inspection(True, UNKNOWN, "not of torch.save", training=False)  # other programs use its suffixes too
STATE = "trainer_state.json"  # of Hugging Face's Trainer, which writes it last
UNFINISHED = "checkpoint-is-incomplete.txt"
"""Of the same, with `enable_jit_checkpoint`: there while that save writes, maybe over an older one of the same step
(`CheckpointManager.execute_jit_checkpoint` in transformers/trainer_jit_checkpoint.py, 5.0 to 5.24)."""
_LAST = ("latest", STATE)  # "latest": of DeepSpeed, which writes it once all ranks are done

# A part of the weights of a Hugging Face model, of which `save_pretrained` writes the index last.
_NUMBERED = re.compile(r"((?:.*/)?(?:diffusion_)?(?:pytorch_)?model)-\d+-of-(\d+)\.(safetensors|bin)")

# Files with the state of an optimizer, by their paths; and files whose `step` is not that of the training.
_OPTIMIZER = re.compile(r"optim|_states\.pt$|recipe_state", re.IGNORECASE)
_NO_STEP = re.compile(r"optim|sched|rng|random|sampler|scaler|dl_state|dataloader|training_args", re.IGNORECASE)


Documents = Mapping[str, Mapping[str, object]]
"""The objects in JSON files, by path; an empty one if a file holds another value."""


class TornCheckpoint(Exception):
    """A part is missing or damaged. The message names the part and the reason."""


@dataclass(frozen=True)
class Tree:
    name: str  # of the directory
    files: Mapping[str, Entry]  # by path relative to it, also those in folders
    folders: frozenset[str] = frozenset()  # their relative paths

    @property
    def shard_folders(self) -> dict[str, list[Entry]]:
        """The folders that torch.distributed.checkpoint wrote, "" for the directory itself, each with the entries in it."""
        found: dict[str, list[Entry]] = {}
        for path, entry in self.files.items():
            found.setdefault(path.rpartition("/")[0], []).append(entry)
        return {folder: content for folder, content in found.items() if is_dcp(folder, (each.name for each in content))}

    def checked(self) -> list[str]:
        """The paths of all files whose kind can be checked, but for shards."""
        return sorted(path for path in self.files if path.endswith(_CHECKED))


def read_tree(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Tree:
    """List what lies below a directory. content: the usable entries directly in it. Links to folders are not followed.

    Raises TornCheckpoint if it has too many files, OSError.
    """
    files: dict[str, Entry] = {}
    folders: list[str] = []
    waiting = [("", content)]
    while waiting:
        above, found = waiting.pop()
        for item in found:
            path = above + item.name
            if item.unusable or (item.is_link and (item.is_dir or item.size == 0)):
                continue
            if not item.is_dir:
                files[path] = item
            elif not item.name.startswith("."):
                folders.append(path)
                waiting.append((f"{path}/", list(storage.entries(f"{entry.name}/{path}"))))
        if len(files) > MAX_FILES and sum(not path.endswith(SHARD_SUFFIX) for path in files) > MAX_FILES:
            raise TornCheckpoint(f"more than {MAX_FILES} files: not a checkpoint of a known format")
    return Tree(entry.name, files, frozenset(folders))


def _check_parts(storage: Storage, tree: Tree, documents: Documents) -> Inspection:
    """Check all parts; return what those of a whole tree say, of format UNKNOWN if none of them is known.

    Raises TornCheckpoint, OSError.
    """
    _check_names(tree, documents)
    shards = [_check_shards(storage, tree, *each) for each in sorted(tree.shard_folders.items())]
    paths = tree.checked()
    with thread_pool() as pool:
        files = list(pool.map(lambda path: _check_file(storage, tree, path), paths))
    numbered = [each for path, each in zip(paths, files, strict=True) if not _NO_STEP.search(path)]
    written_at = _end_of_save(each for path, each in tree.files.items() if path.endswith((*_CHECKED, METADATA, SHARD_SUFFIX)))
    steps = sorted({each.step for each in numbered if each.step is not None})
    trained = {each.training for each in (*shards, *files)} | {True for path in tree.files if _OPTIMIZER.search(path)}
    found = Inspection(
        complete=True,
        format=FILES if shards or any(each is not _FOREIGN for each in files) else UNKNOWN,
        reason=f"whole: {counted(len(tree.files), 'file')}",
        written_at=written_at,
        step=next((each.step for each in numbered if each.step is not None), None),
        epoch=next((each.epoch for each in numbered if each.epoch is not None), None),
        size=sum(each.size for each in tree.files.values()),
        training=True in trained or (None if None in trained else False),
        kinds=_kinds(tree, written_at) if tree.files.keys().isdisjoint(_LAST) else Counter(),
    )
    if len(steps) > 1:
        return replace(found, complete=False, reason=of_two_saves(steps), distrusted=True, compared=True)
    unended = next((path for path, each in zip(paths, files, strict=True) if each.compared), "")
    reason = f"{unended}: {single_files.OLD_FORM}"
    return replace(found, complete=False, reason=reason, compared=True) if unended else found


def of_two_saves(steps: Sequence[int]) -> str:
    return f"its files say different steps, {' and '.join(map(str, steps[:3]))}: a save over an older one did not finish"


def _end_of_save(files: Iterable[Entry]) -> float | None:
    """Return when the last file of the save was written, by the clock of the filesystem; None if unknown.

    What follows after a pause that is longer than writing it took was added later: results, a model in another form.
    """
    end: float | None = None
    for mtime, size in sorted((each.mtime, each.size) for each in files if each.mtime is not None):
        if end is not None and mtime - end > GRACE_S + size / SLOWEST:
            return end
        end = mtime
    return end


def _kinds(tree: Tree, written_at: float | None) -> Counter[str]:
    """Return the kinds of files that the save wrote: no shards, which `.metadata` names, nor what was added or left over."""
    latest = math.inf if written_at is None else written_at + GRACE_S
    files = ((path, each.mtime or 0.0) for path, each in tree.files.items() if not path.endswith(SHARD_SUFFIX))
    of_save = (path for path, mtime in files if mtime <= latest)
    return candidates.kinds_of(path for path in of_save if not candidates.is_temporary(path.rpartition("/")[2]))


def _read_json(storage: Storage, tree: Tree) -> Documents:
    """Return what the JSON files hold that are small, or that say something. Of lines of JSON, each a value, that is the first.

    Raises TornCheckpoint if one is cut short, OSError.
    """
    found = {}
    for path, entry in sorted(tree.files.items()):
        if path in _STATES or path.endswith(INDEX_SUFFIX) or (path.endswith(".json") and entry.size <= MAX_JSON):
            text = storage.read(f"{tree.name}/{path}").decode(errors="replace").lstrip()
            try:
                value, _ = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError) as error:
                raise TornCheckpoint(f"{path} is cut short or damaged: {error}") from error
            found[path] = value if isinstance(value, dict) else {}
    return found


def _check_names(tree: Tree, documents: Documents) -> None:
    """Check that no rank's file is missing, by the names alone; no index of weights, which comes last, and none that it lists."""
    for part in filter(None, map(_NUMBERED.fullmatch, sorted(tree.files))):
        index = f"{part[1]}.{part[3]}{INDEX_SUFFIX}"
        if int(part[2]) > 1 and index not in tree.files:
            raise TornCheckpoint(f"no {index} beside {part[0]}, the save did not finish")
    for path in sorted(path for path in tree.files if path.endswith(INDEX_SUFFIX)):
        weights = documents[path].get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise TornCheckpoint(f"{path} is damaged: it has no weight_map")
        folder = path[: path.rfind("/") + 1]
        absent = sorted({folder + file for file in weights.values()} - tree.files.keys())
        if absent:
            raise TornCheckpoint(f"{absent[0]} is missing, although {path} lists it")
    by_ranks = candidates.by_pattern(tree.files)
    missing = [(pattern, candidates.missing_rank(by_ranks[pattern])) for pattern in sorted(by_ranks)]
    faults = [f"{pattern}: the file of rank {rank} is missing" for pattern, rank in missing if rank]
    if faults:
        raise TornCheckpoint(f"{faults[0]}, the save did not finish")


def _check_file(storage: Storage, tree: Tree, path: str) -> Inspection:
    item = tree.files[path]
    if item.size == 0:
        raise TornCheckpoint(f"{path} is empty")
    with storage.open(f"{tree.name}/{path}") as file:
        found = single_files.check(item, file)
    if found.format == UNKNOWN and not found.compared:
        return _FOREIGN
    if found.compared:
        return found
    if not found.complete:
        raise TornCheckpoint(f"{path}: {found.reason}")
    return found


# The JSON files that give step and epoch, each with the keys for these.
_STATES = {
    STATE: ("global_step", "epoch"),
    "train_state.json": ("current_step", "current_epoch"),  # of sd-scripts (kohya), beside what accelerate writes
    "checkpoint_metadata.json": ("metas.last_train_step", ""),  # of nanotron
}

_FSDP = r"(pytorch_model_fsdp|optimizer)_\d+/"  # accelerate/utils/fsdp_utils.py
_DEEPSPEED_FOLDER = r"global_step\d+[^/]*/"
_TRAINER_STATES = r"training_args\.bin|rng_state(_\d+)?\.pth|scheduler\.pt"
_OTHERS = re.compile(r"(optimizer|scheduler)\.(pt|bin)|rng_state(_\d+)?\.pth|scaler\.pt")


@dataclass(frozen=True)
class Layout:
    format: str  # its name, for people
    signs: tuple[str, ...]  # patterns, each of which fits a name directly in the directory; those of folders end with a slash
    name: str = ""  # pattern of the directory's own name; "": any
    # A file that the tool writes last, or without which nothing works: its name for people, and a pattern of its path.
    needs: tuple[str, str] | None = None
    # Returns what else a save that did not finish lacks, or "".
    missing: Callable[[Tree, Documents], str] = lambda tree, documents: _tracked(tree)
    last: str = ""  # path of a file that the tool writes after weights and optimizer

    def claims(self, name: str, top: Iterable[str]) -> bool:
        """Return whether the tool wrote a directory with these names directly in it, complete or not."""
        names = list(top)
        fits = not self.name or re.fullmatch(self.name, name) is not None
        return fits and all(any(re.fullmatch(sign, each) for each in names) for sign in self.signs)


def _trainer(tree: Tree, documents: Documents) -> str:
    """The Trainer writes weights, optimizer, scheduler, states of random numbers and STATE, in this order (`_save_checkpoint` in
    transformers/trainer.py, 4.40 to 5.24). Ranks do not wait for each other at the end, so every part must be checked.

    A load can do without the states of random numbers; save_only_model writes none of the states.
    """
    step = documents[STATE].get("global_step")
    if not is_count(step):
        return f"{STATE} has global_step {str(step)[:50]}, expected a whole number, 0 or more"
    deepspeed = [folder for folder in tree.folders if re.fullmatch(_DEEPSPEED_FOLDER, f"{folder}/")]
    for folder in deepspeed:
        if not any(path.startswith(f"{folder}/") and path.endswith((".pt", ".distcp")) for path in tree.files):
            return f"{folder} holds no .pt file, the save did not finish"
    # PEFT keeps adapters with names in folders of their own.
    weights = any(re.fullmatch(candidates.WEIGHTS, path.rpartition("/")[2]) for path in tree.files)
    if not (deepspeed or tree.shard_folders or weights):
        return "no model weights, the save did not finish"
    others = [path for path in tree.files if _OTHERS.fullmatch(path)]
    elsewhere = any(not folder.startswith("pytorch_model_fsdp") for folder in tree.shard_folders if "optim" not in folder)
    if not others or deepspeed or elsewhere:  # stored with the weights
        return ""
    if "scheduler.pt" not in others:
        return "no scheduler.pt beside the other states, the save did not finish"
    optimizer = any(path.startswith("optimizer") for path in tree.files) or any("optim" in each for each in tree.shard_folders)
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
META = "meta.pt", r"meta\.pt"  # of Lightning's FSDP strategy, beside shards (_METADATA_FILENAME in fabric/strategies/fsdp.py)
_MODEL_STATES = "*_model_states.pt", r"(.*/)?(.*model_states|layer_\d+.*_states)\.pt"

# The first that claims a directory wins.
LAYOUTS = (
    Layout(LIGHTNING, (_SHARDS, META[1]), needs=META, last=METADATA),
    Layout(LIGHTNING, (_SHARDS,), r".*=.*\.ckpt", needs=META, last=METADATA),
    Layout(DCP, (_SHARDS,), last=METADATA),
    Layout(HUGGING_FACE, (r"trainer_state\.json",), missing=_trainer, last=STATE),
    Layout(HUGGING_FACE, (_TRAINER_STATES,), r"checkpoint-\d+", needs=_STATE_FILE, missing=_trainer, last=STATE),
    Layout(
        ACCELERATE,
        (rf"random_states_\d+\.pkl|(optimizer|scheduler|sampler)(_\d+)?\.bin|train_state\.json|{_FSDP}",),
        needs=("random_states_0.pkl", r"random_states_\d+\.pkl"),
        last="random_states_0.pkl",
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
    Layout(candidates.SAVED_MODEL, (candidates.WEIGHTS,), r"checkpoint-\d+", needs=_STATE_FILE, missing=_trainer),
)


def top_names(content: Iterable[Entry]) -> list[str]:
    """Return the names of entries as `layout_of` takes them: those of folders end with a slash."""
    return [f"{item.name}/" if item.is_dir else item.name for item in content]


def layout_of(name: str, top: Sequence[str]) -> Layout | None:
    """Return the layout of a directory with these names directly in it; None if it is no checkpoint of a known layout."""
    found = next((layout for layout in LAYOUTS if layout.claims(name, top)), None)
    if (found is None or found.format not in (DCP, LIGHTNING)) and holds_several(name, top):
        return None
    if found is not None or not top:
        return found
    says_so = candidates.says_step(name) or not candidates.NAMES.isdisjoint(candidates.words_of(name))
    return STEP_DIRECTORY if says_so else None


def holds_several(name: str, top: Iterable[str]) -> bool:
    """Return whether a directory holds checkpoints of several steps, by the names directly in it, and is no checkpoint itself.

    Numbers alone do not say so in the checkpoint of a step, nor where they begin as those of parts do (agent_0.pt, agent_1.pt).
    """
    steps: defaultdict[tuple[str, bool], set[int]] = defaultdict(set)
    suffixes = ("/", SAFETENSORS_SUFFIX, *candidates.TORCH_SAVE_SUFFIXES)
    for inner in (each.rstrip("/") for each in top if each.endswith(suffixes)):
        step = candidates.step_of(inner)
        if step is not None and not (candidates.is_hidden(inner) or candidates.is_part(inner)):
            steps[candidates.family_of(inner), candidates.says_step(inner) and not inner.isdigit()].add(step)
    by_number = not candidates.says_step(name)
    return any(len(found) > 1 and (said or (by_number and min(found) > 1)) for (_, said), found in steps.items())


def check(storage: Storage, entry: Entry, content: Sequence[Entry], layout: Layout) -> Inspection:
    """Check a directory of a layout. content: the usable entries directly in it. Raises OSError."""
    try:
        tree = read_tree(storage, entry, content)
        unknown = Inspection(False, UNKNOWN, f"{counted(len(tree.files), 'file')}, none of a known format")
        if layout is STEP_DIRECTORY and not (tree.checked() or tree.shard_folders):
            return unknown
        for folder in sorted(tree.folders):
            if re.search(r"rank_?\d+", folder) and not any(path.startswith(f"{folder}/") for path in tree.files):
                raise TornCheckpoint(f"{folder} is empty, the save did not finish")
        if layout.needs is not None and not any(re.fullmatch(layout.needs[1], path) for path in tree.files):
            raise TornCheckpoint(f"no {layout.needs[0]}, the save did not finish")
        documents = _read_json(storage, tree)
        found = _check_parts(storage, tree, documents)
        if layout is STEP_DIRECTORY and found.format == UNKNOWN and found.complete:
            return unknown
        if not found.complete:
            return replace(found, format=layout.format)
        missing = layout.missing(tree, documents)
        if missing:
            raise TornCheckpoint(missing)
        mixed = _mixed(tree, layout)
        if mixed:
            return replace(found, complete=False, format=layout.format, reason=mixed, distrusted=True, compared=True)
    except TornCheckpoint as error:
        return Inspection(False, layout.format, str(error))
    if found.training is False and layout is STEP_DIRECTORY and not candidates.says_step(entry.name):
        return Inspection(False, candidates.SAVED_MODEL, f"{NO_OPTIMIZER}, and its name gives no step: a saved model")
    given = [(documents[path], keys) for path, keys in _STATES.items() if path in documents]
    step, epoch = (_value(given[0][0], key) for key in given[0][1]) if given else (None, None)
    if step is None and (layout.format == LIGHTNING or candidates.step_of(entry.name) is None):
        step, epoch = found.step, found.epoch if epoch is None else epoch
    found = replace(found, format=layout.format, step=step, epoch=epoch)
    if layout.last in tree.files:
        found = replace(found, written_at=tree.files[layout.last].mtime)
    if STATE in documents:
        found = replace(found, reason=f"{STATE} says step {step}, all parts are complete")
    return replace(found, reason=f"{found.reason}, {NO_OPTIMIZER}") if found.training is False else found


def _value(state: object, key: str) -> int | None:
    for word in key.split("."):
        state = state.get(word) if isinstance(state, dict) else None
    if isinstance(state, float) and 0 <= state < 1e9:
        return int(state)
    return state if is_count(state) else None


def two_moments(parts: Iterable[Entry]) -> str:
    """Return which part was written long after others, for people; "" if none was. Pure."""
    found = list(parts)
    end = _end_of_save(found)
    later = [each for each in found if end is not None and each.mtime is not None and each.mtime > end]
    if not later:
        return ""
    said = f"{later[0].name} was written long after the others"
    return f"{said}: a save over an older one did not finish; if it is a whole copy, touch its files"


TICK_S = 2.0  # clocks of two nodes, and of filesystems that count whole seconds, may differ by so much
GRACE_S, SLOWEST = 30.0, 10e6  # to copy a file takes seconds: GRACE_S, and one for each SLOWEST bytes, at most

# What a save writes first and most of. Weights of another kind (by zero_to_fp32, a merged adapter) may have been added later.
_BULK = (r"(^|/)optimizer[^/]*$", rf"{SHARD_SUFFIX}$|_states\.pt$", r"(^|/)adapter_model", rf"(^|/)({candidates.WEIGHTS})$")


def _mixed(tree: Tree, layout: Layout) -> str:
    """Return which part is of another save than the rest, for people; "" if none is seen to be."""
    for folder, content in tree.shard_folders.items():
        named = metadata_files([each.name for each in content])
        marker = min((each for each in content if each.name in named), key=lambda each: each.mtime or 0.0)
        said = younger_than(marker, [each for each in content if each.name.endswith(SHARD_SUFFIX)])
        if said:
            return f"{folder}: " * bool(folder) + said
    kinds = [[each for path, each in tree.files.items() if re.search(kind, path)] for kind in _BULK]
    weights = next(filter(None, kinds[1:]), [])
    if layout is STEP_DIRECTORY and candidates.step_of(tree.name) is None:  # each save writes over the one before it
        return two_moments(tree.files[path] for path in tree.checked())
    ends = layout.last in tree.files and layout.last != METADATA
    return younger_than(tree.files[layout.last], [*kinds[0], *weights]) if ends else ""


def younger_than(marker: Entry, parts: Iterable[Entry]) -> str:
    """Return which part a later save has written over, for people; "" if none is seen. Pure.

    marker: what the tool writes last. A save over an older one leaves the marker of that one until its own end. If it was killed,
    some parts are older than the marker, and others younger by the time between two saves. In a copy without the times, which may
    write the marker between the parts, the next part is younger by no more than its copying took: see GRACE_S and SLOWEST.

    If all parts are younger, they are of one save again: the copy wrote the marker first, or the killed save had written all.
    Two things stay undecided. A copy that was slower, or was interrupted there, is passed over, and the reason says what to do. A
    mixture of two saves with less time between them is taken.
    """
    times = sorted((part.mtime, part.size, part.name) for part in parts if part.mtime is not None)
    younger = [each for each in times if marker.mtime is not None and each[0] > marker.mtime + TICK_S]
    if marker.mtime is None or not 0 < len(younger) < len(times):
        return ""
    mtime, size, name = younger[0]
    after = mtime - marker.mtime
    if after <= GRACE_S + size / SLOWEST:
        return ""
    said = f"{name} was written {after:.0f} s after {marker.name}, and other parts before it"
    return f"{said}: a save over an older one did not finish; if it is a whole copy, touch {marker.name}"


def summary(faults: Sequence[str]) -> str:
    """Return the first fault and the number of the others."""
    return faults[0] if len(faults) == 1 else f"{faults[0]}, and {len(faults) - 1} more faults"
