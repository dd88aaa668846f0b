"""The features of the agent: each is imported only if it is on. A new feature is one more row."""

from __future__ import annotations

from elastic_ext.features.integrity.rows import INTEGRITY
from elastic_ext.features.row import FeatureRow
from elastic_ext.features.stragglers.rows import STRAGGLERS

# In this order the loop calls those of a round; then come those that show and report what these have found.
FEATURES = (
    FeatureRow("resume", "agent.resume:Resuming", lambda known: known.saves),
    FeatureRow("copies to checkpoint_dir", "agent.copying:CheckpointCopies", lambda known: known.settings.local_dir is not None),
    FeatureRow("drains", "agent.drains:Drains", lambda known: not known.one_machine and not known.saves),
    FeatureRow("drains with checkpoint_dir", "agent.published:ToSaves", lambda known: not known.one_machine and known.saves),
    INTEGRITY,
    STRAGGLERS,
    FeatureRow("record of saves", "agent.save_watch:RecordOfSaves", lambda known: known.saves),
    FeatureRow("hangs", "agent.hangs:Hangs", lambda known: known.settings.hang and not known.nccl),
    FeatureRow("hangs with NCCL", "agent.flight_recorder:HangsWithRecords", lambda known: known.settings.hang and known.nccl),
)
