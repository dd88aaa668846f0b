"""When the metrics are pushed through OpenTelemetry."""

from elastic_ext.features.row import FeatureRow

ROWS = (FeatureRow("metrics by OpenTelemetry", "otlp.watch:MetricsPushed", lambda known: known.pushes),)
