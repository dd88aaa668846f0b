"""Claims of the nodes of a round that all their workers are quiet, in the round's store.

`base.round_store.quiet(N)` holds the newest claim of the N-th node to claim it: a `failures.cuts.Reach` as JSON, with SCHEMA, or
WITHDRAWN. Whoever writes a claim reads those of all nodes afterwards, so the last one to claim sees them all.
"""

from __future__ import annotations

import json
import threading

from elastic_ext.base import records, round_store
from elastic_ext.base.round_store import Store
from elastic_ext.failures import cuts
from elastic_ext.failures.cuts import Reach
from elastic_ext.rendezvous.reader import RecordReader

SCHEMA = 1  # of a claim
WITHDRAWN = "-"


class QuietClaims:
    """One agent's view of them, in one round."""

    def __init__(self, nodes: int, reader: RecordReader) -> None:
        """nodes: number of nodes in the round."""
        self._nodes, self._reader = nodes, reader
        self._reach: Reach | None = None
        self._number = 0  # of this node; 0 before its first claim
        self._writing = threading.Lock()

    def set(self, reach: Reach | None) -> bool:
        """Keep this claim for `write`; None: withdraw the last one. Return whether there is anything to write."""
        self._reach = reach
        return reach is not None or self._number > 0

    def write(self, store: Store) -> str | None:
        """Write the newest claim; return why the job hangs, if it does: all nodes are quiet, and two cannot reach each other."""
        with self._writing:  # a thread that comes late writes what is newest by then
            self._number = self._number or store.add(round_store.QUIET, 1)
            reach = self._reach
            text = json.dumps({"schema": SCHEMA, **records.plain(reach)}) if reach is not None else WITHDRAWN
            store.set(round_store.quiet(self._number), text)
        return self._cut(store) if reach is not None else None

    def _cut(self, store: Store) -> str | None:
        reaches = {}
        for number in range(1, min(store.add(round_store.QUIET, 0), self._nodes) + 1):
            key = round_store.quiet(number)
            text = store.get(key).decode(errors="replace") if store.check([key]) else WITHDRAWN
            reach = self._reader.read(Reach, text, key, SCHEMA) if text != WITHDRAWN else None
            if reach is not None:
                reaches[str(number)] = reach
        if len(reaches) + store.add(round_store.DONE, 0) < self._nodes:
            return None
        cut = next(iter(cuts.cuts(reaches)), None)
        return f"a node gets no answer from another one ({cut.silent.address})" if cut is not None else None
