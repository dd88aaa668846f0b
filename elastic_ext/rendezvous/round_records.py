"""The records by which the nodes of a job form its rounds, as JSON with a schema: the values of keys in etcd (`keys`).

A record of another schema is refused. A schema may gain a field that has a default: older records lack it, and older versions
ignore it. Anybody may have written a record: the reader logs each unreadable one once, and the job goes on. The caller decides
what replaces it: an unreadable node is no node, an unreadable header changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, TypeVar

from elastic_ext.base import records
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Count, Name, NameOrEmpty, Port, RecordError, Within, is_name
from elastic_ext.failures.ledger import Ledger, decode_ledger, decode_verdict
from elastic_ext.rendezvous import configuration
from elastic_ext.rendezvous.configuration import Configuration

if TYPE_CHECKING:
    from elastic_ext.etcd import KeyValue

logger = logging.getLogger(__name__)

SCHEMA = 3  # of the records below
MAX_WORKERS = 2**16  # per node
MAX_ROUNDS = 10**9  # that a node may claim to have been in: the next number must still be valid


class State(str, Enum):
    FORMING = "forming"  # before the first round
    RUNNING = "running"
    BROKEN = "broken"
    DONE = "done"
    CLOSED = "closed"  # the job is over for good


class EndKind(str, Enum):
    """The ways in which a round ends while its workers run. Code decides by this, never by the reason, which is for people."""

    STALLED = "stalled"  # no worker of the job makes progress any more
    DIFFERS = "differs"  # replicas of the training state are not equal any more
    FAILED = "failed"  # a node's workers failed
    BROKEN = "broken"  # a node was lost or leaves, or nodes wait to join
    CUT_OFF = "cut_off"  # this node can no longer take part
    CLOSED = "closed"  # the job is over


@dataclass(frozen=True)
class Post:
    """What a node has posted on one topic. value: a record of the topic's own, which only the topic's feature reads."""

    topic: Name
    value: str


@dataclass(frozen=True)
class Posts:
    """What a node has posted for all in one round; see `board`."""

    round: Count = 0
    posts: tuple[Post, ...] = ()


@dataclass(frozen=True)
class Agreed:
    """What holds for all nodes in one round, by topic; see `board`."""

    made: Count = 0  # number of changes in this round: of two headers the newer one has more
    posts: tuple[Post, ...] = ()


@dataclass(frozen=True)
class RoundReport:
    """What a node reports of the end of a round. Its workers of that round have been stopped."""

    round: Count = 0  # the last round whose end it has reported; 0: none
    failure: str = ""  # what failed there (a record of `failures.ledger`); "": nothing did
    follows: bool = False  # see `failures.ledger.Report.waits_for_others`


@dataclass(frozen=True)
class LinkPort:
    """Where other nodes may link to a node (`links`), at its address."""

    port: Port = 0  # of its listening socket; 0: no node may link to it
    key: NameOrEmpty = ""  # who links to it proves to have read this (`handshake`); "": no node may link to it


@dataclass(frozen=True)
class NodeHost:
    """What a node reports of its host."""

    topology: str = ""  # the setting
    machine: str = ""  # see `address.machine`
    has_store: bool = False  # the job's store is on it, and would go with it


@dataclass(frozen=True)
class Node:
    """A node's record of itself."""

    after: Count  # the node waits for a round later than this one. If it was in this round, its workers have been stopped
    workers: Annotated[int, Within(1, MAX_WORKERS)]  # number of its workers
    role: str
    address: Name
    port: Port  # of a store server of this node that already listens and has never been used
    done: Count = 0  # the last round that its workers have finished without a failure; 0 if none
    host: NodeHost = NodeHost()
    report: RoundReport = RoundReport()
    board: Posts = Posts()
    local: bool = False  # it saves to its own disk first, and may resume from there
    # The round that its workers were in when it had to register again; 0 if it never had to.
    round: Annotated[int, Within(0, MAX_ROUNDS)] = 0
    # The round in which it stopped its workers because it was cut off from etcd; 0 if none. This explains failures of other
    # nodes.
    cut: Count = 0
    link: LinkPort = LinkPort()
    silent: tuple[Name, ...] = ()  # addresses of rounds' stores that do not answer it


@dataclass(frozen=True)
class Drain:
    """A node that an operator has asked to leave the job."""

    # node, host: its id, and the name by which its host is refused afterwards.
    node: Name
    host: Name
    number: Count  # `Header.drains_made` when it was asked for
    reason: str = ""  # of the operator, for people
    refused_s: Annotated[int, Within(1, 10**9)] = 3600  # for how long the host may not come back
    now: bool = False  # it does not wait for a checkpoint
    released: bool = False  # the leader has let the node go: no round has it any more
    # Of the checkpoint that was published before it was released; -1: unknown, or none was.
    step: Annotated[int, Within(-1, 2**63 - 1)] = -1
    held: bool = False  # it had published one, but could not be spared: it needs a new one once it can be


@dataclass(frozen=True)
class Header:
    """The state of the job, which every node watches: small, for any number of nodes."""

    round: Count = 0  # number of the running round, or of the last one; 0 before the first
    state: State = State.FORMING
    # nodes, world: number of its nodes and of its workers.
    nodes: Count = 0
    world: Count = 0
    # address, port: the store of this round, at the node of rank 0.
    address: str = ""
    port: Port = 0
    reason: str = ""  # why the job is in this state, for people
    # A name unique to one act of sealing. A leader may be lost, or its view may change, after it has written the assignments of a
    # round and before it writes this header; they must not count for the round that is formed instead.
    seal: str = ""
    verdict: str = ""  # what all nodes do about the failures that ended this round (a record of `failures.ledger`); "": none yet
    local: bool = False  # all nodes may resume from their own disks, and offer the node of rank 0 what they have there
    agreed: Agreed = Agreed()  # a new round begins with nothing
    # Name of the job from its first round to its end, unique among jobs of the same run id; "" before the first round.
    job: str = ""
    end: EndKind | None = None  # how the round ended; None: as `state` says. Older versions do not write it
    # Id of a node whose loss has ended the round; it may be back. "": it ended otherwise. Older versions write none.
    lost: str = ""
    # Nodes that are to leave the job; those that have left stay here until the next round is sealed.
    drains: tuple[Drain, ...] = ()
    drains_made: Count = 0  # number of changes to `drains` in this job
    # In what the nodes' configurations differ, for people, so that no first round is formed; "": in nothing that must be alike.
    differs: str = ""
    # The job's `--nnodes`, from its first round on: what holds when its record is lost. 0: older versions write none.
    min_nodes: Count = 0
    max_nodes: Count = 0
    # Name of the signal for which a node has left and so ended the round; "": it ended otherwise. Older versions write none.
    signal: NameOrEmpty = ""

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state in (State.DONE, State.CLOSED)


@dataclass(frozen=True)
class Assignment:
    """One node's assignment to a round."""

    round: Count
    rank: Count  # of the node
    # base_rank, base_role_rank: of its first worker, among all workers and among those of its role.
    base_rank: Count
    base_role_rank: Count
    role_world: Count  # number of workers with its role
    seal: str = ""  # see Header
    neighbors: tuple[Name, ...] = ()  # ids of the nodes that this node keeps links to

    def of(self, header: Header) -> bool:
        """Return whether this is an assignment to the header's round, not to another attempt to form it."""
        return (self.round, self.seal) == (header.round, header.seal)


Record = TypeVar("Record", Node, Header, Assignment)


def encode(record: Node | Header | Assignment) -> bytes:
    """Return the record as JSON, with its schema."""
    return records.encode(record, SCHEMA).encode()


def decode(kind: type[Record], value: bytes, key: str) -> Record:
    """Decode a record. key: for messages.

    Raises RecordError: it has another schema, or is not a record of this kind.
    """
    data = records.parse(value, key, SCHEMA)
    if kind is Header and "state" not in data:
        raise RecordError(f"{key} holds no header of elastic_ext: the field `state` is missing")
    return records.build(kind, data, key)


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
        verdict = self._try(lambda: decode_verdict(header.verdict), kv.key, header.verdict)
        if verdict is None or verdict.round == header.round:
            return header if verdict is not None else None
        self.note_fault(f"{_shown(kv.key)} holds a header of round {header.round} with a verdict on round {verdict.round}", kv)
        return None

    def configuration(self, kv: KeyValue) -> Configuration | None:
        """Read what a node, or the job, runs with."""
        return self._try(lambda: configuration.decode(kv.value, _shown(kv.key)), kv.key, kv.value)

    def ledger(self, kv: KeyValue) -> Ledger | None:
        """Read the job's ledger."""
        return self._try(lambda: decode_ledger(kv.value), kv.key, kv.value)

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

    def named(self, folder: str, kvs: Iterable[KeyValue]) -> dict[str, KeyValue]:
        """Return the keys of a folder, by the node id or host in them."""
        inside = (kv for kv in kvs if kv.key.startswith(folder.encode()))
        return {name: kv for kv in inside if (name := self.id_of(folder, kv.key)) is not None}

    def assignments(self, folder: str, kvs: Iterable[KeyValue]) -> dict[str, Assignment]:
        """Return the readable assignments of a folder, by node id."""
        found = {id_: self.assignment(kv) for id_, kv in self.named(folder, kvs).items()}
        return {id_: assignment for id_, assignment in found.items() if assignment is not None}

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
