"""The end of a failed round: the leader has its agent judge the reports, and writes one verdict for all nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.etcd import Compare, Delete, Put, absent, unchanged
from elastic_ext.etcd.values import KeyValue, Op
from elastic_ext.failures.cuts import Reach
from elastic_ext.rendezvous.etcd.context import NodeContext
from elastic_ext.rendezvous.etcd.header_record import HeaderRecord
from elastic_ext.rendezvous.round_records import State

LEDGER_TTL_S = 7 * 24 * 3600  # after the last failure


@dataclass(frozen=True)
class RoundReports:
    """The nodes' reports about the end of a round.

    Attributes:
        texts: records of `failures.ledger`, by node id.
        orders: etcd's revision of each, by node id.
        lost: what became of members of the round that are gone, by id.
        nodes: the current number of nodes.
        reaches: see `judgement.Circumstances`.
        needed: ids of nodes without which the job cannot go on: its store is there.
        charges: restarts that count against the budget and have not expired (see `Judgement.window_s`).
    """

    round: int
    texts: Mapping[str, str]
    orders: Mapping[str, int]
    lost: Mapping[str, str]
    nodes: int
    reaches: Mapping[str, Reach]
    needed: frozenset[str] = frozenset()
    charges: int = 0


@dataclass(frozen=True)
class Judgement:
    """The judgement of the leader's agent on the reports.

    Attributes:
        state: of the job after it: BROKEN if the job goes on, else CLOSED.
        verdict, ledger: records of `failures.ledger`.
        charged: the restart counts against the budget, for `window_s` seconds (0: without end).
        refunded: no earlier restart counts any more.
        refused: host that may not come back for `refused_s` seconds; "" if none.
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
    """The leader's questions to its own agent, on the rendezvous thread."""

    def may_grow(self, round_: int) -> bool:
        """Return whether waiting nodes may join this running round now; False: later."""

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        """Return one judgement for all nodes. ledger: the job's; "": a new one."""


class NoAgent:
    """The policy of a node without an agent, as in a simulation: nodes join at once, and no node reports a failure."""

    def may_grow(self, round_: int) -> bool:
        return True

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        raise AssertionError("only agents report failures, and they judge them")


def write_verdict(
    context: NodeContext, header: HeaderRecord, still_leading: Compare, policy: LeaderPolicy, reports: RoundReports
) -> bool:
    """Judge, and write the verdict and its ledger in one transaction. Return False if the header or the ledger has changed or
    this node no longer leads: then nothing is decided.

    reports: without their charges, which are read here.
    """
    client, keys = context.client, context.keys
    ledger = client.get(keys.ledger).kv
    charges = [kv for kv in client.get_prefix(keys.charges, keys_only=True).kvs if kv.key[len(keys.charges) :].isdigit()]
    reports = dataclasses.replace(reports, charges=len(charges))
    judgement = policy.judge(reports, ledger.value.decode(errors="replace") if ledger is not None else "")
    puts: list[Op] = [Put(keys.ledger, judgement.ledger, lease_id=_ledger_lease(context, ledger))]
    if judgement.refunded:  # before, since a transaction may not delete and write in one range
        client.txn([header.unchanged, still_leading], [Delete(keys.charges, prefix=True)])
    if judgement.charged and judgement.window_s:
        # No clock is compared: etcd itself deletes the charge when its time is over.
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
    """Return the ledger's lease. The ledger outlives the job, for a scheduler that starts the job again."""
    if ledger is not None and ledger.lease_id:
        context.client.lease_keep_alive([ledger.lease_id])
        return ledger.lease_id
    return context.client.lease_grant(LEDGER_TTL_S).lease_id
