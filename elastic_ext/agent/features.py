"""The features that are on. The table of all is `features.table`; the agent knows no more of one than its row."""

from __future__ import annotations

import importlib

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_ext.agent.feature import Feature
from elastic_ext.features.row import AgentFacts, FeatureRow
from elastic_ext.features.table import FEATURES
from elastic_ext.rendezvous.contract import Rendezvous

ONE_MACHINE = "elastic_ext.embedded.one_machine"


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
    found: type[Feature] = getattr(importlib.import_module(f"elastic_ext.{module}"), name)
    return found
