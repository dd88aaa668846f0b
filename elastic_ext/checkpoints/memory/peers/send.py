"""Send this node's parts to its peer."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.checkpoints.directory.transfer import TokenBucket
from elastic_ext.checkpoints.memory.peers import keep, wire
from elastic_ext.checkpoints.memory.peers.request import Send
from elastic_ext.checkpoints.memory.peers.wire import PUT, Answer, Pace, PeerError, Request
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

ADOPT_S = 15.0  # how much later than the others an agent may learn of its round
BLOCK_S = 1 / 32  # of a block at the limit of the rate: short, as the receiver waits STALL_S, and all workers take turns
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # after a failure nothing is sent, ever longer


class PeerMetrics(Protocol):
    """What is told of the parts that this node sends."""

    def part_sent(self, size: int | None) -> None:
        """Record that the peer has a part, of so many bytes; None: it does not have it."""


class Paced:
    """At most so many bytes a second. The threads of all workers share it."""

    def __init__(self, rate: float, ended: threading.Event) -> None:
        """rate: 0: no limit. ended: set when nothing is to wait any more."""
        self.block = min(wire.BLOCK, max(1, int(BLOCK_S * rate))) if rate else wire.BLOCK
        self._bucket, self._ended = TokenBucket(rate), ended
        self._lock = threading.Lock()

    def wait(self, size: int, most_s: float) -> None:
        """Return when so many bytes may be sent, or after so long."""
        with self._lock:
            pause = self._bucket.take(size, time.monotonic())
        if pause > 0:
            self._ended.wait(min(pause, max(0.0, most_s)))


@dataclass(frozen=True)
class Circle:
    """The nodes of one round, as one of them sees them.

    Attributes:
        key: known to these nodes only.
        peer: host and port of the one that keeps this node's parts.
        own: this node's ranks.
        limit: bytes for the parts of another node.
    """

    key: str
    peer: tuple[str, int]
    own: range
    limit: int


class Outbox:
    """Sends parts to the peer of one round. After a failure it sends none for a while, so that training is not held up again.

    The threads of all workers share it.
    """

    def __init__(self, storage: Storage, circle: Circle, pace: Pace, metrics: PeerMetrics) -> None:
        self._storage, self._circle, self._pace, self._metrics = storage, circle, pace, metrics
        self._lock = threading.Lock()
        self._paused_until, self._pause_s = 0.0, 0.0
        self._failed = ""  # why the last part was not sent

    def send(self, wanted: Send) -> str:
        """Send a part; return why the peer does not have it, or ""."""
        with self._lock:
            reason = self._failed if time.monotonic() < self._paused_until else ""
        if not reason:
            reason = self._try(wanted)
            self._note(reason)
        self._metrics.part_sent(None if reason else wanted.size)
        return reason

    def _try(self, wanted: Send) -> str:
        try:
            self._put(wanted, time.monotonic() + wanted.limit_s)
        except (OSError, RecordError, PeerError) as error:
            return printable(str(error)) or type(error).__name__
        except Exception as error:  # the worker must have an answer, or it commits nothing at all
            logger.exception("a part could not be sent")
            return type(error).__name__
        return ""

    def _put(self, wanted: Send, deadline: float) -> None:
        keep.checked_rank(wanted.name, wanted.file)
        asked = Request(PUT, wanted.name, wanted.file, wanted.size, wanted.checksum, wanted.kept)
        path = self._storage.path(f"{wanted.name}/{wanted.file}")
        with open(path, "rb") as file, wire.connected(self._circle.peer, deadline) as connection:
            wire.ask(connection, self._circle.key, asked, ADOPT_S)
            connection.send_file(file, wanted.size, self._pace)
            wire.refuse(connection.hear(Answer))

    def _note(self, reason: str) -> None:
        """Pause after a failure; log when failures begin, and when they are over."""
        with self._lock:
            before, self._failed = self._failed, reason
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), MAX_PAUSE_S) if reason else 0.0
            self._paused_until = time.monotonic() + self._pause_s
        if reason and not before:
            logger.warning(
                "the copies in memory are on this node only, as the agent at %s:%s does not take them: %s; if this node is lost, "
                "the job resumes from an older checkpoint",
                *self._circle.peer,
                reason,
            )
        elif before and not reason:
            logger.warning("the agent at %s:%s takes the copies in memory again", *self._circle.peer)
