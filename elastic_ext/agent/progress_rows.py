"""The workers' progress as rows of the metrics. Pure functions only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from elastic_ext.observe.metrics import WorkerProgress
from elastic_ext.workers.progress import Progress


def progress_rows(workers: Sequence[Progress], ranks: Mapping[int, int], step_s: Mapping[int, float]) -> list[WorkerProgress]:
    """Return a row for each worker that reports its progress.

    Args:
        workers: their progress, by local rank.
        ranks: their global ranks, by local rank.
        step_s: recent seconds per step, by local rank, where known.
    """
    median_s = statistics.median(step_s.values()) if step_s else 0.0
    return [
        WorkerProgress(
            local_rank,
            ranks[local_rank],
            each.steps,
            last_step_at=each.last_step_ns / 1e9 if each.last_step_ns else None,
            stepping_s=max(0, each.last_step_ns - each.first_step_ns) / 1e9,
            skew=step_s[local_rank] / median_s if local_rank in step_s and median_s > 0 else None,
            saved_step=each.saved_step,
            saved_at=each.saved_ns / 1e9 if each.saved_ns else None,
            saves=each.saves,
            failed_saves=each.failed_saves,
            saving_s=each.saving_s,
            loads=each.loads,
            loading_s=each.loading_s,
            checks=each.checks,
            checking_s=each.checking_s,
            copies=each.copies,
            copies_stall_s=each.copies_stall_s,
            copied_step=each.copied_step,
            copy_every=each.copy_every or None,
            failed_copies=each.failed_copies,
            unusable_copies=each.unusable_copies,
            steps_before=each.steps_before,
        )
        for local_rank, each in enumerate(workers)
        if each.pid
    ]
