"""Finds out from a worker's stacks what it waits for. Pure, standard library only.

The stacks are in faulthandler's format, innermost frame first, with the main thread last.

These tables are stricter than `detector.waits_for_others`, which only orders suspects: here a mistake would end a healthy job.
So a frame counts only if the call that it makes can do nothing but wait for other ranks, or for this rank's own device. Not
recognised, because the same frame may do the rank's own part (the flight recorder knows better, where it is on):

- `loss.item()` and the like in the script, where many scripts on GPUs wait: any C code may be called from that line;
- the backward pass: on the CPU it computes in the main thread;
- a launch of a kernel that waits because the device's queue is full: its frame is that of the operation;
- what computes inside torch.distributed: DTensor, pipelines, state dicts, checkpoints, pickling of objects to send.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class WaitFor(Enum):
    """What a worker waits for. DEVICE: perhaps for other ranks as well.

    QUEUED, BEGUN: wherever its main thread is. QUEUED: perhaps for its own device, too.
    """

    NOTHING = "nothing that is known"
    RANKS = "other ranks"
    DEVICE = "its device"
    QUEUED = "a collective that does not complete"
    BEGUN = "a collective that has begun and does not complete"


@dataclass(frozen=True)
class Frame:
    path: str
    function: str

    def is_in(self, path: str, functions: tuple[str, ...] = ()) -> bool:
        """functions: (): any."""
        return self.path.endswith(path) and (not functions or self.function in functions)


_FRAME = re.compile(r'  File "(.*)", line \d+ in (.*)')
_THREADS = re.compile(r"^(?=(?:Thread|Current thread) 0x)", re.MULTILINE)

_C10D = "/torch/distributed/distributed_c10d.py"
_FUNCTIONAL = "/torch/distributed/_functional_collectives.py"
_FSDP_GROUP = "/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_COLLECTIVES = (
    _C10D,
    _FUNCTIONAL,
    "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    _FSDP_GROUP,
    "/torch/nn/parallel/distributed.py",
)
_OPERATOR = ("/torch/_ops.py", ("__call__",))  # waits for others where a functional collective calls it
# What these do may take long without any other rank: pickling, connecting all ranks, closing the connections.
_OWN_PART = (
    (_C10D, ("_object_to_tensor", "_tensor_to_object", "init_process_group", "_new_process_group_helper", "new_group")),
    (_C10D, ("_create_process_group_wrapper",)),
    (_C10D, ("split_group", "destroy_process_group", "_shutdown_backend", "_abort_process_group", "shrink_group")),
    (_FUNCTIONAL, ("__torch_dispatch__",)),  # computes with the result
)
_SYNCHRONISING = (
    (_C10D, ("barrier",)),  # NCCL's waits for all that the device has been asked for before, too
    (_FSDP_GROUP, ("finalize_backward",)),  # for gradients on their way to the CPU
    ("/torch/cuda/__init__.py", ("synchronize",)),
    ("/torch/cuda/streams.py", ("synchronize",)),
    ("/torch/accelerator/__init__.py", ("synchronize",)),
)
# The innermost frames of threads that wait for work, or for the end of another thread's.
_IDLE = (
    ("/threading.py", ("wait", "join", "_wait_for_tstate_lock", "acquire", "__enter__")),
    ("/queue.py", ("get",)),
    ("/selectors.py", ("select",)),
    ("/socket.py", ("accept", "readinto")),
    ("/socketserver.py", ("serve_forever",)),
    ("/subprocess.py", ("_try_wait", "_communicate")),
    ("/concurrent/futures/thread.py", ("_worker",)),
    ("/multiprocessing/connection.py", ("wait", "poll", "_poll", "_recv", "accept")),
    ("/multiprocessing/popen_fork.py", ("poll",)),
    ("/multiprocessing/synchronize.py", ("acquire", "__enter__")),
)


def threads(stacks: str) -> list[str]:
    """Return the text of each thread with its heading, the main thread last; "" for that if it is not there."""
    found = _THREADS.split(stacks)[1:]
    cut = stacks.rstrip().endswith("\n...")  # faulthandler lists 100 threads at most, and the main thread last
    return [*found, ""] if cut or not found else found


def main_thread_first(stacks: str, limit: int) -> str:
    """Return the beginning, for people: where the main thread is comes first, and then the other threads. limit: characters."""
    *others, main = threads(stacks)
    return "\n".join(text.rstrip() for text in (main, *others) if text)[:limit]


def wait_of(stacks: str) -> WaitFor:
    """Return what the call waits for in which the main thread is."""
    return _wait_of(_frames(threads(stacks)[-1]))


def _wait_of(frames: list[Frame]) -> WaitFor:
    if not frames:
        return WaitFor.NOTHING
    inner, caller = frames[0], frames[1] if len(frames) > 1 else Frame("", "")
    frame = caller if inner.is_in(*_OPERATOR) and caller.is_in(_FUNCTIONAL) else inner
    if any(frame.is_in(*each) for each in _OWN_PART):
        return WaitFor.NOTHING
    if any(inner.is_in(*each) for each in _SYNCHRONISING):
        return WaitFor.DEVICE
    return WaitFor.RANKS if any(frame.is_in(path) for path in _COLLECTIVES) else WaitFor.NOTHING


def others_idle(stacks: str) -> bool:
    """Return whether all other threads that run Python code wait for work.

    A thread without Python code, such as one of NCCL's, is not in the stacks, or has no frame there.
    """
    return all(_is_idle(frames) for frames in _other_threads(stacks))


def others_wait(stacks: str) -> bool:
    """Return whether all other threads that run Python code wait: for work, for other ranks or for the device."""
    return all(_is_idle(frames) or _wait_of(frames) is not WaitFor.NOTHING for frames in _other_threads(stacks))


def _other_threads(stacks: str) -> list[list[Frame]]:
    return [frames for thread in threads(stacks)[:-1] if (frames := _frames(thread))]


def _is_idle(frames: list[Frame]) -> bool:
    return any(frames[0].is_in(*each) for each in _IDLE)


def _frames(thread: str) -> list[Frame]:
    return [Frame(*match.groups()) for line in thread.splitlines() if (match := _FRAME.fullmatch(line))]
