"""How often a save is listed and recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOOK_S = 1.0  # between two looks into the journals
EVERY_S = 10.0  # between two records of one entry: a log may be written again after each step
LONGEST_S = 60.0  # before an entry is listed again of which a file is not there: NFS hides a new one for up to 60 s (acdirmax)


@dataclass(frozen=True)
class Due:
    """When an entry may be recorded next, and how long it was put off the last time, in seconds."""

    at: float = -math.inf
    pause: float = LOOK_S / 2

    def later(self, now: float) -> Due:
        pause = min(2 * self.pause, LONGEST_S)
        return Due(now + pause, pause)
