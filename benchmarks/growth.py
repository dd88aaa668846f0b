"""How does a job's coordination grow with its nodes? Full handlers on one etcd: their times after each kind of event, and a fit.

    python benchmarks/growth.py [--sizes 64,128,256,512] [--repeat 3] [--processes 8] [--minutes 1]

Handlers as in handlers.py, 32 of them in a process of their own (a rack) and one in another; lease_ttl is 60 s. All share this
machine with their server, so it does the work of all nodes. In seconds:

    form      all start at once, until the last one has its rank
    verdict   the workers of 32 nodes fail, until the last of these nodes has the verdict on 32 reports
    rejoin    the same, until all nodes have their ranks in the next round
    seen 1    a node is killed, until all others know (by links, not by leases)
    lose 1    the same, until they have their ranks in the next round
    seen 32, lose 32   a rack is killed

Between form and verdict all write their status and goodput for --minutes, as often as agents do: what etcd serves meanwhile.

fit: seconds = a + b * nodes by least squares over the sizes, for more nodes: for what grows linearly. It knows nothing of limits.
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
SLACK_S = 60.0  # for a process to report that it has exceeded its own limit
PARTS = ("form", "verdict", "rejoin", "seen 1", "lose 1", "seen 32", "lose 32")
FITTED = (4096, 16384)


def one_try(size: int, args: argparse.Namespace, measures_traffic: bool) -> dict[str, float]:
    """Return seconds by part; traffic per minute. Raises AgentsFailed."""
    others = [count for _, count in split_agents(size - RACK - 1, args.processes)]
    job = {"backend": "ext_etcd", "groups": [1, RACK, *others], "least": 1, "timeout": args.timeout}
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        etcd_traffic.etcd(Path(folder), fsync=False) as endpoint,
        AgentProcesses("handlers.py", [{**job, "endpoint": endpoint}]) as handlers,
    ):

        def ask(**command: Any) -> dict[str, float]:
            [answer] = handlers.ask(args.timeout + command.get("seconds", 0.0) + SLACK_S, **command)
            return {name: value - answer["began"] for name, value in answer.items() if name in ("at", "seen", "verdict")}

        found["form"] = ask(do="form")["at"]
        if measures_traffic:
            before = etcd_traffic.traffic(endpoint)
            ask(do="share", seconds=60 * args.minutes)
            spent = etcd_traffic.traffic(endpoint) - before
            found["requests/min"] = sum(spent.requests.values()) / args.minutes
            found["MB/min"] = (spent.bytes_in + spent.bytes_out) / 1e6 / args.minutes
            found["etcd CPU s/min"] = spent.cpu_s / args.minutes
        failed = ask(do="fail", group=1)
        found["verdict"], found["rejoin"] = failed["verdict"], failed["at"]
        for group, nodes in ((0, 1), (1, RACK)):
            lost = ask(do="lose", group=group)
            found[f"seen {nodes}"], found[f"lose {nodes}"] = lost["seen"], lost["at"]
    print(f"{size}: {found}", file=sys.stderr, flush=True)
    return found


def fit(points: list[tuple[int, float]]) -> dict[str, float]:
    """Return a and b of seconds = a + b * nodes, and the seconds at FITTED."""
    slope, base = numpy.polyfit(*zip(*points, strict=True), 1)
    return {"a": float(base), "b": float(slope)} | {str(nodes): float(base + slope * nodes) for nodes in FITTED}


def draw(figure: Any, rows: list[dict[str, Any]], fits: dict[str, dict[str, float]]) -> None:
    axes = figure.subplots()
    for part in ("form", "lose 1", "lose 32", "verdict"):
        [line] = axes.plot([row["nodes"] for row in rows], [row[part] for row in rows], marker="o", label=part)
        axes.plot(FITTED, [fits[part][str(nodes)] for nodes in FITTED], marker="x", linestyle=":", color=line.get_color())
    axes.set(title="seconds by nodes; dotted: the fit", xlabel="nodes", xscale="log", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default=[64, 128, 256, 512], help="numbers of nodes, two or more")
    parser.add_argument("--repeat", type=int, default=3, help="tries of each size")
    parser.add_argument("--processes", type=int, default=8, help="processes for the handlers that stay")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the traffic is measured")
    parser.add_argument("--timeout", type=float, default=120.0, help="limit for a round, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    if len(args.sizes) < 2 or min(args.sizes) <= RACK + 1:
        parser.error(f"--sizes={args.sizes}: expected two or more sizes over {RACK + 1}")
    machine, rows = measure.machine(), list[dict[str, Any]]()
    for size in args.sizes:
        try:
            tries = [one_try(size, args, index == 0) for index in range(args.repeat)]
        except AgentsFailed as error:
            rows.append({"nodes": size, "why": str(error)})
            print(f"{size}: {error}", file=sys.stderr, flush=True)
            continue
        middle = {part: measure.rounded(measure.median([each[part] for each in tries])) for part in PARTS}
        rows.append({"nodes": size, **middle, **{name: tries[0][name] for name in tries[0] if "/min" in name}, "tries": tries})
    formed = [row for row in rows if "why" not in row]
    fits = {part: fit([(row["nodes"], row[part]) for row in formed]) for part in PARTS} if len(formed) > 1 else {}
    traffic = ("requests/min", "MB/min", "etcd CPU s/min")
    header = ("nodes", *(f"{part} s" for part in PARTS), *traffic)
    cells = [[f"{row['nodes']:,}", *(measure.shown(row.get(each), 2) for each in (*PARTS, *traffic))] for row in rows]
    cells += [
        [f"fit: {nodes:,}", *(measure.shown(fits[part][str(nodes)], 1) for part in PARTS), "-", "-", "-"]
        for nodes in FITTED
        if fits
    ]
    text = measure.table(header, cells) + "".join(f"\n\n{row['nodes']}: {row['why']}" for row in rows if "why" in row)
    record = {"benchmark": "growth", "rows": rows, "fits": fits, "repeat": args.repeat, "machine": machine}
    measure.publish(args.results, record, text, lambda figure: draw(figure, formed, fits) if fits else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
