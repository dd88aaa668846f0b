"""Does a job come back on its first restart? Two gloo workers, one is killed after several collectives.

    python benchmarks/restart_reliability.py [--tries 50] [--stock-tries 10]

Stock runs in its default mode, `--standalone`. It gets fewer tries, because most of them hang until the deadline. A try is

    clean    exit code 0 after exactly one restart
    burned   exit code 0 after more than one restart
    hung     it had not ended at the deadline
    failed   another exit code, or the fault never came
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jobs
import measure

VERDICTS = ("clean", "burned", "hung", "failed")
COLOURS = {"clean": "#4c9f70", "burned": "#e6b35a", "hung": "#c8553d", "failed": "#6b2737"}


def verdict(returncode: int | None, attempts: Iterable[int]) -> str:
    """What a try counts as. returncode: None if it hung. attempts: the restart counts with which workers started."""
    if returncode is None:
        return "hung"
    last = max(attempts, default=0)
    if returncode != 0 or last == 0:
        return "failed"
    return "clean" if last == 1 else "burned"


def one_try(agent: str, timeout_s: float) -> str:
    ended = jobs.run_faulty(agent, "kill", timeout_s)
    found = verdict(ended.returncode, {stamp.attempt for stamp in ended.stamps})
    if agent == "ours" and found != "clean":
        print(ended.output, file=sys.stderr)  # this must not happen: show everything that is known
    return found


def measure_all(tries: dict[str, int], timeout_s: float) -> dict[str, Counter[str]]:
    """Run the tries of both agents in turn, so that a busy machine hits both."""
    found: dict[str, Counter[str]] = {agent: Counter() for agent in tries}
    for number in range(max(tries.values())):
        for agent in tries:
            if number < tries[agent]:
                result = one_try(agent, timeout_s)
                found[agent][result] += 1
                print(f"{agent} {number + 1}/{tries[agent]}: {result}", file=sys.stderr, flush=True)
    return found


def draw(figure: Any, found: dict[str, Counter[str]]) -> None:
    axes = figure.subplots()
    agents = [agent for agent in found if found[agent].total()]
    left = dict.fromkeys(agents, 0.0)
    for name in VERDICTS:
        shares = [100 * found[agent][name] / found[agent].total() for agent in agents]
        bars = axes.barh(agents, shares, left=list(left.values()), color=COLOURS[name], label=name)
        axes.bar_label(bars, [str(found[agent][name] or "") for agent in agents], label_type="center", color="white")
        left = {agent: left[agent] + share for agent, share in zip(agents, shares, strict=True)}
    axes.invert_yaxis()
    axes.set(
        xlabel="% of tries (bars: number of tries)",
        title="Does the job come back on its first restart? SIGKILL of 1 of 2 workers",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(VERDICTS), frameon=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=50, help="number of tries of ours")
    parser.add_argument("--stock-tries", type=int, default=10, help="number of tries of stock")
    parser.add_argument("--timeout", type=float, default=30, help="seconds after which a try counts as hung")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()

    machine = measure.machine()
    found = measure_all({"ours": args.tries, "stock": args.stock_tries}, args.timeout)
    rows = [[agent, *(str(found[agent][name]) for name in VERDICTS), str(found[agent].total())] for agent in found]
    record = {
        "benchmark": "restart_reliability",
        **{agent: {**{name: counts[name] for name in VERDICTS}, "tries": counts.total()} for agent, counts in found.items()},
        "timeout_s": args.timeout,
        "machine": machine,
    }
    text = measure.table(["SIGKILL of 1 of 2 workers", *VERDICTS, "tries"], rows)
    measure.publish(args.results, record, text, lambda figure: draw(figure, found))
    return 0 if found["ours"]["clean"] == args.tries else 1


if __name__ == "__main__":
    sys.exit(main())
