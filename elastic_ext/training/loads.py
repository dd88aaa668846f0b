"""Loads of checkpoints, as the agent's metrics show them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_ext.training.worker import this_worker


def report_loaded(seconds: float) -> None:
    """Report that a checkpoint is in place. seconds: from the request, with the check of its files."""
    worker = this_worker()
    if worker is not None:
        worker.row.report_loaded(seconds)


@contextmanager
def timed_check() -> Iterator[None]:
    """Report the time that this block takes as that of a check for damage, whatever it finds."""
    began = time.monotonic()
    try:
        yield
    finally:
        worker = this_worker()
        if worker is not None:
            worker.row.report_checked(time.monotonic() - began)
