"""Times for people: the labels of an axis, and moments in a text. Pure."""

from __future__ import annotations

from datetime import datetime, timezone

_STEPS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000),
)
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def ticks(length: float, most: int) -> list[float]:
    """Return round times from 0 to `length` seconds, at most `most` + 1 of them."""
    step = next((each for each in _STEPS_S if length / each <= most), length)
    return [number * step for number in range(int(length / step + 1e-9) + 1)]


def offset(at: float, length: float) -> str:
    """Return a time since the beginning as `unit` says, as exact as a picture of `length` seconds needs it."""
    if length < MINUTE_S:
        return f"{at:.0f} s" if abs(at - round(at)) < 1e-6 else f"{at:.{2 if length < 2 else 1}f} s"
    seconds = round(at)
    hours, minutes = seconds // HOUR_S, seconds % HOUR_S // MINUTE_S
    if length < HOUR_S:
        return f"{seconds // MINUTE_S}:{seconds % MINUTE_S:02d}"
    if length < DAY_S:
        return f"{hours}:{minutes:02d}:{seconds % MINUTE_S:02d}"
    return f"{hours // 24} d {hours % 24}:{minutes:02d}"


def unit(length: float) -> str:
    """Return what `offset` counts in."""
    for limit, name in ((MINUTE_S, "seconds"), (HOUR_S, "min:s"), (DAY_S, "h:min:s")):
        if length < limit:
            return name
    return "days h:min"


def clock(unix_s: float, length: float) -> str:
    """Return a moment of the day in UTC, with the day if the picture spans several."""
    at = datetime.fromtimestamp(unix_s, timezone.utc)
    return at.strftime("%m-%d %H:%M" if length >= DAY_S else "%H:%M" if length >= 6 * HOUR_S else "%H:%M:%S")


def moment(unix_s: float) -> str:
    """Return a moment in UTC."""
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    """Return a length of time: "45.2 s", "12 min 5 s", "3 h 12 min", "2 d 4 h"."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    for size, name, below, less in ((DAY_S, "d", HOUR_S, "h"), (HOUR_S, "h", MINUTE_S, "min"), (MINUTE_S, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name}" + (f" {rest} {less}" if rest else "")
    return f"{whole} s"
