"""Candidates, entries of a directory that may be checkpoints: what the name of one says (its family, its order within the family,
its step, and the rank that wrote a part of it), and what a check of it finds.

A family is all checkpoints whose names come from one line of code, so that only their steps and epochs differ.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic_ext.base.settings import compile_pattern
from elastic_ext.checkpoints.record.fold import pattern_of
from elastic_ext.checkpoints.storage import Entry, Storage

OWN_FAMILY = "step_#.g# of elastic_ext"
_OWN = re.compile(r"step_(\d{8,})\.g(\d{4,})")

# What the word before a number says that it counts. `global_step` ends with `step`. A number after any other word may be a step
# where no word says so: model_100.pt.
STEP, EPOCH, OTHER, MODEL = "step", "epoch", "other", "model"
_UNITS = {
    STEP: "step steps globalstep iter iters iteration iterations it ba batch batches update updates",
    EPOCH: "epoch epochs ep",
    OTHER: "rank seed tp pp dp mp cp world size ws gpu gpus node nodes shard part worker workers of fold v version bs "
    "batchsize lr wd fp bf int float uint bfloat samples tokens layer layers head heads dim hidden width depth expert",
}
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}

# The two halves of 0.25 belong to a value (a loss, a learning rate) and are never a step.
_INTEGER = re.compile(r"(?P<word>[A-Za-z]*)(?P<between>[-_=. (]*)(?<![0-9])(?<![0-9]\.)(?P<digits>[0-9]+)(?![0-9])(?!\.[0-9])")
_SIZE = re.compile(r"([x.][0-9]+)*(?:b|m|bit|gb|bn|shot|gpus?|nodes?)(?![a-z])", re.IGNORECASE)  # after it: llama-7b, 8x7b, 4bit
_THOUSAND = re.compile(r"k(?![a-z])", re.IGNORECASE)  # after it: step_90k
# Before it, as in resnet50.
_MODEL = re.compile(r"(res|dense|mobile|shuffle|reg)net|resne[sx]t|vgg|vit|[a-z]*bert|gpt|qwen|llama|yolov?", re.IGNORECASE)
_EPOCH_AFTER = re.compile(r"(?<![a-z])ep(och)?s?[-_=]?[0-9]", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]+")
_WORD = re.compile(r"[^\W\d_]+")
_SUFFIX = re.compile(r"(\.(pt|pth|bin|ckpt|tar|pkl|safetensors))+$")

# 2024-05-01, 20240501, 2024_05_01T12-30-00. Digits after `step` never count as a date.
_DATE = re.compile(
    r"(?<![0-9])(?:19|20)[0-9]{2}([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12][0-9]|3[01])"
    r"(?:[-_T+ ]*(?:[01][0-9]|2[0-3])[-_:.h]?[0-5][0-9](?:[-_:.m]?[0-5][0-9](?:\+[0-9]{2})?)?)?(?![0-9])"
)

# The rank in a name: rank3, mp_rank_00, mp_rank_00_001, tp-0-of-2, shard_1, model_00001-of-00004. `of` gives the number of ranks.
_RANK = re.compile(
    r"(?<![A-Za-z])(?<!lora[-_])(?<!adapter[-_])(?:mp_rank_[0-9]{2,3}(?:_[0-9]{3})+(?![0-9])"
    r"|(?:(?:tp|pp|dp|mp|cp|ep|exp|local|global|zero_pp)?[-_]?[A-Za-z]*rank|tp|pp|dp|mp|cp|shard|part|worker|(?<![0-9])node"
    r"|rng_states?|random_states?)[-_=.]?[0-9]{1,6}(?![0-9])(?:[-_]?of[-_]?[0-9]{1,6})?"
    r"|[0-9]{1,6}[-_]of[-_][0-9]{1,6}|__[0-9]{1,6}(?=\.metadata$))",  # the last one is of torch's use_collectives=False
    re.IGNORECASE,
)
_OF = re.compile(r"(?<=[0-9])[-_]?of[-_]?", re.IGNORECASE)
_LAST_WORD = re.compile(r"(?<![A-Za-z])([A-Za-z]{3,})[-_=]?$")  # `ep` may be epochs or experts
_WORLD = re.compile(r"world_?size[-_=]?([0-9]{1,6})", re.IGNORECASE)

# A hash: its digits count nothing.
_HASH = re.compile(r"(?<![A-Za-z0-9])(?=[0-9a-f]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{6,}(?![A-Za-z0-9])")

TORCH_SAVE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar")
CHECKED_SUFFIXES = (*TORCH_SAVE_SUFFIXES, ".pkl", ".npz", ".safetensors")  # of files whose kind can be checked
TEMPORARY_SUFFIXES = (".tmp", ".part")
# But temp_0.7 is a temperature.
_TEMPORARY = re.compile(
    r"(?<![a-z])(tmp|temp(?![-_=]?[0-9]+\.[0-9])|partial|incomplete|unfinished|trash|deleting)(?![a-z])", re.IGNORECASE
)
NAMES = frozenset({"latest", "last", "current", "checkpoint", "ckpt", "final", "best"})  # words of checkpoints without a step

# The weights of a model, in one file or several.
WEIGHTS = (
    r"((adapter_|diffusion_pytorch_)?model|pytorch_lora_weights)(-\d+-of-\d+|_\d)?\.safetensors(\.index\.json)?"
    r"|((diffusion_)?pytorch_model|adapter_model)(-\d+-of-\d+|_\d|_fsdp)?\.bin(\.index\.json)?"
)
# Files that are always parts of something larger, never checkpoints of their own.
_PARTS = re.compile(
    rf"{WEIGHTS}|training_args\.bin|rng_state(_\d+)?\.pth|.*(model|optim)_states\.pt|model_optim_rng\.pt|distrib_optim\.pt"
    r"|recipe_state\.pt|ft-model-.*|(hf|meta)_model_\d+.*\.pt|adapter_model\.pt|consolidated\.\d+\.pth"
)

ANY = "*"  # stands for the rank in the name of a checkpoint of a file per rank


@dataclass(frozen=True)
class RankName:
    pattern: str  # the name with ANY for each number of the rank
    ranks: tuple[int, ...]  # those numbers; several if the ranks form a grid, as with tp and pp
    totals: tuple[int | None, ...]  # for each, how many there are; None if the name does not say so
    words: tuple[str, ...]  # for each, the word before it


@dataclass(frozen=True)
class _Number:
    """A number in a name. unit: STEP, EPOCH, OTHER, MODEL, or "" if no word says what it counts. start, end: where it is."""

    value: int
    unit: str
    start: int
    end: int


def directory_name(step: int, generation: int) -> str:
    """Return the name of a checkpoint, such as step_00000120.g0003. Names sort by step, `order_of` by age."""
    return f"step_{step:08d}.g{generation:04d}"


def order_of(name: str) -> tuple[int, int] | None:
    """Return (generation, step) of a checkpoint name, or None if it is not one of our names."""
    match = _OWN.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


def order_or_oldest(name: str) -> tuple[int, int]:
    """Return (generation, step) of a checkpoint name. If it is not one of our names, return an order before all others."""
    return order_of(name) or (0, 0)


def step_of(name: str, pattern: str = "") -> int | None:
    """Return the step in a name: from our own naming, else {step} of the user's pattern, else by the words in the name.

    step_00000120.g0003 -> 120, checkpoint_epoch_5.pt -> 5, ep0-ba200-rank1.pt -> 200, step9-seed42.pt -> 9, llama-7b.pt -> None.
    """
    numbers = numbers_of(name, pattern)
    return numbers[-1] if numbers else None


def numbers_of(name: str, pattern: str = "") -> tuple[int, ...]:
    """Return the numbers that order the names of a family, the step last. For our own names: (generation, step)."""
    order = order_of(name)
    if order is not None:
        return order
    return _pattern_numbers(name, pattern) or tuple(number.value for number in _counting(name))


def counted(name: str) -> tuple[tuple[int, str], ...]:
    """Return all whole numbers in a name, each with its unit: STEP, EPOCH, OTHER, MODEL, or "" if no word says what it counts."""
    return tuple((each.value, each.unit) for each in _numbers(name))


def unit_of(name: str) -> str:
    """Return what the last of `numbers_of` counts, judging by the words: STEP, EPOCH, or "" if no word says so."""
    found = _counting(name)
    return found[-1].unit if found else ""


def says_step(name: str) -> bool:
    """Return whether a name says that it is the checkpoint of a step: by such a word, or because it is a number and no more."""
    found = _counting(name)
    return bool(found) and (found[-1].unit != "" or name.isdigit() or not {"checkpoint", "ckpt"}.isdisjoint(words_of(name)))


def family_of(name: str, pattern: str = "") -> str:
    """Return the family of a name: the name with '#' for steps, epochs and all numbers that are not known to stay the same.

    A seed, a size of the model or a rank stays: other runs have others. All our own names form one family. So do all names that
    match a user's pattern with {step} or {epoch}.
    """
    if order_of(name) is not None:
        return OWN_FAMILY
    if _pattern_numbers(name, pattern):
        return pattern
    kept = {(number.start, number.end) for number in _numbers(name) if number.unit == OTHER}
    dates = [match.span() for match in _DATE.finditer(name)]

    def shown(match: re.Match[str]) -> str:
        dated = any(start <= match.start() < end for start, end in dates)
        return match[0] if match.span() in kept and not dated else "#"

    return _DIGITS.sub(shown, name)


def is_exact(name: str, pattern: str = "") -> bool:
    """Return whether the numbers are known to be generation, epoch or step. If so, they alone give the order."""
    return order_of(name) is not None or bool(_pattern_numbers(name, pattern))


def words_of(name: str) -> frozenset[str]:
    """Return the words in a name, in lower case, without its suffix."""
    return frozenset(word.lower() for word in _WORD.findall(_SUFFIX.sub("", name)))


def rank_name(name: str) -> RankName | None:
    """Return the parts of the name of a rank's file; None if it names no rank."""
    world = _WORLD.search(name)
    ranks: list[int] = []
    totals: list[int | None] = []
    words: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        head, *of = _OF.split(match[0])
        before = _LAST_WORD.search(name, 0, match.start()) if head.isdigit() else None
        if before is not None and _UNIT_OF.get(before[1].lower()) in (STEP, EPOCH):
            return match[0]  # step-200-of-500
        found = _DIGITS.findall(head)
        word = head[: head.index(found[0])].strip("-_=.").lower() or ("rank" if head.startswith("__") else "of")
        total = of[0] if of else world[1] if world is not None and word.endswith("rank") else None
        ranks.extend(map(int, found))
        totals.extend([int(total) if total else None] * len(found))
        words.extend([word] * len(found))
        return _DIGITS.sub(ANY, head) + match[0][len(head) :]

    pattern = _RANK.sub(replaced, name)
    return RankName(pattern, tuple(ranks), tuple(totals), tuple(words)) if ranks else None


def is_candidate(entry: Entry) -> bool:
    """Return whether an entry may be a checkpoint: any directory, or a file with a known suffix, unless hidden or temporary.

    Files of safetensors hold weights alone, and most .bin files hold weights or other things (training_args.bin). They count only
    if their name gives a step, or for .bin says that it is a checkpoint.
    """
    if is_hidden(entry.name) or entry.is_dir:
        return not is_hidden(entry.name)
    if entry.name.endswith(".safetensors"):
        return step_of(entry.name) is not None
    if entry.name.endswith(".bin"):
        return step_of(entry.name) is not None or not NAMES.isdisjoint(words_of(entry.name))
    return entry.name.endswith(TORCH_SAVE_SUFFIXES)


def is_part(name: str) -> bool:
    """Return whether a file is a part of something larger by its name, and so never a checkpoint of its own."""
    return _PARTS.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Return whether a name says that it is not there to stay."""
    return name.endswith(TEMPORARY_SUFFIXES) or _TEMPORARY.search(name) is not None


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden or temporary."""
    return name.startswith(".") or is_temporary(name)


def _pattern_numbers(name: str, pattern: str) -> tuple[int, ...]:
    """Return (epoch, step) by the user's pattern, or only the one that the pattern has."""
    match = compile_pattern(pattern).fullmatch(name) if pattern else None
    found = match.groupdict() if match else {}
    return tuple(int(found[key]) for key in ("epoch", "step") if key in found)


def _counting(name: str) -> tuple[_Number, ...]:
    """Return the numbers that may count progress, the step last: by their words, or all others if no word says so."""
    found = _numbers(name)
    steps, epochs = ([number for number in found if number.unit == unit] for unit in (STEP, EPOCH))
    return tuple([*epochs, *steps[-1:]] if steps or epochs else [number for number in found if not number.unit])


def _numbers(name: str) -> list[_Number]:
    """Return the whole numbers in a name. Those of a date count as OTHER."""
    dates = [match.span() for pattern in (_DATE, _HASH) for match in pattern.finditer(name)]
    ranks = [match.span() for match in _RANK.finditer(name)]
    found = []
    for match in _INTEGER.finditer(name):
        start, end = match.span("digits")
        word = match["word"].lower()
        unit = _UNIT_OF.get(word, "")
        if unit == OTHER and name[: match.start()][-1:].isdigit():  # the word is of the number before it: 8gpu_100
            unit = ""
        elif word.startswith("batch") and _EPOCH_AFTER.search(name, end):
            unit = OTHER
        elif _MODEL.fullmatch(word) and not match["between"]:
            unit = MODEL
        if unit != STEP:
            inside = any(first <= start < last for first, last in (*dates, *ranks) if unit != EPOCH or (first, last) in dates)
            if inside or _SIZE.match(name, end):
                unit = OTHER
        found.append(_Number(int(match["digits"]) * (1000 if _THOUSAND.match(name, end) else 1), unit, start, end))
    return found


MAX_RANKS = 1 << 20  # a grid with more is a mistake in a name


def grouped(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries, with one in place of all files that the ranks wrote for the same checkpoint.

    A single file that names a rank stays as it is, unless another checkpoint of its family has several: rank 0 wrote for all.
    """
    listed = list(entries)
    groups: defaultdict[str, list[tuple[Entry, RankName]]] = defaultdict(list)
    for entry in listed:
        found = None if entry.is_dir or entry.unusable else rank_name(entry.name)
        if found is not None:
            groups[found.pattern].append((entry, found))
    several = {family_of(pattern) for pattern, members in groups.items() if len(members) > 1}
    joined = {pattern: members for pattern, members in groups.items() if family_of(pattern) in several}
    alone = {entry.name for members in joined.values() for entry, _ in members}
    left = [entry for entry in listed if entry.name not in alone]
    for pattern, members in joined.items():
        members.sort(key=lambda each: each[1].ranks)
        missing = missing_rank([name for _, name in members])
        torn = f"the file of rank {missing} is missing: {len(members)} are there" if missing else ""
        left.append(replace(join(pattern, [entry for entry, _ in members]), torn=torn))
    return left


def join(name: str, parts: Sequence[Entry]) -> Entry:
    """Return one entry in place of these files. name: theirs, with ANY for what differs."""
    times = [part.mtime for part in parts if part.mtime is not None]
    path = parts[0].path.removesuffix(parts[0].name) + name
    return Entry(name, path, False, sum(part.size for part in parts), max(times, default=None), parts=tuple(parts))


def missing_rank(names: Sequence[RankName]) -> str:
    """Return the first rank whose file is missing among those of one checkpoint, for people; "" if none is seen to be.

    A last rank that is missing shows only if the names say how many there are. The ranks of a node may begin at 0, or where those
    of the node before it end.
    """
    numbers = [number for number, word in enumerate(names[0].words) if word != "node"]
    seen = {tuple(name.ranks[number] for number in numbers) for name in names}
    axes = [_axis(names, number) for number in numbers]
    if not all(axes) or math.prod(map(len, axes)) > MAX_RANKS:
        return ""
    gap = next((ranks for ranks in itertools.product(*axes) if ranks not in seen), ())
    return ", ".join(map(str, gap))


def _axis(names: Sequence[RankName], number: int) -> Sequence[int]:
    """Return all values that one number of the rank must take."""
    values = {name.ranks[number] for name in names}
    totals = {name.totals[number] for name in names if name.totals[number] is not None}
    # A stage of a pipeline writes what only it has: its files lie beside those of other stages under other names.
    if len(values) == 1 and names[0].words[number].startswith("pp"):
        return sorted(values)
    # model-00001-of-00002; and of torch's HuggingFaceStorageWriter: shard-00001-model-00001-of-00002
    from_one = 0 not in values and (names[0].words[number] == "of" or f"shard-{ANY}-model-" in names[0].pattern)
    total = max((total for total in totals if total is not None), default=max(values) + (not from_one))
    return range(1, total + 1) if from_one else range(max(total, max(values) + 1))


def by_pattern(paths: Iterable[str]) -> dict[str, list[RankName]]:
    """Return the names of files below a directory that name a rank, those of the same pattern together."""
    groups: defaultdict[str, list[RankName]] = defaultdict(list)
    for path in paths:
        found = rank_name(path)
        if found is not None:
            groups[found.pattern].append(found)
    return dict(groups)


def kinds_of(names: Iterable[str]) -> Counter[str]:
    """Return how many files there are of each name, with "#" for digits. Where names say how many there must be, one counts."""
    kinds: Counter[str] = Counter()
    for name in names:
        rank, pattern = rank_name(name), pattern_of(name)
        kinds[pattern] = 1 if rank is not None and None not in rank.totals else kinds[pattern] + 1
    return kinds


def lacking(kinds: Counter[str], older: Sequence[Counter[str]]) -> str:
    """Return what a checkpoint lacks that older whole ones have, for people; "" for nothing, or if it has others instead.

    older: the newest first. It must have one of each name of tensors and states that any of them has, as many as that one, and
    one of each other name that all have.
    """
    before = older[0] if older else Counter[str]()
    checked = [kind for kind in sorted(set[str]().union(*older)) if _holds_state(kind)]
    fewer = [kind for kind in checked if 0 < kinds[kind] < before[kind]]
    if fewer:
        counts = f"{fewer[0]}: {kinds[fewer[0]]}, not {before[fewer[0]]}"
        unsaid = "the save did not finish, or the job has shrunk, and nothing in it says which"
        return f"it has fewer files than the one before it ({counts}): {unsaid}"
    if any(_holds_state(kind) and not any(each[kind] for each in older) for kind in kinds):
        return ""
    needed = {*checked, *set(before).intersection(*older)}
    gone = sorted(needed - kinds.keys())
    return f"no {gone[0]}, which one before it has: the save did not finish" if gone else ""


def _holds_state(kind: str) -> bool:
    """Return whether a file of this name holds tensors or other states, or says where they are."""
    return kind.endswith((*CHECKED_SUFFIXES, ".metadata"))


def entry_of(storage: Storage, name: str) -> Entry | None:
    """Return the current entry of a checkpoint, also of one with a file per rank; None if it does not exist. Raises OSError."""
    found = storage.stat(name)
    if found is not None or ANY not in name:
        return found
    fits = re.compile(re.escape(name).replace(re.escape(ANY), r"\d+")).fullmatch
    parts = [each for each in storage.listed() if fits(each.name) and not (each.is_dir or each.unusable)]
    joined = [each for each in grouped(parts) if each.name == name]
    return joined[0] if joined else join(name, parts) if parts else None


def files_by_rank(storage: Storage, name: str) -> dict[int, str]:
    """Return by rank the paths of a checkpoint's files; none if it is one entry, or if no file is that of one rank.

    The files of a grid, as by tp and pp, of local ranks, and the numbered parts of one model are not. Raises OSError.
    """
    entry = entry_of(storage, name) if ANY in name else None
    named = [(rank_name(part.name), part.path) for part in entry.parts] if entry is not None else []
    return {
        found.ranks[0]: path
        for found, path in named
        if found is not None and len(found.ranks) == 1 and found.words[0] in ("rank", "global_rank", "shard")
    }


OWN = "elastic_ext"
TORCH_SAVE = "torch.save"
DCP = "torch.distributed.checkpoint"
LIGHTNING = "Lightning"
HUGGING_FACE = "Hugging Face Trainer"
SAFETENSORS = "safetensors"
SAVED_MODEL = "Hugging Face model"  # or what a Trainer that was killed has left
UNKNOWN = "unknown"  # no sign of a known format
NO_OPTIMIZER = "no optimizer is in it"


@dataclass(frozen=True)
class Inspection:
    complete: bool  # whether training can resume from it, judging by names, sizes and small files
    format: str  # name of the format, for people
    reason: str  # why it is complete or not, one sentence without a period, for people
    written_at: float | None = None  # when its last part was written, in seconds since the epoch by the clock of the filesystem
    # step, epoch: from its content; None if the content does not say, or is costly to read
    step: int | None = None
    epoch: int | None = None
    size: int | None = None  # bytes of all its files; None if unknown
    distrusted: bool = False  # it looks complete, but must not be used
    unreadable: OSError | None = None  # why it could not be read; it may be complete. None: it was read
    training: bool | None = None  # whether it holds the state of an optimizer; None: not known
    kinds: Counter[str] = field(default_factory=Counter)  # of its files, see `kinds_of`; none if it is known to be whole
    compared: bool = False  # it is incomplete only by what lies beside it, or by the times of its files


@dataclass(frozen=True)
class Content:
    """The result of reading a whole file."""

    fault: str = ""  # what is damaged, or ""
    note: str = ""  # what could not be verified, or ""
    unreadable: OSError | None = None  # why it could not be read, which is a fault for now; None: it was read


class Format(Protocol):
    """A user-defined checkpoint format. Neither method may unpickle.

    If `check` raises OSError, the checkpoint counts as unreadable. Any other exception becomes a UsageError that names it.
    """

    def claims(self, entry: Entry) -> bool:
        """Return whether a listed name is a checkpoint of this format. Called for each listed name, so it must not read."""

    def check(self, storage: Storage, entry: Entry) -> Inspection:
        """Return whether the checkpoint is complete, and why or why not."""
