"""Copy tensors into a buffer: at once on the CPU, and without waiting for the host from GPUs.

On CUDA, buffers are pinned, and all is copied on the stream of training, in whose order nothing can change it before. But once
every optimizer step is seen to call torch's hook (`StepsSeen`), what changes only there is copied beside training, on another
stream of each device: the hook makes the next step wait for the copy, on the device. From a snapshot until that step a script
must then change parameters nowhere else; before the snapshot it may. After a step that is captured in a CUDA graph nothing is
copied beside training any more, as its replays call no hook.

A pinned buffer is unpinned before it is unmapped: CUDA would still write to its old pages after something else is mapped there.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_ext.checkpoints.memory.pace import StepsSeen

logger = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]
"""(target in a buffer, source)."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_UNREPORTED = 8  # copies whose stalls are kept until they are asked for


class Copying:
    """The copies of one rank, one after another. Another thread than that of training may call `finish` and `pin` only."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """optimizers: all that train. From now on their steps are watched."""
        self._steps = StepsSeen(optimizers)
        self._lanes: dict[torch.device, Lane] = {}
        self._pinned: dict[int, Tensor] = {}  # by address
        self._unreported: deque[list[Marks]] = deque(maxlen=_UNREPORTED)
        weakref.finalize(self, _unpin, self._lanes, self._pinned).atexit = False
        self._exposed = False  # a copy beside training may be under way
        self._overtaken = False  # ... and a step was captured meanwhile
        _call_before_steps(self._before_step)

    def open(self, sources: Iterable[Tensor]) -> None:
        """Prepare for copies of these, so that buffers can be pinned before the first copy."""
        for device in {source.device for source in sources if source.device.type == "cuda"} - self._lanes.keys():
            self._lanes[device] = Lane(device)

    def start(self, step: int, resting: Sequence[Pair], moving: Sequence[Pair]) -> None:
        """Begin to copy the state after a step.

        resting: what changes only in an optimizer step. moving: what may change before.
        """
        beside = self._steps.all_since_last(step)
        _wait(self._lanes)  # as a rule there is nothing; but a copy that failed may be under way
        self._exposed, self._overtaken = beside, False
        self.open(source for _, source in (*resting, *moving))
        marks = []
        for device, (its_resting, its_moving) in by_device(resting, moving).items():
            if device.type != "cuda":
                for target, source in (*its_resting, *its_moving):
                    target.copy_(source)
                continue
            marks.append(self._lanes[device].copy(its_resting, its_moving, beside))
        if marks:
            self._unreported.append(marks)

    def finish(self) -> None:
        """Wait until everything is in the buffer. Raises RuntimeError if it may be of different steps."""
        with self._beside_captures():
            _wait(self._lanes)
        self._exposed = False
        if self._overtaken:
            raise RuntimeError("an optimizer step was captured in a CUDA graph while the state was copied")

    def pin(self, buffers: Iterable[Tensor]) -> None:
        """Pin these buffers, and let go of all others. Does nothing before the first `open` for a GPU."""
        wanted = {buffer.data_ptr(): buffer for buffer in buffers} if self._lanes else {}
        with self._beside_captures():
            _unpin(self._lanes, self._pinned, wanted.keys())
            for address in wanted.keys() - self._pinned.keys():
                error = torch.cuda.cudart().cudaHostRegister(address, wanted[address].nbytes, _PORTABLE)
                if int(error):
                    text = torch.cuda.cudart().cudaGetErrorString(error)
                    logger.warning("a buffer of the memory tier cannot be pinned (CUDA: %s): copies stall training", text)
                    continue
                self._pinned[address] = wanted[address]

    def device_stall_s(self) -> float | None:
        """Return for how long a copy has stalled training on the devices: once for each copy, the oldest first.

        None without one, or if the devices have not come so far: training is not made to wait for an answer. Ask before the
        next `start`: until then it is unknown how long the next step waits. Devices are taken to stall at the same time.
        """
        if not self._unreported:
            return None
        stalls = [stall_s for marks in self._unreported[0] if (stall_s := marks.stall_s()) is not None]
        if len(stalls) < len(self._unreported[0]):
            return None
        self._unreported.popleft()
        return max(stalls)

    def _before_step(self, optimizer: Optimizer) -> None:
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self._steps.step(optimizer)
            for lane in self._lanes.values():
                lane.hold_step()
        elif not self._steps.captured:
            # A capture must not wait for an event from outside. What is under way may be overtaken by the first replay.
            self._steps.captured, self._overtaken = True, self._exposed
            logger.warning("an optimizer step is captured in a CUDA graph: copies of the state to memory hold up training")

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """By default, to wait for an event or to pin memory in this thread breaks a capture that another thread has begun."""
        library = _cuda_runtime()
        if library is None or not self._lanes:
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        with torch.cuda.device(next(iter(self._lanes))):  # else the call makes a context on device 0
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            try:
                yield
            finally:
                library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class Lane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._marks: Marks | None = None  # of the last copy

    def copy(self, resting: Sequence[Pair], moving: Sequence[Pair], beside: bool) -> Marks:
        """Begin to copy. beside: what rests may be copied beside training."""
        training = torch.cuda.current_stream(self._device)
        began = _mark(training)
        try:
            _copy(moving if beside else (*moving, *resting))
            ended = _mark(training)
            self._side.wait_event(ended)
            with torch.cuda.stream(self._side):
                _copy(resting if beside else ())
            for _, source in resting if beside else ():
                source.record_stream(self._side)  # memory that training frees is not used again before it is copied
            self._marks = Marks(began, ended, _mark(self._side))
        except BaseException:
            torch.cuda.synchronize(self._device)  # no event shows when the device has done what it was given
            raise
        return self._marks

    def wait(self) -> None:
        """Wait for the last copy, on the host."""
        if self._marks is not None:
            self._marks.copied.synchronize()

    def hold_step(self) -> None:
        """Let what training does from now on wait for the last copy, on the device."""
        if self._marks is not None:
            training = torch.cuda.current_stream(self._device)
            if self._marks.reached is None:
                self._marks.reached = _mark(training)
            training.wait_event(self._marks.copied)


@dataclass
class Marks:
    """When one copy was where, as events of one device."""

    began: torch.cuda.Event  # training came to what is copied on its stream
    ended: torch.cuda.Event  # ... and went on
    copied: torch.cuda.Event  # all was copied
    reached: torch.cuda.Event | None = None  # training came to the next optimizer step; None before that, or if no step was seen

    def stall_s(self) -> float | None:
        """Return for how long training stood still; None if that is not over yet."""
        waits = [(self.began, self.ended)]
        if self.reached is not None:
            waits.append((self.reached, self.copied))
        if not all(event.query() for wait in waits for event in wait):
            return None
        return sum(max(0.0, float(begin.elapsed_time(end))) for begin, end in waits) / 1000  # it is in milliseconds


def _wait(lanes: Mapping[torch.device, Lane]) -> None:
    for lane in lanes.values():
        lane.wait()


def _unpin(lanes: Mapping[torch.device, Lane], pinned: dict[int, Tensor], but: Collection[int] = ()) -> None:
    """Let go of all pinned buffers but those at these addresses."""
    gone = [address for address in pinned if address not in but]
    if gone:
        _wait(lanes)  # the device may still write to it
    for address in gone:
        torch.cuda.cudart().cudaHostUnregister(address)
        del pinned[address]


def by_device(resting: Sequence[Pair], moving: Sequence[Pair]) -> dict[torch.device, tuple[list[Pair], list[Pair]]]:
    found: dict[torch.device, tuple[list[Pair], list[Pair]]] = {}
    for kind, pairs in enumerate((resting, moving)):
        for pair in pairs:
            found.setdefault(pair[1].device, ([], []))[kind].append(pair)
    return found


def _copy(pairs: Iterable[Pair]) -> None:
    """Copy in the order of the current stream of the sources' device."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event of a stream's present end. blocking: a thread that waits for it sleeps."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def _call_before_steps(method: Callable[[Optimizer], None]) -> None:
    """Have a method called before each eager step of any optimizer, as long as its object lives."""
    alive = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return  # compiled steps are not seen: nothing of this is traced into them
        call = alive()
        if call is not None:
            call(optimizer)

    register_optimizer_step_pre_hook(hook)


def _cuda_runtime() -> ctypes.CDLL | None:
    """Return the runtime that torch has loaded, for the call that torch does not offer; None if it is not found by its name."""
    if not torch.version.cuda:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
