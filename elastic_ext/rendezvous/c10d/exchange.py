"""Lets the nodes of a round on `ext_c10d` agree on what to resume from, through the job's store, as for verdicts.

Torch's store has no authentication: anybody who reaches its port can write to it. So readers accept only the name of one of the
job's own checkpoints (`checkpoints.choice.resolution`). A job on one machine does not need this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.base.errors import RoundOver
from elastic_ext.rendezvous.c10d import job_keys
from elastic_ext.rendezvous.c10d.store_calls import NOTHING
from elastic_ext.rendezvous.c10d.store_job import Membership, StoreJob
from elastic_ext.rendezvous.handler import RoundEnd

T = TypeVar("T")

CallJob = Callable[[Callable[[StoreJob], T]], "T | None"]


class StoreExchange:
    """One node's end, for one round; see `base.exchange`.

    Invariant: the keys carry the round's number, which is used once. A node that leaves the round while it waits for a key marks
    that key (see `StoreCalls.wait_all`), and readers ignore any later writer of it.
    """

    def __init__(self, membership: Membership, call_job: CallJob[bool], over: Callable[[], RoundEnd | None]) -> None:
        """call_job: calls a function with the store; None: the store is lost. over: how the round has ended; None: it runs."""
        self._membership, self._call_job, self._over = membership, call_job, over

    def offer(self, text: str) -> None:
        self._in_store(lambda job: job.calls.swap(self._offer_of(self._membership.rank), "", text))

    def offers(self, timeout_s: float) -> list[str] | None:
        texts = self._read([self._offer_of(rank) for rank in range(self._membership.nodes)], timeout_s)
        return None if NOTHING in texts else texts

    def publish(self, text: str) -> None:
        self._check_round()
        if self._in_store(lambda job: job.calls.swap(job_keys.choice(self._membership.round), "", text)) != text:
            raise RoundOver("another node has left this round")

    def choice(self, timeout_s: float) -> str:
        (text,) = self._read([job_keys.choice(self._membership.round)], timeout_s)
        if text == NOTHING:
            raise RoundOver("another node has left this round, or rank 0 did not choose a checkpoint in time")
        return text

    def _offer_of(self, rank: int) -> str:
        return job_keys.offer(self._membership.round, rank)

    def _read(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait for the values of these keys; return NOTHING for each that does not arrive in time."""
        deadline = time.monotonic() + timeout_s

        def read(job: StoreJob) -> list[str]:
            job.calls.wait_all(keys, max(0.0, deadline - time.monotonic()), check=self._check_round)
            return [job.calls.read(key) for key in keys]

        return self._in_store(read)

    def _in_store(self, call: Callable[[StoreJob], T]) -> T:
        answers: list[T] = []

        def keep(job: StoreJob) -> bool:
            answers.append(call(job))
            return True

        if self._call_job(keep) is None:
            raise RendezvousConnectionError("the rendezvous store is lost, so no node can start another round")
        return answers[-1]

    def _check_round(self) -> None:
        if (end := self._over()) is not None:
            raise RoundOver(end.reason)
