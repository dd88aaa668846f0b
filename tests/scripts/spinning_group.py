"""A process group "spinning": gloo's, but whoever waits for it spins in C, as whoever waits for NCCL does. No GPU is needed.

The main thread waits in pthread_spin_lock(3), and another thread unlocks it. So the main thread uses a whole core and runs no
Python code, and its innermost frame is torch's. A collective that fails, at its timeout say, ends the process as NCCL's does.
"""

import ctypes
import functools
import os
import queue
import threading

import torch
import torch.distributed as dist

libc = ctypes.CDLL(None)  # a call releases the GIL
libc.pthread_spin_lock.restype = None


class Delay:
    """Seconds by which each collective takes longer, as over a slow network."""

    seconds = 0.0


class Spin:
    """A wait that uses a whole core, until somebody calls `end`."""

    def __init__(self) -> None:
        self._lock = ctypes.c_int()
        self._at = ctypes.byref(self._lock)
        libc.pthread_spin_init(self._at, 0)
        libc.pthread_spin_lock(self._at)
        self.wait = functools.partial(libc.pthread_spin_lock, self._at)  # no Python frame

    def end(self) -> None:
        libc.pthread_spin_unlock(self._at)


class SpinningWork(dist.Work):
    """A wait for gloo's work. An attribute, because a method would be a frame of this file."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        spin = Spin()
        self.wait = spin.wait
        waiting.put((work, spin))


class SpinningGroup(dist.ProcessGroup):
    """gloo, but waits spin."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
        return SpinningWork(self._group.allreduce(tensors, options))

    def getBackendName(self) -> str:
        return "spinning"


def end_spins() -> None:
    while True:
        work, spin = waiting.get()
        threading.Thread(target=end_spin, args=(work, spin), daemon=True).start()


def end_spin(work: dist.Work, spin: Spin) -> None:
    ended = threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    ended.wait()
    if not work.is_success():
        os.abort()
    threading.Event().wait(Delay.seconds)
    spin.end()


waiting: queue.Queue = queue.Queue()  # a thread that waits for it is idle, by its stack
threading.Thread(target=end_spins, daemon=True).start()
dist.Backend.register_backend(
    "spinning",
    lambda store, rank, size, timeout: SpinningGroup(dist.ProcessGroupGloo(store, rank, size, timeout)),
    devices=["cpu"],
)
