"""A checkpoint of many files below one directory: what lies there, and whether each part is whole.

`layouts` has the table of the tools that write such directories. A check here knows only kinds of files: of torch.save and of
safetensors, directories of torch.distributed.checkpoint, JSON, and files of which each rank wrote its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.checkpoints.formats import dcp, safetensors, torch_save
from elastic_ext.checkpoints.formats.files import thread_pool
from elastic_ext.checkpoints.formats.inspection import DCP, TORCH_SAVE_SUFFIXES, UNKNOWN, Inspection
from elastic_ext.checkpoints.formats.rank_files import by_pattern, missing_rank, parts_of, too_few
from elastic_ext.checkpoints.storage import Entry, Storage

MAX_FILES = 20_000  # no checkpoint of training has more; a directory of data may
INDEX_SUFFIX = ".index.json"
_CHECKED = (*TORCH_SAVE_SUFFIXES, ".pkl", safetensors.SUFFIX)
_FOREIGN = Inspection(True, UNKNOWN, "not of torch.save", training=False)  # other programs use its suffixes too
_LAST = ("latest", "trainer_state.json")  # of DeepSpeed and of the Trainer, written once all ranks are done

# Files with the state of an optimizer, by their paths; and files whose `step` is not that of the training.
_OPTIMIZER = re.compile(r"optim|_states\.pt$|recipe_state", re.IGNORECASE)
_NO_STEP = re.compile(r"optim|sched|rng|random|sampler|scaler|dl_state|dataloader|training_args", re.IGNORECASE)


class TornCheckpoint(Exception):
    """A part is missing or damaged. The message names the part and the reason."""


@dataclass(frozen=True)
class Tree:
    """What lies below a directory.

    Attributes:
        name: of the directory.
        files: by path relative to it, also those in folders.
        folders: their relative paths.
    """

    name: str
    files: Mapping[str, Entry]
    folders: frozenset[str] = frozenset()

    @property
    def top(self) -> list[str]:
        """The names directly in the directory; those of folders end with a slash."""
        return [name for name in self.files if "/" not in name] + [f"{name}/" for name in self.folders if "/" not in name]

    @property
    def shard_folders(self) -> dict[str, list[Entry]]:
        """The folders that torch.distributed.checkpoint wrote, "" for the directory itself, each with the entries in it."""
        found: dict[str, list[Entry]] = {}
        for path, entry in self.files.items():
            found.setdefault(path.rpartition("/")[0], []).append(entry)
        return {folder: content for folder, content in found.items() if dcp.matches(folder, [each.name for each in content])}

    @property
    def shard_files(self) -> list[str]:
        """The paths of the files of torch.distributed.checkpoint."""
        return [path for path in self.files if path.endswith((dcp.METADATA, dcp.SHARD_SUFFIX))]

    def checked(self) -> list[str]:
        """The paths of all files whose kind can be checked, but for shards."""
        return sorted(path for path in self.files if path.endswith(_CHECKED))


@dataclass(frozen=True)
class Parts:
    """What the parts of a whole tree say.

    Attributes:
        written_at, size, training, parts: see `Inspection`.
        step, epoch: by a file's content; None if none says so.
        states: the JSON objects in the files that were asked for, by path.
        known: whether a file is of a known format.
    """

    written_at: float | None
    size: int
    training: bool | None
    parts: Mapping[str, frozenset[tuple[int, ...]]]
    step: int | None = None
    epoch: int | None = None
    states: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    known: bool = True


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
        if len(files) > MAX_FILES and sum(not path.endswith(dcp.SHARD_SUFFIX) for path in files) > MAX_FILES:
            raise TornCheckpoint(f"more than {MAX_FILES} files: not a checkpoint of a known format")
    return Tree(entry.name, files, frozenset(folders))


def check_parts(storage: Storage, tree: Tree, states: Sequence[str] = ()) -> Parts:
    """Check all parts. states: paths of JSON files to read, where they exist. Raises TornCheckpoint, OSError."""
    read = {path: read_json(storage, tree, path) for path in states if path in tree.files}
    _check_indices(storage, tree)
    _check_names(tree)
    shards = [_check_shards(storage, tree, *each) for each in sorted(tree.shard_folders.items())]
    paths = tree.checked()
    files = _check_files(storage, tree, paths)
    told = [each for path, each in zip(paths, files, strict=True) if not _NO_STEP.search(path)]
    times = [tree.files[path].mtime for path in [*paths, *tree.shard_files]]
    return Parts(
        written_at=max((time for time in times if time is not None), default=None),
        size=sum(each.size for each in tree.files.values()),
        training=_training(tree, [*shards, *files]),
        parts=_parts(tree),
        step=next((each.step for each in told if each.step is not None), None),
        epoch=next((each.epoch for each in told if each.epoch is not None), None),
        states=read,
        known=bool(shards) or any(each is not _FOREIGN for each in files),
    )


def read_json(storage: Storage, tree: Tree, path: str) -> Mapping[str, object]:
    """Return the object in a JSON file. Raises TornCheckpoint, OSError."""
    try:
        value = json.loads(storage.read(f"{tree.name}/{path}"))
    except (ValueError, RecursionError) as error:
        raise TornCheckpoint(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise TornCheckpoint(f"{path} is damaged: it holds a {type(value).__name__}, expected an object")
    return value


def _training(tree: Tree, found: Sequence[Inspection]) -> bool | None:
    if any(each.training for each in found) or any(_OPTIMIZER.search(path) for path in tree.files):
        return True
    return None if any(each.training is None for each in found) else False


def _parts(tree: Tree) -> Mapping[str, frozenset[tuple[int, ...]]]:
    if not tree.files.keys().isdisjoint(_LAST):
        return {}
    return parts_of([*tree.checked(), *(path for path in tree.files if path.endswith(dcp.METADATA))])


def _check_names(tree: Tree) -> None:
    """Check by the names alone that no rank's file is missing."""
    by_ranks = by_pattern(tree.files)
    for pattern in sorted(by_ranks):
        missing = missing_rank(by_ranks[pattern])
        if missing:
            raise TornCheckpoint(f"{pattern}: the file of rank {missing} is missing, the save did not finish")
    missing = too_few(by_ranks)
    if missing:
        raise TornCheckpoint(f"{missing}, the save did not finish")


def _check_indices(storage: Storage, tree: Tree) -> None:
    """Check that every file that an index of sharded weights names exists."""
    for path in sorted(tree.files):
        if not path.endswith(INDEX_SUFFIX):
            continue
        weights = read_json(storage, tree, path).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise TornCheckpoint(f"{path} is damaged: it has no weight_map")
        folder = path[: len(path) - len(path.rpartition("/")[2])]
        missing = sorted({folder + file for file in weights.values()} - tree.files.keys())
        if missing:
            raise TornCheckpoint(f"{missing[0]} is missing, although {path} lists it")


def check_shards(storage: Storage, entry: Entry, content: Sequence[Entry]) -> Inspection:
    """Check a directory of torch.distributed.checkpoint, with whatever else lies in it. Raises OSError."""
    found = dcp.check(storage, entry, content)
    if not found.complete:
        return found
    try:
        tree = read_tree(storage, entry, content)
        _check_names(tree)
        others = [_check_shards(storage, tree, *each) for each in sorted(tree.shard_folders.items()) if each[0]]
        others += _check_files(storage, tree, tree.checked())
    except TornCheckpoint as error:
        return Inspection(False, DCP, str(error))
    training = found.training or _training(tree, [found, *others])
    return replace(found, training=training, parts=_parts(tree))


def _check_shards(storage: Storage, tree: Tree, folder: str, content: Sequence[Entry]) -> Inspection:
    path = f"{tree.name}/{folder}".rstrip("/")
    found = dcp.check(storage, Entry(path, "", True, 0, None), content)
    if not found.complete:
        raise TornCheckpoint(f"{folder}: {found.reason}" if folder else found.reason)
    return found


def _check_files(storage: Storage, tree: Tree, paths: Sequence[str]) -> list[Inspection]:
    with thread_pool() as pool:
        return list(pool.map(lambda path: _check_file(storage, tree, path), paths))


def _check_file(storage: Storage, tree: Tree, path: str) -> Inspection:
    item = tree.files[path]
    if item.size == 0:
        raise TornCheckpoint(f"{path} is empty")
    with storage.open(f"{tree.name}/{path}") as file:
        found = safetensors.check(item, file) if path.endswith(safetensors.SUFFIX) else torch_save.check(item, file)
    if found.format == UNKNOWN:
        return _FOREIGN
    if not found.complete:
        raise TornCheckpoint(f"{path}: {found.reason}")
    return found
