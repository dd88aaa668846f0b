"""Connects to the store of a round, which the node of rank 0 serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.rendezvous.round_records import Header

logger = logging.getLogger(__name__)

TRIES = 3  # of consecutive rounds
MAX_SILENT = 32
ROUNDS_SILENT = 5  # for how many rounds a host counts as one whose store does not answer: the network may have been mended
CONNECT, STORE = timedelta(seconds=10), timedelta(seconds=300)  # to connect; for later calls, torch's default


class StoreConnector:
    """One agent's connector; it counts consecutive stores that did not answer."""

    def __init__(self, changed: threading.Condition, break_round: Callable[[str], None]) -> None:
        """
        Args:
            changed: notified when the result of `over` may have changed.
            break_round: called with the reason if the store does not answer.
        """
        self._changed = changed
        self._break_round = break_round
        self._unreachable = 0
        self._silent: dict[str, int] = {}  # round of the last store that did not answer, by its host's address

    def silent(self, round_: int) -> tuple[str, ...]:
        """Return the addresses of hosts whose store did not answer lately when this node last tried. round_: the last one."""
        return lately(self._silent, round_)

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
        self._silent.pop(header.address, None)
        if error is None:
            self._unreachable = 0
            return answer.result()
        self._silent[header.address] = header.round
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


def lately(silent: Mapping[str, int], round_: int) -> tuple[str, ...]:
    """Return which addresses were silent in one of the last ROUNDS_SILENT rounds, the latest ones last.

    Args:
        silent: the round in which each was silent, in the order of the rounds.
        round_: the last round.
    """
    return tuple(address for address, at in silent.items() if at > round_ - ROUNDS_SILENT)[-MAX_SILENT:]
