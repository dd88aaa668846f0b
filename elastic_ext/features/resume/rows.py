"""When a job resumes from a checkpoint."""

from elastic_ext.features.row import FeatureRow

ROWS = (FeatureRow("resume", "resume.watch:Resuming", lambda known: known.saves),)
