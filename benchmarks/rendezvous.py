"""What does the protocol cost: how long do N nodes take to get their ranks, and new ones after one is lost?

    python benchmarks/rendezvous.py [--sizes 16,64,128,256,1024,4096] [--repeat 3]

All nodes and the server share this machine. Real participants, many in a process, share an etcd connection and a few threads, so
that this measures requests and not 4,096 interpreters: no stores, no links. handlers.py measures all that an agent has, against
stock. Embedded: on the store of ext_c10d, which is made for 64 nodes at most, instead of etcd.

    form      all start at once, until the last one has its rank
    re-join   one node leaves (its lease is revoked, as by another node when an agent dies), until all others have their ranks in
              the next round

etcd counts the operations: every message that it received, also on streams. Bytes are those of its messages in both directions,
without the HTTP/2 and TCP around them.

The sketch (workers/etcd_sketch.py) does the same with plain gRPC calls, in the same number of processes and connections, in the
same run. The aim is to form within 3 times the sketch's time at 128, 1,024 and 4,096 agents. The grouped sketch has one lease per
process and puts many keys at once, which agents on hosts of their own could not do. DESIGN.md's figures for a sketch of these
sizes come from another machine; they are shown for comparison. Figures are medians.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import etcd_traffic
import measure
from agent_processes import AgentProcesses, AgentsFailed, split_agents

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.embedded_server import EmbeddedServer

DESIGN_S = {128: 0.05, 1024: 0.26, 4096: 1.3}  # DESIGN.md: the first forming of a sketch, etcd included, on another machine
MAX_TIMES_SKETCH = 3.0  # times the sketch
MAX_OPERATIONS = 10.0  # per node and phase, at every size
LEASE_TTL_S = 60  # default 10; longer here, because one process keeps thousands of leases alive
EMBEDDED_MOST = 64  # agents
SLACK_S = 30.0  # for a process to report that it has exceeded its own limit


Served: TypeAlias = Callable[[], etcd_traffic.Traffic]


@dataclass(frozen=True)
class Phase:
    """One forming or re-joining. `*_node` figures are per agent; CPU seconds are of all processes together."""

    seconds: float
    operations_node: float
    bytes_node: float
    pushed_node: float
    client_cpu_s: float
    server_cpu_s: float
    methods_node: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """The phases of one side at one size; None: it was not reached, and `why` says why."""

    form: Phase | None
    rejoin: Phase | None
    why: str = ""


def phase(seconds: float, agents: int, served: etcd_traffic.Traffic, client_cpu_s: float) -> Phase:
    methods = {name: count / agents for name, count in served.requests.items()}
    size = (served.bytes_in + served.bytes_out) / agents
    return Phase(seconds, sum(methods.values()), size, served.pushed / agents, client_cpu_s, served.cpu_s, methods)


def ours(size: int, args: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, etcd_traffic.etcd(Path(folder), args.fsync) as endpoint:
        return _participants(size, args, endpoint, functools.partial(etcd_traffic.traffic, endpoint))


def embedded(size: int, args: argparse.Namespace) -> Outcome:
    with EmbeddedServer() as server:
        assert server.process is not None
        stat = Path(f"/proc/{server.process.pid}/stat")

        def served() -> etcd_traffic.Traffic:
            ticks = stat.read_text().rpartition(")")[2].split()[11:13]  # utime, stime (proc_pid_stat(5))
            return etcd_traffic.Traffic({}, 0.0, 0.0, 0.0, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))

        return _participants(size, args, server.endpoint, served)


def _participants(size: int, args: argparse.Namespace, endpoint: str, served: Served) -> Outcome:
    job = {"endpoint": endpoint, "run_id": "benchmark", "min": size - 1, "max": size, "ttl": LEASE_TTL_S, "loops": args.loops}
    job |= {"clients": args.clients, "own_connections": True, "timeout": args.timeout}
    jobs = [{**job, "first": first, "count": count} for first, count in split_agents(size, args.processes)]
    with AgentProcesses("etcd_agents.py", jobs) as agents:
        form = rejoin = None
        try:
            form = _ours_phase(agents, served, args, size, do="form")
            rejoin = _ours_phase(agents, served, args, size, do="lose", node=size // 2, round=2)
        except AgentsFailed as error:
            return Outcome(form, rejoin, str(error))
        return Outcome(form, rejoin)


def _ours_phase(agents: AgentProcesses, traffic: Served, args: argparse.Namespace, size: int, **command: Any) -> Phase:
    cpu_s = _cpu_s(agents.ask(SLACK_S, do="cpu"))
    before = traffic()
    began = time.monotonic()
    answers = agents.ask(args.timeout + SLACK_S, **command)
    served = traffic() - before
    began = next((answer["began"] for answer in answers if "began" in answer), began)
    return phase(max(answer["at"] for answer in answers) - began, size, served, _cpu_s(answers) - cpu_s)


def _cpu_s(answers: Sequence[dict[str, Any]]) -> float:
    return sum(answer["cpu_s"] for answer in answers)


def sketch(size: int, args: argparse.Namespace, grouped: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, etcd_traffic.etcd(Path(folder), args.fsync) as endpoint:
        job = {"endpoint": endpoint, "run_id": "sketch", "size": size, "ttl": LEASE_TTL_S, "grouped": grouped}
        job["timeout"] = args.timeout
        jobs = [{**job, "first": first, "count": count} for first, count in split_agents(size, args.processes)]
        with AgentProcesses("etcd_sketch.py", jobs) as agents:
            try:
                return Outcome(
                    _ours_phase(agents, functools.partial(etcd_traffic.traffic, endpoint), args, size, do="form"), None
                )
            except AgentsFailed as error:
                return Outcome(None, None, str(error))


def median_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The median forming and the median re-join, each with its own figures. One that failed counts as the slowest."""
    forms, rejoins = ([getattr(found, part) for found in outcomes] for part in ("form", "rejoin"))
    whys = [found.why for found in outcomes if found.why]
    return Outcome(_median_phase(forms), _median_phase(rejoins), next(iter(whys), ""))


def _median_phase(phases: Sequence[Phase | None]) -> Phase | None:
    ranked = sorted(phases, key=lambda each: each.seconds if each else float("inf"))
    return ranked[(len(ranked) - 1) // 2]


def verdict(found: dict[int, dict[str, Outcome]]) -> dict[str, Any]:
    """The aims, and whether they were reached; None: not measured."""
    formed = {size: sides["ours"].form for size, sides in found.items()}
    near = {size: times_the_sketch(sides) for size, sides in found.items()}
    aimed = [near[size] for size in DESIGN_S if size in near]
    phases = [each for sides in found.values() for each in (sides["ours"].form, sides["ours"].rejoin) if each]
    bytes_node = [each.bytes_node for each in formed.values() if each]
    return {
        "times_the_sketch": {str(size): measure.rounded(times) for size, times in near.items()},
        "within_3_times_the_sketch": all(times is not None and times <= MAX_TIMES_SKETCH for times in aimed) if aimed else None,
        "times_the_grouped_sketch": {
            str(size): measure.rounded(times_the_sketch(sides, "grouped sketch")) for size, sides in found.items()
        },
        "times_the_figures_of_DESIGN": {
            str(size): measure.rounded(each.seconds / DESIGN_S[size])
            for size, each in formed.items()
            if each and size in DESIGN_S
        },
        "operations_10_or_fewer": all(each.operations_node <= MAX_OPERATIONS for each in phases) if phases else None,
        "bytes_node_most_by_least": measure.rounded(max(bytes_node) / min(bytes_node), 2) if bytes_node else None,
    }


def times_the_sketch(sides: dict[str, Outcome], side: str = "sketch") -> float | None:
    floor, mine = sides.get(side, Outcome(None, None)).form, sides["ours"].form
    return mine.seconds / floor.seconds if floor and mine else None


def row_cells(size: int, sides: dict[str, Outcome]) -> list[str]:
    mine = sides["ours"]

    def figure(found: Phase | None, name: str, digits: int = 2, scale: float = 1.0) -> str:
        return measure.shown(getattr(found, name) * scale if found else None, digits)

    floors = [sides.get(side, Outcome(None, None)).form for side in SKETCHES]
    cells = [str(size), figure(mine.form, "seconds"), *(figure(floor, "seconds") for floor in floors)]
    cells += [measure.shown(times_the_sketch(sides), 1), figure(mine.rejoin, "seconds")]
    own = sides.get("embedded", Outcome(None, None))
    cells += [figure(own.form, "seconds"), figure(own.rejoin, "seconds")]
    cells += [f"{figure(own.form, 'server_cpu_s')} + {figure(own.rejoin, 'server_cpu_s')}"]
    for name, digits, scale in (("operations_node", 1, 1.0), ("bytes_node", 2, 1e-3)):
        cells += [figure(mine.form, name, digits, scale), figure(mine.rejoin, name, digits, scale)]
    for name in ("client_cpu_s", "server_cpu_s"):
        cells += [f"{figure(mine.form, name)} + {figure(mine.rejoin, name)}"]
    return cells


HEADER = (
    *("agents", "form s", "sketch s", "grouped sketch s", "ours / sketch", "re-join s"),
    *("embedded form s", "embedded re-join s", "embedded server CPU s"),
    *("form ops/node", "re-join ops/node", "form kB/node", "re-join kB/node"),
    *("client CPU s", "server CPU s"),
)


def draw(figure: Any, found: dict[int, dict[str, Outcome]]) -> None:
    times, costs = figure.subplots(1, 2)

    def line(axes: Any, side: str, part: str, name: str, scale: float, **style: Any) -> None:
        phases = {size: getattr(sides[side], part) for size, sides in found.items() if side in sides}
        points = [(size, getattr(each, name) * scale) for size, each in phases.items() if each]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{side}, {part.replace('rejoin', 're-join')}", **style)

    for axes, title in ((times, "seconds until all have their rank"), (costs, "per node: operations (line), kB (dashed)")):
        axes.set(title=title, xlabel="agents", xscale="log", yscale="log")
        axes.set_xticks(list(found), [str(size) for size in found])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    for side, colours in (("ours", ("#4c9f70", "#5b8fb9")), ("embedded", ("#8e6bbf", "#c3a6e0"))):
        for part, colour in zip(("form", "rejoin"), colours, strict=True):
            line(times, side, part, "seconds", 1.0, color=colour)
            line(costs, side, part, "operations_node", 1.0, color=colour)
            line(costs, side, part, "bytes_node", 1e-3, color=colour, linestyle="--")
    line(times, "sketch", "form", "seconds", 1.0, color="black", linestyle=":")
    times.legend(frameon=False)


SIDES = {"ours": ours, "sketch": sketch, "grouped sketch": functools.partial(sketch, grouped=True)}
SKETCHES = ("sketch", "grouped sketch")


def measured(args: argparse.Namespace) -> dict[int, dict[str, Outcome]]:
    found: dict[int, dict[str, Outcome]] = {}
    for size in args.sizes:
        # In turns, so that a busy machine hits all sides.
        tries = [{side: _one_try(side, run, size, args) for side, run in SIDES.items()} for _ in range(args.repeat)]
        found[size] = {side: median_outcome([each[side] for each in tries]) for side in SIDES}
        if size <= EMBEDDED_MOST:
            found[size]["embedded"] = median_outcome([_one_try("embedded", embedded, size, args) for _ in range(args.repeat)])
    return found


def _one_try(side: str, run: Any, size: int, args: argparse.Namespace) -> Outcome:
    outcome: Outcome = run(size, args)
    parts = [measure.shown(part.seconds, 3) if part else "-" for part in (outcome.form, outcome.rejoin)]
    print(f"{size} {side}: form {parts[0]} s, re-join {parts[1]} s {outcome.why}", file=sys.stderr, flush=True)
    return outcome


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default=[16, 64, 128, 256, 1024, 4096], help="numbers of agents")
    parser.add_argument("--repeat", type=int, default=3, help="number of tries")
    parser.add_argument("--processes", type=int, default=2, help="number of processes that run our agents")
    parser.add_argument("--clients", type=int, default=1, help="number of etcd connections in each of them")
    parser.add_argument("--loops", type=int, default=8, help="number of worker threads in each of them")
    parser.add_argument("--timeout", type=float, default=120.0, help="limit for a phase, in seconds")
    parser.add_argument("--fsync", action="store_true", help="make etcd sync its writes to disk")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    return parser.parse_args()


def main() -> int:
    args = options()
    machine = measure.machine()
    found = measured(args)
    reached = verdict(found)
    text = measure.table(HEADER, [row_cells(size, sides) for size, sides in found.items()])
    shared = f"{args.processes} processes, {args.clients} connection(s) and {args.loops} threads in each"
    text += f"\n\nOurs: {shared}; medians of {args.repeat}. The sketches: the same processes, one connection in"
    text += f" each, in turns with ours. etcd {'with' if args.fsync else 'without'} fsync."
    text += " CPU: to form + to re-join."
    text += "".join(
        f"\n{side.capitalize()} at {size}: {sides[side].why}."
        for size, sides in found.items()
        for side in sides
        if sides[side].why
    )
    text += "\n\n" + "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in reached.items())
    rows = [{"agents": size, **{side: asdict(outcome) for side, outcome in sides.items()}} for size, sides in found.items()]
    record = {"benchmark": "rendezvous", "rows": rows, "reached": reached, "repeat": args.repeat, "fsync": args.fsync}
    record |= {"processes": args.processes, "clients": args.clients, "loops": args.loops, "machine": machine}
    measure.publish(args.results, record, text, lambda figure: draw(figure, found))
    return 1 if any(sides["ours"].why for sides in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
