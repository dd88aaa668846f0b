"""What a job runs with on each node: its script, its settings, its versions; and where nodes differ in that. Pure.

Each node writes its `Configuration` as it enters. Before the first round the leader compares all of them, and forms no round
while they differ. From then on the job has a record of its own: a node that comes later compares itself with that, and leaves
if it differs; the leader forms no round with it meanwhile. What must be alike decides for the whole job. The rest is logged.

Invariant: no two nodes of a round differ in what must be alike. Only a node of a version without this record is not compared.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from elastic_ext.base import records
from elastic_ext.base.printable import cut, printable, redacted
from elastic_ext.base.settings import Settings

SCHEMA = 1
MAX_TEXT = 1024  # characters of a value: the longest key in S3
MOST_KEYS = 3  # in a message
MOST_VALUES = 3  # of a key
MOST_NAMES = 3  # of nodes, for one value
NOT_SET = "not set"
TO_DO = "give all nodes of a job the same script and settings, and each job an --rdzv-id of its own"
SCRIPT = "script"
ARGUMENTS = "arguments"
MOST_ARGUMENTS = 16  # of a script that are compared one by one; a record must stay small
DEFAULT_ROLE = "default"  # of torch; DEFAULT_ROLE in torch/distributed/elastic/agent/server/api.py

# What decides for the whole job. Of local_dir each node may have another one, but all have one or none has.
ALIKE = (
    *("checkpoint_dir", "checkpoint_pattern", "verify", "resume_from", "memory_every", "integrity_every"),
    *("hang_timeout", "exit_codes"),
)
GIVEN = ("local_dir",)
PATHS = ("checkpoint_dir", "resume_from")  # may be written in several ways; `Settings` makes a local checkpoint_dir absolute
# The leader's value holds for the job, or each node's own for itself.
LOGGED = ("memory_limit", "budget_window", "grow_at")


_OPTION = re.compile(r"--[\w.-]{1,24}|-[A-Za-z]")  # a short one may have its value attached


@dataclass(frozen=True)
class ConfiguredValue:
    key: str
    text: str  # for people

    @property
    def compared(self) -> str:
        """What is compared: `/c/./d/` is `/c/d`. With `..` a path may lead elsewhere, by a symbolic link."""
        if self.key not in PATHS:
            return self.text
        return self.text.rstrip("/") if "://" in self.text else str(PurePosixPath(self.text))


@dataclass(frozen=True)
class Configuration:
    """What one node runs with. alike: what must be the same on all nodes; logged: what is logged where it is not."""

    host: str
    alike: tuple[ConfiguredValue, ...] = ()
    logged: tuple[ConfiguredValue, ...] = ()


@dataclass(frozen=True)
class WorkerProgram:
    """What the workers of a node run. script: a path, or the name of a module, a command or a function."""

    script: str
    role: str
    workers: int
    max_restarts: int
    versions: Mapping[str, str]  # by package
    arguments: tuple[str, ...] = ()  # of the script


@dataclass(frozen=True)
class Disagreement:
    """Where configurations differ, for people; "" for nowhere. wrong: in what must be alike. noted: in what is logged."""

    wrong: str = ""
    noted: str = ""


def of_node(settings: Settings, host: str, program: WorkerProgram) -> Configuration:
    """Return what this node writes. Nodes of another role may run another script."""
    role = "" if program.role == DEFAULT_ROLE else f" of role {program.role}"
    of_role = f"{SCRIPT}{role}"
    alike = {of_role: program.script.rpartition("/")[2], **{key: getattr(settings, key) for key in ALIKE}}
    alike |= {key: "set" if getattr(settings, key) else None for key in GIVEN}
    logged = {f"path of {of_role}": program.script, "max_restarts": program.max_restarts}
    logged[f"{ARGUMENTS}{role}"] = _arguments(program.arguments)
    logged |= {**{key: getattr(settings, key) for key in LOGGED}, **program.versions}
    return Configuration(host, _values(alike), _values(logged))


def _values(of: Mapping[str, object]) -> tuple[ConfiguredValue, ...]:
    return tuple(ConfiguredValue(key, _text(value)) for key, value in of.items())


def _text(value: object) -> str:
    if value is None or value == "":
        return NOT_SET
    if isinstance(value, bool):
        return "on" if value else "off"
    return cut(printable(redacted(str(value))), MAX_TEXT)


def _arguments(given: Sequence[str]) -> str:
    """Return 16 bits of a hash for each argument: enough to find which differ, and no secret is shown.

    "--lr#1f3a 2#07c2"
    """
    parts = [(_name_of(given, at), each) for at, each in enumerate(given[:MOST_ARGUMENTS])]
    parts += [("later", "\0".join(given[MOST_ARGUMENTS:]))] * (len(given) > MOST_ARGUMENTS)
    return " ".join(f"{name}#{hashlib.blake2b(each.encode(errors='replace'), digest_size=2).hexdigest()}" for name, each in parts)


def _name_of(given: Sequence[str], at: int) -> str:
    """Return the name of the option, also of one whose value follows it; else the position."""
    found = _OPTION.match(given[at]) or (_OPTION.fullmatch(given[at - 1]) if at else None)
    return found[0] if found is not None else str(at + 1)


def encode(value: Configuration) -> str:
    return records.encode(value, SCHEMA)


def decode(data: bytes | str, what: str) -> Configuration:
    """Raises RecordError."""
    return records.read(Configuration, data, what, SCHEMA)


def among(nodes: Sequence[Configuration]) -> Disagreement:
    """Compare nodes with each other."""
    return _compared([(node.host, node) for node in nodes], "on ")


def with_job(job: Configuration, mine: Configuration) -> Disagreement:
    """Compare a node that comes later with the job."""
    return _compared([("in the job", job), ("on this node", mine)])


def merged(nodes: Sequence[Configuration]) -> Configuration:
    """Return what a job runs with, from nodes that do not differ: those of each role have a script of their own."""
    alike = {value.key: value for each in nodes for value in each.alike}
    logged = {value.key: value for each in nodes for value in each.logged}
    return Configuration("", tuple(alike.values()), tuple(logged.values()))


def _compared(placed: Sequence[tuple[str, Configuration]], at: str = "") -> Disagreement:
    """Another version has other settings: only what two nodes or more have is compared. at: stands before names of places."""
    alike = _differing([(place, each.alike) for place, each in placed], at)
    return Disagreement(alike, _differing([(place, each.logged) for place, each in placed], at))


def _differing(placed: Sequence[tuple[str, Sequence[ConfiguredValue]]], at: str) -> str:
    places: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    shown = dict[tuple[str, str], str]()  # as the first one has written it
    for place, values in placed:
        for each in values:
            places[each.key][shown.setdefault((each.key, each.compared), each.text)].append(place)
    differing = [_phrase(key, by_text, at) for key, by_text in places.items() if len(by_text) > 1]
    more = f"; and {len(differing) - MOST_KEYS} more" if len(differing) > MOST_KEYS else ""
    return printable("; ".join(differing[:MOST_KEYS]) + more)  # anybody may have written a record


def _phrase(key: str, by_text: Mapping[str, Sequence[str]], at: str) -> str:
    """checkpoint_dir=/a on n1, n2 and 3 more, but not set on n6"""
    shown, ordered = [], sorted(by_text.items(), key=lambda each: (each[0] == NOT_SET, -len(each[1])))
    if key.partition(" ")[0] == ARGUMENTS:
        others = [place for _, places in ordered[1:] for place in places]
        return _phrase_of_arguments(key, [text for text, _ in ordered], others, at)
    for text, places in ordered[:MOST_VALUES]:
        value = text if text == NOT_SET else f"{key}={text}"
        shown.append(f"{value} {at}{_named(places)}")
    more = f", and {len(ordered) - MOST_VALUES} more values" if len(ordered) > MOST_VALUES else ""
    return ", but ".join(shown) + more


def _phrase_of_arguments(key: str, texts: Sequence[str], others: Sequence[str], at: str) -> str:
    """arguments (--lr, 2) differ on n6. others: the places where they are not as in the first text."""
    common = set(texts[0].split()).intersection(*(text.split() for text in texts[1:]))
    differing = [each for text in texts for each in text.split() if "#" in each and each not in common]
    names = list(dict.fromkeys(each.partition("#")[0] for each in differing)) or ["their order"]
    return f"{key} ({_named(names)}) differ {at}{_named(others)}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
