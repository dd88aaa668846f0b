"""What changes in the record of the hosts that join a running job. Each of these may be repeated without harm.

A store has no clock, so nothing here knows the time: a join and a refusal are as old as their round, and every node knows the age
of the rounds that it was in (`admission`).
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ext.rendezvous.c10d.job_keys import LateJoin, LateJoins, LateRefusal
from elastic_ext.rendezvous.late_joins import Answer, Decision, decide


def joined(record: LateJoins, host: str, round_: int, limit: int) -> tuple[LateJoins, Decision]:
    """Count that this host joined with this round. Return the record with what follows from it. limit: `max_rejoins`."""
    join = LateJoin(host, round_)
    joins = record.joins if join in record.joins else (*record.joins, join)
    decided = decide(sum(each.host == host for each in joins), limit)
    if decided.answer is Answer.NOTHING:
        return replace(record, joins=joins), decided
    others = tuple(each for each in record.refused if each.host != host)
    return LateJoins(joins, (*others, LateRefusal(host, round_, decided.reason))), decided


def passed(record: LateJoins, joins: int, refusals: int) -> LateJoins:
    """Return the record without what is over: joins up to the round `joins`, refusals up to the round `refusals`."""
    return LateJoins(
        tuple(each for each in record.joins if each.round > joins),
        tuple(each for each in record.refused if each.round > refusals),
    )


def why_refused(record: LateJoins, host: str) -> str:
    """Return why this host may not come back yet; "" if it may."""
    return next((each.reason for each in record.refused if each.host == host), "")
