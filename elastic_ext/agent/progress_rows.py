"""The workers' progress as rows of the metrics. Pure functions only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from elastic_ext.observe.metrics import WorkerProgress
from elastic_ext.workers.progress import Progress


def progress_rows(workers: Sequence[Progress], step_s: Mapping[int, float], now_ns: int) -> list[WorkerProgress]:
    """Return a row for each worker that reports its progress.

    Args:
        workers: their progress, by local rank.
        step_s: recent seconds per step, by local rank, where known.
        now_ns: time.monotonic_ns().
    """
    median_s = statistics.median(step_s.values()) if step_s else 0.0
    return [
        WorkerProgress(
            local_rank,
            progress.steps,
            (now_ns - progress.last_step_ns) / 1e9 if progress.last_step_ns else None,
            step_s.get(local_rank),
            step_s[local_rank] / median_s if local_rank in step_s and median_s > 0 else None,
            progress.saved_step,
            progress.failed_saves,
        )
        for local_rank, progress in enumerate(workers)
        if progress.pid
    ]
