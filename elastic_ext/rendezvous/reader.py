"""Reader of a job's records, which anybody may have written. It logs each unreadable record once, and the job goes on.

The caller decides what replaces a record: an unreadable node is no node, an unreadable header changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from elastic_ext.base import records
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError, is_name
from elastic_ext.failures.ledger import JobVerdict, Ledger, decode_ledger, decode_verdict
from elastic_ext.rendezvous.round_records import Assignment, Header, Node, decode

if TYPE_CHECKING:
    from elastic_ext.etcd import KeyValue

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAULTS = 1000  # distinct ones; more are not logged


def _warn(text: str) -> None:
    logger.warning("%s; ignoring it", text)


class RecordReader:
    """One agent's reader; any thread may call its methods. They return None for what they cannot read."""

    def __init__(self, on_fault: Callable[[str], None] = _warn) -> None:
        """on_fault: called with one line, once for each unreadable pair of key and content."""
        self._on_fault = on_fault
        self._faults: set[tuple[bytes, int]] = set()

    def node(self, kv: KeyValue) -> Node | None:
        """Read a node's record. It must have a lease: the job would wait forever for a node whose record never expires."""
        if not kv.lease_id:
            self._once(f"{_shown(kv.key)} has no lease, so it does not count as a node", kv.key, kv.value)
            return None
        return self._try(lambda: decode(Node, kv.value, _shown(kv.key)), kv.key, kv.value)

    def assignment(self, kv: KeyValue) -> Assignment | None:
        """Read a node's assignment to a round."""
        return self._try(lambda: decode(Assignment, kv.value, _shown(kv.key)), kv.key, kv.value)

    def header(self, kv: KeyValue) -> Header | None:
        """Read a header. Invariant: its verdict, if any, can be carried out and is on the header's own round.

        A header with any other verdict is unreadable: the header before it holds, and its failure is still to be judged.
        """
        header = self._try(lambda: decode(Header, kv.value, _shown(kv.key)), kv.key, kv.value)
        if header is None or not header.verdict:
            return header
        verdict = self.verdict(header.verdict, kv.key)
        if verdict is not None and verdict.round != header.round:
            self._once(
                f"{_shown(kv.key)} holds a header of round {header.round} with a verdict on round {verdict.round}",
                kv.key,
                kv.value,
            )
        return header if verdict is not None and verdict.round == header.round else None

    def ledger(self, kv: KeyValue) -> Ledger | None:
        """Read the job's ledger."""
        return self._try(lambda: decode_ledger(kv.value), kv.key, kv.value)

    def verdict(self, text: str, key: bytes) -> JobVerdict | None:
        """Decode a verdict that was read from this key."""
        return self._try(lambda: decode_verdict(text), key, text)

    def id_of(self, prefix: str, key: bytes) -> str | None:
        """Return the node id or host after the prefix of a key; None for other keys, as in a job named `<this one>/nodes`."""
        try:
            id_ = key.decode()[len(prefix) :]
        except UnicodeDecodeError:
            id_ = ""
        if is_name(id_):
            return id_
        self._once(f"{_shown(key)} is not the key of a node or host", key, b"")
        return None

    def read(self, kind: type[T], text: str, key: str, schema: int) -> T | None:
        """Read a record of another kind, with its schema."""
        return self._try(lambda: records.read(kind, text, key, schema), key.encode(), text)

    def note_fault(self, text: str, kv: KeyValue) -> None:
        """Log once why a record is unreadable, for a caller that decodes the record itself."""
        self._once(text, kv.key, kv.value)

    def _try(self, decode: Callable[[], T], key: bytes, content: bytes | str) -> T | None:
        try:
            return decode()
        except RecordError as error:
            self._once(str(error), key, content)
            return None

    def _once(self, text: str, key: bytes, content: bytes | str) -> None:
        fault = (key, hash(content))
        if fault not in self._faults and len(self._faults) < MAX_FAULTS:
            self._faults.add(fault)
            self._on_fault(printable(text))


def _shown(key: bytes) -> str:
    return key.decode(errors="backslashreplace")[:300]
