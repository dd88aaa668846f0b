"""When a node may be asked to leave. With checkpoints, it also looks for one in `checkpoint_dir`."""

from elastic_ext.features.row import FeatureRow

ROWS = (
    FeatureRow("drains", "drains.watch:Drains", lambda known: not known.one_machine and not known.saves),
    FeatureRow("drains with checkpoint_dir", "drains.published:ToSaves", lambda known: not known.one_machine and known.saves),
)
