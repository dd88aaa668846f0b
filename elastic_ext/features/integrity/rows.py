"""What is known of comparisons of replicas (`integrity_every`), also where there are none."""

from elastic_ext.features.row import FeatureRow
from elastic_ext.telemetry import families

METRICS = {
    "elastic_ext_replicas_uncompared_workers": families.gauge(
        "Workers of this agent of which nothing is compared in this round, though `integrity_every` is set: they hold no "
        "replicas, or hashing has failed. Absent without that setting."
    ),
}
ROWS = (FeatureRow("integrity", "integrity.watch:Integrity", lambda known: known.settings.integrity_every > 0, METRICS),)
