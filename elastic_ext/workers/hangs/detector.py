"""Does this node's part of the job hang, and who is to blame? Pure, standard library only; times are in seconds.

A job hangs when no worker of it makes progress for longer than its limit: all others wait in a collective for the one that is
stuck. So a worker alone says nothing, and neither does a node: each node claims that all its workers stall, takes the claim back
when one of them goes on, and the job hangs when all nodes claim so.

Progress is a sign of life of the training: a step of an optimizer, a report, a change of phase. How long is too long is learned
from the gaps between the signs so far in the same phase, and is never less than a floor:

- IDLE_FLOOR_S where nobody does anything: no processor time, no reading, writing, sending or receiving;
- WORKING_FLOOR_S where somebody works. It may be an evaluation or a save that nobody told us of, and the others wait for it. The
  same where somebody sleeps in the kernel: it waits for a disk or a file server, which may be away for minutes;
- LONG_FLOOR_S in a phase that is long by nature, START_FLOOR_S before the first sign.

With the setting hang_timeout that is the limit, also where somebody sleeps in the kernel, and START_FACTOR times that before the
first sign where nobody does anything; the long phases, and a start at which somebody works, keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

IDLE_FLOOR_S = 60.0
WORKING_FLOOR_S = 1800.0
LONG_FLOOR_S = 1800.0
START_FLOOR_S = 1800.0
START_FACTOR = 10.0
LONG_PHASES = frozenset({"compile", "checkpoint", "eval", "exit"})

QUANTILE = 0.99
QUANTILE_FACTOR = 10.0  # times the gap that all but 1 % stay below, up to WORKING_FLOOR_S
LONGEST_FACTOR = 2.0  # of what takes longer: what has ended well may take as long again

WORKING_SHARE = 0.02  # of a processor: less is what threads use that wait with a timeout
WORKING_BYTES_S = 100_000.0
RUNNING_SHARE = 0.2  # of a processor: it runs in a circle, perhaps beside others
STARVED_SHARE = 0.5  # of the time ready to run and not running
IMMINENT_SHARE = 0.75  # of the limit: from then on a hang is to be expected, if nobody works
LEAST_LOOK_S = 0.1
LATE_S = 10.0  # a look that comes so late: this machine had stopped, not the workers

STOPPED, ASLEEP_IN_KERNEL = "T", "D"
SURE, STUCK, WAITS = 0, 1, 2  # how little speaks for it that a worker is the one that the others wait for


@dataclass(frozen=True)
class Worker:
    """What is known of one worker that runs.

    Attributes:
        steps, reports: signs of life so far.
        quiet_s: since the last sign of life, or since it was started.
        gaps: between earlier signs in this phase: how many of less than 2 ** index ms.
        working: it, or what it has started, has used processor time or has moved bytes, lately; None: not known.
        asleep_in_kernel: it, or what it has started, has been seen in state D lately.
        idle_s: since it was last seen to work; 0: not known.
        state: of its main thread, a letter of proc(5); "": not known.
        debugged: somebody looks at it with a debugger.
        known: its progress is known at all: its bootstrap is in place.
    """

    rank: int
    steps: int
    quiet_s: float
    reports: int = 0
    phase: str = ""
    gaps: tuple[int, ...] = ()
    working: bool | None = None
    asleep_in_kernel: bool = False
    idle_s: float = 0.0
    state: str = ""
    debugged: bool = False
    known: bool = True

    @property
    def started(self) -> bool:
        return self.steps + self.reports > 0


class Activity(Enum):
    """What the workers of a node do, all together."""

    NONE = "nothing"
    KERNEL = "asleep in the kernel"
    WORK = "work"


@dataclass(frozen=True)
class Assessment:
    """Of one node. culprits: ranks of those that are behind, as far as words tell. reason: for people.

    imminent: not stalled yet, but soon, and nobody works: what can still be saved should be.
    """

    stalled: bool
    culprits: tuple[int, ...]
    reason: str
    imminent: bool = False


def judge(workers: Sequence[Worker], fixed_s: float | None = None) -> Assessment:
    """Whether all workers of this node stall.

    Args:
        workers: those that run.
        fixed_s: the setting hang_timeout; None: the limits are learned.
    """
    if not workers or any(not worker.known and worker.quiet_s < START_FLOOR_S for worker in workers):
        return Assessment(
            False, (), "the progress of the workers is not known"
        )  # later: stuck before its first step, like others
    held = [worker.rank for worker in workers if worker.debugged]
    if held:
        return Assessment(False, (), f"rank {held[0]} is in a debugger")
    activity = activity_of(workers)
    for worker in workers:
        limit = limit_s(worker, activity, fixed_s)
        if worker.quiet_s < limit:
            within = f"rank {worker.rank} is within its limit: {worker.quiet_s:.3g} of {limit:.3g} s"
            return Assessment(False, (), within, all(is_imminent(each, fixed_s) for each in workers))
    behind = min((worker.steps, worker.reports) for worker in workers)
    culprits = tuple(worker.rank for worker in workers if (worker.steps, worker.reports) == behind)
    longest = max(workers, key=lambda worker: limit_s(worker, activity, fixed_s))
    return Assessment(
        True,
        culprits,
        f"no worker here has made progress for {min(worker.quiet_s for worker in workers):.3g} s "
        f"(limit {limit_s(longest, activity, fixed_s):.3g} s); the lowest step is {behind[0]}, of rank {culprits[0]}",
    )


def is_imminent(worker: Worker, fixed_s: float | None) -> bool:
    """It has given no sign of life for most of the limit, and has not worked since about half of it."""
    limit = limit_s(worker, Activity.NONE, fixed_s)
    if worker.asleep_in_kernel and limit < limit_s(worker, Activity.KERNEL, fixed_s):
        return False
    return worker.quiet_s >= IMMINENT_SHARE * limit and worker.idle_s >= (IMMINENT_SHARE - 0.55) * limit


def works(cpu_share: float | None, bytes_s: float | None) -> bool:
    """Whether a worker does something. What is not known counts as work: a job that works must not be ended.

    Args:
        cpu_share: of a processor that it and what it has started used lately.
        bytes_s: that they moved in a second, by files and sockets.
    """
    if cpu_share is None or bytes_s is None:
        return True
    return cpu_share >= WORKING_SHARE or bytes_s >= WORKING_BYTES_S


def activity_of(workers: Sequence[Worker]) -> Activity:
    """Once one has been stopped by a signal nothing that the others do counts: it cannot bring that one back."""
    if any(worker.state == STOPPED for worker in workers):
        return Activity.NONE
    if any(worker.working is not False for worker in workers):  # what is not known may be work
        return Activity.WORK
    return Activity.KERNEL if any(worker.asleep_in_kernel for worker in workers) else Activity.NONE


def limit_s(worker: Worker, activity: Activity, fixed_s: float | None) -> float:
    """How long this worker may give no sign of life. activity: of all workers of its node."""
    works, idle = activity is Activity.WORK, activity is Activity.NONE
    if worker.phase in LONG_PHASES:
        return max(LONG_FLOOR_S, learned_s(worker.gaps, idle=False))
    if not worker.started:
        if fixed_s is not None:  # imports and data sets take as long as they take, on a busy machine at least
            return max(START_FLOOR_S, START_FACTOR * fixed_s) if works else START_FACTOR * fixed_s
        return float("inf") if works else START_FLOOR_S  # a script without steps, at work
    if fixed_s is not None:
        return fixed_s
    return max(IDLE_FLOOR_S if idle else WORKING_FLOOR_S, learned_s(worker.gaps, idle))


def learned_s(gaps: Sequence[int], idle: bool) -> float:
    """The limit that the gaps so far ask for; 0 without any. gaps: see Worker."""
    total, below = sum(gaps), 0
    usual = longest = 0.0
    for bucket, count in enumerate(gaps):
        edge = 2.0**bucket / 1000
        if count and below < QUANTILE * total:
            usual = edge
        if count:
            longest = edge
        below += count
    limit = max(min(QUANTILE_FACTOR * usual, WORKING_FLOOR_S), LONGEST_FACTOR * usual)
    # A gap that was seen once says what work may take, not how long everybody may do nothing.
    return limit if idle else max(limit, LONGEST_FACTOR * longest)


def next_look_s(workers: Sequence[Worker], fixed_s: float | None = None) -> float:
    """After how many seconds `judge` may say something else.

    At half of the least limit the workers' vitals are read, to be compared when a hang is imminent and at the limit; later, as
    long as the stall lasts, as often as at first: somebody who works may cease to.
    """
    often = (
        IDLE_FLOOR_S if fixed_s is None else fixed_s
    ) / 2  # the first step, or the end of an evaluation, makes limits this short
    quiet = [(worker.quiet_s, limit_s(worker, Activity.NONE, fixed_s)) for worker in workers]
    if not quiet:
        return often
    until = (max(share * limit - quiet_s for quiet_s, limit in quiet) for share in (0.5, IMMINENT_SHARE, 1.0))
    return max(LEAST_LOOK_S, min(often, next((left_s for left_s in until if left_s > 0), often)))


def needs_vitals(workers: Sequence[Worker], fixed_s: float | None = None) -> bool:
    """All have been quiet for so long that what the kernel says of them counts."""
    return all(worker.quiet_s >= 0.45 * limit_s(worker, Activity.NONE, fixed_s) for worker in workers)


def condition(state: str, wchan: str, cpu_share: float | None, waiting_share: float | None) -> str:
    """In words, what a worker does that makes no progress.

    Args:
        state, wchan: see vitals.Vitals.
        cpu_share: of a processor that it used lately; None: not known.
        waiting_share: of the time that it was ready to run and had no processor.
    """
    at = f" in {wchan}" if wchan else ""
    if state == STOPPED:
        return "stopped by a signal (state T)"
    if state == ASLEEP_IN_KERNEL:
        return f"asleep in the kernel{at} (state D)"
    if cpu_share is None or waiting_share is None:
        return "state not known" if not state else f"state {state}"
    if cpu_share < RUNNING_SHARE and waiting_share >= STARVED_SHARE and waiting_share > cpu_share:
        return f"starved: ready to run {waiting_share:.0%} of the time, and had {cpu_share:.0%} of a processor"
    if cpu_share >= RUNNING_SHARE:
        return f"busy: {cpu_share:.0%} of a processor used"
    return f"asleep{at}: {cpu_share:.0%} of a processor used"


# Who is to blame.


@dataclass(frozen=True)
class Stuck:
    """One worker of a node that hangs, after all have been asked where they are.

    Attributes:
        condition: see `condition`.
        stack: of its threads, the main thread's last; "": it could not be had.
    """

    rank: int
    steps: int
    reports: int
    quiet_s: float
    phase: str
    state: str
    condition: str
    stack: str = ""

    @property
    def blame(self) -> tuple[int, ...]:
        """The lowest of a job is the one that the others wait for.

        One that was stopped comes first, for no other can be stopped so. One that waits in a collective comes last: the number of
        its steps says little, it may have nothing to optimize. Else it is the one with the fewest steps, and among those that
        have the same number one that sleeps in the kernel.
        """
        if self.state == STOPPED:
            return (SURE, self.steps, self.reports, SURE)
        if waits_for_others(self.stack):
            return (WAITS, self.steps, self.reports, WAITS)
        return (STUCK, self.steps, self.reports, SURE if self.state == ASLEEP_IN_KERNEL else STUCK)

    @property
    def reason(self) -> str:
        phase = f", in phase {self.phase}" if self.phase else ""
        waits = ", waits for other ranks" if waits_for_others(self.stack) else ""
        return (
            f"rank {self.rank} made no progress for {self.quiet_s:.3g} s after step {self.steps}{phase}; {self.condition}{waits}"
        )


# Where the innermost Python frame of a rank is that waits for others: parts of the path, and the function where only some do.
_WAITING = (
    ("/torch/distributed/", ""),
    ("/torch/autograd/graph.py", "_engine_run_backward"),  # the gradients are reduced in there
    ("/torch/nn/parallel/distributed.py", ""),
    ("/torch/cuda/__init__.py", "synchronize"),
    ("/torch/cuda/streams.py", "synchronize"),
    ("/torch/_ops.py", "__call__"),  # functional collectives
)
# And where it does its own part all the same: a disk or a store that does not answer holds it, and the others wait for it.
_STORING = tuple(
    f"/torch/distributed/checkpoint/{name}.py"
    for name in (
        "filesystem",
        "_fsspec_filesystem",
        "storage",
        "hf_storage",
        "quantized_hf_storage",
        "_hf_utils",
        "_storage_utils",
        "_extension",
    )
)


def waits_for_others(stack: str) -> bool:
    """Whether the main thread is inside a collective. stack: faulthandler's, with the main thread at the end."""
    thread = stack[max(stack.rfind("\nThread 0x"), stack.rfind("\nCurrent thread 0x"), 0) :]
    frame = next((line for line in thread.splitlines() if line.lstrip().startswith("File ")), "")
    if any(path in frame for path in _STORING):
        return False
    return any(path in frame and frame.endswith(function) for path, function in _WAITING)


def culprits(stuck: Sequence[Stuck]) -> list[Stuck]:
    """Those with the least `blame`."""
    least = min((each.blame for each in stuck), default=())
    return [each for each in stuck if each.blame == least]
