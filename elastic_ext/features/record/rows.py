"""When what workers save is recorded."""

from elastic_ext.features.row import FeatureRow

ROWS = (FeatureRow("record of saves", "record.watch:RecordOfSaves", lambda known: known.saves),)
