"""Counts how often this host joins a job that is under way, in etcd, whose leases end each count: no clocks are compared.

`rendezvous.late_joins` decides what follows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from elastic_ext.etcd import EtcdClient, Put
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.tasks import HostRefused, TaskRunner
from elastic_ext.rendezvous.late_joins import WINDOW_S, Answer, decide, is_late

logger = logging.getLogger(__name__)


class LateJoins:
    """Counts those of this host."""

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str, limit: int, refused_s: int) -> None:
        """limit, refused_s: the settings `max_rejoins` and `refuse_node`."""
        self._client, self._keys, self._host = client, keys, host
        self._limit, self._refused_s = limit, refused_s
        self._last = 0  # the last round of this node

    def entered(self, round_: int, tasks: TaskRunner) -> None:
        """This node is in a new round. It is counted in the background if this node was not in the round before."""
        late, self._last = is_late(round_, self._last), round_
        if late:
            count: Callable[[], None] = functools.partial(self._count, round_)
            tasks.post(lambda: tasks.run(count))

    def _count(self, round_: int) -> None:
        """Raises HostRefused, EtcdError."""
        lease = self._client.lease_grant(WINDOW_S)
        self._client.txn([], [Put(self._keys.join(self._host, round_), "", lease_id=lease.lease_id)])
        decided = decide(len(self._client.get_prefix(self._keys.joins(self._host), keys_only=True).kvs), self._limit)
        line = decided.line(self._refused_s)
        if decided.answer is not Answer.NOTHING:
            lease = self._client.lease_grant(self._refused_s)
            self._client.txn([], [Put(self._keys.refusal(self._host), decided.reason, lease_id=lease.lease_id)])
        if decided.answer is Answer.LEAVE:
            raise HostRefused(line)
        logger.log(decided.level, "%s", line)
