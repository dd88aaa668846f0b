"""Who restarts the job, and how long each takes: ours with and without copies in memory, stock in two ways, and an ideal one.

Ours: `elastic_ext.planning.advice`, the constants of which are our own measurements. Stock: the figures of the same benchmarks.
Where stock was not measured at a size it gets the best figure of a smaller one: torchrun's rounds of 256 agents did not come up
at all, and count here with what 128 took.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.hangs.detector import START_FLOOR_S
from elastic_ext.planning import advice
from elastic_ext.planning.advice import CONNECT, LOAD, ROUND, SETUP, START, VERDICT
from scale.causes import Shows
from scale.inputs import FIGURES

STOCK_EXIT_S = 0.425  # restart.json, sigkill, stock: the phase of the agent
STOCK_LOST_S = 44.88  # warm/node_loss.json, node, stock: with its rendezvous
STOCK_ENDS_S = 1.65  # verdict.json, stock: until all agents have left, from an exception
STOCK_ROUND_S = 8.92  # handlers.json, 128 agents, re-join
STOCK_START_S = 2.54  # restart.json, sigkill, stock: all but the phase of the agent, most of it imports
STOCK_SAVE_STALL_S_BYTE = 0.191 / 500e6  # checkpoint_stall.json, dcp.async_save
TIMEOUT_S = FIGURES["collective timeout"].value
SILENT_S = 7.987  # node_loss.json, link: of a node that no longer answers; lease_ttl is 10 s there
# (GPUs, seconds) from a failure until a job runs again that the scheduler starts as a whole (arXiv 2602.00277, figure 2).
COLD_STARTS = ((16_000, 200.0), (22_000, 300.0), (64_000, 600.0), (98_000, 900.0))
AGES_S = (0.0, *(60.0 * 1.1**number for number in range(110)))  # when the agent is asked how often to copy: up to 22 days


def cold_start_s(gpus: int) -> float:
    """Return how long it takes until a job that is started again as a whole trains."""
    return advice.along(COLD_STARTS, gpus)


@dataclass(frozen=True)
class Side:
    """A side.

    Attributes:
        judges: it decides with elastic_ext's modules.
        memory: it has copies in memory.
        whole: the scheduler starts the whole job again.
        planned: it copies to memory as often as `elastic-ext plan` advises, not as often as the agent chooses.
        strikes: a node leaves when its fault shows again, whatever the modules decide: only a simulation knows that it does.
        ideal: it knows everything at once, decides right and loses no step.
    """

    name: str
    judges: bool = False
    memory: bool = False
    whole: bool = False
    ideal: bool = False
    planned: bool = False
    strikes: bool = False


OURS = Side("ours", judges=True, memory=True)
OURS_PLANNED = Side("ours, memory_every as planned", judges=True, memory=True, planned=True)
OURS_STRIKES = Side("ours, if each bad node left at its second failure", judges=True, memory=True, planned=True, strikes=True)
OURS_DISK = Side("ours, checkpoints on disk only", judges=True)
STOCK = Side("stock, restarts in the job")
STOCK_JOB = Side("stock, the whole job restarts", whole=True)
IDEAL = Side("ideal: known at once, nothing lost", memory=True, ideal=True)
SIDES = (OURS, OURS_PLANNED, OURS_DISK, STOCK, STOCK_JOB, IDEAL)


@dataclass(frozen=True)
class Scale:
    """The size of a job, and what it saves.

    Attributes:
        detect: factor for the times until ours notices something.
        lazy: process groups connect lazily (NCCLX).
    """

    gpus: int
    step_s: float = FIGURES["step"].value
    disk_every_s: float = FIGURES["checkpoints on disk"].value
    setup_s: float = FIGURES["setup of a script"].value
    detect: float = 1.0
    lazy: bool = False

    @property
    def nodes(self) -> int:
        return self.gpus // 8

    @property
    def state_bytes(self) -> float:
        return FIGURES["state"].value * self.gpus

    @property
    def read_bytes_s(self) -> float:
        return FIGURES["storage, reads"].value * self.gpus

    @property
    def write_bytes_s(self) -> float:
        return FIGURES["storage, writes"].value * self.gpus

    @property
    def connect_s(self) -> float:
        return advice.connect_s(self.gpus) * (advice.CONNECT_SHARE_LAZY if self.lazy else 1.0)

    @property
    def load_disk_s(self) -> float:
        return self.state_bytes / self.read_bytes_s


def detection_s(side: Side, scale: Scale, shows: Shows, starting: bool) -> float:
    """Return how long it takes until the side knows. starting: before the first step of a round."""
    if side.ideal:
        return 0.0
    if side.judges:
        hang_s = START_FLOOR_S if starting else advice.hang_limit_s(scale.step_s, scale.gpus)
        found = {Shows.EXIT: advice.EXIT_S, Shows.GONE: advice.LOST_S, Shows.SILENT: SILENT_S, Shows.HANG: hang_s}
        return found[shows] * scale.detect
    silent_s = TIMEOUT_S if side.whole else STOCK_LOST_S
    ends_s = STOCK_ENDS_S if side.whole else STOCK_EXIT_S
    return {Shows.EXIT: ends_s, Shows.GONE: STOCK_LOST_S, Shows.SILENT: silent_s, Shows.HANG: TIMEOUT_S}[shows]


def restart(side: Side, scale: Scale, moved: bool, from_disk: bool) -> Mapping[str, float]:
    """Return the phases after the detection. moved: another node takes a part of the state."""
    if side.whole:
        return {START: cold_start_s(scale.gpus), LOAD: scale.load_disk_s}
    node_bytes = scale.state_bytes / scale.nodes
    memory_s = node_bytes / advice.PEER_BYTES_S if moved else node_bytes / 8 / advice.BACK_BYTES_S
    load_s = scale.load_disk_s if from_disk else memory_s
    if side.ideal:
        return {CONNECT: scale.connect_s, SETUP: scale.setup_s}
    if side.judges:
        return {
            VERDICT: advice.verdict_s(scale.nodes),
            ROUND: advice.round_s(scale.nodes),
            START: advice.WARM_START_S,
            CONNECT: scale.connect_s,
            LOAD: load_s,
            SETUP: scale.setup_s,
        }
    return {ROUND: STOCK_ROUND_S, START: STOCK_START_S, CONNECT: scale.connect_s, LOAD: load_s, SETUP: scale.setup_s}


def cold(side: Side, scale: Scale) -> Mapping[str, float]:
    """Return the phases of a start as a whole, by the scheduler."""
    return {START: cold_start_s(scale.gpus), LOAD: scale.load_disk_s}


@dataclass(frozen=True)
class Copies:
    """How the state is saved. Times of running are those since the workers began.

    Attributes:
        memory: (from this time of running on, seconds of running from one copy to the next), in order.
        memory_ready_s, disk_ready_s: until it can be used. disk_s: seconds of running from one save to the next.
        copy_s: what a copy stalls. stalled: share of the time for which saves to disk do.
    """

    memory: tuple[tuple[float, float], ...]
    memory_ready_s: float
    copy_s: float
    disk_s: float
    disk_ready_s: float
    stalled: float

    def _spans(self, running_s: float) -> list[tuple[float, float, float]]:
        """Return when each of the intervals begins, how long it is, and for how long it has held."""
        ends = [start for start, _ in self.memory[1:]] + [math.inf]
        found = zip(self.memory, ends, strict=False)
        return [(start, every_s, min(running_s, end) - start) for (start, every_s), end in found if running_s > start]

    def kept_s(self, running_s: float) -> float:
        """Return what is left of the running time for steps."""
        made = sum(span_s / every_s for _, every_s, span_s in self._spans(running_s))
        return running_s * (1 - self.stalled) - made * self.copy_s

    def running_s(self, kept_s: float) -> float:
        """Return how long it runs for this many seconds of steps."""
        found = kept_s
        for _ in range(5):  # each time the error falls by the share of the stalls
            found = kept_s + found - self.kept_s(found)
        return found

    def newest_s(self, running_s: float) -> float:
        """Return the time of running at which the newest copy in memory was made; 0: there is none."""
        made = [start + span_s // every_s * every_s for start, every_s, span_s in self._spans(running_s)]
        return made[-1] if made else 0.0


def copies(side: Side, scale: Scale, rate_s: float) -> Copies:
    """Return how a side saves. rate_s: failures of the job in a second."""
    per_gpu = scale.state_bytes / scale.gpus
    stall_s = per_gpu * (advice.SAVE_STALL_S_BYTE if side.judges or side.ideal else STOCK_SAVE_STALL_S_BYTE)
    write_s = scale.state_bytes / scale.write_bytes_s
    stalled = 0.0 if side.ideal else stall_s / (scale.disk_every_s + stall_s)
    if not side.memory:
        return Copies((), 0.0, 0.0, scale.disk_every_s, write_s, stalled)
    often, copy_s, ready_s = advice.copies(scale.state_bytes, scale.nodes, 8, scale.step_s)
    if side.planned:
        chosen = {0.0: advice.memory_steps(often, copy_s, rate_s, scale.step_s)}
    else:
        chosen = {age_s: advice.copies(scale.state_bytes, scale.nodes, 8, scale.step_s, age_s)[0] for age_s in AGES_S}
    copy_s = 0.0 if side.ideal else copy_s
    changes = [0.0] + [later for earlier, later in itertools.pairwise(chosen) if chosen[earlier] != chosen[later]]
    memory = tuple((age_s, chosen[age_s] * scale.step_s + copy_s) for age_s in changes)
    return Copies(memory, ready_s, copy_s, scale.disk_every_s, write_s, stalled)
