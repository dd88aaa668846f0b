"""Streams and events of a device that does not exist, in one of the two extreme orders that CUDA's rules allow.

Either the streams of training run at once, and every other stream stands still until somebody waits for it, or the reverse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream: Stream | None = None
        self.done = False

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.do(self._pass)

    def _pass(self) -> None:
        self.done = True

    def synchronize(self) -> None:
        while not self.done:
            self.stream.run_one()


class Stream:
    def __init__(self, device: torch.device, at_once: bool) -> None:
        self.device, self._at_once = device, at_once
        self._work: deque[Callable[[], None]] = deque()

    def do(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        while self._at_once and self._work:
            self.run_one()

    def run_one(self) -> None:
        self._work.popleft()()

    def wait_event(self, event: Event) -> None:
        self.do(event.synchronize)


class OnDevice:
    """A tensor of the device: a number."""

    def __init__(self, cuda: Cuda, device: str, value: int) -> None:
        self.cuda, self.device, self.value = cuda, torch.device(device), value

    def add(self, number: int) -> None:
        """As a kernel does."""

        def kernel() -> None:
            self.value += number

        self.cuda.current_stream(self.device).do(kernel)

    def record_stream(self, stream: Stream) -> None:
        assert stream.device == self.device


class InBuffer:
    """A place in a buffer."""

    value: int | None = None

    def copy_(self, source: OnDevice, non_blocking: bool) -> None:
        assert non_blocking, "training must not wait"

        def copy() -> None:
            self.value = source.value

        source.cuda.current_stream(source.device).do(copy)


class Cuda:
    """What devices.py uses of torch.cuda and of its runtime. calls: for pinned memory."""

    def __init__(self, training_late: bool) -> None:
        self._training_late = training_late
        self._current: dict[torch.device, Stream] = {}
        self.capturing = False
        self.calls: list[tuple[str, int]] = []

    def current_stream(self, device: torch.device) -> Stream:
        return self._current.setdefault(device, Stream(device, not self._training_late))

    def new_stream(self, device: torch.device) -> Stream:
        return Stream(device, self._training_late)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self._current[stream.device] = stream
        yield
        self._current[stream.device] = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("pin", address))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unpin", address))
        return 0


def install(monkeypatch: pytest.MonkeyPatch, training_late: bool) -> Cuda:
    """Put it in the place of torch's. training_late: whether training stands still until somebody waits for it."""
    made = Cuda(training_late)
    instead = {
        "Stream": made.new_stream,
        "Event": Event,
        "current_stream": made.current_stream,
        "stream": made.stream,
        "device": nullcontext,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: made.capturing,
        "cudart": lambda: made,
    }
    for name, value in instead.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", None)
    return made
