"""The end of a round whose workers failed: the leader has its agent judge the reports, and writes one verdict for all nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.etcd import Compare, Delete, Put, absent, unchanged
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord
from elastic_ext.rendezvous.round_records import State

LEDGER_TTL_S = 7 * 24 * 3600  # after the last failure


@dataclass(frozen=True)
class RoundReports:
    """What nodes have reported about the end of a round.

    Attributes:
        texts: records of `failures.ledger`, by id of the node.
        orders: etcd's revision of each, by id.
        lost: members of the round that are gone.
        nodes: how many there are now.
        charges: restarts that count against the budget and have not expired (see `Judgement.window_s`).
    """

    round: int
    texts: Mapping[str, str]
    orders: Mapping[str, int]
    lost: tuple[str, ...]
    nodes: int
    charges: int = 0


@dataclass(frozen=True)
class Judgement:
    """What the agent of the leader makes of the reports.

    Attributes:
        state: of the job after it: BROKEN if it goes on, else CLOSED.
        verdict, ledger: records of `failures.ledger`.
        charged: the restart counts against the budget, for `window_s` seconds (0: without end).
        refunded: no earlier restart counts any more.
        refused: host that may not come back for `refused_s` seconds; "": none.
    """

    state: State
    reason: str
    verdict: str
    ledger: str
    charged: bool = False
    refunded: bool = False
    window_s: int = 0
    refused: str = ""
    refused_s: int = 0


class LeaderPolicy(Protocol):
    """What the leader asks its own agent; on the rendezvous thread."""

    def may_grow(self, round_: int) -> bool:
        """Whether nodes that wait may join this round now, which runs; False: later."""

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        """One judgement for all nodes. ledger: the job's; "": a new one."""


class NoAgent:
    """The policy of a node without an agent, as in a simulation: nodes join at once, and no node reports a failure."""

    def may_grow(self, round_: int) -> bool:
        return True

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        raise AssertionError("only agents report failures, and they judge them")


def write_verdict(
    context: NodeContext, header: HeaderRecord, still_leading: Compare, policy: LeaderPolicy, reports: RoundReports
) -> bool:
    """Judge, and write the verdict with the ledger that it rests on in one transaction. Returns False if the header or the ledger
    has changed, or this node leads no more: then nothing is decided.

    reports: without their charges, which are read here.
    """
    client, keys = context.client, context.keys
    ledger = client.get(keys.ledger).kv
    charges = [kv for kv in client.get_prefix(keys.charges, keys_only=True).kvs if kv.key[len(keys.charges) :].isdigit()]
    reports = dataclasses.replace(reports, charges=len(charges))
    judgement = policy.judge(reports, ledger.value.decode(errors="replace") if ledger is not None else "")
    puts: list[Op] = [Put(keys.ledger, judgement.ledger, lease_id=_ledger_lease(context, ledger))]
    if judgement.refunded:  # before, for a transaction may not delete and write in one range
        client.txn([header.unchanged, still_leading], [Delete(keys.charges, prefix=True)])
    if judgement.charged and judgement.window_s:
        # No clock is compared: etcd itself takes the charge away when its time is over.
        lease = client.lease_grant(judgement.window_s)
        puts.append(Put(keys.charge(reports.round), "", lease_id=lease.lease_id))
    if judgement.refused:
        lease = client.lease_grant(judgement.refused_s)
        puts.append(Put(keys.refusal(judgement.refused), judgement.reason, lease_id=lease.lease_id))
    same_ledger = unchanged(keys.ledger, ledger.mod_revision) if ledger is not None else absent(keys.ledger)
    judged = dataclasses.replace(
        header.value, state=judgement.state, reason=judgement.reason, verdict=judgement.verdict, end=None
    )
    return header.write(judged, [still_leading, same_ledger], puts)


def _ledger_lease(context: NodeContext, ledger: KeyValue | None) -> int:
    """The ledger outlives the job, for a scheduler that starts it again."""
    if ledger is not None and ledger.lease_id:
        context.client.lease_keep_alive([ledger.lease_id])
        return ledger.lease_id
    return context.client.lease_grant(LEDGER_TTL_S).lease_id
