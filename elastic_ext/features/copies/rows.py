"""When checkpoints are copied to `checkpoint_dir`."""

from elastic_ext.features.row import FeatureRow

ROWS = (
    FeatureRow("copies to checkpoint_dir", "copies.watch:CheckpointCopies", lambda known: known.settings.local_dir is not None),
)
