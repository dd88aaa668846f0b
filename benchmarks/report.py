"""Runs the benchmarks that are older than the code they measure, and writes the page of results, benchmarks/results/README.md.

    python benchmarks/report.py [--all | --list | --page] [--only restart,node_loss]

A result is old if anything has changed in the folders that it measures since the commit that it was measured at. Run this on a
machine that does nothing else, with nothing uncommitted; all of them take hours. A benchmark that fails keeps its last result.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import measure

REPOSITORY = Path(__file__).parent.parent
PAGE = measure.RESULTS / "README.md"
AGENT = tuple(f"elastic_ext/{room}" for room in ("agent", "features", "workers", "rendezvous", "embedded", "failures"))
ETCD = ("elastic_ext/rendezvous", "elastic_ext/etcd")
LATENESS = ("elastic_ext/hangs", "elastic_ext/features", "elastic_ext/workers/bootstrap", "elastic_ext/agent")
SAVES = ("elastic_ext/checkpoints",)
HEAD = """# Results

Written by `make report` from the files beside it: each is what its script printed. [How they are measured](../README.md).

`make pictures` draws the plots again from the JSON lines. Those of checkpoint_stall, own_etcd and verdict show single tries that
their JSON lacks: only `make bench` draws them.
"""


@dataclass(frozen=True)
class Benchmark:
    """A script and one way to run it.

    Attributes:
        script: its name, and that of its files.
        measures: folders of the repository whose code the result depends on.
        variant: the folder of the result below results/; "": none.
        needs: what this machine must have: "root" or "a GPU"; "": nothing.
    """

    script: str
    measures: tuple[str, ...]
    arguments: str = ""
    variant: str = ""
    needs: str = ""

    @property
    def name(self) -> str:
        return f"{self.script}, {self.variant}" if self.variant else self.script

    @property
    def command(self) -> str:
        results = f" --results benchmarks/results/{self.variant}" if self.variant else ""
        return f"benchmarks/{self.script}.py{' ' * bool(self.arguments)}{self.arguments}{results}"

    @property
    def result(self) -> Path:
        """The JSON line."""
        return measure.RESULTS / self.variant / f"{self.script}.json"

    def lacks(self) -> str:
        """Return what this machine lacks to run it; "" if nothing."""
        here = {"root": os.geteuid() == 0, "a GPU": Path("/dev/nvidiactl").exists()}
        return "" if here.get(self.needs, True) else self.needs


BENCHMARKS = (
    Benchmark("restart_reliability", AGENT),
    Benchmark("restart", AGENT),
    Benchmark("restart", AGENT, "--rows=sigkill,early --busy=2", "busy"),
    Benchmark("restart", AGENT, "--device=cuda --repeat=3 --rows=sigkill", "gpu", "a GPU"),
    Benchmark("node_loss", (*AGENT, *ETCD), "--sides=ours,ours-2,stock,tuned", needs="root"),
    Benchmark("node_loss", AGENT, "--rows=node,agent,container --sides=ours,embedded,embedded-warm,stock", "embedded"),
    Benchmark("node_loss", AGENT, "--rows=node,container,join --sides=ours,warm,stock", "warm"),
    Benchmark("hangs", LATENESS),
    Benchmark("hangs", LATENESS, "--rows=elsewhere,evaluates,compiles --repeat=2", "long"),
    Benchmark("stragglers", LATENESS, "--repeat=2 --quiet-minutes=0 --samples=0", needs="root"),
    Benchmark("stragglers", LATENESS, "--rows= --samples=0", "quiet", "root"),
    Benchmark("stragglers", LATENESS, "--rows= --quiet-minutes=0", "overhead", "root"),
    Benchmark("integrity", ("elastic_ext/features", "elastic_ext/failures", "elastic_ext/agent"), "--repeat=2"),
    Benchmark("handlers", (*ETCD, "elastic_ext/embedded")),
    Benchmark("growth", ETCD, "--minutes=0.5"),
    Benchmark("rendezvous", ETCD),
    Benchmark("steady_state", ETCD),
    Benchmark("overhead", ("elastic_ext/workers", "elastic_ext/telemetry", "elastic_ext/status", "elastic_ext/agent")),
    Benchmark("scrape_load", ("elastic_ext/http", "elastic_ext/telemetry")),
    Benchmark("own_etcd", ("elastic_ext/own_etcd", "elastic_ext/agent")),
    Benchmark("verdict", ("elastic_ext/failures", "elastic_ext/rendezvous", "elastic_ext/agent")),
    Benchmark("code_bug_waste", ("elastic_ext/failures", "elastic_ext/agent")),
    Benchmark("classification", ("elastic_ext/failures",)),
    Benchmark("checkpoint_stall", SAVES),
    Benchmark("trainers", (*SAVES, "elastic_ext/training", "elastic_ext/features", *AGENT[:1]), needs="root"),
    Benchmark("save_record", ("elastic_ext/workers/bootstrap",)),
    Benchmark("memory_tier", (*SAVES, "elastic_ext/workers/standby")),
    Benchmark("checkpoints", SAVES),
    Benchmark("simulate", ("benchmarks/scale", "elastic_ext/planning", "elastic_ext/failures", "elastic_ext/hangs")),
    Benchmark("compressed", ("benchmarks/scale", *AGENT)),
)


def is_old(benchmark: Benchmark) -> bool:
    """Return whether there is no result, or the code that it measures has changed since (also if its commit is unknown here)."""
    if not benchmark.result.exists():
        return True
    commit = json.loads(benchmark.result.read_text())["measured"]["commit"]
    paths = [f"benchmarks/{benchmark.script}.py", *benchmark.measures]
    command = ["git", "diff", "--quiet", commit, "--", *paths]
    return subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL).returncode != 0


def section(benchmark: Benchmark) -> str:
    """Return what the page shows of a result."""
    files = benchmark.result
    record = json.loads(files.read_text())
    folder = f"{benchmark.variant}/" if benchmark.variant else ""
    measured, machine = record["measured"], record.get("machine", record)
    where = f"{machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}, load before: {machine['load_1m']:g}"
    lines = [f"## {benchmark.name}", f"{measured['date']}, commit {measured['commit'][:8]}, {where}.", f"    {benchmark.command}"]
    lines.append(files.with_suffix(".md").read_text().strip())
    if files.with_suffix(".png").exists():
        lines.append(f"![{benchmark.name}]({folder}{files.stem}.png)")
    return "\n\n".join([*lines, f"[JSON]({folder}{files.name})"])


def page() -> str:
    """Return the page of all results."""
    return "\n\n".join([HEAD.strip(), *(section(each) for each in BENCHMARKS if each.result.exists())]) + "\n"


def run(benchmark: Benchmark) -> bool:
    """Run it; return whether it could."""
    if missing := benchmark.lacks():
        print(f"{benchmark.name}: not run, this machine lacks {missing}", file=sys.stderr)
        return True
    print(f"{benchmark.name}: {benchmark.command}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, *shlex.split(benchmark.command)], cwd=REPOSITORY).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="run all of them")
    which.add_argument("--list", action="store_true", help="run none, list the old ones")
    which.add_argument("--page", action="store_true", help="run none, write the page")
    parser.add_argument("--only", default="", help="comma-separated names of scripts")
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))
    scripts = dict.fromkeys(each.script for each in BENCHMARKS)
    if unknown := only.difference(scripts):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; there are {', '.join(scripts)}")
    chosen = [each for each in BENCHMARKS if not only or each.script in only]
    due = [] if args.page else [each for each in chosen if args.all or is_old(each)]
    if args.list:
        print("\n".join(each.name for each in due) or "none is old")
        return 0
    failed = [each.name for each in due if not run(each)]
    PAGE.write_text(page())
    if failed:
        print(f"failed, and keeps its last result: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
