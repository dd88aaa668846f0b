"""How old what each node tells is, by the reader's own clock: no two machines' clocks are compared. Pure."""

from __future__ import annotations

from elastic_ext.rendezvous.job_status import JobStatus


class Sightings:
    """For how long this reader has known what each node tells."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, float]] = {}

    def read(self, status: JobStatus, now: float) -> None:
        """Take in the reports that were read at `now`."""
        before = self._first
        self._first = {
            id_: before[id_] if id_ in before and before[id_][0] == told.version else (told.version, now)
            for id_, told in status.reports.items()
        }

    def age_s(self, id_: str, now: float) -> float | None:
        seen = self._first.get(id_)  # at once: another thread may read a newer status
        return round(now - seen[1], 3) if seen is not None else None
