"""One job before it runs: the failures to expect, where its time will go, what to set, and what limits it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ext.base.errors import UsageError
from elastic_ext.base.goodput import best_interval_s
from elastic_ext.base.settings import Settings
from elastic_ext.checkpoints.memory import pace
from elastic_ext.failures.history import MAX_FAILURES_IN_A_ROW
from elastic_ext.failures.judgement import SETTLE_S
from elastic_ext.hangs import detector

# Where the time of a job goes when failures interrupt it: a closed form.
#
# The assumptions, without which it is only an estimate: failures come at one constant rate, independently of each other and of
# what the job does (a Poisson process), so one may also hit a recovery, which then begins again; each class of failures takes the
# same time each time; nodes fail one at a time.
#
# With T between two saves that do not stall training, w = 0 and one class, this is Daly's complete model.

PRODUCTIVE, LOST_STEPS, STALLS, WAITING = "productive", "lost steps", "saves", "waiting for nodes"
MAX_SPARES = 1_000_000


@dataclass(frozen=True)
class FailureClass:
    """Failures that a job recovers from in the same way."""

    name: str
    share: float  # of all failures, from 0 to 1
    phases: Mapping[str, float]  # seconds from the failure until training goes on, by phase, in order
    every_s: float  # running time from one copy to the next of those that the job resumes from
    ready_s: float = 0.0  # seconds after which a copy can be used
    replaces: bool = False  # whether a node leaves for repair

    @property
    def recovery_s(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class Supply:
    """Nodes beyond those that the job runs on. spares: None if there is always one. repair_s: mean time until a node is back."""

    spares: int | None = None
    repair_s: float = 0.0


@dataclass(frozen=True)
class Expectation:
    """Shares of the job's time, which add up to 1."""

    productive: float  # the effective training time ratio, ETTR
    # the other shares by what takes them; phases of recoveries by their names
    lost: Mapping[str, float] = field(default_factory=dict)
    held: float = 0.0  # productive share of the time of all nodes that the job holds, spares included

    @property
    def dominates(self) -> str:
        """The greatest loss; "" if nothing is lost."""
        return max(self.lost, key=lambda name: self.lost[name]) if any(self.lost.values()) else ""


def expect(
    classes: Sequence[FailureClass], rate_s: float, nodes: int, stalled: float = 0.0, supply: Supply | None = None
) -> Expectation:
    """Return what to expect.

    classes: their shares add up to 1. rate_s: failures of the whole job in a second, more than 0. stalled: share of the running
    time for which saves hold up training.
    """
    supply = supply or Supply()
    again = sum(each.share * -math.expm1(-rate_s * each.recovery_s) for each in classes)
    running = 1.0 - again  # share of the time; the rest is recovery. The time of a cycle is 1 / (rate_s * running)
    kept = sum(each.share * _kept(rate_s, each) for each in classes)
    lost: dict[str, float] = {LOST_STEPS: running * (1.0 - stalled) * (1.0 - kept), STALLS: running * stalled}
    for each in classes:
        for name, share in _in_phases(rate_s, each):
            lost[name] = lost.get(name, 0.0) + each.share * share
    waiting = waiting_share(out_for_repair(classes, rate_s, supply), supply.spares)
    lost = {name: share * (1.0 - waiting) for name, share in lost.items()}
    productive = running * (1.0 - stalled) * kept * (1.0 - waiting)
    return Expectation(productive, {**lost, WAITING: waiting}, productive * nodes / (nodes + (supply.spares or 0)))


def _kept(rate_s: float, each: FailureClass) -> float:
    """Return the share of the running time since the last recovery that is in the newest copy when a failure comes."""
    exponent = rate_s * each.every_s
    return math.exp(-rate_s * each.ready_s) * (exponent / math.expm1(exponent) if 0 < exponent < 700 else float(not exponent))


def _in_phases(rate_s: float, each: FailureClass) -> Iterator[tuple[str, float]]:
    """Yield each phase with its share of the time, if all failures were of this class: a failure may come before it ends."""
    began_s = 0.0
    for name, seconds in each.phases.items():
        yield name, math.exp(-rate_s * began_s) * -math.expm1(-rate_s * seconds)
        began_s += seconds


def out_for_repair(classes: Sequence[FailureClass], rate_s: float, supply: Supply) -> float:
    """Return how many nodes are out for repair on average, if the job never waits."""
    return rate_s * supply.repair_s * sum(each.share for each in classes if each.replaces)


def waiting_share(out: float, spares: int | None) -> float:
    """Return the share of the time for which a job lacks a node.

    It runs as long as no more nodes than it has spares are out, and none fails while it waits: Erlang's loss formula for one
    server more than spares, for any distribution of the repair times.

    out: see `out_for_repair`.
    """
    if spares is None or out <= 0:
        return 0.0
    blocked = 1.0
    for servers in range(1, spares + 2):
        blocked = out * blocked / (servers + out * blocked)
    return blocked


def spares_for(out: float, share: float) -> int:
    """Return how many spares keep the time without a node below `share`. out: see `out_for_repair`."""
    blocked, servers = 1.0, 0
    while servers < MAX_SPARES:
        servers += 1
        blocked = out * blocked / (servers + out * blocked)
        if blocked <= share:
            break
    return servers - 1


def most_within(mean: float, risk: float) -> int:
    """Return the number that a Poisson variable of this mean exceeds with a probability of `risk` at most. Both are above 0."""
    log_term = -mean
    below, number = math.exp(log_term), 0
    while 1.0 - below > risk and number < mean + 50 * (1 + math.sqrt(mean)):
        number += 1
        log_term += math.log(mean / number)
        below += math.exp(log_term)
    return number


# What the phases of a recovery take, in seconds. Three sources: medians of this package's own benchmarks, on two cores without a
# GPU (`benchmarks/results`, a test compares them); published figures for what only a cluster shows; and the limits that the
# product itself applies, asked of the code that applies them. Each constant names its source. What has none is an argument.

# Of our benchmarks.
EXIT_S = 0.135  # restart.json, sigkill, warm: from the end of a worker until its agent starts the next one
LOST_S = 0.439  # node_loss.json, node: from the end of a node's processes until the others have stopped
WARM_START_S = 0.32  # warm/node_loss.json, node: from the round to the first collective
REJOIN_S_NODE = 0.93e-3  # rendezvous.json, re-join at 4,096: seconds for each node, with its client and the server on two cores
VERDICT_S = 0.086  # verdict.json: until all nodes have the verdict, once the reports are there
SAVE_STALL_S_BYTE = 0.035 / 500e6  # checkpoint_stall.json: what a save stalls a worker
COPY_BYTES_S = 12.1e9  # memory_tier.json, rates, 1,000 MB: out of the state into the buffer, for each worker
PEER_BYTES_S = 1.57e9  # the same: from agent to agent, for each node
BACK_BYTES_S = 4.1e9  # the same: from the buffer back into the state, for each worker
REQUESTS_S_NODE = 38.5 / 128  # steady_state.json: what an idle node asks of etcd at lease_ttl 10 s

# (ranks, seconds) until all process groups of a job are connected: at least 1.4 s at 32 to 1,024 ranks (NeMo-RL#3186, groups that
# shrink), and what Meta has measured with NCCL at 16,000 to 98,000 GPUs (arXiv 2602.00277, figure 2).
CONNECTS = ((32, 1.4), (1024, 2.0), (16_000, 17.0), (22_000, 30.0), (64_000, 100.0), (98_000, 200.0))
CONNECT_SHARE_LAZY = 24 / 265  # with NCCLX, which connects lazily (arXiv 2510.20171, 96,000 GPUs)


def along(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at this place: a power law between two points and after the last one; the first value before them."""
    if at <= points[0][0]:
        return points[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in itertools.pairwise(points) if at <= pair[1][0]), points[-2:])
    return y0 * math.exp(math.log(y1 / y0) / math.log(x1 / x0) * math.log(at / x0))


def connect_s(ranks: int) -> float:
    """Return how long the first collectives take to connect all ranks."""
    return along(CONNECTS, ranks)


def round_s(nodes: int) -> float:
    """Return how long the nodes take to form the next round; by fit beyond 4,096."""
    return REJOIN_S_NODE * nodes


def verdict_s(nodes: int) -> float:
    """Return how long it takes from the end of a round until all nodes have the verdict.

    Each node writes one record, as for a round, so the same fit holds for them.
    """
    return SETTLE_S + VERDICT_S + REJOIN_S_NODE * nodes


def hang_limit_s(step_s: float, ranks: int) -> float:
    """Return for how long a steady job may stand in a collective before it counts as a hang: `hangs.detector` decides."""
    steps = max(detector.STEADY_GAPS, 100)
    bucket = max(0, math.ceil(math.log2(max(step_s, 1e-3) * 1000)))
    status = detector.WorkerStatus(0, steps, 0.0, gaps=(*(0,) * bucket, steps), wait=detector.WaitFor.QUEUED, world=ranks)
    return detector.wait_limit_s(status)


def copies(state_bytes: float, nodes: int, per_node: int, step_s: float, age_s: float = 0.0) -> tuple[int, float, float]:
    """Return every how many steps the state is copied to memory, what a copy stalls, and how long until it is on two nodes.

    age_s: for how long the job has not failed. Without any, the agent copies most often.
    """
    stall_s, commit_s = state_bytes / (nodes * per_node) / COPY_BYTES_S, state_bytes / nodes / PEER_BYTES_S
    every, _ = pace.choose(None, [pace.Timing(step_s, stall_s, commit_s, age_s=age_s)])
    return every, stall_s, commit_s


# One job.

DAY_S = 86400.0
# Shares of all failures. Llama 3 (arXiv 2407.21783, table 5): of 419 interruptions, GPUs and other parts of hosts caused 289, and
# maintenance of hosts 32. ByteRobust (arXiv 2509.16293, table 1): 9.9 % of the incidents are hangs.
REPLACED_SHARE, LOST_SHARE, HANG_SHARE = 289 / 419, 32 / 419, 0.099
REPAIR_S = 129.3 * 3600  # mean of the 584 faults in the trace of InfiniteHBD (arXiv 2502.03885); the median is 20.4 hours
SETUP_S = 10.0  # assumed: a script builds its model and its data loaders, and captures or compiles what it needs
TOGETHER_SHARE = 57 / 482  # of the faults in that trace that begin within ten minutes of each other: of several nodes
STORAGE_SHARE = 0.1  # assumed: of the time for which one job may keep the storage busy with checkpoints
WAITING_SHARE = 1e-3  # of the time, for which spares are advised without a target
RISK_30_DAYS = 1e-3  # that the budget ends a job in this time although every failure is one to restart for
WINDOW_S = 3600
MOST_RATE_S = 1.0  # failures of a job in a second; with more no job trains, and a rate was given for a time between failures, say
ETCD_AWAY_S = 300.0  # an outage of etcd to plan for, where none is given

DETECTION, VERDICT, ROUND, START, CONNECT, LOAD, SETUP = "detection", "verdict", "round", "start", "connect", "load", "setup"


@dataclass(frozen=True)
class PlannedJob:
    nodes: int
    node_mtbf_s: float  # mean time between two failures of one node
    step_s: float  # a training step
    state_bytes: float  # the whole training state, over all ranks
    # write_bytes_s, read_bytes_s: of the storage, for the whole job
    write_bytes_s: float
    read_bytes_s: float
    gpus_per_node: int = 8
    spares: int | None = None  # None to have them advised
    repair_s: float = REPAIR_S  # mean time until a node that has left is back
    every_s: float | None = None  # time between two checkpoints; None for the best one
    setup_s: float = SETUP_S
    connect_s: float | None = None  # until all process groups are connected; None for the published figure at this size
    memory: bool = True  # whether the script makes copies in memory
    # replaced, lost, hangs: shares of the failures after which a node leaves, that take a node at once, and that are hangs. After
    # the rest the same nodes go on
    replaced: float = REPLACED_SHARE
    lost: float = LOST_SHARE
    hangs: float = HANG_SHARE
    # share of those that take nodes and take several at once: both copies of a part of the state may be gone, so the job resumes
    # from disk
    together: float = TOGETHER_SHARE
    etcd_outages_s: float = 1 / (30 * DAY_S)  # outages of etcd in a second
    etcd_away_s: float = ETCD_AWAY_S  # how long one lasts

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def rate_s(self) -> float:
        """Failures of the job in a second."""
        return self.nodes / self.node_mtbf_s

    @property
    def copies_gone(self) -> float:
        """Share of the failures that take nodes after which no copy in memory is whole; with one node, all."""
        return 1.0 if self.nodes == 1 else self.together

    @property
    def disk_share(self) -> float:
        """Share of the failures after which the job resumes from disk."""
        return (self.replaced + self.lost) * self.copies_gone if self.memory else 1.0


@dataclass(frozen=True)
class Saves:
    """How often the state is saved: to disk by seconds, to memory by steps (0: never), and what that costs."""

    disk_s: float
    write_s: float  # how long the storage takes to write one checkpoint
    memory_steps: int
    ready_s: float  # until a copy in memory can be used
    stalled: float  # share of the running time for which saves hold up training


@dataclass(frozen=True)
class Advice:
    job: PlannedJob
    expected: Expectation
    spares: int  # those of the job, or advised
    saves: Saves
    hang_limit_s: float
    settings: Mapping[str, tuple[str, str]]  # values by name, each with why
    control_plane: Mapping[str, str]  # what the job asks of etcd, and what an outage of it costs
    notes: tuple[str, ...]  # what limits the job


def saves_of(job: PlannedJob) -> Saves:
    """Return how often the state is saved. To disk no more often than STORAGE_SHARE allows."""
    stall_s, write_s = job.state_bytes / job.ranks * SAVE_STALL_S_BYTE, job.state_bytes / job.write_bytes_s
    between_s = 1 / (job.rate_s * job.disk_share) if job.disk_share else DAY_S
    disk_s = job.every_s or max(best_interval_s(stall_s, between_s), write_s / STORAGE_SHARE, job.step_s)
    stalled = stall_s / (disk_s + stall_s)
    if not job.memory:
        return Saves(disk_s, write_s, 0, 0.0, stalled)
    often, copy_s, ready_s = copies(job.state_bytes, job.nodes, job.gpus_per_node, job.step_s)
    every = memory_steps(often, copy_s, job.rate_s, job.step_s)
    return Saves(disk_s, write_s, every, ready_s, stalled + copy_s / (every * job.step_s + copy_s))


def memory_steps(often: int, copy_s: float, rate_s: float, step_s: float) -> int:
    """Return every how many steps a copy in memory costs least, together with the steps that a failure loses.

    often: as often as the product copies after a failure: as its cost allows. copy_s: what a copy stalls. rate_s:
    failures of the job in a second.
    """
    return max(often, round(best_interval_s(copy_s, 1 / rate_s) / step_s))


def classes_of(job: PlannedJob, saves: Saves, settings: Settings) -> tuple[FailureClass, ...]:
    """Return the failures of a job by how it recovers from them. Those of share 0 are left out."""
    node_bytes, disk_s = job.state_bytes / job.nodes, job.state_bytes / job.read_bytes_s
    in_place_s, moved_s = node_bytes / job.gpus_per_node / BACK_BYTES_S, node_bytes / PEER_BYTES_S
    from_memory, from_disk = (saves.memory_steps * job.step_s, saves.ready_s), (saves.disk_s, saves.write_s)
    after = {
        VERDICT: verdict_s(job.nodes),
        ROUND: round_s(job.nodes),
        START: WARM_START_S,
        CONNECT: connect_s(job.ranks) if job.connect_s is None else job.connect_s,
    }
    silent_s = max(LOST_S, settings.lease_ttl - 2.0)
    rest = 1 - job.replaced - job.lost - job.hangs
    kinds = (
        ("a worker ends", rest, 0.0, EXIT_S, in_place_s, False),
        ("a worker ends, and its node leaves", job.replaced, job.copies_gone, EXIT_S, moved_s, True),
        ("a node is lost", job.lost, job.copies_gone, silent_s, moved_s, True),
        ("a hang", job.hangs, 0.0, hang_limit_s(job.step_s, job.ranks), in_place_s, False),
    )
    found = []
    for name, share, together, found_s, load_s, replaces in kinds:
        disk = together if job.memory else 1.0
        for part, load, (every_s, ready_s) in ((1 - disk, load_s, from_memory), (disk, disk_s, from_disk)):
            phases = {DETECTION: found_s, **after, LOAD: load, SETUP: job.setup_s}
            found.append(FailureClass(name, share * part, phases, every_s, ready_s, replaces))
    return tuple(each for each in found if each.share > 1e-12)


def advise(job: PlannedJob, target: float | None = None) -> Advice:
    """Return what to expect and what to set.

    target: an ETTR that spares should make possible; None: as many as keep the time without a node below WAITING_SHARE.

    Raises UsageError: the shares of the failures are more than 1, or the job fails more often than MOST_RATE_S.
    """
    settings = Settings()
    if job.rate_s > MOST_RATE_S:
        raise UsageError(
            f"{job.nodes:,} nodes with {job.node_mtbf_s:.3g} s between two failures of one have {job.rate_s:.3g} failures in a "
            f"second: expected {MOST_RATE_S:g} at most; --mtbf-node-days is the time between two failures of one node, in days"
        )
    if job.replaced + job.lost + job.hangs > 1 + 1e-9:
        raise UsageError(f"the shares of failures add up to {job.replaced + job.lost + job.hangs:.3g}: expected 1 at most")
    saves = saves_of(job)
    classes = classes_of(job, saves, settings)
    out = out_for_repair(classes, job.rate_s, Supply(None, job.repair_s))
    without_limit = expect(classes, job.rate_s, job.nodes, saves.stalled)
    most = without_limit.productive
    share = WAITING_SHARE if target is None or target >= most else 1 - target / most
    spares = job.spares if job.spares is not None else spares_for(out, share)
    expected = expect(classes, job.rate_s, job.nodes, saves.stalled, Supply(spares, job.repair_s))
    hang_s = hang_limit_s(job.step_s, job.ranks)
    return Advice(
        replace(job, spares=spares),
        expected,
        spares,
        saves,
        hang_s,
        _settings(job, spares, saves, out),
        _control_plane(job, settings),
        tuple(_notes(job, expected, without_limit, target, hang_s)),
    )


def _settings(job: PlannedJob, spares: int, saves: Saves, out: float) -> dict[str, tuple[str, str]]:
    charged_s = job.rate_s * (1 - job.replaced - job.lost)
    restarts = max(1, most_within(charged_s * WINDOW_S, RISK_30_DAYS * WINDOW_S / (30 * DAY_S)))
    first_back_s = job.repair_s / max(1, spares + 1)
    found = {
        "--nnodes": (
            str(job.nodes),
            f"start {job.nodes + spares} agents: {spares} wait as spares; {out:.3g} nodes are out on average",
        ),
        "--max-restarts": (str(restarts), f"{charged_s * WINDOW_S:.2g} restarts are charged in an hour on average"),
        "budget_window": (str(WINDOW_S), "the budget is for an hour, so that a long job does not use it up"),
        "refuse_node": (str(round(min(job.repair_s, 7 * DAY_S))), "a node that had to leave is to come back after its repair"),
        "rejoin_timeout": (
            "",
            f"without a spare, a node is back after {first_back_s / 3600:.3g} h on average: a job that waits less is requeued",
        ),
    }
    if saves.memory_steps:
        often, *_ = copies(job.state_bytes, job.nodes, job.gpus_per_node, job.step_s)
        why = "more often costs more than failures do" if saves.memory_steps > often else "as the agent does after a failure"
        found["memory_every"] = (str(saves.memory_steps), f"{why}: a copy every {saves.memory_steps * job.step_s:.3g} s")
    if restarts >= MAX_FAILURES_IN_A_ROW:
        found["--max-restarts"] = (str(restarts), f"but {MAX_FAILURES_IN_A_ROW} failures in a row without a new step end any job")
    return found


def _control_plane(job: PlannedJob, settings: Settings) -> dict[str, str]:
    requests_s = REQUESTS_S_NODE * job.nodes * 10 / settings.lease_ttl
    meets = job.rate_s * job.etcd_outages_s * job.etcd_away_s * 30 * DAY_S
    lost_s = meets * job.etcd_away_s / 2
    return {
        "requests while nothing happens": f"{requests_s:.0f}/s to etcd (lease_ttl={settings.lease_ttl})",
        "a round": f"{round_s(job.nodes):.2g} s" + ("" if job.nodes <= 4096 else ", by fit: 4,096 nodes were measured"),
        "an outage of etcd": f"training goes on; {meets:.2g} failures in 30 days meet one, and wait {lost_s:.3g} s in all",
    }


def _notes(job: PlannedJob, expected: Expectation, without_limit: Expectation, target: float | None, hang_s: float) -> list[str]:
    notes = []
    if target is not None and target > without_limit.productive:
        best = without_limit.productive
        notes.append(f"an ETTR of {target:.2%} is out of reach: without any wait for nodes it would be {best:.2%}")
    if name := expected.dominates:
        notes.append(f"the greatest loss: {name}, {expected.lost[name]:.2%} of the time")
    if hang_limit_s(job.step_s, 1) < hang_s:
        notes.append(
            f"a hang is noticed after {hang_s:.0f} s, since {job.ranks:,} ranks may take as long to connect; hang_timeout sets "
            "another limit"
        )
    if job.connect_s is None and connect_s(job.ranks) > 60:
        notes.append(
            f"connecting {job.ranks:,} ranks takes {connect_s(job.ranks):.0f} s as published for NCCL; connected lazily "
            f"(NCCLX), about {CONNECT_SHARE_LAZY:.0%} of that: --connect"
        )
    if job.ranks > CONNECTS[-1][0]:
        notes.append(f"figures beyond {CONNECTS[-1][0]:,} ranks are extrapolated")
    return notes
