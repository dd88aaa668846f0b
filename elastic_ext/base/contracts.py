"""What passes between subpackages that do not know each other, or between their processes.

The channel on which nodes agree on a checkpoint, which each rendezvous implements and `checkpoints.choice` uses; and the
environment variables by which an agent informs its workers and its copier about checkpoints. The agent sets all of these.

The variables, version 1: some may be added, but never change their meaning. With `checkpoint_dir` set, a worker finds:

    ELASTIC_EXT_CHECKPOINT_DIR   the setting checkpoint_dir: a URL or an absolute path, also where the user gave a relative one
    ELASTIC_EXT_LOCAL_DIR        the setting local_dir, likewise; "" for none
    ELASTIC_EXT_SAVE_DIR         the one of these two in which a script that saves in its own way should save in this round
    ELASTIC_EXT_RESUME_FROM      absolute path or URL of the checkpoint to resume from, or of the file in it that this rank wrote;
                                 "": begin from nothing
    ELASTIC_EXT_RESUME_STEP      its step, a decimal number; absent if neither its content nor its name gives one
    ELASTIC_EXT_MEMORY_DIR       the agent's directory in memory for copies of the state; "" or absent for none
    ELASTIC_EXT_MEMORY_LIMIT     how many bytes this worker's copies may have there, all together
    ELASTIC_EXT_MEMORY_EVERY     the setting memory_every, a decimal number; absent for the default
    ELASTIC_EXT_MEMORY_DOMAIN    the setting topology, for the choice of the node that has the same copies; "" or absent: unknown
    ELASTIC_EXT_MEMORY_MB_S      how many megabytes of them this worker may send to that node per second; 0 or absent: no limit
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

CHECKPOINT_DIR = "ELASTIC_EXT_CHECKPOINT_DIR"
LOCAL_DIR = "ELASTIC_EXT_LOCAL_DIR"
SAVE_DIR = "ELASTIC_EXT_SAVE_DIR"
RESUME_FROM = "ELASTIC_EXT_RESUME_FROM"
RESUME_STEP = "ELASTIC_EXT_RESUME_STEP"
MEMORY_DIR = "ELASTIC_EXT_MEMORY_DIR"
MEMORY_LIMIT = "ELASTIC_EXT_MEMORY_LIMIT"
MEMORY_EVERY = "ELASTIC_EXT_MEMORY_EVERY"
MEMORY_DOMAIN = "ELASTIC_EXT_MEMORY_DOMAIN"
MEMORY_MB_S = "ELASTIC_EXT_MEMORY_MB_S"


def resume_variables(path: str, step: int | None) -> dict[str, str]:
    """Return the variables for a checkpoint. path: "" to begin from nothing. step: None if it is unknown."""
    return {RESUME_FROM: path, **({} if step is None else {RESUME_STEP: str(step)})}


@dataclass(frozen=True)
class SavePlace:
    """Whether to save in `local_dir`, and why not, for people; "" where it is not set."""

    local: bool = False
    reason: str = ""
    full: bool = False  # because there is no room


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a round resumes from. The default: nothing, because the job has none."""

    path: str = ""  # local path or URL of the checkpoint; "": the round begins from nothing
    # step, reason, passed_over: see `checkpoints.agreement.messages.Agreement`.
    step: int | None = None
    reason: str = ""
    passed_over: bool = False
    local: bool = False  # it is in the nodes' local directories; `path` is this node's part of it
    lost: str = ""  # why a newer copy in the nodes' memory is not used; "": no copy is newer. Only node 0 knows
    # By rank, the path of the file that this rank wrote, if each wrote its own; `path` then has a "*" for the rank.
    files: Mapping[int, str] = field(default_factory=dict)
    save_number: int | None = None  # see `checkpoints.agreement.messages.Agreement`
    rounds: int = 0  # the number of the last round that a record of saves in any node's `local_dir` knows
    fetched: int = 0  # the number under which it was fetched from other nodes; 0: it was not
    place: SavePlace = SavePlace()  # where a script that saves in its own way should do so

    @property
    def at(self) -> int | None:
        """The step at which the round begins; None if unknown."""
        return self.step if self.path or self.passed_over else 0

    @property
    def variables(self) -> dict[str, str]:
        return resume_variables(self.path, self.step)

    def variables_of(self, rank: int) -> dict[str, str]:
        """The same for one rank, which gets the path of its own file; empty if it gets what all get."""
        return resume_variables(self.files[rank], self.step) if rank in self.files else {}


@dataclass(frozen=True)
class MemoryRoom:
    """The memory for copies of one node, or of one of its workers; see the variables of these names."""

    directory: str
    limit: int
    every: int | None = None  # 0: no copies; None: as often as costs little
    domain: str = ""
    rate: float = 0.0  # bytes per second; 0: no limit

    def variables(self, workers: int) -> dict[str, str]:
        """Return the environment variables for each worker of the node. workers: how many there are."""
        return {
            MEMORY_DIR: self.directory,
            MEMORY_LIMIT: str(self.limit // max(1, workers)),
            MEMORY_DOMAIN: self.domain,
            MEMORY_MB_S: str(self.rate / 1e6 / max(1, workers)),
            **({} if self.every is None else {MEMORY_EVERY: str(self.every)}),
        }


def memory_room(environ: Mapping[str, str] = os.environ) -> MemoryRoom | None:
    """Return the memory for copies of this worker; None if its agent gave it none."""
    directory, every = environ.get(MEMORY_DIR, ""), environ.get(MEMORY_EVERY, "")
    if not directory:
        return None
    limit, rate = int(environ.get(MEMORY_LIMIT) or 0), 1e6 * float(environ.get(MEMORY_MB_S) or 0)
    return MemoryRoom(directory, limit, int(every) if every else None, environ.get(MEMORY_DOMAIN, ""), rate)


class Exchange(Protocol):
    """The channel on which the nodes of one round agree on the checkpoint to resume from.

    Each method raises RoundOver if the round ends first, and torch's error for a lost rendezvous if it can no longer reach any
    node.
    """

    def offer(self, text: str) -> None:
        """Publish the checkpoints that this node could load from its own disk."""

    def offers(self, timeout_s: float) -> list[str] | None:
        """Return the offers of all nodes, by rank; None if a node has no offer or was late. For node 0 only."""

    def publish(self, text: str) -> None:
        """Publish the choice. Once this returns, no other choice can reach the nodes of this round. For node 0 only."""

    def choice(self, timeout_s: float) -> str:
        """Return the choice that node 0 has published. For the other nodes."""


class SingleNode:
    """The exchange of a round with one node: nothing leaves this process."""

    def __init__(self) -> None:
        self._offered: list[str] = []

    def offer(self, text: str) -> None:
        self._offered = [text]

    def offers(self, timeout_s: float) -> list[str] | None:
        return self._offered

    def publish(self, text: str) -> None:
        """Do nothing, because there is no other node."""

    def choice(self, timeout_s: float) -> str:
        raise AssertionError("the only node is node 0")
