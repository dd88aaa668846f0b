"""The vocabulary of a diagnosis: the kinds of failure, the responses of a rule, and the collectives in which ranks wait.

Of these, `compared` says which rank of a job that hangs is in another one than the rest. Pure, standard library only.

A worker describes its own collective to its agent (`workers.bootstrap.recorder`), agents put them in their reports, and the
judgement of the failure compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from elastic_ext.base.printable import ranks_in_words
from elastic_ext.base.records import Count, Rank

CODE = "code"
DATA = "data"
NUMERIC = "numeric"
USER_STOP = "user_stop"
PREEMPTION = "preemption"
HOST_MEMORY = "host_memory"
DEVICE_MEMORY = "device_memory"
STORAGE = "storage"
NODE_LOST = "node_lost"  # or it was cut off, or asked to leave; no worker of it reports more
NETWORK = "network"  # also the kind of a cascade if no other failure is known
HARDWARE = "hardware"
HANG = "hang"
CRASH = "crash"
CASCADE = "cascade"  # this worker failed because another one did
UNKNOWN = "unknown"

KINDS = (
    CODE, DATA, NUMERIC, USER_STOP, PREEMPTION, HOST_MEMORY, DEVICE_MEMORY, STORAGE, NODE_LOST, NETWORK, HARDWARE, HANG, CRASH,
    CASCADE, UNKNOWN,
)  # fmt: skip

Kind = Annotated[str, KINDS.__contains__]


class Response(Enum):
    """The answer of a rule. FOLLOW is for cascades only: the response of the root cause applies."""

    STOP = "stop"
    CONFIRM = "confirm"  # restart once; stop if it happens again without progress
    RESTART = "restart"  # charged to the budget
    RESTART_FREE = "restart_free"
    REPLACE_NODE = "replace_node"  # this node leaves, the others re-form
    REQUEUE = "requeue"  # the allocation ends: leave, so that the scheduler starts the job again
    FOLLOW = "follow"


class Weight(Enum):
    """Where the evidence of a diagnosis stands, from the strongest. It bounds the answer.

    Invariant: a single failure ends a job (65) or costs a node (69) only where it is `certain`. Lines of an abort may confirm
    what was seen before. What anything may have printed chooses between answers that restart.
    """

    PLATFORM = "platform"  # the platform, the kernel, a driver, our own probes, a signal, or an exit code that a rule declares
    CLASS = "class"  # the class of the exception that ended the script, with its errno, causes and frames
    MESSAGE = "message"  # its message, by a rule of that class or library
    ABORT_LINES = "lines of an abort"  # the last lines before an abort, from a writer that is known
    PRINTED = "printed"  # anything else on stderr, and a bare exit code

    @property
    def certain(self) -> bool:
        """Whether it may end a job, or have a node leave."""
        return self in (Weight.PLATFORM, Weight.CLASS, Weight.MESSAGE)


MOST_NAMED = 8  # collectives in a text
# Operations whose inputs have the same shapes on all ranks of the group.
_SAME_SHAPES = {"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"}


_Short = Annotated[str, lambda text: len(text) <= 200 and text.isprintable()]


@dataclass(frozen=True)
class Collective:
    """The collective that a rank has waited in for longest."""

    rank: Rank
    operation: _Short  # as torch's flight recorder names it, such as all_reduce
    number: Count  # in its group, in the order in which the rank issues them
    group: _Short  # the group's description, else its name
    first: Rank = -1  # the first rank of the group; -1 if unknown. Groups of other ranks may have the same name
    size: Count = 0  # number of ranks of the group; 0 if unknown
    shapes: _Short = ""  # of its inputs, as JSON; "" if unknown

    def __str__(self) -> str:
        return f"{self.operation} {self.number} of group {self.group}"


def compared(found: Sequence[Collective], ranks: Collection[int]) -> str:
    """Return who waits in another collective than the rest, in one line; "" if nothing shows that.

    Ranks are compared that share a group; in a group of all ranks, those that are in no collective of it, too. Of several such
    groups the one in which most ranks wait is shown.

    ranks: all ranks of the job.
    """
    groups: dict[tuple[str, int, int], list[Collective]] = {}
    for each in found:
        groups.setdefault((each.group, each.first, each.size), []).append(each)
    for (_, _, size), members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        inside = {each.rank for each in members}
        absent = set(ranks) - inside if size == len(ranks) else set()
        positions = _positions([*members, *(each for each in found if each.rank in absent)])
        if missing := absent - {each.rank for each in found}:
            positions["no collective that its recorder shows"] = sorted(missing)
        if len(positions) > 1:
            return _text(positions)
    return ""


def _positions(found: Sequence[Collective]) -> dict[str, list[int]]:
    """Return the ranks in each collective, in order; shapes distinguish those whose ranks agree on everything else."""
    ranks: dict[str, list[int]] = {}
    shapes = {str(each): set[str]() for each in found}
    for each in found:
        shapes[str(each)].add(each.shapes)
    for each in sorted(found, key=lambda one: one.rank):
        differ = each.operation in _SAME_SHAPES and len(shapes[str(each)] - {""}) > 1
        ranks.setdefault(f"{each} with inputs {each.shapes}" if differ else str(each), []).append(each.rank)
    return ranks


def _text(positions: dict[str, list[int]]) -> str:
    """Return the positions in one line, those of fewest ranks first."""
    *few, (most, at_most) = sorted(positions.items(), key=lambda item: (len(item[1]), item[1]))
    parts = [f"{_are(ranks)} in {position}" for position, ranks in few[:MOST_NAMED]]
    if more := few[MOST_NAMED:]:
        parts.append(f"{sum(len(ranks) for _, ranks in more)} ranks are in {len(more)} others")
    is_rest = len(at_most) > 1 and len(at_most) > len(few[-1][1])
    return ", ".join([*parts, f"the others in {most}" if is_rest else f"{_are(at_most)} in {most}"])


def _are(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'}"
