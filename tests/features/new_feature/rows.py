"""When a round may be ended by a file: always. It counts how often."""

from elastic_ext.features.new_feature.decide import APPEARED

from elastic_ext.features.row import FeatureRow
from elastic_ext.telemetry import families

METRICS = {"elastic_ext_files_appeared": families.gauge("Rounds that a file on this node has ended.")}
ROWS = (FeatureRow("end by a file", "new_feature.watch:EndByFile", lambda known: True, METRICS, (APPEARED,)),)
