"""What the nodes of a round claim of their workers, in the round's store: that all stall, are quiet, or have finished.

`base.round_store.claim(RANK)` holds a node's `Claim` as JSON, with SCHEMA; while its workers work, there is no such key. Each
write says all that the node claims, so it may be repeated after an error. Whoever writes a claim looks for the others'
afterwards, so the last node to claim sees them all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from elastic_ext.base import records, round_store
from elastic_ext.base.round_store import Store
from elastic_ext.failures import cuts
from elastic_ext.failures.cuts import Reach
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.rounds import CLAIMS_S, STALLED

SCHEMA = 1  # of a claim
NO_CLAIM = "-"  # in place of a key that is absent


@dataclass(frozen=True)
class Claim:
    """What a node claims of all its workers. reach: of the node, if they are quiet."""

    stalled: bool = False
    finished: bool = False
    reach: Reach | None = None


WORK = Claim()


def hang(claims: Collection[Claim]) -> str | None:
    """Return why the job hangs; None if it does not: all nodes stall, or all are quiet and two cannot reach each other.

    claims: of all nodes. Those that have finished wait for nothing.
    """
    left = [claim for claim in claims if not claim.finished]
    if not left or any(not claim.stalled and claim.reach is None for claim in left):
        return None
    if all(claim.stalled for claim in left):
        return STALLED
    reaches = {str(number): claim.reach for number, claim in enumerate(left) if claim.reach is not None}
    cut = next(iter(cuts.cuts(reaches)), None)
    return f"{STALLED}: a node gets no answer from another one ({cut.silent.address})" if cut is not None else None


class Claims:
    """One agent's view of them, in one round. One thread at a time sends; `change` never waits for it."""

    def __init__(self, rank: int, nodes: int, reader: RecordReader) -> None:
        """rank: of this node. nodes: number of nodes in the round."""
        self._key = round_store.claim(rank)
        self._keys = [round_store.claim(each) for each in range(nodes)]
        self._reader = reader
        self._lock = threading.Lock()
        self._wanted = WORK
        self._changes = 0  # a claim that is repeated is one: the others' may have changed since
        self._sending = False
        self._finished = (0, 0.0)  # how many nodes have finished, and when this one has seen that

    def change(self, change: Callable[[Claim], Claim]) -> bool:
        """Change what `send` is to tell. Return whether the caller has to start a thread that calls it."""
        with self._lock:
            before, self._wanted = self._wanted, change(self._wanted)
            if before == self._wanted == WORK:
                return False
            self._changes += 1
            start = not self._sending
            self._sending = True
            return start

    def send(self, store: Store) -> str | None:
        """Write the newest claim, and those that come meanwhile. After an error, call it again with another connection.

        Returns:
            Why the job hangs; this node then sends no more. None if it does not.
        """
        while True:
            with self._lock:
                number, claim = self._changes, self._wanted
            if (why := self._tell(store, claim)) is not None:
                return why
            with self._lock:
                if number == self._changes:
                    self._sending = False
                    return None

    def _tell(self, store: Store, claim: Claim) -> str | None:
        if claim == WORK:
            store.delete_key(self._key)
            return None
        store.set(self._key, json.dumps({"schema": SCHEMA, **records.plain(claim)}))
        all_claim = store.check(self._keys)  # one request, mostly the only one; only its answer shows that set() has arrived
        # When a job ends, all nodes finish at about the same time: none of them reads the claims of all the others.
        if not all_claim or claim.finished:
            return None
        claims = [self._read(store, key) for key in self._keys]
        finished = sum(each.finished for each in claims)
        if finished != self._finished[0]:
            self._finished = (finished, time.monotonic())
        # The others may be about to finish, too, and their claims older than that; see `rounds.CLAIMS_S`.
        return None if finished and time.monotonic() < self._finished[1] + CLAIMS_S else hang(claims)

    def _read(self, store: Store, key: str) -> Claim:
        # get() would wait for a key that is gone again. This changes nothing, and returns NO_CLAIM for it.
        text = store.compare_set(key, NO_CLAIM, NO_CLAIM).decode(errors="replace")
        found = self._reader.read(Claim, text, key, SCHEMA) if text != NO_CLAIM else None
        return found or WORK
