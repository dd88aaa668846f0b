"""How does a job's coordination grow with its nodes? Full handlers on one etcd: their times after each kind of event, and a fit.

    python benchmarks/growth.py [--sizes 64,128,256,512] [--repeat 3] [--processes 8] [--minutes 1]

Handlers as in handlers.py: the leader and another one in processes of their own, and 32 more (a rack); lease_ttl is 60 s. All
share this machine with their server, so it does the work of all nodes. In seconds:

    form      all start at once, until the last one has its rank
    verdict   the workers of 32 nodes fail, until the last of these nodes has the verdict on 32 reports
    rejoin    the same, until all nodes have their ranks in the next round
    seen 1    a node is killed, until all others know (by links, not by leases)
    lose 1    the same, until they have their ranks in the next round
    seen 32, lose 32   a rack is killed

On a cluster each node has its own processors, and only the leader and etcd have more to do the more nodes there are. So their CPU
seconds are measured, too: for each part ("seen" and "verdict" are within the other one).

Between form and verdict all write their status and goodput for --minutes, as often as agents do: what etcd serves meanwhile.

fit: CPU seconds = a + b * nodes by least squares over the sizes, for more nodes: for what grows linearly. It knows nothing of
limits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import etcd_traffic
import measure
import numpy
from agent_processes import AgentProcesses, AgentsFailed, split_agents
from rendezvous import sizes

RACK = 32
LEADER, ONE, OF_RACK = range(3)  # groups
SLACK_S = 60.0  # for a process to report that it has exceeded its own limit
PARTS = ("form", "verdict", "rejoin", "seen 1", "lose 1", "seen 32", "lose 32")
CPU_OF = ("leader", "etcd")
COSTS = tuple(f"{part}: {who}" for part in PARTS if part.partition(" ")[0] in ("form", "rejoin", "lose") for who in CPU_OF)
FITTED = (4096, 16384)


def one_try(size: int, args: argparse.Namespace, measures_traffic: bool) -> dict[str, float]:
    """Return seconds and CPU seconds by part; traffic per minute. Raises AgentsFailed."""
    others = [count for _, count in split_agents(size - RACK - 2, args.processes)]
    job = {"backend": "ext_etcd", "groups": [1, 1, RACK, *others], "least": 1, "timeout": args.timeout}
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        etcd_traffic.etcd(Path(folder), fsync=False) as endpoint,
        AgentProcesses("handlers.py", [{**job, "endpoint": endpoint}]) as handlers,
    ):

        def cpu_s() -> tuple[float, float]:
            [answer] = handlers.ask(SLACK_S, do="cpu")
            return answer["cpu_s_of"][str(LEADER)], etcd_traffic.traffic(endpoint).cpu_s

        def ask(part: str, **command: Any) -> dict[str, float]:
            before = cpu_s()
            [answer] = handlers.ask(args.timeout + command.get("seconds", 0.0) + SLACK_S, **command)
            if part:
                found[part] = answer["at"] - answer["began"]
                spent = zip(CPU_OF, before, cpu_s(), strict=True)
                found.update({f"{part}: {who}": after - was for who, was, after in spent})
            return {name: value - answer["began"] for name, value in answer.items() if name in ("seen", "verdict")}

        ask("form", do="form", first=LEADER)
        if measures_traffic:
            before = etcd_traffic.traffic(endpoint)
            ask("", do="share", seconds=60 * args.minutes)
            spent = etcd_traffic.traffic(endpoint) - before
            found["requests/min"] = sum(spent.requests.values()) / args.minutes
            found["MB/min"] = (spent.bytes_in + spent.bytes_out) / 1e6 / args.minutes
            found["etcd CPU s/min"] = spent.cpu_s / args.minutes
        found["verdict"] = ask("rejoin", do="fail", group=OF_RACK)["verdict"]
        for group, nodes in ((ONE, 1), (OF_RACK, RACK)):
            found[f"seen {nodes}"] = ask(f"lose {nodes}", do="lose", group=group)["seen"]
    print(f"{size}: {found}", file=sys.stderr, flush=True)
    return found


def fit(points: list[tuple[int, float]]) -> dict[str, float]:
    """Return a and b of CPU seconds = a + b * nodes, and the CPU seconds at FITTED."""
    slope, base = numpy.polyfit(*zip(*points, strict=True), 1)
    return {"a": float(base), "b": float(slope)} | {str(nodes): float(base + slope * nodes) for nodes in FITTED}


def draw(figure: Any, rows: list[dict[str, Any]], fits: dict[str, dict[str, float]]) -> None:
    axes = figure.subplots()
    for cost in COSTS:
        [line] = axes.plot([row["nodes"] for row in rows], [row[cost] for row in rows], marker="o", label=cost)
        axes.plot(FITTED, [fits[cost][str(nodes)] for nodes in FITTED], marker="x", linestyle=":", color=line.get_color())
    axes.set(title="CPU seconds by nodes; crosses: the fit", xlabel="nodes", xscale="log", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def shown(rows: list[dict[str, Any]], fits: dict[str, dict[str, float]]) -> str:
    """The tables: seconds and traffic, and CPU seconds with what they are for more nodes."""
    traffic = ("requests/min", "MB/min", "etcd CPU s/min")
    seconds = [[f"{row['nodes']:,}", *(measure.shown(row.get(each), 2) for each in (*PARTS, *traffic))] for row in rows]
    costs = [[f"{row['nodes']:,}", *(measure.shown(row.get(each), 2) for each in COSTS)] for row in rows]
    costs += [[f"fit: {nodes:,}", *(measure.shown(fits[each][str(nodes)], 1) for each in COSTS)] for nodes in FITTED if fits]
    tables = (("nodes", *(f"{part} s" for part in PARTS), *traffic), seconds), (("CPU seconds of", *COSTS), costs)
    return "\n\n".join(measure.table(header, cells) for header, cells in tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default=[64, 128, 256, 512], help="numbers of nodes, two or more")
    parser.add_argument("--repeat", type=int, default=3, help="tries of each size")
    parser.add_argument("--processes", type=int, default=8, help="processes for the handlers that stay")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the traffic is measured")
    parser.add_argument("--timeout", type=float, default=300.0, help="limit for a round, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    if len(args.sizes) < 2 or min(args.sizes) <= RACK + 2:
        parser.error(f"--sizes={args.sizes}: expected two or more sizes over {RACK + 2}")
    machine, rows = measure.machine(), list[dict[str, Any]]()
    for size in args.sizes:
        try:
            tries = [one_try(size, args, index == 0) for index in range(args.repeat)]
        except AgentsFailed as error:
            rows.append({"nodes": size, "why": str(error)})
            print(f"{size}: {error}", file=sys.stderr, flush=True)
            continue
        middle = {name: measure.rounded(measure.median([each[name] for each in tries])) for name in (*PARTS, *COSTS)}
        rows.append({"nodes": size, **middle, **{name: tries[0][name] for name in tries[0] if "/min" in name}, "tries": tries})
    formed = [row for row in rows if "why" not in row]
    fits = {cost: fit([(row["nodes"], row[cost]) for row in formed]) for cost in COSTS} if len(formed) > 1 else {}
    text = shown(rows, fits) + "".join(f"\n\n{row['nodes']}: {row['why']}" for row in rows if "why" in row)
    record = {"benchmark": "growth", "rows": rows, "fits": fits, "repeat": args.repeat, "machine": machine}
    measure.publish(args.results, record, text, lambda figure: draw(figure, formed, fits) if fits else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
