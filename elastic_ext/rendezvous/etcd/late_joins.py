"""How often a host joins a job that is under way. Each time costs all nodes a restart, so a host that comes and goes is refused.

`decide` decides from plain values; `LateJoins` counts in etcd, whose leases end each count: no clocks are compared.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from elastic_ext.etcd import EtcdClient, Put
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.tasks import HostRefused, TaskRunner

logger = logging.getLogger(__name__)

WINDOW_S = 3600
NO_LIMIT = -1


class Answer(Enum):
    """What follows from a join."""

    NOTHING = "nothing"
    REFUSE = "refuse"  # the host stays, but once it has left it may not come back yet
    LEAVE = "leave"  # the host is refused, and has to leave: its agent has outlived the time when it was away


@dataclass(frozen=True)
class Decision:
    """reason: for people."""

    answer: Answer
    reason: str


def decide(joins: int, limit: int) -> Decision:
    """Decide on a host after a join. joins: how often it has joined within WINDOW_S, this time included. limit: `max_rejoins`."""
    times = "once" if joins == 1 else f"{joins} times"
    reason = f"it has joined the running job {times} within {WINDOW_S // 60} minutes"
    if limit == NO_LIMIT:
        return Decision(Answer.NOTHING, f"{reason} (max_rejoins: no limit)")
    reason = f"{reason} (max_rejoins={limit})"
    if joins <= limit:
        return Decision(Answer.NOTHING, reason)
    return Decision(Answer.REFUSE if joins == limit + 1 else Answer.LEAVE, f"{reason}, which restarts all nodes each time")


class LateJoins:
    """Counts those of this host."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str, limit: int, refused_s: int) -> None:
        """limit, refused_s: the settings `max_rejoins` and `refuse_node`."""
        self._client, self._keys, self._host = client, keys, host
        self._limit, self._refused_s = limit, refused_s
        self._last = 0  # the last round of this node

    def entered(self, round_: int, tasks: TaskRunner) -> None:
        """This node is in a new round. It is counted in the background if this node was not in the round before."""
        late = round_ > 1 and self._last != round_ - 1
        self._last = round_
        if late:
            count: Callable[[], None] = functools.partial(self._count, round_)
            tasks.post(lambda: tasks.run(count))

    def _count(self, round_: int) -> None:
        """Raises HostRefused, EtcdError."""
        lease = self._client.lease_grant(WINDOW_S)
        self._client.txn([], [Put(self._keys.join(self._host, round_), "", lease_id=lease.lease_id)])
        joins = len(self._client.get_prefix(self._keys.joins(self._host), keys_only=True).kvs)
        decided = decide(joins, self._limit)
        if decided.answer is Answer.NOTHING:
            logger.log(
                logging.WARNING if joins > 1 else logging.INFO, "this host was not in the round before: %s", decided.reason
            )
            return
        lease = self._client.lease_grant(self._refused_s)
        self._client.txn([], [Put(self._keys.refusal(self._host), decided.reason, lease_id=lease.lease_id)])
        if decided.answer is Answer.LEAVE:
            raise HostRefused(f"this host may not come back for {self._refused_s} s: {decided.reason}")
        logger.warning("once it has left, this host may not come back for %s s: %s", self._refused_s, decided.reason)
