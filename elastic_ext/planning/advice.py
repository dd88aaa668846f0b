"""One job before it runs: the failures to expect, where its time will go, what to set, and what limits it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_ext.base.errors import UsageError
from elastic_ext.base.goodput import best_interval_s
from elastic_ext.base.settings import Settings
from elastic_ext.failures.policy import MAX_FAILURES_IN_A_ROW
from elastic_ext.planning import times
from elastic_ext.planning.expectation import Expectation, FailureClass, Supply, expect, most_within, out_for_repair, spares_for

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
    stall_s, write_s = job.state_bytes / job.ranks * times.SAVE_STALL_S_BYTE, job.state_bytes / job.write_bytes_s
    between_s = 1 / (job.rate_s * job.disk_share) if job.disk_share else DAY_S
    disk_s = job.every_s or max(best_interval_s(stall_s, between_s), write_s / STORAGE_SHARE, job.step_s)
    stalled = stall_s / (disk_s + stall_s)
    if not job.memory:
        return Saves(disk_s, write_s, 0, 0.0, stalled)
    often, copy_s, ready_s = times.copies(job.state_bytes, job.nodes, job.gpus_per_node, job.step_s)
    every = memory_steps(often, copy_s, job.rate_s, job.step_s)
    return Saves(disk_s, write_s, every, ready_s, stalled + copy_s / (every * job.step_s + copy_s))


def memory_steps(often: int, copy_s: float, rate_s: float, step_s: float) -> int:
    """Return every how many steps a copy in memory costs least, together with the steps that a failure loses.

    often: as often as the product copies by itself after a failure: as its cost allows. copy_s: what a copy stalls. rate_s:
    failures of the job in a second.
    """
    return max(often, round(best_interval_s(copy_s, 1 / rate_s) / step_s))


def classes_of(job: PlannedJob, saves: Saves, settings: Settings) -> tuple[FailureClass, ...]:
    """Return the failures of a job by how it recovers from them. Those of share 0 are left out."""
    node_bytes, disk_s = job.state_bytes / job.nodes, job.state_bytes / job.read_bytes_s
    in_place_s, moved_s = node_bytes / job.gpus_per_node / times.BACK_BYTES_S, node_bytes / times.PEER_BYTES_S
    from_memory, from_disk = (saves.memory_steps * job.step_s, saves.ready_s), (saves.disk_s, saves.write_s)
    after = {
        VERDICT: times.verdict_s(job.nodes, settings.settle),
        ROUND: times.round_s(job.nodes),
        START: times.WARM_START_S,
        CONNECT: times.connect_s(job.ranks) if job.connect_s is None else job.connect_s,
    }
    silent_s = max(times.LOST_S, settings.lease_ttl - 2.0)
    rest = 1 - job.replaced - job.lost - job.hangs
    kinds = (
        ("a worker ends", rest, 0.0, times.EXIT_S, in_place_s, False),
        ("a worker ends, and its node leaves", job.replaced, job.copies_gone, times.EXIT_S, moved_s, True),
        ("a node is lost", job.lost, job.copies_gone, silent_s, moved_s, True),
        ("a hang", job.hangs, 0.0, times.hang_limit_s(job.step_s, job.ranks), in_place_s, False),
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
    spares = job.spares if job.spares is not None else _spares(out, target, without_limit.productive)
    expected = expect(classes, job.rate_s, job.nodes, saves.stalled, Supply(spares, job.repair_s))
    hang_s = times.hang_limit_s(job.step_s, job.ranks)
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


def _spares(out: float, target: float | None, most: float) -> int:
    share = WAITING_SHARE if target is None or target >= most else 1 - target / most
    return spares_for(out, share)


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
            f"without a spare, a node is back after {first_back_s / 3600:.3g} h on average: who waits for less is requeued",
        ),
    }
    if saves.memory_steps:
        often, *_ = times.copies(job.state_bytes, job.nodes, job.gpus_per_node, job.step_s)
        why = "more often costs more than failures do" if saves.memory_steps > often else "as the agent does after a failure"
        found["memory_every"] = (str(saves.memory_steps), f"{why}: a copy every {saves.memory_steps * job.step_s:.3g} s")
    if restarts >= MAX_FAILURES_IN_A_ROW:
        found["--max-restarts"] = (str(restarts), f"but {MAX_FAILURES_IN_A_ROW} failures in a row without a new step end any job")
    return found


def _control_plane(job: PlannedJob, settings: Settings) -> dict[str, str]:
    requests_s = times.REQUESTS_S_NODE * job.nodes * 10 / settings.lease_ttl
    meets = job.rate_s * job.etcd_outages_s * job.etcd_away_s * 30 * DAY_S
    lost_s = meets * job.etcd_away_s / 2
    return {
        "requests while nothing happens": f"{requests_s:.0f}/s to etcd (lease_ttl={settings.lease_ttl})",
        "a round": f"{times.round_s(job.nodes):.2g} s" + ("" if job.nodes <= 4096 else ", by fit: 4,096 nodes were measured"),
        "an outage of etcd": f"training goes on; {meets:.2g} failures in 30 days meet one, and wait {lost_s:.3g} s in all",
    }


def _notes(job: PlannedJob, expected: Expectation, without_limit: Expectation, target: float | None, hang_s: float) -> list[str]:
    notes = []
    if target is not None and target > without_limit.productive:
        best = without_limit.productive
        notes.append(f"an ETTR of {target:.2%} is out of reach: without any wait for nodes it would be {best:.2%}")
    if name := expected.dominates:
        notes.append(f"most is lost to {name}: {expected.lost[name]:.2%} of the time")
    if times.hang_limit_s(job.step_s, 1) < hang_s:
        notes.append(
            f"a hang is noticed after {hang_s:.0f} s, since {job.ranks:,} ranks may take as long to connect; hang_timeout sets "
            "another limit"
        )
    if job.connect_s is None and times.connect_s(job.ranks) > 60:
        notes.append(
            f"connecting {job.ranks:,} ranks takes {times.connect_s(job.ranks):.0f} s as published for NCCL; connected lazily "
            f"(NCCLX), about {times.CONNECT_SHARE_LAZY:.0%} of that: --connect"
        )
    if job.ranks > times.CONNECTS[-1][0]:
        notes.append(f"figures beyond {times.CONNECTS[-1][0]:,} ranks are extrapolated")
    return notes
