"""The failures of a job so far, and their comparison with the current one. Pure functions, standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ext.failures.classify import Diagnosis
from elastic_ext.failures.evidence import Precedent


@dataclass(frozen=True)
class PastFailure:
    """The ledger's record of a failure.

    Attributes:
        steps: optimizer steps that the worker had done since it started; None if unknown.
        resumed_at: step of the checkpoint that the worker started from, 0 for the beginning; None if unknown.
        resumed_from: path or URL of that checkpoint; "" if there was none.
        kind: the kind of the diagnosis.
        charged: whether the restart after it counted against the budget.
        warm: whether its process was a warm standby; None if unknown.
        cut: see Evidence.
        gone_back_to: step of the newest checkpoint, if that was tried next as only copies in memory were refused; else None.
    """

    fingerprint: str
    steps: int | None = None
    resumed_at: int | None = None
    first_step_done: bool | None = None
    node: str | None = None
    kind: str = ""
    charged: bool = False
    resumed_from: str = ""
    warm: bool | None = None
    cut: tuple[str, ...] = ()
    gone_back_to: int | None = None


def record(diagnosis: Diagnosis, resumed_at: int | None, resumed_from: str = "") -> PastFailure:
    """Return the ledger's record of a root cause."""
    evidence = diagnosis.evidence
    return PastFailure(
        diagnosis.fingerprint,
        evidence.step,
        resumed_at,
        evidence.first_step_done,
        evidence.node,
        diagnosis.kind,
        resumed_from=resumed_from,
        warm=evidence.warm,
        cut=evidence.cut,
    )


def precedents(now: PastFailure, earlier: Sequence[PastFailure], charged: int = 0) -> tuple[Precedent, ...]:
    """Compare the earlier failures, oldest first, with this one, for `policy.decide`.

    The same failure after copies in memory were refused is not yet a bug: the cause may be older than the checkpoint that was
    tried then. So progress is unknown, and the checkpoint before that one is tried, too.

    charged: restarts that still count against the budget. If any does, the last failure is no older than it: no clock is needed.
    """
    return tuple(
        Precedent(
            past.fingerprint == now.fingerprint,
            _progress_since(past, (*earlier[number + 1 :], now)),
            past.node,
            past.first_step_done,
            bool(now.resumed_from) and past.resumed_from == now.resumed_from,
            past.warm,
            past.cut,
            recent=charged > 0 and number == len(earlier) - 1,
            kind=past.kind,
            charged=past.charged,
        )
        for number, past in enumerate(earlier)
    )


def _progress_since(past: PastFailure, later: Sequence[PastFailure]) -> bool | None:
    values = {progress(past, each) for each in later}
    unknown = None in values or past.gone_back_to is not None
    return True if True in values else None if unknown else False


def progress(past: PastFailure, later: PastFailure) -> bool | None:
    """Return whether the later try got further than the past one; None if unknown.

    Users number checkpoints in steps or in epochs. So a lower step than at the past failure means "no progress" only if both
    tries began at the same checkpoint: a job may also resume by itself from an unknown place.
    """
    begins_known = past.resumed_at is not None and later.resumed_at is not None
    if later.first_step_done is False:
        # Steps of non-torch optimizers are not counted; then only checkpoints show progress.
        return past.first_step_done is False and begins_known and (later.resumed_at or 0) > (past.resumed_at or 0)
    if past.steps is None or later.steps is None:
        return None
    reached_then = past.steps + (past.resumed_at or 0 if begins_known else 0)
    reached_now = later.steps + (later.resumed_at or 0 if begins_known else 0)
    if reached_now > reached_then:
        return True
    if reached_now == reached_then or (begins_known and past.resumed_at == later.resumed_at):
        return False
    return None
