"""When hangs are looked for. With NCCL, its flight recorder is asked, too."""

from elastic_ext.features.row import FeatureRow

ROWS = (
    FeatureRow("hangs", "hangs.watch:Hangs", lambda known: known.settings.hang and not known.nccl),
    FeatureRow("hangs with NCCL", "hangs.flight_recorder:HangsWithRecords", lambda known: known.settings.hang and known.nccl),
)
