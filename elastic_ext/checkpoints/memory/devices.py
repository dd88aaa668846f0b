"""Copy tensors into a buffer: at once on the CPU, and beside training from a GPU.

On CUDA, buffers are pinned, and what changes only in an optimizer step is copied on a stream of its own; the next optimizer step
waits for it on the device. All else is copied on the stream of training, in whose order nothing can change it before. The host
waits for neither. (Written to CUDA's documented rules, and not yet run on a GPU.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

logger = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]
"""(target in a buffer, source)."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class Copying:
    """The copies of one rank, one after another."""

    def __init__(self) -> None:
        self._side: _SideStream | None = None

    def start(self, resting: Sequence[Pair], moving: Sequence[Pair]) -> None:
        """Begin to copy. resting: what changes only in an optimizer step; moving: what may change before."""
        device = next((source.device for _, source in (*resting, *moving) if source.is_cuda), None)
        if device is None:
            for target, source in (*resting, *moving):
                target.copy_(source)
            return
        if self._side is None:
            self._side = _SideStream(device)
        self._side.copy(resting, moving)

    def finish(self) -> None:
        """Wait until everything is in the buffer. Any thread may call this."""
        if self._side is not None:
            self._side.wait()

    def pin(self, buffers: Iterable[Tensor]) -> None:
        """Pin these buffers, and no others. Does nothing before the first copy from a GPU."""
        if self._side is not None:
            self._side.pin(buffers)


class _SideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        self._pinned: dict[int, Tensor] = {}  # by address
        register_optimizer_step_pre_hook(lambda *_: self._hold_step())

    def copy(self, resting: Sequence[Pair], moving: Sequence[Pair]) -> None:
        current = torch.cuda.current_stream(self._device)
        for target, source in moving:
            target.copy_(source, non_blocking=True)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, source in resting:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(self._stream)
            self._copied = self._stream.record_event()

    def wait(self) -> None:
        copied = self._copied
        if copied is not None:
            copied.synchronize()

    def _hold_step(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def pin(self, buffers: Iterable[Tensor]) -> None:
        wanted = {buffer.data_ptr(): buffer for buffer in buffers}
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            for address in self._pinned.keys() - wanted.keys():
                runtime.cudaHostUnregister(address)
                del self._pinned[address]
            for address in wanted.keys() - self._pinned.keys():
                error = runtime.cudaHostRegister(address, wanted[address].nbytes, _PORTABLE)
                if int(error):
                    logger.warning("a buffer of the memory tier cannot be pinned (CUDA error %s): copies stall training", error)
                    continue
                self._pinned[address] = wanted[address]
