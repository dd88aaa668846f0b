"""Copies of the state in memory, as the agent's metrics show them."""

from __future__ import annotations

from elastic_ext.training.worker import this_worker


def report_copied(step: int, stall_s: float, every: int) -> None:
    """Report a committed copy of this step. stall_s: for how long it has stalled training. every: steps until the next one."""
    worker = this_worker()
    if worker is not None:
        worker.row.report_copied(step, stall_s, every)


def report_copy_failed() -> None:
    """Report that the state could not be copied, on this rank or another."""
    worker = this_worker()
    if worker is not None:
        worker.row.report_copy_failed()


def report_copy_unusable() -> None:
    """Report that the copy which the agent has chosen could not be loaded."""
    worker = this_worker()
    if worker is not None:
        worker.row.report_copy_unusable()
