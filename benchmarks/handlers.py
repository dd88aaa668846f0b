"""How long do N agents take to form a round, and to form the next one? Full handlers, ours and stock's, in one run.

    python benchmarks/handlers.py [--sizes 16,64,128] [--repeat 3] [--processes 8]

A handler is all that an agent has for its rounds: on etcd a connection, a store server, a link to its neighbors, a fence; stock's
has a connection to the c10d store and a thread that keeps it alive. All of them, and the server, share this machine, in a few
processes that are forked from one that has imported torch. No worker is started.

    form      all start at once, until the last one has its rank and a connection to the round's store
    re-join   all call next_rendezvous again, until the last one has its rank in the next round

Embedded: ours on the store of ext_c10d, made for 64 nodes at most. Sides take turns; figures are medians, CPU that of all
handlers for both rounds. rendezvous.py measures the protocol alone, without stores and links, up to 4,096 nodes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import etcd_traffic
import measure
from agent_processes import AgentProcesses, AgentsFailed, split_agents
from rendezvous import EMBEDDED_MOST, sizes

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.embedded_server import EmbeddedServer

SLACK_S = 30.0  # for a process to report that it has exceeded its own limit
BACKENDS = {"etcd": "ext_etcd", "embedded": "ext_c10d", "stock": "c10d"}


@dataclass(frozen=True)
class Try:
    """Seconds; None: not in time, and `why` says how far it came. cpu_ms: for each handler and both rounds."""

    form: float | None = None
    rejoin: float | None = None
    cpu_ms: float | None = None
    why: str = ""


@contextmanager
def served(side: str) -> Iterator[str]:
    """Yield the endpoint of a server for one try."""
    if side == "stock":
        with AgentProcesses("stock_agents.py", [{"host": True}]) as host:
            yield f"127.0.0.1:{host.up[0]['port']}"
    elif side == "embedded":
        with EmbeddedServer() as server:
            yield server.endpoint
    else:
        with tempfile.TemporaryDirectory() as folder, etcd_traffic.etcd(Path(folder), fsync=False) as endpoint:
            yield endpoint


def one_try(side: str, size: int, args: argparse.Namespace) -> Try:
    groups = [count for _, count in split_agents(size, args.processes)]
    job = {"backend": BACKENDS[side], "groups": groups, "least": size, "timeout": args.timeout}
    found = Try()
    try:
        with served(side) as endpoint, AgentProcesses("handlers.py", [{**job, "endpoint": endpoint}]) as handlers:
            cpu_s = handlers.ask(SLACK_S, do="cpu")[0]["cpu_s"]
            found = Try(form=_form(handlers, args.timeout))
            found = Try(found.form, rejoin=_form(handlers, args.timeout))
            cpu_s = handlers.ask(SLACK_S, do="cpu")[0]["cpu_s"] - cpu_s
            found = Try(found.form, found.rejoin, 1000 * cpu_s / size)
    except AgentsFailed as error:
        found = Try(found.form, found.rejoin, why=str(error))
    print(f"{size} {side}: {found}", file=sys.stderr, flush=True)
    return found


def _form(handlers: AgentProcesses, timeout_s: float) -> float:
    began = time.monotonic()
    at: float = handlers.ask(timeout_s + SLACK_S, do="form")[0]["at"]
    return at - began


def summary(tries: list[Try]) -> dict[str, Any]:
    """The medians of what was measured, and why something was not."""

    def middle(name: str) -> float | None:
        values = [getattr(each, name) for each in tries]
        return measure.rounded(measure.median(values)) if None not in values else None

    why = next((each.why for each in tries if each.why), "")
    return {name: middle(name) for name in ("form", "rejoin", "cpu_ms")} | {"why": why, "tries": [asdict(each) for each in tries]}


def cells(row: dict[str, Any]) -> list[str]:
    """The columns of HEADER."""
    sides = [row.get(side, {}) for side in BACKENDS]
    found = [str(row["agents"])]
    for name, digits in (("form", 2), ("rejoin", 2), ("cpu_ms", 0)):
        found += [measure.shown(side.get(name), digits) for side in sides]
    return [*found, measure.shown(measure.ratio(sides[2].get("rejoin"), sides[0].get("rejoin")), 0)]


HEADER = (
    "agents",
    *(f"{side}: {what}" for what in ("form s", "re-join s", "CPU ms/agent") for side in BACKENDS),
    "re-join: stock / etcd",
)
COLOURS = {"etcd": "#4c9f70", "embedded": "#8e6bbf", "stock": "#c8553d"}


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    for axes, part in zip(figure.subplots(1, 2), ("form", "rejoin"), strict=True):
        for side, colour in COLOURS.items():
            points = [(row["agents"], row[side][part]) for row in rows if row.get(side, {}).get(part)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=side)
        axes.set(title=f"seconds to {part.replace('rejoin', 're-join')}", xlabel="agents", xscale="log", yscale="log")
        axes.set_xticks([row["agents"] for row in rows], [str(row["agents"]) for row in rows])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, default=[16, 64, 128], help="numbers of agents")
    parser.add_argument("--repeat", type=int, default=3, help="tries of each side")
    parser.add_argument("--processes", type=int, default=8, help="processes for all handlers of a side")
    parser.add_argument("--timeout", type=float, default=60.0, help="limit for a round, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine, rows = measure.machine(), []
    for size in args.sizes:
        sides = [side for side in BACKENDS if side != "embedded" or size <= EMBEDDED_MOST]
        tries = [{side: one_try(side, size, args) for side in sides} for _ in range(args.repeat)]
        rows.append({"agents": size, **{side: summary([each[side] for each in tries]) for side in sides}})
    text = measure.table(HEADER, map(cells, rows))
    whys = [(side, row["agents"], row[side]["why"]) for row in rows for side in BACKENDS if side in row]
    text += "".join(f"\n\n{side} at {size}: {why}" for side, size, why in whys if why)
    record = {"benchmark": "handlers", "rows": rows, "repeat": args.repeat, "processes": args.processes, "machine": machine}
    measure.publish(args.results, record, text, lambda figure: draw(figure, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
