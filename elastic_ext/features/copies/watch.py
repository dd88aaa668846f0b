"""Copies of checkpoints from `local_dir` to `checkpoint_dir`, by the copier beside the agent."""

from __future__ import annotations

from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.companion import Companion, LocalWorkers
from elastic_ext.agent.feature import Feature, JobParts
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.copying import copier


class CopierUpdates(Companion):
    """Reports saves to the checkpoint copier."""

    def __init__(self, copier: copier.Copier) -> None:
        self._copier = copier

    def check(self, workers: LocalWorkers) -> None:
        self._copier.update_saves(sum(progress.saves for progress in workers.read_progress()))

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._copier.look_now()  # a worker may have saved just before it ended


class CheckpointCopies(Feature):
    def __init__(self, parts: JobParts) -> None:
        super().__init__(parts)
        self._copier = copier.start(parts.settings, parts.token, parts.metrics)

    @staticmethod
    def check(settings: Settings) -> None:
        copier.claim_local_dir(settings)

    def beside_job(self) -> Companion | None:
        return CopierUpdates(self._copier) if self._copier is not None else None

    def round_begins(self, beginning: RoundBeginning) -> None:
        if self._copier is not None:
            self._copier.abandon_newer_than(beginning.checkpoint.path)
            self._copier.note_round(beginning.saves_locally)

    def end(self, copy_s: float | None) -> tuple[str, ...]:
        return self._copier.close(copy_s) if self._copier is not None else ()
