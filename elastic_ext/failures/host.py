"""What the host says about a failure: the kernel's memory killer, the GPU driver's log, the platform. I/O beside `classify`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_ext.failures import evidence, sources
from elastic_ext.settings import Settings

PLATFORM_S = 0.4  # the settle time of a verdict is 0.5 s: a platform that answers later is unknown


@dataclass(frozen=True)
class HostSays:
    """Since the round started. None, or a platform without a name: not known."""

    oom_kills: int | None
    xids: tuple[int, ...]
    platform: evidence.Platform


class Host:
    """Asked after a failure; knows what was there before the round."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._log = sources.KernelLog()
        self._before: dict[str, int] = {}
        self._platform = evidence.Platform()
        self._asking: threading.Thread | None = None

    def close(self) -> None:
        self._log.close()

    def round_started(self, pids: Iterable[int]) -> None:
        self._before = sources.oom_counts(tuple(pids))
        self._log.xids()  # what came before this round is not of it

    def ask(self) -> None:
        """A worker has failed: begin to ask the platform, beside all else; see `says`."""
        self._platform = evidence.Platform()
        self._asking = threading.Thread(target=self._ask, name="elastic_ext-platform", daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        found = sources.detect(os.environ, self._settings.pod_file, self._settings.pod_api)
        if found is not None:
            self._platform = evidence.Platform(found.name, found.reason or "", found.disruption_target)

    def says(self, wait_s: float = PLATFORM_S) -> HostSays:
        """wait_s: for the platform's answer."""
        if self._asking is not None:
            self._asking.join(wait_s)
        xids = self._log.xids() or []
        return HostSays(sources.oom_kills_since(self._before), tuple(xid.number for xid in xids), self._platform)
