"""What is known of stragglers, also where they are not looked for."""

from dataclasses import dataclass

from elastic_ext.base.records import NameOrEmpty, Rank, Ratio, Seconds
from elastic_ext.features.row import AgentFacts, FeatureRow
from elastic_ext.telemetry import families


@dataclass(frozen=True)
class Straggler:
    """A rank, or a host (rank -1), that is late: it issues the collectives of a step later than the others."""

    node: NameOrEmpty
    rank: Rank
    # late_s, p90_s: per step, median and 90th percentile
    late_s: Seconds
    p90_s: Seconds
    step_s: Seconds
    share: Ratio  # part of a step that it is late by
    error_s: Seconds = 0.0  # by how much late_s may be wrong, because the clocks of hosts differ; 0 within a host

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}" if self.rank >= 0 else f"{self.node}, with all its ranks,"

    @property
    def text(self) -> str:
        clocks = f" (clocks aligned to {self.error_s * 1e3:.2g} ms)" if self.error_s else ""
        return f"{self.who} is late by {_ms(self.late_s)} of a step of {_ms(self.step_s)}: {self.share:.0%}{clocks}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


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
