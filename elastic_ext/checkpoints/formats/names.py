"""Parse the name of a checkpoint: its family, its order within the family, its step, and the rank that wrote a part of it.

A family is all checkpoints whose names come from one line of code, so that only their steps and epochs differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic_ext.base.setting_sources import compile_pattern
from elastic_ext.checkpoints.formats.manifest import order_of

OWN_FAMILY = "step_#.g# of elastic_ext"

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

# 2024-05-01, 20240501, 2024_05_01T12-30-00. Digits after `step` are never taken for one.
_DATE = re.compile(
    r"(?<![0-9])(?:19|20)[0-9]{2}([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12][0-9]|3[01])"
    r"(?:[-_T+ ]*(?:[01][0-9]|2[0-3])[-_:.h]?[0-5][0-9](?:[-_:.m]?[0-5][0-9](?:\+[0-9]{2})?)?)?(?![0-9])"
)

# The rank in a name: rank3, mp_rank_00, mp_rank_00_001, tp-0-of-2, shard_1, model_00001-of-00004. `of` gives the number of ranks.
_RANK = re.compile(
    r"(?<![A-Za-z])(?<!lora[-_])(?<!adapter[-_])(?:(?P<mp>mp_rank_)(?P<first>[0-9]{2,3})(?P<others>(?:_[0-9]{3})+)(?![0-9])"
    r"|(?P<word>(?:tp|pp|dp|mp|cp|ep|exp|local|global|zero_pp)?[-_]?[A-Za-z]*rank|tp|pp|dp|mp|cp|shard|part|worker|(?<![0-9])node"
    r"|rng_states?|random_states?)[-_=.]?"
    r"(?P<rank>[0-9]{1,6})(?![0-9])(?:[-_]?of[-_]?(?P<total>[0-9]{1,6}))?"
    r"|(?P<number>[0-9]{1,6})[-_]of[-_](?P<count>[0-9]{1,6}))",
    re.IGNORECASE,
)
_WORLD = re.compile(r"world_?size[-_=]?([0-9]{1,6})", re.IGNORECASE)

ANY = "*"  # stands for the rank in the name of a checkpoint of a file per rank


@dataclass(frozen=True)
class RankName:
    """The name of one rank's part of a checkpoint.

    Attributes:
        pattern: the name with ANY for each number of the rank.
        ranks: those numbers; several if the ranks form a grid, as with tp and pp.
        totals: for each, how many there are; None if the name does not say so.
        words: for each, the word before it.
    """

    pattern: str
    ranks: tuple[int, ...]
    totals: tuple[int | None, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class _Number:
    """A number in a name. unit: STEP, EPOCH, OTHER, MODEL, or "" if no word says what it counts. start, end: where it is."""

    value: int
    unit: str
    start: int
    end: int


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
        text, at = match[0], match.start()
        spans = [match.span(group) for group in ("first", "rank", "number") if match[group]]
        begin = match.start("others")
        spans += [(begin + each.start(), begin + each.end()) for each in _DIGITS.finditer(match["others"] or "")]
        word = (match["word"] or ("mp_rank" if match["mp"] else "of")).lower().strip("-_")
        total = match["total"] or match["count"] or (world[1] if world is not None and word.endswith("rank") else None)
        for start, end in reversed(spans):
            text = f"{text[: start - at]}{ANY}{text[end - at :]}"
        for start, end in spans:
            ranks.append(int(name[start:end]))
            totals.append(int(total) if total else None)
            words.append(word)
        return text

    pattern = _RANK.sub(replaced, name)
    return RankName(pattern, tuple(ranks), tuple(totals), tuple(words)) if ranks else None


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
    dates = [match.span() for match in _DATE.finditer(name)]
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
