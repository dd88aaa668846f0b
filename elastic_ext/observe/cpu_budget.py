"""How much CPU time a piece of work may take over time: a burst, then a share of one core. Pure; the caller tells the time."""

from __future__ import annotations


class CpuBudget:
    """Credit in CPU seconds that grows with time and shrinks with use. It may become negative: work is paid for afterwards.

    Args:
        share: of one core, in the long run.
        burst_s: CPU seconds that may be used at once after a quiet time.
    """

    def __init__(self, share: float, burst_s: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._credit_s, self._at = burst_s, 0.0

    def spend(self, cpu_s: float, now: float) -> None:
        """Take note of work that is done."""
        self._credit_s = self._credit(now) - cpu_s
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return how long to wait before the next piece of work; 0: it may begin."""
        return max(0.0, -self._credit(now) / self._share)

    def _credit(self, now: float) -> float:
        return min(self._burst_s, self._credit_s + self._share * max(0.0, now - self._at))
