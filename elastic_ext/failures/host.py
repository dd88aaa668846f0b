"""What the host says about a failure: the kernel's memory killer, the GPU driver's log, the platform. I/O beside `classify`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_ext.base.settings import Settings
from elastic_ext.failures import sources
from elastic_ext.failures.evidence import Platform

ANSWER_S = 0.4  # the settle time of a verdict is 0.5 s: a platform or a driver that answers later is unknown
NVIDIA_DRIVER = "/proc/driver/nvidia/version"  # there while its kernel module is


@dataclass(frozen=True)
class HostEvidence:
    """Since the round started. None, or a platform without a name: not known."""

    oom_kills: int | None
    xids: tuple[int, ...]
    platform: Platform
    gpu_recovery: tuple[str, ...] = ()


class Host:
    """Asked after a failure; knows what was there before the round."""

    def __init__(self, settings: Settings, driver: str = NVIDIA_DRIVER) -> None:
        """driver: a file that is there where NVIDIA's driver is."""
        self._settings = settings
        self._driver = driver
        self._log = sources.KernelLog()
        self._before: dict[str, int] = {}
        self._platform = Platform()
        self._gpu_recovery: tuple[str, ...] = ()
        self._asking: list[threading.Thread] = []

    def close(self) -> None:
        self._log.close()

    def round_started(self, pids: Iterable[int]) -> None:
        self._before = sources.oom_counts(tuple(pids))
        self._log.begin()  # what came before this round is not of it

    def ask(self) -> None:
        """A worker has failed: begin to ask the platform and the GPU driver, beside all else; see `says`."""
        self._platform, self._gpu_recovery = Platform(), ()
        asked: list[Callable[[], None]] = [self._ask_platform]
        if os.path.exists(self._driver):
            asked.append(self._ask_driver)
        self._asking = [threading.Thread(target=ask, name="elastic_ext-host", daemon=True) for ask in asked]
        for thread in self._asking:
            thread.start()

    def _ask_platform(self) -> None:
        self._platform = sources.detect(os.environ, self._settings.pod_file, self._settings.pod_api)

    def _ask_driver(self) -> None:
        """In a process of its own, which makes no CUDA context."""
        actions = [gpu.action for gpu in sources.recovery_actions() or ()]
        self._gpu_recovery = tuple(action for action in actions if action not in (None, "none"))

    def says(self, wait_s: float = ANSWER_S) -> HostEvidence:
        """wait_s: for all answers together; what comes later is not known."""
        deadline = time.monotonic() + wait_s
        for thread in self._asking:
            thread.join(max(0.0, deadline - time.monotonic()))
        xids = tuple(xid.number for xid in self._log.xids() or [])
        return HostEvidence(sources.oom_kills_since(self._before), xids, self._platform, self._gpu_recovery)
