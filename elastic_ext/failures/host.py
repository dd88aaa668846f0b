"""The host's evidence about a failure: the kernel's OOM killer, the GPU driver's log, the platform. `classify` does no I/O."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_ext.base.settings import Settings
from elastic_ext.failures import sources
from elastic_ext.failures.evidence import Platform

ANSWER_S = 0.4  # the verdict waits 0.5 s for reports (`settle`); a platform or driver that answers later counts as unknown
NVIDIA_DRIVER = "/proc/driver/nvidia/version"  # exists while the kernel module is loaded


@dataclass(frozen=True)
class HostEvidence:
    """The host's evidence since the round started. None, or a platform without a name, means unknown."""

    oom_kills: int | None
    xids: tuple[int, ...]
    platform: Platform
    gpu_recovery: tuple[str, ...] = ()


class HostProbe:
    """Collects the host's evidence after a failure, and keeps the counts from before the round."""

    def __init__(self, settings: Settings, driver: str = NVIDIA_DRIVER) -> None:
        """driver: a file that exists while NVIDIA's driver is loaded."""
        self._settings = settings
        self._driver = driver
        self._log = sources.KernelLog()
        self._before: dict[str, int] = {}
        self._platform = Platform()
        self._gpu_recovery: tuple[str, ...] = ()
        self._asking: list[threading.Thread] = []

    def close(self) -> None:
        """Release the kernel log."""
        self._log.close()

    def round_started(self, pids: Iterable[int]) -> None:
        """Record the counts at the start of a round. pids: the round's workers."""
        self._before = sources.oom_counts(tuple(pids))
        self._log.begin()  # ignore records from before this round

    def start_asking(self) -> None:
        """Start to ask the platform and the GPU driver, each in its own thread; see `evidence`."""
        self._platform, self._gpu_recovery = Platform(), ()
        questions: list[Callable[[], None]] = [self._ask_platform]
        if os.path.exists(self._driver):
            questions.append(self._ask_driver)
        self._asking = [threading.Thread(target=ask, name="elastic_ext-host", daemon=True) for ask in questions]
        for thread in self._asking:
            thread.start()

    def _ask_platform(self) -> None:
        self._platform = sources.detect(os.environ, self._settings.pod_file, self._settings.pod_api)

    def _ask_driver(self) -> None:
        """Ask the driver in a child process, which creates no CUDA context."""
        actions = [gpu.action for gpu in sources.recovery_actions() or ()]
        self._gpu_recovery = tuple(action for action in actions if action not in (None, "none"))

    def evidence(self, wait_s: float = ANSWER_S) -> HostEvidence:
        """Return the evidence after `start_asking`. wait_s: seconds for all answers together; later answers count as unknown."""
        deadline = time.monotonic() + wait_s
        for thread in self._asking:
            thread.join(max(0.0, deadline - time.monotonic()))
        xids = tuple(xid.number for xid in self._log.xids() or [])
        return HostEvidence(sources.oom_kills_since(self._before), xids, self._platform, self._gpu_recovery)
