"""Progress and phases: what the hang detector sees of a script besides its optimizer steps."""

from __future__ import annotations

from elastic_ext.base.errors import UsageError
from elastic_ext.training.worker import this_worker
from elastic_ext.workers import progress_layout

_PHASES = tuple(name for name in progress_layout.PHASES if name != "exit")


def report_progress() -> None:
    """Report progress that is not a step of a torch.optim.Optimizer, e.g. a batch of an evaluation."""
    worker = this_worker()
    if worker is not None:
        worker.row.report_progress()


def phase(name: str) -> Phase:
    """Say what this process does from now on.

    The phase lasts until the next call, or, as `with elastic_ext.phase("eval"):`, until the block ends. Call it in the thread
    that trains; other threads have no phase. The hang detector is more patient with "compile", "checkpoint" and "eval".

    Args:
        name: "compile", "data", "step", "checkpoint" or "eval"; "" for none of them.

    Raises:
        UsageError: another name.
    """
    if name not in _PHASES:
        raise UsageError(f"phase({name!r}): expected one of {', '.join(filter(None, _PHASES))}")
    worker = this_worker()
    before = worker.row.phase if worker is not None else 0
    _enter(progress_layout.PHASES.index(name))
    return Phase(before)


class Phase:
    """A phase that has begun; the end of a `with` block brings back the one before."""

    def __init__(self, before: int) -> None:
        self._before = before

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, *exc: object) -> None:
        _enter(self._before)


def _enter(phase_: int) -> None:
    worker = this_worker()
    if worker is not None:
        worker.row.enter_phase(phase_)
