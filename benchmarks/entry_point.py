"""What does an unrelated torchrun pay because this package is installed? Torch loads every entry point that it finds.

    python benchmarks/entry_point.py [--repeat 20]

The promise is less than 5 ms and no import of torch. For comparison it shows the time of torchrun's own imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure

WORKER = Path(__file__).with_name("workers") / "load_entry_point.py"
PROMISE_MS = 5.0


def load(*options: str) -> dict[str, Any]:
    """Load the entry points in a fresh interpreter. workers/load_entry_point.py describes the result."""
    done = subprocess.run([sys.executable, str(WORKER), *options], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="number of interpreters that load the entry points")
    parser.add_argument(
        "--torchrun-repeat", type=int, default=3, help="how many more interpreters also import torch.distributed.run"
    )
    parser.add_argument("--promise-ms", type=float, default=PROMISE_MS, help="if the median is above this, the exit code is 1")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()

    machine = measure.machine()
    loads = [load() for _ in range(args.repeat)]
    seconds = [found["seconds"] for found in loads]
    cost = statistics.median(seconds)
    torchrun = measure.median([load("--torchrun")["torchrun_s"] for _ in range(args.torchrun_repeat)])
    modules = loads[0]["modules"]
    imports_torch = any(name.partition(".")[0] == "torch" for name in modules)
    kept = cost * 1000 < args.promise_ms and not imports_torch
    record = {
        "benchmark": "entry_point",
        "median_s": measure.rounded(cost, 5),
        "max_s": measure.rounded(max(seconds), 5),
        "repeat": args.repeat,
        "promise_s": args.promise_ms / 1000,
        "kept": kept,
        "imports_torch": imports_torch,
        "modules": modules,
        "torchrun_import_s": measure.rounded(torchrun),
        "machine": machine,
    }
    rows = [
        ["entry points of elastic_ext, median", f"{cost * 1000:.2f}"],
        ["the same, slowest", f"{max(seconds) * 1000:.2f}"],
        ["promise", f"{args.promise_ms:.2f}"],
        ["torchrun's own imports, median", measure.shown(torchrun and torchrun * 1000)],
    ]
    text = measure.table(["an unselected torchrun pays", "ms"], rows) + "\n\nModules imported: " + ", ".join(modules)
    measure.publish(args.results, record, text)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
