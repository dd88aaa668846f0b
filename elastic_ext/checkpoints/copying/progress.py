"""What an agent knows of the work of its copier, by what that reports. Pure: times are monotonic seconds that callers pass."""

from __future__ import annotations

from elastic_ext.checkpoints.copying.protocol import Pulse, Report, moved


class Progress:
    """Progress is: bytes that this node or another one has sent, checkpoints that became complete.

    Attributes:
        last: the last report, None before the first.
        working: it has been given work, and has not reported since that nothing is left.
        heard_at: when it last said something, or was given work.
        moved_at: when there was progress last, or a wait for it began.
    """

    def __init__(self, now: float) -> None:
        self.last: Report | None = None
        self.working = True
        self.heard_at = self.moved_at = now
        self._pulsed = 0  # bytes of its turn that were counted already

    def started(self, now: float) -> None:
        """A process was started; it looks for work by itself."""
        self.working, self.heard_at, self._pulsed = True, now, 0

    def ordered(self, now: float) -> None:
        """An order was sent."""
        if not self.working:
            self.working, self.heard_at = True, now

    def heard(self, message: Report | Pulse, now: float) -> int:
        """Take a message; return the bytes sent since the one before."""
        self.heard_at = now
        if isinstance(message, Pulse):
            self.moved_at = now
            new, self._pulsed = max(0, message.pulse - self._pulsed), message.pulse
            return new
        if self.last is None or moved(message, self.last):
            self.moved_at = now
        self.last, self.working = message, bool(message.waiting or message.failures)
        new, self._pulsed = max(0, message.sent - self._pulsed), 0
        return new
