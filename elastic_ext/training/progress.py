"""Progress, phases and amounts of work, which a script reports to the agent besides its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.base.errors import UsageError
from elastic_ext.training.worker import this_worker
from elastic_ext.workers import progress_layout

_PHASES = tuple(name for name in progress_layout.PHASES if name != "exit")


def report_progress() -> None:
    """Report progress other than a step of a torch.optim.Optimizer, e.g. an evaluation batch."""
    if (worker := this_worker()) is not None:
        worker.row.report_progress()


def report_total_steps(total: int, done: int | None = None) -> None:
    """Report how many optimizer steps the whole job will make; the agent works out from it how far the job is.

    total: from the beginning of the job to its end, not from the last restart. done: how many of them are done now; default: as
    many as the checkpoint has that the agent chose. Raises UsageError unless they are whole numbers, of 1 and of 0 or more.
    """
    if not _is_whole(total, 1) or not (done is None or _is_whole(done, 0)):
        raise UsageError(f"report_total_steps({total!r}, {done!r}): expected whole numbers, of 1 or more and of 0 or more")
    if (worker := this_worker()) is not None:
        worker.row.report_total_steps(total, done)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < 1 << 62


def phase(name: str) -> Phase:
    """Begin a phase of this process.

    The phase lasts until the next call, or, as `with elastic_ext.phase("eval"):`, until the block ends. Call this in the training
    thread; other threads have no phase. The hang detector is more patient with "compile", "checkpoint" and "eval".

    name: "compile", "data", "step", "checkpoint" or "eval"; "" for none of them. Raises UsageError for any other.
    """
    if name not in _PHASES:
        raise UsageError(f"phase({name!r}): expected one of {', '.join(filter(None, _PHASES))}")
    before = worker.row.phase if (worker := this_worker()) is not None else 0
    _enter(progress_layout.PHASES.index(name))
    return Phase(before)


class Phase:
    """A phase that has begun; the end of a `with` block restores the previous one."""

    def __init__(self, before: int) -> None:
        self._before = before

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        _enter(self._before, failed=kind is not None)


def _enter(phase_: int, failed: bool = False) -> None:
    if (worker := this_worker()) is not None:
        worker.row.enter_phase(phase_, failed)


MOST_FLOPS = 1e21  # of one call: days of a GPU. The agent's word for the sum holds 1.8e25
_flops_left = 0.0  # reported, but less than a million


def report_tokens(count: int) -> None:
    """Count tokens that this process has trained on. Raises UsageError for less than 0 and for what is no whole number."""
    if not isinstance(count, int) or count < 0:
        raise UsageError(f"report_tokens({count!r}): expected a whole number of 0 or more")
    if (worker := this_worker()) is not None:
        worker.row.add_tokens(count)


def report_flops(count: float) -> None:
    """Count floating-point operations that this process has done. Raises UsageError for less than 0 and more than MOST_FLOPS."""
    global _flops_left
    if not 0 <= count <= MOST_FLOPS:
        raise UsageError(f"report_flops({count!r}): expected a number from 0 to {MOST_FLOPS:g}")
    if (worker := this_worker()) is not None:
        whole, _flops_left = divmod(count + _flops_left, 1e6)
        worker.row.add_megaflops(int(whole))


@contextmanager
def doing(account: str) -> Iterator[None]:
    """Count the training thread's time in this block in `account`, one of progress_layout.ACCOUNTS, in any phase."""
    worker = this_worker()
    if worker is None:
        yield
        return
    before = worker.row.doing
    worker.row.begin_doing(progress_layout.ACCOUNTS.index(account) + 1)
    try:
        yield
    finally:
        worker.row.begin_doing(before)
