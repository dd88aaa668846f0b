"""The rate of the bytes that a node sends, and its signs of life while a file takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_ext.checkpoints.copying.coordination import HEARTBEAT_S, Coordination

PULSE_S = 5.0  # interval between pulses to the agent while one file is being sent


@dataclass
class TokenBucket:
    """A rate limit. rate: bytes per second; 0: no limit."""

    rate: float
    paid_until: float = field(default=float("-inf"))

    def take(self, size: int, now: float) -> float:
        """Return the seconds to wait before sending `size` bytes.

        Over any period it lets through at most rate x time bytes plus one block.
        """
        if self.rate <= 0:
            return 0.0
        begin = max(now, self.paid_until)
        self.paid_until = begin + size / self.rate
        return begin - now


class Throttle:
    """Called with each block. Limits the rate, and tells the agent and the other nodes that this node is at work.

    Attributes:
        sent: bytes sent in this turn.
    """

    def __init__(
        self,
        bucket: TokenBucket,
        coordination: Coordination,
        pulse: Callable[[int], None],
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """pulse: called with the bytes of this turn so far, every PULSE_S seconds while a file takes long."""
        self._bucket, self._coordination, self._pulse, self._wait = bucket, coordination, pulse, wait
        self.sent = self._sent_before = 0  # bytes of this turn, and of all turns before it
        self._pulse_at = self._beat_at = time.monotonic()

    def begin_turn(self) -> None:
        """Count from zero."""
        self._sent_before, self.sent = self._sent_before + self.sent, 0
        self._pulse_at = self._beat_at = time.monotonic()

    def wait_to_send(self, size: int) -> None:
        """Wait until `size` more bytes may be sent. Raises OSError."""
        pause = self._bucket.take(size, time.monotonic())
        while pause > 0:  # waiting for the rate is not a stall
            self._wait(min(pause, PULSE_S))
            pause -= PULSE_S
            self.report_alive()
        self.sent += size
        self.report_alive()

    def report_alive(self) -> None:
        """Tell the agent and the other nodes that this node is at work, if it is time to. Raises OSError."""
        now = time.monotonic()
        if now - self._pulse_at >= PULSE_S:
            self._pulse_at = now
            self._pulse(self.sent)
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            self._coordination.beat(self._sent_before + self.sent, now)
