"""What is known of stragglers, also where they are not looked for."""

from elastic_ext.features.row import AgentFacts, FeatureRow
from elastic_ext.telemetry import families


def compares_ranks(known: AgentFacts) -> bool:
    alone = known.one_machine and known.workers == 1
    return known.settings.stragglers != "off" and not alone


METRICS = {
    "elastic_ext_straggler_seconds": families.gauge(
        "By how much a named straggler issues the collectives of a step later than the others, median; rank is empty for a whole "
        "host. Of the whole job, on the agent of rank 0 only.",
        "host",
        "rank",
        most="32",
    ),
    "elastic_ext_straggler_ratio": families.gauge("The same, as a share of the step.", "host", "rank", most="32"),
    "elastic_ext_lateness_largest_ratio": families.gauge(
        "The latest rank or host of the job by the last comparison, named or not, as a share of a step; on the agent of rank 0 "
        "only."
    ),
}
ROWS = (FeatureRow("stragglers", "stragglers.watch:Stragglers", compares_ranks, METRICS),)
