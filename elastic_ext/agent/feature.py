"""What a feature of the agent is: a part that can be off. `features` has them, and the loop knows no more of one than this.

The agent makes each feature that is on once, and calls it as long as it runs. What works beside the workers is a `Companion`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

from elastic_ext.agent.beginning import RoundBeginning
from elastic_ext.agent.companion import Companion, RoundPlace
from elastic_ext.agent.journal import Journal
from elastic_ext.agent.leaving import SavesOnDemand
from elastic_ext.agent.observation import Observation
from elastic_ext.base.settings import Settings
from elastic_ext.events import otel
from elastic_ext.features.row import AgentFacts, FeatureRow
from elastic_ext.features.table import FEATURES
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.telemetry.agent_metrics import AgentMetrics
from elastic_ext.workers.progress import ProgressTable

ONE_MACHINE = "elastic_ext.embedded.one_machine"
TOPICS = tuple(topic for row in FEATURES for topic in row.topics)  # also of those that are off here


@dataclass(frozen=True)
class JobParts:
    """What a feature gets of the agent. token: marks the processes that it starts. run_dir: the agent's private directory."""

    settings: Settings
    job: Rendezvous
    token: str
    run_dir: str
    metrics: AgentMetrics
    observation: Observation  # what the agent shows
    journal: Journal  # the agent's events
    wake: Callable[[], None]  # makes the loop look again; any thread may call it


@dataclass(frozen=True)
class RoundParts:
    """What a feature gets of a round whose workers have been started."""

    place: RoundPlace
    ranks: Mapping[int, int]  # global ranks by local rank
    progress: ProgressTable | None  # None if there was no room for it
    bootstrap: bool  # the workers run through the bootstrap
    own_groups: bool  # each worker leads its own process group
    messages: Mapping[int, Mapping[str, object]]  # what each worker was given, by local rank
    saves: SavesOnDemand | None  # None if workers cannot be asked to save


class Feature:
    """One feature that is on. Override what it has."""

    def __init__(self, parts: JobParts) -> None:
        self.parts = parts

    @staticmethod
    def check(settings: Settings) -> None:
        """Refuse settings that cannot work, before anything is started. Raises UsageError."""

    def beside_job(self) -> Companion | None:
        """Return what works beside the workers of all rounds. The loop calls it after those of the round."""

    def agree(self, group: WorkerGroup) -> RoundBeginning | None:
        """Return where this round begins, the same on every node; None: this feature does not know. Raises as `nodes.agree`."""

    def saves_to(self) -> Sequence[str]:
        """Return where the workers save, paths and URLs. What they have left when they are stopped may no longer write there."""
        return ()

    def round_begins(self, beginning: RoundBeginning) -> None:
        """Called before the workers of a round are started, and so before one can save."""

    def variables(self) -> Mapping[str, str]:
        """Return what the environment of each worker gets."""
        return {}

    def message(self) -> Mapping[str, object]:
        """Return what the message to each worker gets, see `worker_env.WorkerMessage`; of workers that report their progress."""
        return {}

    def beside_round(self, round_: RoundParts) -> Companion | None:
        """Return what works beside the workers of this round."""

    def end(self, copy_s: float | None) -> tuple[str, ...]:
        """End what this feature runs, before the agent ends; return the checkpoints that are then on this node only.

        copy_s: seconds that copying them may still take; None means as long as it makes progress.
        """
        return ()

    def close(self) -> None:
        """Release what is left, at the very end."""


def facts_of(job: Rendezvous, spec: WorkerSpec) -> AgentFacts:
    one_machine = type(job).__module__ == ONE_MACHINE  # by its name: a job of several nodes does not import that class
    nccl, pushes = torch.distributed.is_nccl_available(), bool(otel.exporters(os.environ, otel.METRICS))
    return AgentFacts(job.settings, one_machine, spec.local_world_size, nccl, pushes)


def load(facts: AgentFacts) -> tuple[type[Feature], ...]:
    """Import those that are on. The agent does so before its first round: a failure must not wait for an import.

    Raises UsageError: one of them cannot work with these settings.
    """
    found = tuple(class_of(row) for row in FEATURES if row.on(facts))
    for each in found:
        each.check(facts.settings)
    return found


def class_of(row: FeatureRow) -> type[Feature]:
    module, _, name = row.where.partition(":")
    found: type[Feature] = getattr(importlib.import_module(f"elastic_ext.features.{module}"), name)
    return found
