"""The features of the agent: each is imported only if it is on. A new feature is one more row."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent.feature import Feature
from elastic_ext.base.settings import Settings
from elastic_ext.rendezvous.contract import Rendezvous

ONE_MACHINE = "elastic_ext.embedded.one_machine"


@dataclass(frozen=True)
class AgentFacts:
    """What says whether a feature has anything to do."""

    settings: Settings
    one_machine: bool = False  # no other node can join the job
    workers: int = 1  # of this node
    nccl: bool = False  # torch has NCCL

    @property
    def saves(self) -> bool:
        return self.settings.checkpoint_dir is not None

    @property
    def compares_ranks(self) -> bool:
        alone = self.one_machine and self.workers == 1
        return self.settings.stragglers != "off" and not alone


@dataclass(frozen=True)
class FeatureRow:
    """One feature. where: its module in this package, and its class. on: whether it has anything to do; pure."""

    name: str
    where: str
    on: Callable[[AgentFacts], bool]


# In this order the loop calls those of a round; then come those that show and report what these have found.
FEATURES = (
    FeatureRow("resume", "resume:Resuming", lambda known: known.saves),
    FeatureRow("copies to checkpoint_dir", "copying:CheckpointCopies", lambda known: known.settings.local_dir is not None),
    FeatureRow("drains", "drains:Drains", lambda known: not known.one_machine and not known.saves),
    FeatureRow("drains with checkpoint_dir", "published:ToSaves", lambda known: not known.one_machine and known.saves),
    FeatureRow("integrity", "integrity:Integrity", lambda known: known.settings.integrity_every > 0),
    FeatureRow("stragglers", "lateness:Stragglers", lambda known: known.compares_ranks),
    FeatureRow("record of saves", "save_watch:RecordOfSaves", lambda known: known.saves),
    FeatureRow("hangs", "hangs:Hangs", lambda known: known.settings.hang and not known.nccl),
    FeatureRow("hangs with NCCL", "flight_recorder:HangsWithRecords", lambda known: known.settings.hang and known.nccl),
)


def facts_of(job: Rendezvous, spec: WorkerSpec) -> AgentFacts:
    # By its name: a job of several nodes does not import that class.
    one_machine = type(job).__module__ == ONE_MACHINE
    return AgentFacts(job.settings, one_machine, spec.local_world_size, torch.distributed.is_nccl_available())


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
    found: type[Feature] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found
