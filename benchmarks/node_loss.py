"""How long until all workers train again after a node is lost, or joins? Three nodes on this machine.

    python benchmarks/node_loss.py [--repeat 3] [--rows node,agent,container,link,join,rank0,etcd]
                                   [--sides ours,warm,ours-2,embedded,embedded-warm,stock,tuned]

Each node is a torchrun with one gloo worker (workers/stepping_job.py), --nnodes=2:3. The sides:

    ours      --rdzv-backend=ext_etcd with lease_ttl=10 (the default) and standby=off
    warm      the same with standby=on (the default); the fault comes once all agents have their standbys
    ours-2    as ours with lease_ttl=2, the shortest
    embedded  as ours with --rdzv-backend=ext_c10d: the job's own store, beside the agent that starts first
    embedded-warm  the same with standby=on: what --rdzv-backend=ext_c10d does by default
    stock     c10d with defaults, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which most of its restarts do not come up
    tuned     stock with keep_alive_interval=1, keep_alive_max_attempt=3, last_call_timeout=1

In the row `container` the agent, its worker and its helpers die at one instant, as when a container is killed; in the row
`node` our reaper is left. The agent that starts first has stock's store; the rows node, agent, container and link lose another
node. `link` puts one node into a network namespace of its own, and needs root.

The phases; each ends when the last node gets there:

    stop      the old workers of the remaining nodes have ended (in the row `join`, since the new agent has imported torch)
    round     the new workers' processes are made (accurate to 10 ms, the clock tick of /proc); a standby's process is older
    start     the first all_reduce of the new world: Python, torch, gloo; the same for all sides
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import jobs
import measure
from job_events import JobEvents, WorkerEvent
from network_namespace import Link, link

sys.path.append(str(Path(__file__).with_name("workers")))
from standby_count import await_standbys

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import EtcdCluster, EtcdServer, free_port

WORKERS = Path(__file__).with_name("workers")
ROWS = {
    "node": "kill a node with its workers",
    "agent": "kill only the agent",
    "container": "kill all processes of a node at once",
    "link": "cut a node's link",
    "join": "a node joins (2 to 3)",
    "rank0": "kill the node of rank 0",
    "etcd": "kill the leader of 3 etcd members",
}
TUNED = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
SIDES = {
    "ours": ("ext_etcd", "lease_ttl=10,standby=off"),
    "warm": ("ext_etcd", "lease_ttl=10,standby=on"),
    "ours-2": ("ext_etcd", "lease_ttl=2,standby=off"),
    "embedded": ("ext_c10d", "lease_ttl=10,standby=off"),
    "embedded-warm": ("ext_c10d", "lease_ttl=10,standby=on"),
    "stock": ("c10d", ""),
    "tuned": ("c10d", TUNED),
}
"""Backend and --rdzv-conf of each side."""

LEASES_S = {"ours": 10, "warm": 10, "ours-2": 2, "embedded": 10, "embedded-warm": 10}
PHASES = ("stop", "round", "start")
COLOURS = ("#c8553d", "#e6b35a", "#4c9f70")
FORM_S = 120.0  # limit for the first round; stock waits 30 s for a third node in the row `join`
ETCD = ("--heartbeat-interval=100", "--election-timeout=1000")  # etcd's own defaults, because the tests run it faster


class ClusterJob:
    """One job: its agents by node, its servers, and its events. Nothing of it survives the with block."""

    def __init__(self, side: str, row: str) -> None:
        self.backend, self.conf = SIDES[side]
        self.row = row
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.cluster: EtcdCluster | None = None
        self.link: Link | None = None
        self._stack = ExitStack()

    def __enter__(self) -> ClusterJob:
        jobs.adopt_orphans()
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _enter(self) -> None:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="node_loss_")))
        self._stack.callback(jobs.kill_children)
        self.events = JobEvents(self.folder / "events")
        self._stack.callback(self.events.close)
        if self.row == "link":
            self.link = self._stack.enter_context(link())
        host = self.link.near if self.link is not None else "127.0.0.1"
        port = free_port()
        if self.backend == "ext_etcd" and self.row == "etcd":
            self.cluster = self._stack.enter_context(EtcdCluster(self.folder / "etcd", args=ETCD))
            self.endpoint = ",".join(self.cluster.endpoints)
            return
        self.endpoint = f"{host}:{port}"
        if self.backend == "ext_etcd":
            everywhere = (f"--listen-client-urls=http://0.0.0.0:{port}",)
            self._stack.enter_context(EtcdServer(self.folder / "etcd", args=(*everywhere, *ETCD), client_port=port))

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, node: str) -> None:
        far = self.link is not None and node == "c"
        own = self.link.far if self.link is not None and far else self.endpoint.rpartition(":")[0].partition(":")[0]
        conf = [self.conf] if self.conf else []
        variables = {"NODE": node}
        if self.backend == "c10d":
            conf.append(f"is_host={int(not self.agents)}")  # all nodes share this host's name, so stock cannot know its host
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.link is not None:
            variables["GLOO_SOCKET_IFNAME"] = f"{self.link.name}{'f' if far else 'n'}"
        where = [f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=job", f"--local-addr={own}"]
        options = [*where, f"--rdzv-conf={','.join(conf)}", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=20"]
        script = [str(WORKERS / "stepping_job.py"), self.events.path]
        command = [sys.executable, str(WORKERS / "reporting_torchrun.py"), self.events.path, *options, *script]
        with open(self.folder / f"output.{node}", "wb") as output:
            self.agents[node] = subprocess.Popen(
                [*(self.link.inside if self.link is not None and far else []), *command],
                cwd=self.folder,
                env=jobs.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.events.follow(self.agents[node].pid)

    def output(self) -> str:
        paths = sorted(self.folder.glob("output.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-jobs.TAIL :]}" for path in paths)


class Result(Enum):
    """What happened after one fault; the values are in the JSON line."""

    DIES = "job dies"
    NOTHING = "nothing"
    RESTARTS = "restarts"
    TRAINS_AGAIN = "trains again"
    TRAINS_ON = "trains on"


SHOWN = {
    Result.DIES: "after {:.0f} s",
    Result.NOTHING: "in {:.0f} s",
    Result.RESTARTS: "{:.1f} s",
    Result.TRAINS_AGAIN: "{:.1f} s",
    Result.TRAINS_ON: "pause {:.2f} s",
}
"""How a table shows `after_s` behind each result."""


@dataclass(frozen=True)
class Outcome:
    """What happened after one fault.

    Attributes:
        after_s: seconds until all train again or the job dies; without any reaction, until the benchmark gave up; for a job that
            trains on or restarts without need, its longest pause.
        phases_s: by PHASES; only if the job trains again.
    """

    result: Result
    after_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)


def phases(fault_ns: int, stopped_ns: Iterable[int], new: Iterable[WorkerEvent], made_ns: Mapping[int, int]) -> dict[str, float]:
    """The seconds of each phase. new: the first step of each worker of the new world."""
    new = list(new)
    stopped = max(stopped_ns)
    borders = [fault_ns, stopped, max(stopped, *(made_ns[step.pid] for step in new)), max(step.ns for step in new)]
    return {phase: (borders[index + 1] - borders[index]) / 1e9 for index, phase in enumerate(PHASES)}


def inject_fault(job: ClusterJob, before: Mapping[int, WorkerEvent]) -> tuple[int, str]:
    """Cause the row's fault; return when, and which node is lost (or new)."""
    fault_ns = time.monotonic_ns()
    if job.row == "join":
        job.start("c")
        job.events.until(lambda: job.events.agents.get("c"), FORM_S)
        return job.events.agents["c"], "c"
    if job.row == "etcd":
        assert job.cluster is not None
        job.cluster.leader().kill()
        return fault_ns, ""
    # Only the row rank0 loses the node with stock's store (a), which is rank 0 there.
    rank = 0 if job.row == "rank0" else max(rank for rank, step in before.items() if step.node != "a")
    victim = before[rank]
    if job.link is not None:
        job.link.cut()
        return fault_ns, "c"
    if job.row == "container":
        jobs.kill_whole(job.agents[victim.node].pid)
        return fault_ns, victim.node
    job.agents[victim.node].kill()
    if job.row != "agent":
        os.kill(victim.pid, signal.SIGKILL)
    return fault_ns, victim.node


def observe(side: str, row: str, timeout_s: float) -> Outcome | None:
    """One try; None: the job did not start (its output goes to stderr)."""
    with ClusterJob(side, row) as job:
        events = job.events
        for node in "ab" if row == "join" else "abc":
            job.start(node)
        before = events.until(lambda: events.training(len(job.agents)), FORM_S)
        if before is None:
            print(f"{side} {row}: did not start\n{job.output()}", file=sys.stderr)
            return None
        if side in ("warm", "embedded-warm"):
            for agent in job.agents.values():
                await_standbys(agent.pid, 1)
        old = set(events.first)  # including those of a smaller round that formed before the last node came
        fault_ns, lost = inject_fault(job, before)
        if row == "etcd":
            return _trains_on(events, old, {step.pid for step in before.values()}, 1.5 * LEASES_S[side])
        remaining = {name: agent.pid for name, agent in job.agents.items() if name != lost or row == "join"}
        stopping = [step.pid for step in before.values() if step.node in remaining]
        world = len(remaining)

        def settled() -> Outcome | None:
            there = {step.rank: step for step in events.first.values() if step.world == world and step.pid not in old}
            if len(there) == world and all(pid in events.ended_ns for pid in stopping):
                found = phases(fault_ns, [events.ended_ns[pid] for pid in stopping], there.values(), events.made_ns)
                return Outcome(Result.TRAINS_AGAIN, sum(found.values()), found)
            ends_ns = [events.ended_ns[pid] for pid in remaining.values() if pid in events.ended_ns]
            return Outcome(Result.DIES, (max(ends_ns) - fault_ns) / 1e9) if len(ends_ns) == len(remaining) else None

        outcome = events.until(settled, timeout_s) or Outcome(Result.NOTHING, timeout_s)
        if outcome.result is not Result.TRAINS_AGAIN:
            print(f"{side} {row}: {outcome.result.value}\n{job.output()}", file=sys.stderr)
        return outcome


def _trains_on(events: JobEvents, old: set[int], running: set[int], hold_s: float) -> Outcome:
    """Whether every worker trains on for `hold_s`, and the longest pause between two steps."""
    events.pause_ns.clear()
    changed = events.until(lambda: True if events.first.keys() - old or events.ended_ns.keys() & running else None, hold_s)
    return Outcome(Result.RESTARTS if changed else Result.TRAINS_ON, max(events.pause_ns.values(), default=0) / 1e9)


@dataclass
class Cell:
    """The outcomes of one side in one row."""

    outcomes: list[Outcome] = field(default_factory=list)
    not_up: int = 0

    def add(self, outcome: Outcome | None) -> None:
        if outcome is None:
            self.not_up += 1
        else:
            self.outcomes.append(outcome)

    @property
    def total_s(self) -> float | None:
        """The median, if all train again."""
        again = {o.result for o in self.outcomes} == {Result.TRAINS_AGAIN}
        return measure.median([o.after_s for o in self.outcomes]) if again else None

    @property
    def phases_s(self) -> dict[str, float | None]:
        return {phase: measure.median([o.phases_s[phase] for o in self.outcomes if o.phases_s]) for phase in PHASES}

    def shown(self) -> str:
        if (total_s := self.total_s) is not None:
            return f"{total_s:.2f} ({' + '.join(measure.shown(seconds) for seconds in self.phases_s.values())})"
        worst = {result: max((o.after_s for o in self.outcomes if o.result is result), default=None) for result in Result}
        return "; ".join(f"{result.value} {SHOWN[result].format(s)}" for result, s in worst.items() if s is not None) or "-"

    def record(self) -> dict[str, Any]:
        return {
            "median_s": measure.rounded(self.total_s),
            "phases_s": {phase: measure.rounded(seconds) for phase, seconds in self.phases_s.items()},
            "outcomes": [[outcome.result.value, measure.rounded(outcome.after_s)] for outcome in self.outcomes],
            "not_up": self.not_up,
        }


def skip_reason(row: str, side: str) -> str | None:
    """Why this cannot be measured; None: it can."""
    if row == "etcd" and side not in LEASES_S:
        return "its store is one process; see the row of rank 0"
    if row == "link" and os.geteuid() != 0:
        return "a network namespace needs root"
    return None


def draw(figure: Any, found: Mapping[str, Mapping[str, Cell]]) -> None:
    """A bar per row and side, stacked by phase, or text if it never trains again."""
    axes = figure.subplots()
    bars = [(row, side, cell) for row, cells in found.items() for side, cell in cells.items() if row != "etcd"]
    left = [0.0] * len(bars)
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        widths = [(cell.phases_s[phase] or 0.0) if cell.total_s is not None else 0.0 for _, _, cell in bars]
        drawn = axes.barh(range(len(bars)), widths, 0.7, left=left, color=colour, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.bar_label(drawn, [measure.shown(c.total_s, 1) if c.total_s is not None else c.shown() for _, _, c in bars], padding=3)
    axes.set_yticks(range(len(bars)), [f"{ROWS[row]}: {side}" for row, side, _ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seconds until all train again")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.set_size_inches(9, 1.5 + 0.28 * len(bars))


def _chosen(parser: argparse.ArgumentParser, given: str, known: Mapping[str, Any]) -> list[str]:
    chosen = given.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"unknown {unknown[0]!r}; expected some of {', '.join(known)}")
    return chosen


def measure_row(row: str, tries: Mapping[str, int], timeout_s: float) -> dict[str, Cell]:
    """Try the sides in turns. A side that did nothing until the timeout gets no further tries."""
    cells = {side: Cell() for side in tries}
    left = {side: count for side, count in tries.items() if skip_reason(row, side) is None}
    while left := {side: count for side, count in left.items() if count > 0}:
        for side in list(left):
            outcome = observe(side, row, timeout_s)
            cells[side].add(outcome)
            left[side] = 0 if outcome is not None and outcome.result is Result.NOTHING else left[side] - 1
            shown = Cell([outcome]).shown() if outcome is not None else "did not start"
            print(f"{row} {side}: {shown}", file=sys.stderr, flush=True)
    return cells


def report(
    found: Mapping[str, Mapping[str, Cell]], sides: list[str], tries: Mapping[str, int]
) -> tuple[str, list[dict[str, Any]]]:
    """The table, and the rows of the JSON line."""
    records, rows = [], []
    for row, cells in found.items():
        ours = cells["ours"].total_s if "ours" in cells else None
        ratios = {side: measure.ratio(cells[side].total_s, ours) for side in ("stock", "tuned") if side in cells}
        skipped = {side: reason for side in cells if (reason := skip_reason(row, side)) is not None}
        shown_ratios = " / ".join(measure.shown(value, 1) for value in ratios.values()) or "-"
        rows.append([ROWS[row], *("-" if side in skipped else cells[side].shown() for side in sides), shown_ratios])
        ratio = {side: measure.rounded(value) for side, value in ratios.items()}
        records.append({"row": row, **{side: cells[side].record() for side in sides}, "ratio": ratio, "skipped": skipped})
    text = measure.table(["seconds until all train again", *sides, "stock / ours, tuned / ours"], rows)
    text += (
        f"\n\nMedians of {', '.join(f'{count} ({side})' for side, count in tries.items())}. In brackets: {' + '.join(PHASES)}."
    )
    return text, records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="number of tries of each side")
    parser.add_argument("--stock-repeat", type=int, default=1, help="number of tries of stock with defaults, about 50 s each")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated, from: {', '.join(ROWS)}")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"comma-separated, from: {', '.join(SIDES)}")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds to wait for a job to train again")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    rows, sides = _chosen(parser, args.rows, ROWS), _chosen(parser, args.sides, SIDES)

    # Leave through the with blocks, so that no agent and no namespace stays.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    machine = measure.machine()
    tries = {side: min(args.repeat, args.stock_repeat) if side == "stock" else args.repeat for side in sides}
    found = {row: measure_row(row, tries, args.timeout) for row in rows}
    text, records = report(found, sides, tries)
    record = {"benchmark": "node_loss", "rows": records, "tries": tries, "timeout_s": args.timeout, "machine": machine}
    measure.publish(args.results, record, text, lambda figure: draw(figure, found))
    bad = {Result.NOTHING, Result.DIES, Result.RESTARTS}
    ours = [cells[side] for cells in found.values() for side in cells if side in LEASES_S]
    return 1 if any(cell.not_up or bad & {o.result for o in cell.outcomes} for cell in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
