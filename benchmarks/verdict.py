"""How long until every node knows what a failure means? Three nodes; rank 1 raises NameError in mid-training.

    python benchmarks/verdict.py [--repeat 5]

    verdict   from the exception until every agent has shown the verdict (ours; stock has none)
    gone      from the exception until every agent has exited

Ours is --rdzv-backend=ext_etcd with defaults, including its settle time of 0.5 s; stock is c10d. Both run with --max-restarts=0,
the only way to keep stock from restarting. Each agent has one worker.
"""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import measure

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.etcd_server import EtcdServer, free_port

SCRIPT = Path(__file__).with_name("workers") / "one_raises.py"
NODES = 3
VERDICT = b"elastic_ext: stop:"
AIM_S = 1.0


@dataclass(frozen=True)
class AgentTimes:
    """Seconds from the exception to the slowest node; None: not seen. codes: the exit codes of all agents."""

    verdict_s: float | None
    gone_s: float | None
    codes: tuple[int | None, ...]


def run_job(side: str, timeout_s: float) -> AgentTimes:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stamps = Path(directory, "stamps")
        ours = side == "ours"  # each try has its own etcd, because everything that is left of a try is killed
        endpoint = stack.enter_context(EtcdServer(Path(directory))).endpoint if ours else f"localhost:{free_port()}"
        where = [
            f"--rdzv-backend={'ext_etcd' if ours else 'c10d'}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={os.path.basename(directory)}",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *where, f"--nnodes={NODES}", "--max-restarts=0"]
        agents = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(SCRIPT), str(stamps)],
                    cwd=directory,
                    env=jobs.environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
            for _ in range(NODES)
        ]
        try:
            verdicts, ends = _watch(agents, time.monotonic() + timeout_s)
        finally:
            for agent in agents:
                agent.kill()
            jobs.kill_children()
        raised = [stamp.ns / 1e9 for stamp in jobs.read_stamps(stamps)]
        codes = tuple(agent.returncode for agent in agents)
        if not raised:
            return AgentTimes(None, None, codes)
        verdict_s = max(verdicts) - raised[0] if len(verdicts) == NODES else None
        return AgentTimes(verdict_s, max(ends) - raised[0] if len(ends) == NODES else None, codes)


def _watch(agents: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[list[float], list[float]]:
    """When the agents showed their verdicts, and when they ended; monotonic seconds."""
    verdicts: list[float] = []
    ends: list[float] = []
    output = dict.fromkeys(range(len(agents)), b"")
    with selectors.DefaultSelector() as selector:
        for number, agent in enumerate(agents):
            assert agent.stderr is not None
            selector.register(agent.stderr, selectors.EVENT_READ, number)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                data, now = os.read(key.fd, 1 << 16), time.monotonic()
                if not data:
                    selector.unregister(key.fileobj)
                    agents[key.data].wait()
                    ends.append(time.monotonic())
                elif VERDICT not in output[key.data]:
                    output[key.data] += data
                    if VERDICT in output[key.data]:
                        verdicts.append(now)
    return verdicts, ends


def draw(figure: Any, found: dict[str, list[AgentTimes]]) -> None:
    axes = figure.subplots()
    for place, each in enumerate(found.values()):
        gone = [one_try.gone_s for one_try in each if one_try.gone_s is not None]
        axes.plot([place] * len(gone), gone, "o", color="#c8553d", label="all agents gone" if not place else None)
        known = [one_try.verdict_s for one_try in each if one_try.verdict_s is not None]
        axes.plot([place] * len(known), known, "o", color="#4c9f70", label="verdict on all nodes" if not place else None)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="seconds after the exception", title="A bug on one of three nodes", xlim=(-0.5, len(found) - 0.5))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="number of tries of each side")
    parser.add_argument("--timeout", type=float, default=300, help="limit for one job, in seconds")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine = measure.machine()
    jobs.adopt_orphans()
    found: dict[str, list[AgentTimes]] = {"ours": [], "stock": []}
    for _ in range(args.repeat):
        for side, each in found.items():
            each.append(run_job(side, args.timeout))
            print(side, each[-1], file=sys.stderr, flush=True)
    medians = {
        side: {
            "verdict_s": measure.rounded(
                measure.median([one_try.verdict_s for one_try in each if one_try.verdict_s is not None])
            ),
            "gone_s": measure.rounded(measure.median([one_try.gone_s for one_try in each if one_try.gone_s is not None])),
            "codes": sorted({str(code) for one_try in each for code in one_try.codes}),
        }
        for side, each in found.items()
    }
    rows = [
        [side, measure.shown(each["verdict_s"]), measure.shown(each["gone_s"]), " ".join(each["codes"])]
        for side, each in medians.items()
    ]
    text = measure.table(["side", "verdict on all nodes s", "all agents gone s", "exit codes"], rows)
    text += f"\n\nMedians of {args.repeat}, of the slowest of {NODES} nodes. Ours waits 0.5 s for other causes (settle)."
    verdict_s = medians["ours"]["verdict_s"]
    record = {
        "benchmark": "verdict",
        "sides": medians,
        "within_1_s": verdict_s is not None and verdict_s <= AIM_S,
        "machine": machine,
    }
    measure.publish(args.results, record, text, lambda figure: draw(figure, found))
    return 0 if medians["ours"]["codes"] == ["65"] else 1


if __name__ == "__main__":
    sys.exit(main())
