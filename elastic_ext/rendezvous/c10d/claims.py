"""What the nodes of a round claim of their workers, in the round's store: that all stall, are quiet, or have finished.

`base.round_store.claim(RANK)` holds a node's `Claim` as JSON, with SCHEMA; there is no such key until the node's first claim. A
withdrawal is a claim, too: of nothing. Each write says all that the node claims, so it may be repeated after an error. Whoever
writes a claim looks at the others' afterwards, so the last node to claim sees them all.

Invariant: the number in a key only grows. Each write is a compare-and-set from the value that it replaces, which has a smaller
number, and no key is deleted. So a write that was held up on its way, on a connection that was given up, changes nothing once a
newer claim has arrived: a claim never comes back after its withdrawal.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from elastic_ext.base import records, round_store
from elastic_ext.base.records import Count
from elastic_ext.base.round_store import Store
from elastic_ext.failures import cuts
from elastic_ext.failures.cuts import Reach
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.rounds import CLAIMS_S, STALLED

SCHEMA = 1  # of a claim


@dataclass(frozen=True)
class Claim:
    """What a node claims of all its workers. reach: of the node, if they are quiet. number: how many it has made, with this."""

    stalled: bool = False
    finished: bool = False
    reach: Reach | None = None
    number: Count = field(default=0, compare=False)


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


@dataclass(frozen=True)
class Sent:
    """number: of the newest claim that the store holds. why: why the job hangs, by all claims; None if it does not."""

    number: int
    why: str | None = None


class Claims:
    """One agent's view of them, in one round. Any number of threads may `send` at the same time; no method waits for another."""

    def __init__(self, rank: int, nodes: int, reader: RecordReader) -> None:
        """rank: of this node. nodes: number of nodes in the round."""
        self._key = round_store.claim(rank)
        self._keys = [round_store.claim(each) for each in range(nodes)]
        self._reader = reader
        self._lock = threading.Lock()
        self._newest = WORK
        self._changed = 0  # number of the first claim that said what the newest one says; those since then repeat it
        self._told = 0  # number of the newest claim that needs no more sending
        self._there = b""  # what our key held when a thread last wrote it; only a guess, which saves requests
        self._works: str | None = None  # key of a node that claimed nothing when a thread last looked; only a guess, too
        self._finished = (0, 0.0)  # how many nodes have finished, and when this one has seen that

    def change(self, change: Callable[[Claim], Claim]) -> bool:
        """Change what `send` is to tell; return whether it says something else now.

        A claim that is repeated is told again: the others' may have changed since.
        """
        with self._lock:
            before, after = self._newest, change(self._newest)
            if not before == after == WORK:
                self._newest = replace(after, number=before.number + 1)
            if before != after:
                self._changed = self._newest.number
            return before != after

    @property
    def all_told(self) -> bool:
        with self._lock:
            return self._told == self._newest.number

    def told(self, number: int) -> None:
        """Send the claim of this number, and those before it, no more."""
        with self._lock:
            self._told = max(self._told, number)

    def send(self, store: Store) -> Sent:
        """Write the newest claim, and changes that come meanwhile, and look at the others'.

        A repetition that comes meanwhile is for the next call: they may come faster than the store answers.
        """
        while True:
            claim = self._newest
            self._write(store, claim)
            # When a job ends, all nodes finish at about the same time: none of them reads the claims of all the others.
            looks = self._stands(claim) and claim != WORK and not claim.finished
            why = self._look(store) if looks else None
            if self._stands(claim):
                return Sent(claim.number, why)

    def _stands(self, claim: Claim) -> bool:
        """Return whether the newest claim is this one, or has only repeated it."""
        return claim.number >= self._changed

    def _write(self, store: Store, claim: Claim) -> None:
        """Write the claim unless a newer one is there; see the module's invariant."""
        text = json.dumps({"schema": SCHEMA, **records.plain(claim)}).encode()
        there = self._there
        while (found := store.compare_set(self._key, there, text.decode())) != text:
            if claim.number <= self._read(found, self._key).number <= self._newest.number:
                break  # what lies beyond is a stranger's
            there = found if found != there else b""  # torch returns what was expected if the key is absent
        self._there = found

    def _look(self, store: Store) -> str | None:
        """Return why the job hangs by what all nodes claim now. One that works is enough to know that it does not."""
        if (key := self._works) is not None and self._read(store.get(key), key) == WORK:
            return None
        if not store.check(self._keys):
            return None
        found = {key: self._read(value, key) for key, value in zip(self._keys, store.multi_get(self._keys), strict=True)}
        claims = list(found.values())
        self._works = next((key for key, each in found.items() if each == WORK), None)
        finished = sum(each.finished for each in claims)
        if finished != self._finished[0]:
            self._finished = (finished, time.monotonic())
        # The others may be about to finish, too, and their claims older than that; see `rounds.CLAIMS_S`.
        return None if finished and time.monotonic() < self._finished[1] + CLAIMS_S else hang(claims)

    def _read(self, value: bytes, key: str) -> Claim:
        return self._reader.read(Claim, value.decode(errors="replace"), key, SCHEMA) or WORK
