"""Who restarts the job, and how long each takes: ours with and without copies in memory, stock in two ways, and an ideal one.

Ours: `elastic_ext.planning.times`, the constants of which are our own measurements. Stock: the figures of the same benchmarks.
Where stock was not measured at a size it gets the best figure of a smaller one: torchrun's rounds of 256 agents did not come up
at all, and count here with what 128 took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ext.hangs.detector import START_FLOOR_S
from elastic_ext.planning import advice, times
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


@dataclass(frozen=True)
class Side:
    """A side.

    Attributes:
        judges: it decides with elastic_ext's modules.
        memory: it has copies in memory.
        whole: the scheduler starts the whole job again.
        planned: it copies to memory as often as `elastic-ext plan` advises, not as often as a copy's cost allows.
        strikes: a node that fails again within an hour leaves, whatever the modules decide: a rule that they do not have.
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
OURS_STRIKES = Side("ours, if a node left at its second failure in an hour", judges=True, memory=True, planned=True, strikes=True)
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
        return times.connect_s(self.gpus) * (times.CONNECT_SHARE_LAZY if self.lazy else 1.0)

    @property
    def load_disk_s(self) -> float:
        return self.state_bytes / self.read_bytes_s


def detection_s(side: Side, scale: Scale, shows: Shows, starting: bool) -> float:
    """Return how long it takes until the side knows. starting: before the first step of a round."""
    if side.ideal:
        return 0.0
    if side.judges:
        hang_s = START_FLOOR_S if starting else times.hang_limit_s(scale.step_s, scale.gpus)
        found = {Shows.EXIT: times.EXIT_S, Shows.GONE: times.LOST_S, Shows.SILENT: times.SILENT_S, Shows.HANG: hang_s}
        return found[shows] * scale.detect
    silent_s = TIMEOUT_S if side.whole else STOCK_LOST_S
    ends_s = STOCK_ENDS_S if side.whole else STOCK_EXIT_S
    return {Shows.EXIT: ends_s, Shows.GONE: STOCK_LOST_S, Shows.SILENT: silent_s, Shows.HANG: TIMEOUT_S}[shows]


def restart(side: Side, scale: Scale, moved: bool, from_disk: bool) -> Mapping[str, float]:
    """Return the phases after the detection. moved: another node takes a part of the state."""
    if side.whole:
        return {START: times.cold_start_s(scale.gpus), LOAD: scale.load_disk_s}
    node_bytes = scale.state_bytes / scale.nodes
    memory_s = node_bytes / times.PEER_BYTES_S if moved else node_bytes / 8 / times.BACK_BYTES_S
    load_s = scale.load_disk_s if from_disk else memory_s
    if side.ideal:
        return {CONNECT: scale.connect_s, SETUP: scale.setup_s}
    if side.judges:
        return {
            VERDICT: times.verdict_s(scale.nodes, 0.5),
            ROUND: times.round_s(scale.nodes),
            START: times.WARM_START_S,
            CONNECT: scale.connect_s,
            LOAD: load_s,
            SETUP: scale.setup_s,
        }
    return {ROUND: STOCK_ROUND_S, START: STOCK_START_S, CONNECT: scale.connect_s, LOAD: load_s, SETUP: scale.setup_s}


def cold(side: Side, scale: Scale) -> Mapping[str, float]:
    """Return the phases of a start as a whole, by the scheduler."""
    return {START: times.cold_start_s(scale.gpus), LOAD: scale.load_disk_s}


@dataclass(frozen=True)
class Copies:
    """How the state is saved: seconds of running from one to the next, and until it can be used; share of stalls."""

    memory_s: float
    memory_ready_s: float
    disk_s: float
    disk_ready_s: float
    stalled: float


def copies(side: Side, scale: Scale, rate_s: float) -> Copies:
    """Return how a side saves. rate_s: failures of the job in a second."""
    per_gpu = scale.state_bytes / scale.gpus
    stall_s = per_gpu * (times.SAVE_STALL_S_BYTE if side.judges or side.ideal else STOCK_SAVE_STALL_S_BYTE)
    write_s = scale.state_bytes / scale.write_bytes_s
    stalled = stall_s / (scale.disk_every_s + stall_s)
    if not side.memory:
        return Copies(0.0, 0.0, scale.disk_every_s, write_s, stalled)
    every, copy_s, ready_s = times.copies(scale.state_bytes, scale.nodes, 8, scale.step_s)
    if side.planned:
        every = advice.memory_steps(every, copy_s, rate_s, scale.step_s)
    memory_s = every * scale.step_s
    return Copies(memory_s, ready_s, scale.disk_every_s, write_s, 0.0 if side.ideal else stalled + copy_s / (memory_s + copy_s))
