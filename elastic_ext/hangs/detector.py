"""Decides whether this node's part of the job hangs, and who is to blame. Pure, standard library only; times are in seconds.

A job hangs when every worker has made no progress for longer than its limit: all others wait in a collective for the one that
is stuck. So neither one worker nor one node can know it. Each node claims that all its workers stall and withdraws the claim when
one of them continues. The job hangs when all nodes claim it.

Progress is a sign of life of the training: an optimizer step, a report, a change of phase. The limit is learned from the gaps
between earlier signs in the same phase. It is never less than a floor:

- WAIT_FLOOR_S if every worker has stayed in one call that can only wait for other ranks or for its device, whether it spins there
  or sleeps, or has a collective that does not complete. The job must be steady: STEADY_GAPS gaps. See `wait_of` for the calls,
  and `stacks` for how the agent can be sure;
- IDLE_FLOOR_S if no worker does anything: no processor time, no reading, writing, sending or receiving;
- WORKING_FLOOR_S if a worker works: the others may be waiting for its unreported evaluation or save. The same floor applies if
  a worker sleeps in the kernel: it waits for a disk or a file server, which may be away for minutes;
- LONG_FLOOR_S in a phase that is long by nature, START_FLOOR_S before the first sign.


The setting hang_timeout replaces the limit, even if a worker sleeps in the kernel. Before the first sign, the limit is
START_FACTOR times hang_timeout if no worker does anything. Long phases, and a start at which a worker works, keep their limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic_ext.base.diagnosis import Collective
from elastic_ext.base.printable import counted

# What a worker waits for, by its stacks, which are in faulthandler's format, innermost frame first, with the main thread last.
#
# These tables are stricter than `waits_for_others`, which only orders suspects: a mistake here would end a healthy job. So a
# frame counts only if the call that it makes can do nothing but wait for other ranks, or for this rank's own device. Not
# recognised, because the same frame may do the rank's own part (the flight recorder knows better, where it is on):
#
# - `loss.item()` and the like in the script, where many scripts on GPUs wait: any C code may be called from that line;
# - the backward pass: on the CPU it computes in the main thread;
# - a launch of a kernel that waits because the device's queue is full: its frame is that of the operation;
# - what computes inside torch.distributed: DTensor, pipelines, state dicts, checkpoints, pickling of objects to send.


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


# Whether the job hangs.

# The least that is published for hang detection is 15 s. A device may be busy with what this rank itself has asked of it.
WAIT_FLOOR_S = {WaitFor.RANKS: 15.0, WaitFor.BEGUN: 15.0, WaitFor.QUEUED: 60.0, WaitFor.DEVICE: 60.0}
# Times the ranks of the job, if that is longer: a group's first collective connects them all. For all groups of 10,000 ranks,
# MegaScale (NSDI 2024) reports 30 s, after much work on it.
CONNECT_S = 0.01
IDLE_FLOOR_S = 60.0
WORKING_FLOOR_S = 1800.0
LONG_FLOOR_S = 1800.0
START_FLOOR_S = 1800.0
START_FACTOR = 10.0
LONG_PHASES = frozenset({"compile", "checkpoint", "eval", "exit"})

QUANTILE = 0.99
QUANTILE_FACTOR = 10.0  # times the gap that 99 % stay below, up to WORKING_FLOOR_S
LONGEST_FACTOR = 2.0  # times a longer gap: what ended well once may take longer next time

WORKING_SHARE = 0.02  # of a processor; threads that wait with a timeout use less
WORKING_BYTES_S = 100_000.0
RUNNING_SHARE = 0.2  # of a processor: an endless loop, perhaps on a shared processor
STARVED_SHARE = 0.5  # of the time, ready to run but not running
IMMINENT_SHARE = 0.75  # of the limit: a hang is expected from then on, if no worker works
IMMINENT_IDLE_SHARE = 0.2  # of the limit: no worker has worked for this long, so not since about half of the limit
STEADY_GAPS = 20  # in this phase; fewer do not show how long a step may take
STAY_SHARE = 0.8  # of that limit: a worker has not left its call for this long, no matter what it did before
LATE_S = 10.0  # a check this late means that the machine had stopped, not the workers

WITHOUT_HANDLERS = STOPPED, ASLEEP_IN_KERNEL = "T", "D"  # states in which a process handles no signal
CERTAIN, LIKELY, UNLIKELY = 0, 1, 2  # whether a worker is the one that the others wait for
STATS_SHARE = 0.45  # of the limit: the process stats are read from then on
# Of the limit of a wait: from then on the agent checks whether the workers stay; leaves time for STAY_SHARE.
CALL_CHECK_SHARE = 0.2
# Between later checks, and between reads of the process stats while this node claims a stall. No node checks again when the last
# one claims, so a claim may be this old, and older where an agent is late. The stays of all nodes must have a moment in common
# all the same: each lasts for 12 s at least.
CALL_CHECK_S = 3.0
# Of the interval between checks, 30 s by default: the process stats are compared over this time at least, however often they are
# read. Over CALL_CHECK_S, 60 ms would count as work: background threads, or a few dumps of stacks. Over 27 s it takes 0.54 s,
# which a process that computes uses up before the next check.
WINDOW_SHARE = 0.9
MIN_CHECK_S = 0.1


@dataclass(frozen=True)
class WorkerStatus:
    """A snapshot of one running worker.

    "Its family" is the worker and every process that it has started.
    """

    rank: int  # its global rank
    # steps, reports: how many signs of life of each kind it has given
    steps: int
    quiet_s: float  # seconds since its last sign of life, or since its start
    reports: int = 0
    phase: str = ""
    # a histogram of the gaps between earlier signs in this phase: how many were shorter than 2 ** index ms
    gaps: tuple[int, ...] = ()
    working: bool | None = None  # its family has recently used processor time or moved bytes; None: not known
    asleep_in_kernel: bool = False  # a thread of its family was recently in state D
    idle_s: float = 0.0  # seconds since its family was last seen to work; 0: not known
    state: str = ""  # state of its main thread, a letter from proc(5); "": not known
    debugged: bool = False  # a debugger holds it
    known: bool = True  # its bootstrap is in place; without it, its progress is not known
    wait: WaitFor = WaitFor.NOTHING  # what the worker waits for; not known before the first check of calls
    stayed_s: float = 0.0  # seconds for which it has done nothing else, and nothing else of its family did anything
    world: int = 1  # number of ranks of the job

    @property
    def started(self) -> bool:
        return self.steps + self.reports > 0

    @property
    def steady(self) -> bool:
        return self.known and self.started and self.phase not in LONG_PHASES and sum(self.gaps) >= STEADY_GAPS


class Activity(Enum):
    """The combined activity of a node's workers."""

    NONE = "nothing"
    WAIT = "each only waits"
    KERNEL = "asleep in the kernel"
    WORK = "work"


@dataclass(frozen=True)
class Assessment:
    """The state of one node's workers."""

    stalled: bool  # whether all of them stall
    culprits: tuple[int, ...]  # the ranks with the fewest steps
    reason: str  # an explanation for people
    # they do not stall yet but soon will, and no worker works: the job should save what it can. A wait for others is no reason to
    # save: only steps can save, and a worker that steps does not wait. It would also go on for ever in a job whose others wait
    # while one saves.
    imminent: bool = False
    waiting: bool = False  # they stall by the limit of a wait only. On one of several nodes that is nothing special.


def assess(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> Assessment:
    """Assess whether all workers of this node stall.

    workers: all running workers. fixed_s: the setting hang_timeout; None: the limits are learned.
    """
    # A worker that is still unknown after START_FLOOR_S is stuck before its first step.
    if not workers or any(not worker.known and worker.quiet_s < START_FLOOR_S for worker in workers):
        return Assessment(False, (), "the progress of a worker is not known")
    held = [worker.rank for worker in workers if worker.debugged]
    if held:
        return Assessment(False, (), f"rank {held[0]} is in a debugger")
    found = _compare(workers, activity_of(workers), fixed_s)
    if not found.stalled and fixed_s is None and all(stays(worker) for worker in workers):
        waiting = _compare(workers, Activity.WAIT, fixed_s)
        return replace(waiting, waiting=True) if waiting.stalled else found
    return found


def _compare(workers: Sequence[WorkerStatus], activity: Activity, fixed_s: float | None) -> Assessment:
    for worker in workers:
        limit = limit_s(worker, activity, fixed_s)
        if worker.quiet_s < limit:
            within = f"rank {worker.rank} is within its limit: {worker.quiet_s:.3g} of {limit:.3g} s"
            return Assessment(False, (), within, all(is_imminent(each, fixed_s) for each in workers))
    lowest = min((worker.steps, worker.reports) for worker in workers)
    behind = tuple(worker.rank for worker in workers if (worker.steps, worker.reports) == lowest)
    longest_s = max(limit_s(worker, activity, fixed_s) for worker in workers)
    waits = {worker.wait for worker in workers}
    if WaitFor.DEVICE in waits:
        waits.add(WaitFor.RANKS)  # the device may wait for them
    found = " or ".join(wait.value for wait in WaitFor if wait in waits)
    where = f"; each waits for {found}" if activity is Activity.WAIT else ""
    return Assessment(
        True,
        behind,
        f"no worker here has made progress for {min(worker.quiet_s for worker in workers):.3g} s "
        f"(limit {longest_s:.3g} s){where}; the lowest step is {lowest[0]}, at rank {behind[0]}",
    )


def is_imminent(worker: WorkerStatus, fixed_s: float | None) -> bool:
    limit = limit_s(worker, Activity.NONE, fixed_s)
    if worker.asleep_in_kernel and limit < limit_s(worker, Activity.KERNEL, fixed_s):
        return False
    return worker.quiet_s >= IMMINENT_SHARE * limit and worker.idle_s >= IMMINENT_IDLE_SHARE * limit


def works(cpu_share: float | None, bytes_s: float | None) -> bool:
    """Return whether a worker works. Unknown counts as work: a job that works must not be stopped.

    cpu_share: the share of a processor that its family has used recently; None: not known. bytes_s: bytes per second that its
    family has moved through files and sockets; None: not known.
    """
    if cpu_share is None or bytes_s is None:
        return True
    return cpu_share >= WORKING_SHARE or bytes_s >= WORKING_BYTES_S


def activity_of(workers: Sequence[WorkerStatus]) -> Activity:
    """Return the workers' combined activity. NONE if a signal has stopped one: nothing that the others do can resume it."""
    if any(worker.state == STOPPED for worker in workers):
        return Activity.NONE
    if any(worker.working is not False for worker in workers):  # unknown counts as work
        return Activity.WORK
    return Activity.KERNEL if any(worker.asleep_in_kernel for worker in workers) else Activity.NONE


def stays(worker: WorkerStatus) -> bool:
    """Return whether this worker has stayed in a call that only waits, for long enough to be sure of it."""
    if worker.wait is WaitFor.NOTHING or not worker.steady or worker.state == STOPPED:
        return False
    return worker.stayed_s >= STAY_SHARE * limit_s(worker, Activity.WAIT, None)


def limit_s(worker: WorkerStatus, activity: Activity, fixed_s: float | None) -> float:
    """Return for how many seconds this worker may give no sign of life. activity: that of its node."""
    works, idle = activity is Activity.WORK, activity is Activity.NONE
    if worker.phase in LONG_PHASES:
        return max(LONG_FLOOR_S, learned_s(worker.gaps, idle=False))
    if not worker.started:
        if fixed_s is not None:  # imports and data sets may take much longer on a busy machine
            return max(START_FLOOR_S, START_FACTOR * fixed_s) if works else START_FACTOR * fixed_s
        return float("inf") if works else START_FLOOR_S  # the script may never step
    if fixed_s is not None:
        return fixed_s
    if activity is Activity.WAIT:
        return wait_limit_s(worker)
    return max(IDLE_FLOOR_S if idle else WORKING_FLOOR_S, learned_s(worker.gaps, idle))


def wait_limit_s(worker: WorkerStatus) -> float:
    """Return for how many seconds a steady worker may give no sign of life if each stays in a call that only waits."""
    longest_s, connect_s = learned_s(worker.gaps, idle=False), CONNECT_S * worker.world
    if worker.wait in (WaitFor.DEVICE, WaitFor.QUEUED):  # the collective may be queued behind much work of its own device
        return max(WAIT_FLOOR_S[worker.wait], connect_s, longest_s)
    # One long gap was mostly one rank's own part, which no call of all ranks contains; only the end of it may have been one.
    return max(WAIT_FLOOR_S[WaitFor.RANKS], connect_s, learned_s(worker.gaps, idle=True), min(longest_s, IDLE_FLOOR_S))


def learned_s(gaps: Sequence[int], idle: bool) -> float:
    """Return the limit learned from the gaps so far, in seconds; 0 if there are none. gaps: see WorkerStatus."""
    usual, longest = gaps_s(gaps)
    limit = max(min(QUANTILE_FACTOR * usual, WORKING_FLOOR_S), LONGEST_FACTOR * usual)
    # One long gap shows how long work may take, not how long all workers may do nothing.
    return limit if idle else max(limit, LONGEST_FACTOR * longest)


def gaps_s(gaps: Sequence[int]) -> tuple[float, float]:
    """Return the gap that QUANTILE of the gaps stay below, and the longest, in seconds; 0 if there are none."""
    total, below = sum(gaps), 0
    usual = longest = 0.0
    for bucket, count in enumerate(gaps):
        edge = 2.0**bucket / 1000
        if count and below < QUANTILE * total:
            usual = edge
        if count:
            longest = edge
        below += count
    return usual, longest


def condition(state: str, wchan: str, cpu_share: float | None, waiting_share: float | None) -> str:
    """Describe for people what a worker without progress does.

    state, wchan: see process_stats.ProcessStats. cpu_share: the share of a processor that it has used recently; None: not known.
    waiting_share: the share of the time that it was ready to run but had no processor; None: not known.
    """
    at = f" in {wchan}" if wchan else ""
    if state == STOPPED:
        return "stopped by a signal (state T)"
    if state == ASLEEP_IN_KERNEL:
        return f"asleep in the kernel{at} (state D)"
    if cpu_share is None or waiting_share is None:
        return "state not known" if not state else f"state {state}"
    if cpu_share < RUNNING_SHARE and waiting_share >= STARVED_SHARE and waiting_share > cpu_share:
        return f"starved: ready to run {waiting_share:.0%} of the time, but got {cpu_share:.0%} of a processor"
    if cpu_share >= RUNNING_SHARE:
        return f"busy: {cpu_share:.0%} of a processor used"
    return f"asleep{at}: {cpu_share:.0%} of a processor used"


# Blame.


@dataclass(frozen=True)
class Stuck(WorkerStatus):
    """One worker of a node that hangs, after all workers were asked for their stacks."""

    condition: str = ""  # what it does, for people; see `condition`
    stack: str = ""  # the stacks of its threads, the main thread's last; "": not available
    collective: Collective | None = None  # which of its collectives does not complete; None: not known

    @property
    def blame(self) -> tuple[int, ...]:
        """A sort key: the others wait for the worker with the lowest one in the job.

        A worker that a signal has stopped comes first, because a hang never stops a worker. One that waits in a collective comes
        last; its step count says little, since it may have nothing to optimize. In between, workers with fewer steps come first;
        among equals, those that sleep in the kernel.
        """
        if self.state == STOPPED:
            return (CERTAIN, self.steps, self.reports, CERTAIN)
        if waits_for_others(self.stack):
            return (UNLIKELY, self.steps, self.reports, UNLIKELY)
        return (LIKELY, self.steps, self.reports, CERTAIN if self.state == ASLEEP_IN_KERNEL else LIKELY)

    @property
    def reason(self) -> str:
        """The reason for the hang if this worker is the culprit, in one line for people."""
        phase = f", in phase {self.phase}" if self.phase else ""
        waits = ", waits for other ranks" if waits_for_others(self.stack) else ""
        waits += f", in {self.collective}" if self.collective else ""
        waits += LOCKED if _BATON in _innermost(self.stack) else ""
        return (
            f"rank {self.rank} made no progress for {self.quiet_s:.3g} s, {counted(self.steps, 'step')} after its start{phase}; "
            f"{self.condition}{waits}"
        )


_BATON = "/torch/utils/file_baton.py"
LOCKED = (
    ", waits for the build of a C++ extension by another process: if none builds it, one was killed, and the file `lock` in its "
    "directory under TORCH_EXTENSIONS_DIR has to be removed"
)
# The innermost Python frame of a rank that waits for others: part of its path, and the function ("": any function).
_WAITING = (
    ("/torch/distributed/", ""),
    ("/torch/autograd/graph.py", "_engine_run_backward"),  # reduces the gradients
    ("/torch/nn/parallel/distributed.py", ""),
    ("/torch/cuda/__init__.py", "synchronize"),
    ("/torch/cuda/streams.py", "synchronize"),
    ("/torch/_ops.py", "__call__"),  # functional collectives
)
# Exceptions: frames of a rank that does its own part. It waits for a disk or a store, and the others wait for it.
_STORING = tuple(
    f"/torch/distributed/checkpoint/{name}.py"
    for name in (
        *("filesystem", "_fsspec_filesystem", "storage", "hf_storage", "quantized_hf_storage"),
        *("_hf_utils", "_storage_utils", "_extension"),
    )
)


def waits_for_others(stack: str) -> bool:
    """Return whether the main thread waits in a collective. stack: in faulthandler's format, with the main thread last."""
    frame = _innermost(stack)
    if any(path in frame for path in _STORING):
        return False
    return any(path in frame and frame.endswith(function) for path, function in _WAITING)


def _innermost(stack: str) -> str:
    """Return the line of the main thread's innermost frame; "" without one."""
    return next((line for line in threads(stack)[-1].splitlines() if line.lstrip().startswith("File ")), "")


def culprits(stuck: Sequence[Stuck]) -> list[Stuck]:
    """Return the workers with the lowest `blame`; several if nothing distinguishes them."""
    least = min((each.blame for each in stuck), default=())
    return [each for each in stuck if each.blame == least]


def next_check_s(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> float:
    """Return after how many seconds `assess` may give another answer, as long as this node claims no stall.

    The process stats are read at half of the smallest limit, and compared when a hang is imminent and at the limit. From then on,
    the interval stays at half of the floor, because a worker that works may stop working.
    """
    often = _often_s(fixed_s)
    quiet = [(worker.quiet_s, limit_s(worker, Activity.NONE, fixed_s)) for worker in workers]
    if not quiet:
        return often
    until = (max(share * limit - quiet_s for quiet_s, limit in quiet) for share in (0.5, IMMINENT_SHARE, 1.0))
    return max(MIN_CHECK_S, min(often, next((left_s for left_s in until if left_s > 0), often)))


def window_s(fixed_s: float | None = None) -> float:
    """Return over how many seconds the process stats are compared: less right after the first ones, more after a longer pause."""
    return WINDOW_SHARE * min(_often_s(fixed_s), IDLE_FLOOR_S / 2)


def _often_s(fixed_s: float | None) -> float:
    # The first step, or the end of an evaluation, can shorten the limits to this floor.
    return (IDLE_FLOOR_S if fixed_s is None else fixed_s) / 2


def needs_stats(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> bool:
    """Return whether all workers have been quiet for so long that their process stats are needed."""
    return all(worker.quiet_s >= STATS_SHARE * limit_s(worker, Activity.NONE, fixed_s) for worker in workers)


def needs_call_checks(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> bool:
    """Return whether all workers have been quiet for so long that it matters whether they stay in their calls."""
    return fixed_s is None and all(
        worker.steady and not worker.debugged and worker.quiet_s >= _call_check_from_s(worker) for worker in workers
    )


def next_call_check_s(workers: Sequence[WorkerStatus], fixed_s: float | None = None) -> float:
    """Return after how many seconds a check of calls may give another answer; inf: the limit of a wait does not apply."""
    if fixed_s is not None:
        return float("inf")
    if not workers or not all(worker.steady for worker in workers):
        return CALL_CHECK_SHARE * WAIT_FLOOR_S[WaitFor.RANKS]  # they may be by then
    first_s = max(_call_check_from_s(worker) - worker.quiet_s for worker in workers)
    if first_s > 0:
        return max(MIN_CHECK_S, first_s)
    limits = [(worker, wait_limit_s(worker)) for worker in workers]
    claim_s = max(max(limit - worker.quiet_s, STAY_SHARE * limit - worker.stayed_s) for worker, limit in limits)
    return max(MIN_CHECK_S, min(CALL_CHECK_S, claim_s)) if claim_s > 0 else CALL_CHECK_S


def _call_check_from_s(worker: WorkerStatus) -> float:
    """Return the quiet seconds from which on this worker's call is checked. Before that, it is unknown what it waits for."""
    return CALL_CHECK_SHARE * wait_limit_s(replace(worker, wait=WaitFor.RANKS))
