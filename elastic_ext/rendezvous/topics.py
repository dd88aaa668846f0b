"""The topics of the board, and the rules of those by which a round ends. Pure; see `board`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from elastic_ext.base.records import Count, Within
from elastic_ext.failures import joint_evidence
from elastic_ext.failures.joint_evidence import Hashed
from elastic_ext.rendezvous.board import RoundMembers, Ruling, Topic
from elastic_ext.rendezvous.round_records import EndKind

NO_STEP = -1
MAX_SAVES = 10**6  # on demand, per round
_Step = Annotated[int, Within(NO_STEP, 2**63 - 1)]  # NO_STEP: unknown


@dataclass(frozen=True)
class SaveOrder:
    """A save on demand. A node posts which one it wants, the next one; all nodes get the last one that anybody wants."""

    number: Annotated[int, Within(1, MAX_SAVES)]  # in this round, from 1


@dataclass(frozen=True)
class ResumeChoice:
    """What all nodes resume from (a message of `checkpoints.agreement`). The node of rank 0 writes it into the header itself."""

    text: str


@dataclass(frozen=True)
class SaveDone:
    """A node has completed a save on demand. number: of the request in this round."""

    number: Count
    step: _Step = NO_STEP


@dataclass(frozen=True)
class ReadyToLeave:
    """A node's workers have published a checkpoint since the drain with this number was asked for (`round_records.Drain`)."""

    number: Count
    step: _Step = NO_STEP


@dataclass(frozen=True)
class Replicas:
    """What the workers of a node have hashed of their replicas in this round."""

    hashed: tuple[Hashed, ...]


@dataclass(frozen=True)
class Stalled:
    """All workers of a node stall."""


def equal(values: Mapping[str, Replicas], members: RoundMembers, now: float) -> Ruling | None:
    """End the round once replicas differ that were equal in it; only warn if they never were."""
    found = joint_evidence.difference(each for replicas in values.values() for each in replicas.hashed)
    if found is None:
        return None
    return Ruling(found.text, EndKind.DIFFERS if found.agreed is not None else None)


NO_PROGRESS = "no worker of the job is making progress"
MAY_BE_OLD = "claims of a stall may be from the time before other workers finished"
# Workers that all waited for one that has finished go on. By this time their nodes have withdrawn their claims of a stall: a node
# that claims checks its workers every hangs.detector.CALL_CHECK_S, for any hang_timeout. It sees a step, or a process that
# computes, at the first check or the second; work that barely counts as such, once it fills the window over which the process
# stats are compared (detector.window_s, 27 s at most). The rest is for a late agent (detector.LATE_S), and for reports.
CLAIMS_S = 45.0


def stall(values: Mapping[str, Stalled], members: RoundMembers, now: float) -> Ruling | None:
    """End the round once all nodes stall whose workers have not finished."""
    training = set(members.ids) - members.done
    if not training or training - values.keys():
        return None
    if members.finished_at is not None and now < (until := members.finished_at + CLAIMS_S):
        return Ruling(MAY_BE_OLD, until=until)
    return Ruling(NO_PROGRESS, EndKind.STALLED)


def next_save(known: SaveOrder | None) -> SaveOrder:
    """Return the save to ask for. known: the last one that all nodes have got."""
    return SaveOrder(known.number + 1 if known is not None else 1)


def last_save(values: Mapping[str, SaveOrder], members: RoundMembers, now: float) -> Ruling | None:
    """Have all nodes save if a node wants a save that is newer than the last one. Who wants the same one, gets one."""
    wanted, known = max(each.number for each in values.values()), SAVE.agreed(members.agreed)
    if known is not None and wanted <= known.number:
        return None
    return Ruling(f"save {wanted} of this round was asked for", agreed=SAVE.for_all(SaveOrder(wanted)))


HASHED = Topic("hashed", Replicas, equal)
STALLED = Topic("stalled", Stalled, stall, must_be_heard=True)
SAVE = Topic("save", SaveOrder, last_save)
SAVED = Topic("saved", SaveDone)
RESUME = Topic("resume", ResumeChoice)
READY = Topic("ready to leave", ReadyToLeave)
RULED = (HASHED, STALLED, SAVE)  # those with a rule; those that end the round first stand first
