"""When a file on one of the nodes ends the round. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.rendezvous.board import RoundMembers, Ruling, Topic
from elastic_ext.rendezvous.round_records import EndKind


@dataclass(frozen=True)
class Appeared:
    path: str


def end(values: Mapping[str, Appeared], members: RoundMembers, now: float) -> Ruling | None:
    return Ruling(f"{min(each.path for each in values.values())} has appeared", EndKind.BROKEN)


APPEARED = Topic("a file appeared", Appeared, end)
