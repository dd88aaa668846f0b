"""What does an idle job of 128 nodes cost its store? Ours on etcd, stock's c10d on its TCPStore.

    python benchmarks/steady_state.py [--agents 128] [--seconds 20]

Each agent has its own connection, as on a node of its own. Ours keeps its lease alive and does nothing else. Stock sends a
keep-alive every 5 s, and its monitor loop calls num_nodes_waiting() every 0.1 s (torchrun's --monitor-interval), which reads the
store once a second. Both run with defaults.

Bytes are what /proc/net/dev counts on the loopback device: everything including TCP and IP headers and answers, each packet once.
The benchmark first moves into a network namespace of its own, to exclude other traffic; if it may not, it says so and counts all.
etcd leases and gRPC connections have rhythms of up to 10 s, so measure for at least 20 s.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import etcd_traffic
import measure
from agent_processes import AgentProcesses, split_agents

MIN_BYTES_RATIO = 100.0  # the aim: this many times fewer than stock
MONITOR_INTERVAL_S = 0.1  # torchrun's default
READY_S = 180.0
QUIET_S = 0.5  # with keep-alives only; after it the round has formed
_ALONE = "ELASTIC_EXT_BENCHMARK_ALONE"  # set for the copy of this process that runs in its own network namespace
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h


@dataclass(frozen=True)
class IdleRates:
    """Rates per second. requests_s: by kind, counted by etcd, or for stock by the agents. CPU: of all processes."""

    requests_s: dict[str, float]
    bytes_s: float
    client_cpu: float
    server_cpu: float


def loopback_bytes(table: str) -> int:
    """Bytes that the loopback device has received, which is also all that was sent on it. table: the text of /proc/net/dev."""
    for line in table.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise ValueError("no line for lo: expected Linux's /proc/net/dev")


def _loopback_bytes() -> int:
    return loopback_bytes(Path("/proc/net/dev").read_text())


def idle_for(seconds: float) -> None:
    """The measurement itself: time passes, and no event ends it."""
    time.sleep(seconds)


def observe(seconds: float, ask: Callable[[], tuple[dict[str, float], float, float]]) -> IdleRates:
    """ask: returns the requests by kind so far, and the CPU seconds of the clients and of the server so far."""
    requests, client_s, server_s = ask()
    lo, began = _loopback_bytes(), time.monotonic()
    idle_for(seconds)
    lo, took = _loopback_bytes() - lo, time.monotonic() - began
    later, client_later_s, server_later_s = ask()
    rates = {name: (count - requests.get(name, 0.0)) / took for name, count in later.items() if count != requests.get(name, 0.0)}
    return IdleRates(rates, lo / took, (client_later_s - client_s) / took, (server_later_s - server_s) / took)


def ours(agents: int, seconds: float, processes: int, lease_ttl_s: int) -> IdleRates:
    with tempfile.TemporaryDirectory() as folder, etcd_traffic.etcd(Path(folder), fsync=False) as endpoint:
        job = {"endpoint": endpoint, "run_id": "benchmark", "min": agents, "max": agents, "ttl": lease_ttl_s, "loops": 4}
        job |= {"own_connections": True, "timeout": READY_S}
        jobs = [{**job, "first": first, "count": count, "clients": count} for first, count in split_agents(agents, processes)]
        with AgentProcesses("etcd_agents.py", jobs) as members:
            members.ask(READY_S, do="form")

            def ask() -> tuple[dict[str, float], float, float]:
                served = etcd_traffic.traffic(endpoint)
                return served.requests, sum(answer["cpu_s"] for answer in members.ask(READY_S, do="cpu")), served.cpu_s

            await_quiet(endpoint)
            return observe(seconds, ask)


def await_quiet(endpoint: str) -> None:
    """Wait until the last node has its watches, so that forming the round is not measured."""
    deadline = time.monotonic() + READY_S
    before = etcd_traffic.traffic(endpoint)
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        after = etcd_traffic.traffic(endpoint)
        if (after - before).requests.keys() <= {"LeaseKeepAlive"}:
            return
        before = after


def stock(agents: int, seconds: float, processes: int) -> IdleRates:
    with AgentProcesses("stock_agents.py", [{"host": True}]) as host:
        job = {"host": False, "port": host.up[0]["port"], "run_id": "benchmark", "min": agents, "max": agents, "timeout": READY_S}
        jobs = [{**job, "count": count} for _, count in split_agents(agents, processes)]
        with AgentProcesses("stock_agents.py", jobs) as members:
            members.ask(READY_S, do="form")
            members.ask(READY_S, do="poll", interval=MONITOR_INTERVAL_S)

            def ask() -> tuple[dict[str, float], float, float]:
                answers = members.ask(READY_S, do="count")
                counts = {name: float(sum(answer[name] for answer in answers)) for name in ("gets", "sets", "conflicts")}
                [server] = host.ask(READY_S, do="cpu")
                return counts, sum(answer["cpu_s"] for answer in answers), server["cpu_s"]

            return observe(seconds, ask)


def move_into_a_namespace() -> bool:
    """Start this program again in a network namespace of its own; return False if the system does not allow that."""
    if _ALONE in os.environ:
        _start_loopback()
        return True
    unshare = shutil.which("unshare")
    own = ("--user", "--map-root-user", "--net")
    if unshare is None or subprocess.run([unshare, *own, "true"], capture_output=True, check=False).returncode != 0:
        return False
    return os.execve(unshare, [unshare, *own, "--", sys.executable, *sys.argv], {**os.environ, _ALONE: "1"})


def _start_loopback() -> None:
    with socket.socket() as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def draw(figure: Any, sides: dict[str, IdleRates]) -> None:
    every = figure.subplots(1, 3)
    figures = {
        "requests/s": lambda side: sum(side.requests_s.values()),
        "kB/s": lambda side: side.bytes_s / 1e3,
        "CPU, % of a core": lambda side: 100 * (side.client_cpu + side.server_cpu),
    }
    for axes, (title, value) in zip(every, figures.items(), strict=True):
        bars = axes.bar(list(sides), [value(side) for side in sides.values()], 0.5, color=("#4c9f70", "#c8553d"))
        axes.bar_label(bars, [measure.shown(value(side), 1) for side in sides.values()], padding=2)
        axes.set(title=title, yscale="log")
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)


def row_cells(name: str, side: IdleRates) -> list[str]:
    kinds = ", ".join(f"{kind} {rate:.1f}" for kind, rate in sorted(side.requests_s.items()))
    rates = [measure.shown(sum(side.requests_s.values()), 1), measure.shown(side.bytes_s / 1e3, 1)]
    return [name, kinds, *rates, measure.shown(100 * side.client_cpu, 1), measure.shown(100 * side.server_cpu, 1)]


def only_keep_alives(side: IdleRates) -> bool:
    """Whether there was nothing but LeaseKeepAlive: no reads, no writes, no new watches."""
    return set(side.requests_s) <= {"LeaseKeepAlive"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=128, help="number of idle agents")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure each side")
    parser.add_argument("--processes", type=int, default=4, help="number of processes that run the agents of a side")
    parser.add_argument("--lease-ttl", type=int, default=10, help="lease TTL of ours in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    alone = move_into_a_namespace()

    machine = measure.machine()
    sides = {
        "ours": ours(args.agents, args.seconds, args.processes, args.lease_ttl),
        "stock": stock(args.agents, args.seconds, args.processes),
    }
    fewer = measure.ratio(sides["stock"].bytes_s, sides["ours"].bytes_s)
    reached = {
        "times_fewer_bytes": measure.rounded(fewer, 1),
        "100_times_fewer_bytes": fewer is not None and fewer >= MIN_BYTES_RATIO,
        "keep_alives_only": only_keep_alives(sides["ours"]),
    }
    header = ["", "requests/s by kind", "requests/s", "kB/s", "clients' CPU %", "server's CPU %"]
    text = measure.table(header, [row_cells(name, side) for name, side in sides.items()])
    text += f"\n\n{args.agents} idle members for {args.seconds:g} s. CPU in % of one core. Ours: lease TTL {args.lease_ttl} s."
    text += "" if alone else " Cannot create a network namespace: the bytes include all other loopback traffic of this host."
    text += "\n\n" + "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in reached.items())
    record = {"benchmark": "steady_state", "agents": args.agents, "seconds": args.seconds, "alone": alone, "reached": reached}
    record |= {name: asdict(side) for name, side in sides.items()} | {"machine": machine}
    measure.publish(args.results, record, text, lambda figure: draw(figure, sides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
