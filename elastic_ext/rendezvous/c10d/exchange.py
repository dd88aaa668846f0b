"""How the nodes of a round on `ext_c10d` agree what to resume from: through the store of the rendezvous, as verdicts do.

Torch's store knows no authentication, so whoever reaches its port may write there: what is read is the name of one of the job's
own checkpoints and nothing else (`checkpoints.resolution`). A job on one machine never comes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.base.errors import RoundOver
from elastic_ext.rendezvous.c10d.store_calls import NOTHING
from elastic_ext.rendezvous.c10d.store_job import Part, StoreJob
from elastic_ext.rendezvous.handler import RoundEnd

T = TypeVar("T")

Ask = Callable[[Callable[[StoreJob], T]], "T | None"]


class StoreExchange:
    """One node's end, for one round; see `base.exchange`.

    Invariant: the keys carry the round's number, which is used once; a node that leaves the round while it waits for a key marks
    it (see `StoreCalls.wait_all`), and no later writer of that key is believed.
    """

    def __init__(self, part: Part, ask: Ask[bool], over: Callable[[], RoundEnd | None]) -> None:
        """ask: puts a question to the job's store; None: the store is lost. over: why the round is over; None: it runs."""
        self._part, self._ask, self._over = part, ask, over
        self._choice = f"{part.round}/choice"

    def offer(self, text: str) -> None:
        self._asked(lambda shared: shared.calls.swap(self._offer(self._part.rank), "", text))

    def offers(self, timeout_s: float) -> list[str] | None:
        keys = [self._offer(rank) for rank in range(self._part.nodes)]
        told = self._read(keys, timeout_s)
        return None if NOTHING in told else told

    def publish(self, text: str) -> None:
        self._check_round()
        if self._asked(lambda shared: shared.calls.swap(self._choice, "", text)) != text:
            raise RoundOver("another node has left this round")

    def choice(self, timeout_s: float) -> str:
        (text,) = self._read([self._choice], timeout_s)
        if text == NOTHING:
            raise RoundOver("another node has left it, or that of rank 0 has not said in time what to resume from")
        return text

    def _offer(self, rank: int) -> str:
        return f"{self._part.round}/offer/{rank}"

    def _read(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """NOTHING for what is not there in time."""
        deadline = time.monotonic() + timeout_s

        def read(shared: StoreJob) -> list[str]:
            shared.calls.wait_all(keys, max(0.0, deadline - time.monotonic()), look=self._check_round)
            return [shared.calls.read(key) for key in keys]

        return self._asked(read)

    def _asked(self, question: Callable[[StoreJob], T]) -> T:
        answers: list[T] = []

        def keep(shared: StoreJob) -> bool:
            answers.append(question(shared))
            return True

        if self._ask(keep) is None:
            raise RendezvousConnectionError("the rendezvous store is lost: no node can start again")
        return answers[-1]

    def _check_round(self) -> None:
        if (why := self._over()) is not None:
            raise RoundOver(why.reason)
