"""Which links of this host went down: InfiniBand and RoCE ports, and the interfaces that workers use. Linux counts that.

A link that flaps or stays down breaks the collectives of all nodes, and the host that reports it first is rarely the one with it.
NCCL's own words for it ("Got async event : port error") go to stdout, and only if NCCL_DEBUG is set.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SYSFS = Path("/sys/class")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # NCCL's may begin with "=" (no prefixes) or "^" (all but these)
SAMPLE_S = 300.0  # seconds between two looks while a round runs
# A link that went down longer ago did not cause this failure: collectives give up after 10 minutes (torch's default), and
# InfiniBand after one or two.
WINDOW_S = 900.0
MAX_NAMED = 8  # links in a report


@dataclass(frozen=True)
class Link:
    """One link. downs: how often it has gone down since the host started; None: not counted."""

    up: bool
    downs: int | None


@dataclass(frozen=True)
class LinksDown:
    """Links that were up and went down, by name, e.g. "mlx5_0 port 1". away: one of them is still down, or its device is gone."""

    names: tuple[str, ...] = ()
    away: bool = False


NONE_DOWN = LinksDown()


def links(environ: Mapping[str, str], own: str = "", sysfs: Path = SYSFS) -> dict[str, Link]:
    """Return the links of this host by name. A device whose firmware hangs may never answer.

    Args:
        environ: of the workers; see INTERFACES.
        own: the interface by which the other nodes reach this one; "" if unknown.
    """
    found = {}
    for port in sorted(sysfs.glob("infiniband/*/ports/*")):
        interface = _text(port / "gid_attrs/ndevs/0")  # of RoCE: there, the port's own counter may stay at 0
        downs = [_number(port / "counters/link_downed"), _downs(sysfs / "net" / interface) if interface else None]
        known = [each for each in downs if each is not None]
        found[f"{port.parts[-3]} port {port.name}"] = Link("ACTIVE" in _text(port / "state"), sum(known) if known else None)
    for folder in sorted((sysfs / "net").glob("*")):
        if (folder / "device").exists() or _is_used(folder.name, environ, own):
            found[folder.name] = Link(_text(folder / "carrier") == "1", _downs(folder))
    return found


def _is_used(name: str, environ: Mapping[str, str], own: str) -> bool:
    given = [each for variable in INTERFACES if (each := environ.get(variable, "")) and not each.startswith("^")]
    prefixes = [prefix for each in given for prefix in each.removeprefix("=").split(",") if prefix]
    return name == own or (name != "lo" and name.startswith(tuple(prefixes)))


def went_down(before: Mapping[str, Link], now: Mapping[str, Link]) -> LinksDown:
    """Return the links that were up before and have gone down since, also if they are up again."""
    away = [name for name, link in before.items() if link.up and not (name in now and now[name].up)]
    back = [name for name, link in before.items() if link.up and name not in away and (now[name].downs or 0) > (link.downs or 0)]
    return LinksDown(tuple((*away, *back)[:MAX_NAMED]), bool(away))


def _downs(interface: Path) -> int | None:
    return _number(interface / "carrier_down_count")


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """Return the content of a file; "" if it cannot be read: an interface that is shut off has no carrier."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


class LinkHistory:
    """The last looks at the links, while a round runs. Each look is on a thread of its own: sysfs asks the device."""

    def __init__(self, environ: Mapping[str, str], own: str = "", sysfs: Path = SYSFS) -> None:
        self._environ, self._own, self._sysfs = environ, own, sysfs
        self._looks: deque[tuple[float, dict[str, Link]]] = deque()  # with their times; the oldest alone may be out of the window
        self._look: threading.Thread | None = None
        self._due = 0.0

    def round_started(self) -> None:
        """Forget earlier looks: what happened before this round has nothing to do with it."""
        self._looks.clear()
        self.look()

    def next_look_s(self) -> float:
        """Return the seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def look(self, now: float | None = None) -> None:
        """Begin a look, unless the last one has not ended. Returns at once. now: time.monotonic() if None."""
        now = time.monotonic() if now is None else now
        self._due = now + SAMPLE_S
        if self._look is None or not self._look.is_alive():
            look = threading.Thread(target=self._take, args=(now,), name="elastic_ext-links", daemon=True)
            try:
                look.start()
            except RuntimeError as error:  # a limit on threads: no reason to end a job that runs
                logger.debug("the links of this host are not read: %s", error)
                return
            self._look = look

    def went_down(self, wait_s: float) -> LinksDown:
        """Return the links that went down in the last WINDOW_S, by the newest look. wait_s: for that look to end, in seconds."""
        if self._look is not None:
            self._look.join(wait_s)
        looks = list(self._looks)
        return went_down(looks[0][1], looks[-1][1]) if looks else NONE_DOWN

    def _take(self, now: float) -> None:
        try:
            self._looks.append((now, links(self._environ, self._own, self._sysfs)))
            while len(self._looks) > 1 and self._looks[1][0] <= now - WINDOW_S:
                self._looks.popleft()
        except OSError as error:
            logger.debug("the links of this host cannot be read: %s", error)
