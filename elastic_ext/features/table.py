"""The features of the agent, by folder. Of one that is off, only its `rows` are imported. A new feature is one more name here."""

import importlib

from elastic_ext.features.row import FeatureRow

# In this order the loop calls those of a round; then come those that show and report what these have found.
FOLDERS = ("resume", "copies", "drains", "integrity", "stragglers", "record", "hangs", "otlp")
FEATURES: tuple[FeatureRow, ...] = tuple(
    row for folder in FOLDERS for row in importlib.import_module(f"elastic_ext.features.{folder}.rows").ROWS
)
