"""The evidence of one failed worker, as plain values that `classify` judges, the form of it that rules match, and the reader of
the worker's error file.

An error file can hold anything: half a record from a worker that was killed, gigabytes, invalid JSON, fields that torch does not
expect. It is read here, within bounds, and never by torch's own reader, which raises into the agent.
"""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from elastic_ext.base.diagnosis import Weight
from elastic_ext.base.records import Rank

MAX_ERROR_FILE_BYTES = 1 << 20  # the bootstrap writes at most about 200 KiB
MAX_MESSAGE = 16 * 1024  # characters of a message that are kept, because the job's records hold them
MAX_NAME = 500  # characters of a class name or of a frame
MAX_FRAMES = 100  # the innermost are kept
MAX_CAUSES, MAX_CAUSE = 8, 2 * 1024  # the nearest are kept; characters of one
MAX_BASES = 16
CERTAIN, WAITS = 0, 2  # the first number of Evidence.hang_blame: the others surely waited for it; it waits for others, too


@dataclass(frozen=True)
class Wrapped:
    """An exception inside another one: the one that it was raised from, or a member of the group."""

    type: str
    message: str
    bases: tuple[str, ...] = ()  # names of the base classes, nearest first, without Exception and what is above it
    errno: int | None = None  # of an OSError


@dataclass(frozen=True)
class RaisedException:
    """An uncaught exception of the script."""

    type: str
    message: str
    frames: tuple[str, ...] = ()  # "file.py:line in function", outermost first
    causes: tuple[str, ...] = ()  # "type: message" of the exceptions that Python shows above it in the traceback, nearest first
    # bases, errno: see Wrapped
    bases: tuple[str, ...] = ()
    errno: int | None = None
    wrapped: tuple[Wrapped, ...] = ()  # what it was raised from, and the members of a group, nearest first


@dataclass(frozen=True)
class ErrorFile:
    """The content of a worker's error file."""

    path: str = ""  # the path of the file if torch may also read it, else ""
    data: dict[str, Any] | None = None  # torch's {"message": ...}, validated; None without a usable file
    problem: str = ""  # why an existing file is not used, else ""
    exception: RaisedException | None = None  # the exception, if the file names one
    raised_ns: int | None = None  # the worker's time.monotonic_ns() when it caught the exception; None if unknown


@dataclass(frozen=True)
class Platform:
    """The report of Kubernetes or Slurm on the end of this node's part of the job."""

    name: str = ""  # "kubernetes" or "slurm"; "" if unknown
    reason: str = ""  # in the platform's words, e.g. "OOMKilled", "PREEMPTED", "DUE TO TIME LIMIT"; "" if unknown
    disruption_target: bool | None = None  # whether the pod has the condition DisruptionTarget; None if unknown


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the ledger keeps of a failure, and `policy` looks at as it is."""

    kind: str = ""  # the kind of its diagnosis; "" if unknown
    warm: bool | None = None  # whether its process was a warm standby; None if unknown
    cut: tuple[str, ...] = ()  # see Evidence
    of_node: bool = False  # whether a bad node may cause such failures, see `history.may_be_of_a_node`
    before_repair: bool = False  # whether its node has been given back since, see `ledger.given_back`
    lost_node: bool = False  # whether a node that was lost caused it
    # whether the ranks of its node changed places with another node's for the restart after it, or it was no rank's, as of a link
    moved: bool = False


TRAITS = tuple(each.name for each in fields(Traits))


@dataclass(frozen=True)
class Precedent(Traits):
    """An earlier failure of this job, compared with the current one."""

    same_fingerprint: bool  # whether it was the same failure
    progress: bool | None = None  # whether the job made progress between the two (a step or a checkpoint); None if unknown
    node: str | None = None  # name of the node where it happened; None if unknown
    first_step_done: bool | None = None  # whether its worker had done an optimizer step; None if unknown
    same_checkpoint: bool = False  # whether both rounds had resumed from the same checkpoint
    # whether the job has not failed since, and a restart by then is still charged to its budget: no checkpoint has given it back,
    # and `budget_window` has not passed
    recent: bool = False
    charged: bool = True  # whether the restart after it was charged
    same_rank: bool = False  # whether it was the same rank
    rank_here: bool = False  # whether its rank is now on the node of the current one
    same_step: bool | None = None  # whether the job was at the same step; None if unknown
    no_further: bool = False  # whether the try since has made no more steps, and it is unknown where they began

    @property
    def surely_none_since(self) -> bool:
        """Whether the job surely made no progress since. If its worker had done no step, the script's may just not be counted."""
        return self.progress is False and self.first_step_done is not False


@dataclass(frozen=True)
class Evidence:
    """The evidence of one worker that did not end with 0. An unknown value is None (or empty), never a guess."""

    rank: Rank
    exit_code: int | None = None  # the exit code of the process; None if a signal ended it or if it is unknown
    signal: str | None = None  # name of the signal that ended it, e.g. "SIGKILL"
    exception: RaisedException | None = None  # the uncaught exception of the script, from the error file
    step: int | None = None  # optimizer steps that this worker had done
    first_step_done: bool | None = None  # whether this worker had done an optimizer step
    warm: bool | None = None  # whether its process was a warm standby
    stopped_by_agent: bool = False  # whether it worked until the agent stopped it
    ended_ns: int = 0  # time.monotonic_ns() when the exception was caught, else when the exit was seen
    stderr_tail: str = ""  # the end of its stderr
    agent_signal: str | None = None  # name of the signal that the agent itself got
    oom_kills: int | None = None  # the increase of the oom_kill count of its cgroup; None if unknown
    xids: tuple[int, ...] = ()  # NVIDIA Xid numbers in the kernel log since it started
    # recovery actions that the NVIDIA driver asks for on its node (host.ACTIONS except "none")
    gpu_recovery: tuple[str, ...] = ()
    platform: Platform = Platform()
    hang: bool | None = None  # whether the hang detector ended it
    hang_reason: str = ""  # the detector's reason for this worker
    # of all workers that hung, the one with the lowest value is the cause (see `hangs.detector.Stuck`)
    hang_blame: tuple[int, ...] = ()
    shared: bool = False  # workers of other nodes have failed in the same way in the same round, so that no node is to blame
    everywhere: bool = False  # so have those of all nodes whose workers failed by themselves; see `judgement`
    # the names, in order, of each two hosts of the job that cannot reach each other; the first two stand for all
    cuts: tuple[tuple[str, ...], ...] = ()
    cuts_text: str = ""  # who gets no answer from whom, in one line
    # names of the hosts of replicas that differ: that of the odd one, or all without a majority; see `joint_evidence`
    differs: tuple[str, ...] = ()
    # links of its node that went down shortly before, e.g. "mlx5_0 port 1"; whether one of them is still down; see `host.links`
    links: tuple[str, ...] = ()
    link_away: bool = False
    full: str = ""  # how the file system of its logs is full; "": it is not, or unknown; see `host.no_room`
    link_failed: bool = False  # whether they are why the round ended; see `judgement`
    checkpoint_load: bool | None = None  # whether it was loading a checkpoint
    node_health_failed: bool | None = None  # whether this node's health check failed before the start; None without a check
    node: str | None = None  # name of the node where it ran
    history: tuple[Precedent, ...] = ()  # earlier failures of the job, oldest first

    @property
    def cut(self) -> tuple[str, ...]:
        """The names of the two hosts that stand for all that cannot reach each other; (): no two are known."""
        return self.cuts[0] if self.cuts else ()

    @property
    def before_first_step(self) -> bool:
        """Whether this worker certainly had not done an optimizer step."""
        return self.first_step_done is False


def exit_status(exitcode: int | None) -> tuple[int | None, str | None]:
    """Split an exit code of subprocess into (exit code, signal name)."""
    if exitcode is None or exitcode >= 0:
        return exitcode, None
    try:
        return None, signal.Signals(-exitcode).name
    except ValueError:
        return None, f"signal {-exitcode}"


def read_error_file(path: str) -> ErrorFile:
    """Read a worker's error file. Never raises, for any content."""
    if not path or not os.path.isfile(path):
        return ErrorFile()
    try:
        size = os.path.getsize(path)
        if size > MAX_ERROR_FILE_BYTES:
            return ErrorFile(problem=f"error file {path} has {size} bytes, more than the limit of {MAX_ERROR_FILE_BYTES}")
        with open(path, "rb") as file:
            data = json.loads(file.read(MAX_ERROR_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        return ErrorFile(problem=f"error file {path} cannot be read: {type(error).__name__}")
    if not _fit_for_torch(data):
        return ErrorFile(problem=f"error file {path} lacks the fields that torch writes")
    exception, raised_ns = _exception(data)
    return ErrorFile(path, data, "", exception, raised_ns)


def _fit_for_torch(data: object) -> bool:
    """Return whether torch's ProcessFailure and ChildFailedError can show this; both index into it unchecked."""
    if not isinstance(data, dict):
        return False
    message = data.get("message")
    if isinstance(message, str):
        return _is_int(data.get("timestamp", 0))
    if not isinstance(message, dict):
        return False
    extra = message.get("extraInfo")
    return (
        isinstance(extra, dict)
        and _is_int(extra.get("timestamp"))
        and isinstance(extra.get("py_callstack", ""), str)
        and isinstance(message.get("message", ""), str)
    )


def _is_int(value: Any) -> bool:
    try:
        return 0 <= int(value) < 1 << 37  # seconds that datetime.fromtimestamp accepts: up to the year 6325
    except (TypeError, ValueError, OverflowError):
        return False


def _exception(data: dict[str, Any]) -> tuple[RaisedException | None, int | None]:
    """Return the exception from the bootstrap's fields, else from the text of torch's `@record`: "KeyError: 'x'"."""
    ours = data.get("elastic_ext")
    if isinstance(ours, dict) and isinstance(ours.get("type"), str):
        raised_ns = ours.get("monotonic_ns")
        own = _wrapped(ours, MAX_MESSAGE)
        return RaisedException(
            own.type,
            own.message,
            tuple(frame[-MAX_NAME:] for frame in _texts(ours.get("frames"))[-MAX_FRAMES:]),
            tuple(cause[:MAX_CAUSE] for cause in _texts(ours.get("causes"))[:MAX_CAUSES]),
            own.bases,
            own.errno,
            tuple(_wrapped(each, MAX_CAUSE) for each in _objects(ours.get("wrapped"))[:MAX_CAUSES]),
        ), raised_ns if type(raised_ns) is int else None
    message = data["message"]
    text = message.get("message", "") if isinstance(message, dict) else message
    name, _, rest = text.partition(": ")
    if not name.replace(".", "").isidentifier():
        return None, None
    return RaisedException(name[:MAX_NAME], rest[:MAX_MESSAGE]), None


def _texts(values: object) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


def _objects(values: object) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _wrapped(account: dict[str, Any], max_message: int) -> Wrapped:
    errno = account.get("errno")
    return Wrapped(
        str(account.get("type", ""))[:MAX_NAME],
        str(account.get("message", ""))[:max_message],
        tuple(base[:MAX_NAME] for base in _texts(account.get("bases"))[:MAX_BASES]),
        errno if type(errno) is int and 0 < errno < 1 << 31 else None,
    )


Text = str | tuple[str, ...]
"""A text to search for, in lower-case ASCII; a tuple matches if all of its texts are in one line. Words match as a whole."""


@dataclass(frozen=True)
class EvidenceView:
    """The evidence in the form that rules match: how the worker ended, and one text with the place where it stands."""

    evidence: Evidence
    place: Weight  # where the text stands
    text: SearchText
    # the full and the bare names of the exception and of its base classes; empty if no exception ended the script
    exception_names: frozenset[str] = frozenset()
    speakers: frozenset[str] = frozenset()  # the same of the exception whose message the text is; empty if it is no message
    signal: str | None = None  # the signal that ended the worker; exit code 128+N counts as signal N
    errno: int | None = None
    answers: frozenset[str] = frozenset()  # status of HTTP and error codes by which a server has answered, in lower case


class SearchText:
    """A text for case-insensitive searches."""

    def __init__(self, text: str, of_library: bool = False) -> None:
        """Keep `text`, and an ASCII form of it: the table's texts are ASCII, so other characters may be replaced.

        of_library: a known library has written all of it, so that quotes and paths are part of what it says.
        """
        self.original, self._of_library = text, of_library
        self.ascii = text.encode("ascii", "replace").lower().decode("ascii")

    @cached_property
    def lower(self) -> str:
        """The whole text in lower case, because a user's pattern may hold any letter."""
        return self.original.lower()

    @cached_property
    def words(self) -> str:
        """The ASCII form without what is in quotes or in a path: a sample, a name, a file. It says nothing about the failure."""
        if self._of_library:
            return self.ascii
        plain = _QUOTED.sub("'...'", self.ascii)
        return _WORD.sub(lambda word: "/..." if _is_path(word[0]) else word[0], plain) if "/" in plain else plain

    def __contains__(self, wanted: str) -> bool:
        return _has_word(self.words, wanted)

    def line(self, parts: tuple[str, ...]) -> str:
        """Return the first line that holds all parts, in lower case; "" if none does. Linear."""
        text = self.words
        rarest, *others = parts
        at = text.find(rarest) if all(part in text for part in others) else -1
        while at >= 0:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            line = text[text.rfind("\n", 0, at) + 1 : end]
            if _has_word(line, rarest) and all(_has_word(line, part) for part in others):
                return line
            at = text.find(rarest, end)
        return ""


_QUOTED = re.compile(r"(?<!\w)(?:'[^'\n]{0,300}'|\"[^\"\n]{0,300}\"|`[^`\n]{0,300}`)(?!\w)")
_WORD = re.compile(r"[^\s'\"`]{1,4096}")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_OF_WORDS = _LETTERS | {"_"}
_BEFORE = _OF_WORDS | {"/"}


def _is_path(word: str) -> bool:
    """Return whether a word is a path or an address: "a/b" alone may be two words, as in "GPU/Partition"."""
    return word.startswith(("/", "./", "../", "~/")) or word.count("/") > 1 or ("/" in word and "." in word.strip(".,:;)"))


def _has_word(text: str, wanted: str) -> bool:
    """Return whether the text holds `wanted`, and no word goes on where it ends: "loss is inf" is not in "loss is inferred"."""
    at = text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        begins = wanted[0] not in _LETTERS or at == 0 or text[at - 1] not in _BEFORE
        if begins and (wanted[-1] not in _LETTERS or text[end : end + 1] not in _OF_WORDS):
            return True
        at = text.find(wanted, at + 1)
    return False


def contains(text: SearchText, wanted: tuple[Text, ...]) -> bool:
    """Return whether one of the wanted texts occurs; a tuple occurs if one line holds all of its texts."""
    return any(one in text if isinstance(one, str) else bool(text.line(one)) for one in wanted)
