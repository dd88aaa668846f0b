"""How long does it take to classify a failure with 64 KB of text on stderr?

    python benchmarks/classification.py [--repeat 50]

Stock torchrun does not classify, so there is nothing to compare with. The texts: the log of a training loop, and texts that are
hard to search: random letters, random bytes, words, and the texts of the rules without their last letter.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure

from elastic_ext.failures.classify import MAX_TEXT, classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.rules import RULES

TEXTS = sorted({text for rule in RULES for one in rule.texts for text in ([one] if isinstance(one, str) else one)})
PROMISE_MS = 10.0
LETTERS = string.ascii_lowercase + " \n"


def log(random_: random.Random) -> str:
    return "".join(
        f"2026-11-21 10:11:12 INFO step {step} loss {random_.random():.5f} tokens/s {step * 3}\n" for step in range(1500)
    )


def words(random_: random.Random) -> str:
    known = ["".join(random_.choices(string.ascii_lowercase, k=random_.randint(2, 9))) for _ in range(5000)]
    return "".join(random_.choice(known) + random_.choice("     \n") for _ in range(20_000))


KINDS: dict[str, Callable[[random.Random], str]] = {
    "a log": log,
    "letters": lambda random_: "".join(random_.choices(LETTERS, k=MAX_TEXT)),
    "bytes": lambda random_: random_.randbytes(MAX_TEXT).decode("latin-1"),
    "words": words,
    "near misses": lambda random_: "".join(random_.choice(TEXTS)[:-1] + random_.choice(" \n") for _ in range(8000)),
}


def milliseconds(evidence: Evidence, repeat: int) -> list[float]:
    classify(evidence)
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        classify(evidence)
        found.append((time.perf_counter() - began) * 1e3)
    return found


def draw(figure: Any, rows: dict[str, Any], promise_ms: float) -> None:
    axes = figure.subplots()
    bars = axes.barh(list(rows), [row["median_ms"] for row in rows.values()], color="#4c9f70")
    axes.bar_label(bars, fmt="%.2f")
    axes.axvline(promise_ms, color="#888888", linestyle=":")
    axes.set(xlabel="milliseconds", title="What does a failure mean? 64 KB of stderr")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=50, help="number of measurements of each row")
    parser.add_argument("--promise-ms", type=float, default=PROMISE_MS, help="if a median takes longer, the exit code is 1")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    args = parser.parse_args()
    machine, rows = measure.machine(), {}
    for kind, make in KINDS.items():
        text = make(random.Random(0))[:MAX_TEXT]
        for ended, exception in (("exit code", None), ("exception", RaisedException("RuntimeError", text, ()))):
            found = milliseconds(Evidence(0, exit_code=1, exception=exception, stderr_tail=text), args.repeat)
            rows[f"{kind}, {ended}"] = {
                "median_ms": measure.rounded(measure.median(found)),
                "max_ms": measure.rounded(max(found)),
            }
    record: dict[str, Any] = {
        "benchmark": "classification",
        "rows": rows,
        "kept": all(row["median_ms"] <= args.promise_ms for row in rows.values()),
        "machine": machine,
    }
    lines = [[name, measure.shown(row["median_ms"]), measure.shown(row["max_ms"])] for name, row in rows.items()]
    text = measure.table(["64 KB of", "median (ms)", "worst (ms)"], lines)
    measure.publish(args.results, record, text, lambda figure: draw(figure, rows, args.promise_ms))
    return 0 if record["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
