"""The agent's view of its copier's progress, from the copier's messages. Pure: callers pass the time in monotonic seconds."""

from __future__ import annotations

from elastic_ext.checkpoints.copying.protocol import Pulse, Report, made_progress


class Progress:
    """The copier's progress: bytes sent by this node or another, and checkpoints that became complete.

    Attributes:
        last: the last report; None before the first.
        working: it was given work, and has not yet reported that nothing is left.
        heard_at: when it last sent a message or was given work.
        progress_at: when it last made progress, or when a wait for progress began.
    """

    def __init__(self, now: float) -> None:
        self.last: Report | None = None
        self.working = True
        self.heard_at = self.progress_at = now
        self._pulsed = 0  # bytes of this turn that are already counted

    def started(self, now: float) -> None:
        """Note that a process was started; it looks for work by itself."""
        self.working, self.heard_at, self._pulsed = True, now, 0

    def ordered(self, now: float) -> None:
        """Note that an order was sent."""
        if not self.working:
            self.working, self.heard_at = True, now

    def heard(self, message: Report | Pulse, now: float) -> int:
        """Process a message; return the bytes sent since the previous one."""
        self.heard_at = now
        if isinstance(message, Pulse):
            self.progress_at = now
            new, self._pulsed = max(0, message.pulse - self._pulsed), message.pulse
            return new
        if self.last is None or made_progress(message, self.last):
            self.progress_at = now
        self.last, self.working = message, bool(message.waiting or message.failures)
        new, self._pulsed = max(0, message.sent - self._pulsed), 0
        return new
