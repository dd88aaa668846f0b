"""Connects to the store of a round, which the node of rank 0 serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.rendezvous.round_records import Header

logger = logging.getLogger(__name__)

TRIES = 3  # of consecutive rounds
MAX_SILENT = 32
CONNECT, STORE = timedelta(seconds=10), timedelta(seconds=300)  # to connect; for later calls, torch's default


class StoreConnector:
    """One agent's connector; it counts consecutive stores that did not answer.

    Attributes:
        silent: addresses of hosts whose store did not answer when this node last tried.
    """

    def __init__(self, changed: threading.Condition, break_round: Callable[[str], None]) -> None:
        """
        Args:
            changed: notified when the result of `over` may have changed.
            break_round: called with the reason if the store does not answer.
        """
        self._changed = changed
        self._break_round = break_round
        self._unreachable = 0
        self.silent: tuple[str, ...] = ()

    def connect(self, header: Header, over: Callable[[], object | None]) -> TCPStore | None:
        """Connect to the store of this round; return None if it does not answer or the round is over.

        Its host may just have died, and torch tries for minutes: a thread does that; this call returns once the round is over.

        Args:
            over: returns None while the round runs.

        Raises:
            RendezvousConnectionError: this is the last of TRIES consecutive stores that did not answer.
        """
        answer: Future[TCPStore] = Future()
        threading.Thread(target=self._try, args=(header, answer), name="elastic_ext-connect", daemon=True).start()
        with self._changed:
            while not answer.done():
                if over() is not None:
                    return None
                self._changed.wait()
        error = answer.exception()
        self.silent = tuple(each for each in self.silent if each != header.address)
        if error is None:
            self._unreachable = 0
            return answer.result()
        self.silent = (*self.silent, header.address)[-MAX_SILENT:]
        self._unreachable += 1
        if self._unreachable == TRIES:  # the other nodes are better off without this one
            raise RendezvousConnectionError(
                f"the stores of {TRIES} rounds in a row did not answer, the last one at {header.address}:{header.port}"
                f": {error}; expected all hosts of the job to reach each other: check the network"
            ) from error
        logger.warning("the store of round %s does not answer: %s", header.round, error)
        self._break_round("the store of rank 0 does not answer")
        return None

    def _try(self, header: Header, answer: Future[TCPStore]) -> None:
        try:
            store = TCPStore(header.address, header.port, is_master=False, wait_for_workers=False, timeout=CONNECT)
            store.set_timeout(STORE)
            answer.set_result(store)
        except (RuntimeError, ValueError) as error:  # torch raises these for a store that does not answer
            answer.set_exception(error)
        with self._changed:
            self._changed.notify_all()
