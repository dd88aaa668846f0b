"""Reads what others have put beside a job's records. What cannot be read is no record: it is told once, and the job goes on.

What stands in for it is for who asks: a node that cannot be read is no node, a header that cannot be read changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from elastic_ext.base import records
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError, is_name
from elastic_ext.failures import ledger as job
from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.rounds import Assignment, Header, Node

if TYPE_CHECKING:
    from elastic_ext.etcd import KeyValue

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_TOLD = 1000  # different ones; whoever writes more of them is not told of any more


def _warn(text: str) -> None:
    logger.warning("%s; it is passed over", text)


class RecordReader:
    """One agent's; from any thread."""

    def __init__(self, tell: Callable[[str], None] = _warn) -> None:
        """tell: called with one line for each key and content that cannot be read, once."""
        self._tell = tell
        self._told: set[tuple[bytes, int]] = set()

    def node(self, kv: KeyValue) -> Node | None:
        """A node's record is under the node's lease; one that no lease takes away would be waited for, and for ever."""
        if not kv.lease_id:
            self._once(f"{_shown(kv.key)} is under no lease, so it is no node", kv.key, kv.value)
            return None
        return self._try(lambda: rounds.decode(Node, kv.value, _shown(kv.key)), kv.key, kv.value)

    def assignment(self, kv: KeyValue) -> Assignment | None:
        return self._try(lambda: rounds.decode(Assignment, kv.value, _shown(kv.key)), kv.key, kv.value)

    def header(self, kv: KeyValue) -> Header | None:
        """Invariant: a verdict that it carries is one that can be carried out, on the header's own round.

        One with another verdict is no header at all: what was before holds, so its failure has yet to be judged.
        """
        header = self._try(lambda: rounds.decode(Header, kv.value, _shown(kv.key)), kv.key, kv.value)
        if header is None or not header.verdict:
            return header
        verdict = self.verdict(header.verdict, kv.key)
        if verdict is not None and verdict.round != header.round:
            self._once(f"{_shown(kv.key)} holds a verdict on round {verdict.round} in round {header.round}", kv.key, kv.value)
        return header if verdict is not None and verdict.round == header.round else None

    def ledger(self, kv: KeyValue) -> job.Ledger | None:
        return self._try(lambda: job.decode_ledger(kv.value), kv.key, kv.value)

    def verdict(self, text: str, key: bytes) -> job.JobVerdict | None:
        return self._try(lambda: job.decode_verdict(text), key, text)

    def id_of(self, prefix: str, key: bytes) -> str | None:
        """The rest of a key: the id of a node, or a host; None where it is none, as a key of the job `<this one>/nodes`."""
        try:
            id_ = key.decode()[len(prefix) :]
        except UnicodeDecodeError:
            id_ = ""
        if is_name(id_):
            return id_
        self._once(f"{_shown(key)} is the key of no node or host", key, b"")
        return None

    def read(self, kind: type[T], text: str, key: str, schema: int) -> T | None:
        """A record of another kind."""
        return self._try(lambda: records.read(kind, text, key, schema), key.encode(), text)

    def cannot(self, text: str, kv: KeyValue) -> None:
        """For who reads by other means: tell once why this cannot be read."""
        self._once(text, kv.key, kv.value)

    def _try(self, decode: Callable[[], T], key: bytes, content: bytes | str) -> T | None:
        try:
            return decode()
        except RecordError as error:
            self._once(str(error), key, content)
            return None

    def _once(self, text: str, key: bytes, content: bytes | str) -> None:
        what = (key, hash(content))
        if what not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(what)
            self._tell(printable(text))


def _shown(key: bytes) -> str:
    return key.decode(errors="backslashreplace")[:300]
