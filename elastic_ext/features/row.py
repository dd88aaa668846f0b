"""What is known of each feature, also of one that is off: its row. So neither this nor the `rows` of a feature load much."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic_ext.base.settings import Settings
from elastic_ext.rendezvous.board import Topics
from elastic_ext.telemetry.families import Family


@dataclass(frozen=True)
class AgentFacts:
    """What says whether a feature has anything to do."""

    settings: Settings
    one_machine: bool = False  # no other node can join the job
    workers: int = 1  # of this node
    nccl: bool = False  # torch has NCCL
    pushes: bool = False  # metrics, by OpenTelemetry

    @property
    def saves(self) -> bool:
        return self.settings.checkpoint_dir is not None


@dataclass(frozen=True)
class FeatureRow:
    """One feature. where: its module in this folder, and its class. on: whether it has anything to do; pure."""

    name: str
    where: str
    on: Callable[[AgentFacts], bool]
    metrics: Mapping[str, Family] = field(default_factory=dict)  # by name; `observation.FeatureMetrics` has their values
    topics: Topics = ()  # of the board, with a rule each
